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

from fa_verify.ttir.memory.views import coordinates, span_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.memory.argument import Argument
    from fa_verify.ttir.memory.cells import Access, Cells
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.sanitizer.findings import Findings


_TABLE = 1 << 22  # entries; beyond, sorting costs less than a table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprint:
    """What a program that writes elements of `tensor` may read.

    Attributes:
        tensor: An output.
        name: For messages.
        labels: Region of each element, integers from 0, broadcast over the tensor's shape.
        reads: For each labelled tensor it speaks of, by name, a number for each region of this
            tensor and one for each region of that one: equal numbers belong together.
    """

    tensor: torch.Tensor
    name: str
    labels: torch.Tensor
    reads: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class Map:
    """Tells the region of an element of one tensor from its offset in the storage."""

    def __init__(self, tensor: torch.Tensor, name: str, labels: torch.Tensor) -> None:
        """Number the regions from 1; 0 is no region."""
        self.tensor, self.name = tensor, name
        self.origin: int = int(tensor.storage_offset())
        self.span: int = span_of(tensor)
        self.storage = tensor.untyped_storage()  # held, so that its address stays its own
        self.key = (self.storage.data_ptr(), tensor.element_size())
        shape = (1,) * (tensor.ndim - labels.ndim) + tuple(labels.shape)
        varies = [dim for dim in range(tensor.ndim) if shape[dim] > 1]
        self._numbers: Array = labels.reshape([shape[dim] for dim in varies]).numpy() + 1
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
            if not stride:  # all of its elements lie where the first does
                at[dim] = np.zeros_like(rest)
                continue
            at[dim], rest = np.divmod(rest, stride)
            inside &= at[dim] < size
        where = tuple([np.where(inside, at[dim], 0) for dim in self._varies])
        found: Array = np.where(inside, self._numbers[where], 0)
        return found

    def place(self, offset: int) -> str:
        """The element at an offset in the storage, as text."""
        shape, strides = tuple(self.tensor.shape), tuple(self.tensor.stride())
        return ", ".join(map(str, coordinates(shape, strides, offset - self.origin) or ()))


def _corners(cells: Cells) -> Array:
    """Offsets of a tile's first and last elements, (programs or 1, some); -1 for none."""
    index, valid = cells.index, cells.valid
    if valid is None:
        ends = tuple([slice(None, None, max(extent - 1, 1)) for extent in index.shape[1:]])
        return index[(slice(None), *ends)].reshape(index.shape[0], -1).copy()
    if index.shape[1:] != valid.shape[1:]:
        shape = np.broadcast_shapes(index.shape[1:], valid.shape[1:])
        index = np.broadcast_to(index, (index.shape[0], *shape))
        valid = np.broadcast_to(valid, (valid.shape[0], *shape))
    index, valid = index.reshape(index.shape[0], -1), valid.reshape(valid.shape[0], -1)
    first, last = valid.argmax(axis=1), valid.shape[1] - 1 - valid[:, ::-1].argmax(axis=1)
    if valid.shape[0] == 1:
        return index[:, [first[0], last[0]]] if valid[0, first[0]] else index[:, :0]
    rows = np.arange(valid.shape[0])
    of = rows if index.shape[0] > 1 else 0
    outer = np.stack([index[of, first], index[of, last]], axis=1)
    return np.where(valid[rows, first][:, None], outer, -1)


@dataclass(slots=True, eq=False)
class _Seen:
    """The corners of every tile that went through one argument at one operation."""

    access: Access
    arg: Argument
    # By the programs, how many rows, how long the runs: the programs, and tiles of each.
    parts: dict[tuple[bytes, int, int], tuple[Array, list[Array]]] = field(default_factory=dict)

    def add(self, linear: Array, cells: Cells) -> None:
        """One more tile of each of the programs `linear`."""
        offsets = _corners(cells)
        key = (linear.tobytes(), offsets.shape[0], cells.length)
        found = self.parts.get(key)
        if found is None:
            self.parts[key] = (linear, [offsets])
        else:
            found[1].append(offsets)

    def flat(self) -> tuple[Array, Array]:
        """Program and offset in the storage of each corner."""
        programs: list[Array] = []
        offsets: list[Array] = []
        for (_, _, length), (linear, tiles) in self.parts.items():
            at = tiles[0] if len(tiles) == 1 else np.concatenate(tiles, axis=1)
            who, where = (x.reshape(-1) for x in np.broadcast_arrays(linear[:, None], at))
            if where.min(initial=0) < 0:
                who, where = who[where >= 0], where[where >= 0]
            programs.append(who)
            offsets.append(where)
            if length > 1:
                programs.append(who)
                offsets.append(where + (length - 1))
        return np.concatenate(programs).astype(np.int64), np.concatenate(offsets) + self.arg.origin


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
        self._maps: list[Map] = []
        self._launches: list[Reading] = []

    def label(self, tensor: torch.Tensor, name: str, labels: torch.Tensor) -> None:
        """Give the elements of a tensor regions, unless an element lies in several."""
        found = Map(tensor, name, labels)
        if found.unique:
            self._maps.append(found)

    def reading(self, arguments: Sequence[Argument], grid: tuple[int, int, int]) -> Reading | None:
        """Begin a launch; None when nothing is labelled."""
        if not self._maps:
            return None
        for arg in arguments:
            arg.regions = [
                found
                for found in self._maps
                if found.key == (arg.key, arg.flat.itemsize)
                and found.origin < arg.origin + arg.size
                and arg.origin < found.origin + found.span
            ]
        self._launches.append(Reading(grid))
        return self._launches[-1]

    def judge(self, footprints: Sequence[Footprint], findings: Findings) -> None:
        """Report every read of a region that belongs to nothing that its program wrote."""
        outputs = [(x, Map(x.tensor, x.name, x.labels)) for x in footprints]
        for reading in self._launches:
            if reading.loads and reading.stores:
                self._judge(reading, outputs, findings)

    def _judge(
        self, reading: Reading, outputs: Sequence[tuple[Footprint, Map]], findings: Findings
    ) -> None:
        wrote = [(f, output, *_written(reading, output)) for f, output in outputs]
        wrote = [entry for entry in wrote if entry[1].unique and entry[2].size]
        count = prod(reading.grid)
        for seen in reading.loads.values() if wrote else ():
            programs, offsets = seen.flat()
            for found in seen.arg.regions:
                region = found.find(offsets) - 1
                judged = np.zeros(programs.size, np.bool_)
                allowed = region < 0
                for footprint, output, writers, at in wrote:
                    if found.name in footprint.reads:
                        own, theirs = (x.numpy() for x in footprint.reads[found.name])
                        classes = 1 + int(max(own.max(), theirs.max()))
                        mine = writers * classes + own[output.find(at) - 1]
                        read = programs * classes + theirs[region]
                        judged |= _among(programs, writers, count)
                        allowed |= _among(read, mine, count * classes)
                stray = judged & ~allowed
                if stray.any():
                    where = programs[stray], offsets[stray]
                    self._report(reading.grid, seen, found, where, wrote, findings)

    @staticmethod
    def _report(  # noqa: PLR0917
        grid: tuple[int, int, int], seen: _Seen, found: Map, where: tuple[Array, Array],
        wrote: Sequence[tuple[Footprint, Map, Array, Array]], findings: Findings,
    ) -> None:  # fmt: skip
        programs, offsets = where
        program = int(programs[0])
        offset = int(offsets[programs == program].min())
        own = next(
            f"{footprint.name}[{output.place(int(at[writers == program].max()))}]"
            for footprint, output, writers, at in wrote
            if (writers == program).any()
        )
        read = f"{found.name}[{found.place(offset)}]"
        site, (nx, ny, _) = seen.access.site, grid
        findings.add(
            "neighbour-read", site, seen.arg,
            (program % nx, program // nx % ny, program // (nx * ny)), offset - seen.arg.origin,
            len(set(programs.tolist())),
            f"the program reads {read}, and writes {own} and nothing else that depends on it",
            mask=True if site.masked else None, landed=read,
        )  # fmt: skip


def _among(codes: Array, members: Array, size: int) -> Array:
    """Which of some numbers below `size` are members."""
    if size > _TABLE:
        return np.isin(codes, members)
    table = np.zeros(size, np.bool_)
    table[members] = True
    return table[codes]


def _written(reading: Reading, output: Map) -> tuple[Array, Array]:
    """Programs, and offsets in the storage of elements of a tensor that each wrote alone."""
    programs: list[Array] = [np.zeros(0, np.int64)]
    offsets: list[Array] = [np.zeros(0, np.int64)]
    for seen in reading.stores.values():
        arg = seen.arg
        if (arg.key, arg.flat.itemsize) == output.key and arg.tracking is not None:
            who, at = seen.flat()
            alone = (arg.tracking.writer[at] == who + 1) & (output.find(at) > 0)
            programs.append(who[alone])
            offsets.append(at[alone])
    return np.concatenate(programs), np.concatenate(offsets)
