"""Puts what went wrong with an operation of one launch into words: where, how far, onto what."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.memory.argument import Argument
    from fa_verify.ttir.memory.cells import Access, Cells, Touched
    from fa_verify.ttir.memory.known import Memory
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.sanitizer.findings import Findings, Site


class Reports:
    """The sentences of one launch.

    Attributes:
        arguments: Every tensor of the launch, so that a stray access can be told where it landed.
        memory: Names of tensors that the launch does not have.
    """

    def __init__(self, machine: Machine, findings: Findings) -> None:
        """Describe programs of `machine` to `findings`."""
        self._machine, self._findings = machine, findings
        self.arguments: list[Argument] = []
        self.memory: Memory | None = None

    def _program(self, lane: int) -> tuple[int, int, int]:
        return self._machine.position(int(self._machine.lanes.linear[lane]))

    def program(
        self, lane: int, kind: str, site: Site, count: int, detail: str,
        *, argument: Argument | None = None,
    ) -> None:  # fmt: skip
        """Something that concerns no element, first seen in `lane`."""
        name = None if argument is None else argument.name
        self._findings.add(kind, site, name, self._program(lane), 0, count, detail)

    def outside(self, access: Access, arg: Argument, cells: Cells, wrong: Array, kind: str) -> None:
        """Lanes of a tile, `wrong` among `cells`, lie outside their argument."""
        common = np.broadcast_shapes(cells.index.shape, wrong.shape)
        index, wrong = np.broadcast_to(cells.index, common), np.broadcast_to(wrong, common)
        lane = np.unravel_index(int(np.argmax(wrong)), common)
        count = int(np.count_nonzero(wrong)) * (prod(access.shape) // prod(common[1:]))
        if common[0] == 1:
            count *= self._machine.lanes.linear.size
        offsets = index[wrong]
        low, high, offset = int(offsets.min()), int(offsets.max()), int(index[lane])
        distance, detail = max(high - arg.size + 1, -low), ""
        if 0 <= offset < arg.size:
            near = arg.distance(offset)
            detail = f"between the elements of {arg.name}, {near} from the nearest"
        if distance > 0:
            unit = "element" if distance == 1 else "elements"
            side = "past the end" if high >= arg.size else "before the beginning"
            detail += f"{', and ' * bool(detail)}up to {distance} {unit} {side} of {arg.name}"
        else:
            distance = near
        detail += f" (shape {arg.sizes}, strides {arg.strides})"
        landed = self._landing(arg, offset)
        if landed:
            detail += f", in {landed}"
        if access.site.masked:
            detail += "; the mask let it through: it is true there"
        else:
            detail += "; the access has no mask"
        program = self._program(int(lane[0]))
        self._findings.add(
            kind, access.site, arg, program, offset, count, detail,
            mask=True if access.site.masked else None, distance=distance, landed=landed,
        )  # fmt: skip

    def _landing(self, arg: Argument, offset: int) -> str:
        """What else lies where `offset` of `arg` points: an argument's element, a name, or ""."""
        address = arg.address + offset * arg.flat.itemsize
        for other in self.arguments:
            at = (address - other.address) // max(other.flat.itemsize, 1)
            if other.address != arg.address and 0 <= at < other.size and other.holds(at):
                where = other.coordinates(at)
                return f"{other.name}[{', '.join(map(str, where or (at,)))}]"
        return "" if self.memory is None else self.memory.name_at(address)

    def unwritten(self, touched: Touched, missing: Array) -> None:
        """Elements, `missing` among `touched`, are read that nobody wrote."""
        _, offset, program = touched.first(missing)
        self._findings.add(
            "uninitialised-read", touched.access.site, touched.arg,
            self._machine.position(program - 1), offset, int(np.count_nonzero(missing)),
            f"nobody wrote this element of {touched.arg.name}",
        )  # fmt: skip
