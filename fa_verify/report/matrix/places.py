"""`Matrix`: the cells of each device, and what ran there."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import msgspec

from fa_verify.report.matrix.cells import Cell, cell
from fa_verify.report.result import compared
from fa_verify.variants import EVERY, ORDER, variants

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fa_verify.report.facts import Facts
    from fa_verify.report.result import Result

__all__ = ["Matrix", "Place", "matrix"]

_PRECISIONS: Final = ("float16", "bfloat16", "float32/ieee", "float32/tf32x3", "float32/tf32")
_FP8: Final = "float8"
_CPU: Final = "the CPU backend"  # on whatever machine: it imitates a chip
_Cells = dict[str, dict[str, dict[str, Cell]]]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What ran on one device.

    Attributes:
        device: Its name.
        versions: Names and versions of fa_verify, python, torch and triton.
        commands: Command lines, with their seeds.
        sources: Each kernel's target and the hash of its source.
        cells: By kernel, variant and precision.
    """

    device: str
    versions: tuple[str, ...]
    commands: tuple[str, ...]
    sources: tuple[str, ...]
    cells: _Cells

    def __add__(self, other: Place) -> Place:
        """What ran in both; the device is this one's."""
        cells: _Cells = {
            kernel: {variant: dict(found) for variant, found in rows.items()}
            for kernel, rows in self.cells.items()
        }
        for kernel, rows in other.cells.items():
            for variant, found in rows.items():
                mine = cells.setdefault(kernel, {}).setdefault(variant, {})
                for precision, one in found.items():
                    mine[precision] = mine[precision] + one if precision in mine else one
        return Place(
            device=self.device,
            versions=_union(self.versions, other.versions),
            commands=_union(self.commands, other.commands),
            sources=_union(self.sources, other.sources),
            cells=cells,
        )

    @property
    def total(self) -> Cell:
        """All cases."""
        every = (found for rows in self.cells.values() for found in rows[EVERY].values())
        return functools.reduce(operator.add, every, Cell())

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those of any kernel, in order."""
        present = {p for rows in self.cells.values() for found in rows.values() for p in found}
        return _ordered(present, _PRECISIONS)

    @property
    def tables(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """Precisions, and the kernels that are shown with them: fp8 with those that take it."""
        found: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        for kernel, rows in self.cells.items():
            kinds = {p.startswith(_FP8) for p in rows[EVERY]}
            found[tuple(p for p in self.precisions if p.startswith(_FP8) in kinds)].append(kernel)
        return tuple((precisions, tuple(kernels)) for precisions, kernels in found.items())

    def variants(self, kernel: str) -> tuple[str, ...]:
        """Those that cases of the kernel were of, in order."""
        return _ordered(self.cells[kernel], ORDER)

    def without(self, kernel: str) -> tuple[str, ...]:
        """Variants that no case of the kernel was of."""
        every = {variant for rows in self.cells.values() for variant in rows}
        return _ordered({*ORDER, *every} - set(self.cells[kernel]), ORDER)

    def tensors(self, kernel: str) -> tuple[str, ...]:
        """Those that the kernel returned."""
        present = {name for one in self.cells[kernel][EVERY].values() for name in one.tensors}
        return tuple(name for name in _ordered(present, compared(present)) if name in present)


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """Places, a device each, sorted."""

    places: tuple[Place, ...] = ()

    def __add__(self, other: Matrix) -> Matrix:
        """The cases of both."""
        found = {place.device: place for place in self.places}
        for place in other.places:
            known = found.get(place.device)
            found[place.device] = known + place if known else place
        return Matrix(places=tuple(found[device] for device in sorted(found)))

    @property
    def total(self) -> Cell:
        """All cases."""
        return functools.reduce(operator.add, (place.total for place in self.places), Cell())


def matrix(facts: Facts, results: Iterable[Result]) -> Matrix:
    """The matrix of a run; a case counts under each variant that it is of."""
    alike: defaultdict[tuple[str, str, tuple[str, ...]], list[Result]] = defaultdict(list)
    sources = set()
    for result in results:
        alike[result.kernel, result.precision, (EVERY, *variants(result.case))].append(result)
        sources.add(f"{result.record.target} {result.record.source_hash}".strip())
    cells: _Cells = {}
    for (kernel, precision, names), some in sorted(alike.items()):
        counted = cell(some)
        for name in names:
            row = cells.setdefault(kernel, {}).setdefault(name, {})
            row[precision] = row[precision] + counted if precision in row else counted
    if not cells:
        return Matrix()
    place = Place(
        device=_CPU if facts.backend == "cpu" else facts.device or facts.backend or "?",
        versions=tuple(f"{name} {version}" for name, version in facts.versions if version),
        commands=(facts.command,) if facts.command else (),
        sources=tuple(sorted(sources)),
        cells=cells,
    )
    return Matrix(places=(place,))


def _ordered(
    names: Iterable[str] | Mapping[str, object], order: tuple[str, ...]
) -> tuple[str, ...]:
    """In an order; what it does not name comes last."""
    place = {name: index for index, name in enumerate(order)}
    return tuple(sorted(names, key=lambda name: (place.get(name, len(order)), name)))


def _union(left: tuple[str, ...], right: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({*left, *right}))
