"""Which region of which tensor each program reads, and whether it may, by what it writes.

A caller who knows what a kernel computes labels the elements of tensors with regions (integers) and
states, once the outputs are known, which regions of the others a program that wrote a region of an
output may read. A program that wrote several regions may read what belongs to any of them; one that
wrote none is not judged. What several programs wrote, and what is updated atomically, counts as
written by none. Of a tile the first and last elements are looked at. Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.views import coordinates, span_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from fa_verify.ttir.argument import Argument
    from fa_verify.ttir.cells import Access, Cells
    from fa_verify.ttir.findings import Findings
    from fa_verify.ttir.floats import Array
    from fa_verify.ttir.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprint:
    """What a program that writes elements of `tensor` may read.

    Attributes:
        tensor: An output.
        name: For messages.
        labels: Region of each element, integers from 0, broadcast over the tensor's shape.
        reads: For each labelled tensor it speaks of, by name, bool (regions of this tensor,
            regions of that one).
    """

    tensor: torch.Tensor
    name: str
    labels: torch.Tensor
    reads: Mapping[str, torch.Tensor]


class Map:
    """Tells the region of an element of one tensor from its offset in the storage."""

    def __init__(self, tensor: torch.Tensor, labels: torch.Tensor, first: int) -> None:
        """Number the regions from `first`; 0 is no region."""
        self.tensor, self.first = tensor, first
        self.count = int(labels.max()) + 1
        self.origin: int = int(tensor.storage_offset())
        self.span: int = span_of(tensor)
        self.storage = tensor.untyped_storage()  # held, so that its address stays its own
        self.key = (self.storage.data_ptr(), tensor.element_size())
        shape = (1,) * (tensor.ndim - labels.ndim) + tuple(labels.shape)
        varies = [dim for dim in range(tensor.ndim) if shape[dim] > 1]
        self._numbers: Array = labels.reshape([shape[dim] for dim in varies]).numpy() + first
        steps = sorted(
            ((tensor.stride(d), tensor.shape[d], d) for d in range(tensor.ndim)
             if tensor.shape[d] > 1), reverse=True,
        )  # fmt: skip
        last = max((i for i, (_, _, dim) in enumerate(steps) if dim in varies), default=-1)
        self._steps = steps[: last + 1]
        self._varies = varies
        inner = [sum((size - 1) * st for st, size, _ in steps[i + 1 :]) for i in range(len(steps))]
        self.unique = all(step[0] > below for step, below in zip(self._steps, inner, strict=False))

    def find(self, offsets: Array) -> Array:
        """Region of each offset in the storage; 0 outside."""
        rest = offsets - self.origin
        inside = (rest >= 0) & (rest < self.span)
        at: dict[int, Array] = {}
        for stride, size, dim in self._steps:
            at[dim], rest = np.divmod(rest, stride)
            inside &= at[dim] < size
        where = tuple([np.where(inside, at[dim], 0) for dim in self._varies])
        found: Array = np.where(inside, self._numbers[where], 0)
        return found

    def place(self, offset: int) -> str:
        """The element at an offset in the storage, as text."""
        shape, strides = tuple(self.tensor.shape), tuple(self.tensor.stride())
        return ", ".join(map(str, coordinates(shape, strides, offset - self.origin) or ()))


def _corners(cells: Cells) -> tuple[Array, Array | None]:
    """Offsets of a tile's first and last elements, (programs or 1, some), and which count."""
    index, valid = cells.index, cells.valid
    if valid is None:
        ends = tuple([slice(None, None, max(extent - 1, 1)) for extent in index.shape[1:]])
        return index[(slice(None), *ends)].reshape(index.shape[0], -1).copy(), None
    if index.shape[1:] != valid.shape[1:]:
        shape = np.broadcast_shapes(index.shape[1:], valid.shape[1:])
        index = np.broadcast_to(index, (index.shape[0], *shape))
        valid = np.broadcast_to(valid, (valid.shape[0], *shape))
    index, valid = index.reshape(index.shape[0], -1), valid.reshape(valid.shape[0], -1)
    if valid.shape[0] == 1:
        first, last = int(valid.argmax()), valid.shape[1] - 1 - int(valid[0, ::-1].argmax())
        return index[:, [first, last]] if valid[0, first] else index[:, :0], None
    outer = np.stack([valid.argmax(axis=1), valid.shape[1] - 1 - valid[:, ::-1].argmax(axis=1)], 1)
    rows = np.arange(valid.shape[0])[:, None]
    return (index[0][outer] if index.shape[0] == 1 else index[rows, outer]), valid[rows, outer]


@dataclass(slots=True, eq=False)
class _Seen:
    """The corners of every tile that went through one argument at one operation."""

    access: Access
    arg: Argument
    parts: list[tuple[Array, Array, Array | None, int]] = field(default_factory=list)

    def add(self, linear: Array, cells: Cells) -> None:
        """One more tile of each of the programs `linear`."""
        offsets, valid = _corners(cells)
        self.parts.append((linear, offsets, valid, cells.length))

    def flat(self) -> tuple[Array, Array]:
        """Program and offset in the storage of each corner."""
        programs: list[Array] = []
        offsets: list[Array] = []
        for linear, at, valid, length in self.parts:
            who, where = np.broadcast_arrays(linear[:, None], at)
            if valid is not None:
                keep = np.broadcast_to(valid, who.shape)
                who, where = who[keep], where[keep]
            who, where = who.reshape(-1), where.reshape(-1)
            programs += [who, who]
            offsets += [where, where + (length - 1)]
        return np.concatenate(programs), np.concatenate(offsets) + self.arg.origin


@dataclass(slots=True, eq=False)
class Reading:
    """What the programs of one launch loaded and stored."""

    grid: tuple[int, int, int]
    loads: dict[tuple[int, str], _Seen] = field(default_factory=dict)
    stores: dict[tuple[int, str], _Seen] = field(default_factory=dict)

    def read(self, access: Access, arg: Argument, cells: Cells, machine: Machine) -> None:
        """A load through `arg`."""
        if arg.regions:
            self._note(self.loads, access, arg, cells, machine)

    def write(self, access: Access, arg: Argument, cells: Cells, machine: Machine) -> None:
        """A store through `arg`."""
        self._note(self.stores, access, arg, cells, machine)

    @staticmethod
    def _note(
        table: dict[tuple[int, str], _Seen], access: Access, arg: Argument, cells: Cells,
        machine: Machine,
    ) -> None:  # fmt: skip
        if not cells.index.size or not cells.length:
            return
        key = (id(access), arg.name)
        seen = table.get(key)
        if seen is None:
            seen = table[key] = _Seen(access, arg)
        seen.add(machine.lanes.linear, cells)


class Regions:
    """The labels of one execution, and what its launches read."""

    def __init__(self) -> None:
        """Label nothing."""
        self._maps: dict[str, list[Map]] = {}
        self._count = 1
        self._launches: list[Reading] = []

    def label(self, tensor: torch.Tensor, name: str, labels: torch.Tensor) -> None:
        """Give the elements of a tensor regions, unless an element lies in several."""
        found = Map(tensor, labels, self._count)
        if found.unique:
            self._maps.setdefault(name, []).append(found)
            self._count += found.count

    def reading(self, arguments: Sequence[Argument], grid: tuple[int, int, int]) -> Reading | None:
        """Begin a launch; None when nothing is labelled."""
        if not self._maps:
            return None
        for arg in arguments:
            arg.regions = [
                found
                for found in self._all()
                if found.key == (arg.key, arg.flat.itemsize)
                and found.origin < arg.origin + arg.size
                and arg.origin < found.origin + found.span
            ]
        self._launches.append(Reading(grid))
        return self._launches[-1]

    def _all(self) -> Iterator[Map]:
        return (found for maps in self._maps.values() for found in maps)

    def judge(self, footprints: Sequence[Footprint], findings: Findings) -> None:
        """Report every read of a region that belongs to nothing that its program wrote."""
        outputs = [
            (footprint, Map(footprint.tensor, footprint.labels, 1)) for footprint in footprints
        ]
        for reading in self._launches:
            if reading.loads and reading.stores:
                self._judge(reading, outputs, findings)

    def _judge(
        self, reading: Reading, outputs: Sequence[tuple[Footprint, Map]], findings: Findings
    ) -> None:
        allowed = np.zeros((prod(reading.grid), self._count), np.bool_)
        judged = np.zeros(allowed.shape, np.bool_)
        wrote: list[tuple[str, Map, Array]] = []
        for footprint, output in outputs:
            written = _written(reading, output)
            mine = written[:, 1:] > 0
            if not mine.any():
                continue
            wrote.append((footprint.name, output, written))
            for name, may in footprint.reads.items():
                for found in self._maps.get(name, ()):
                    part = slice(found.first, found.first + found.count)
                    allowed[:, part] |= (mine.astype(np.float32) @ may.numpy()) > 0
                    judged[:, part] |= mine.any(axis=1, keepdims=True)
        if not wrote:
            return
        forbidden = judged & ~allowed
        forbidden[:, 0] = False
        for seen in reading.loads.values():
            programs, offsets = seen.flat()
            for found in seen.arg.regions:
                stray = forbidden[programs, found.find(offsets)]
                if stray.any():
                    self._report(
                        reading.grid, seen, found, programs[stray], offsets[stray], wrote, findings
                    )

    def _report(  # noqa: PLR0917
        self, grid: tuple[int, int, int], seen: _Seen, found: Map, programs: Array, offsets: Array,
        wrote: Sequence[tuple[str, Map, Array]], findings: Findings,
    ) -> None:  # fmt: skip
        program = int(programs[0])
        offset = int(offsets[programs == program].min())
        own = next(
            f"{name}[{output.place(int(written[program].max()) - 1)}]"
            for name, output, written in wrote
            if written[program].any()
        )
        name = next(name for name, maps in self._maps.items() if found in maps)
        read = f"{name}[{found.place(offset)}]"
        site, (nx, ny, _) = seen.access.site, grid
        findings.add(
            "neighbour-read", site, seen.arg,
            (program % nx, program // nx % ny, program // (nx * ny)), offset - seen.arg.origin,
            len(set(programs.tolist())),
            f"the program reads {read}, and writes {own} and nothing else that depends on it",
            mask=True if site.masked else None, landed=read,
        )  # fmt: skip


def _written(reading: Reading, output: Map) -> Array:
    """Offset + 1 of an element, by program and region, that the program wrote alone."""
    table = np.zeros((prod(reading.grid), output.count + 1), np.int64)
    for seen in reading.stores.values():
        arg = seen.arg
        if (arg.key, arg.flat.itemsize) == output.key and arg.tracking is not None:
            programs, offsets = seen.flat()
            alone = arg.tracking.writer[offsets] == programs + 1
            table[programs[alone], output.find(offsets[alone])] = offsets[alone] + 1
    table[:, 0] = 0
    return table
