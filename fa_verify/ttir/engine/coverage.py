"""`Coverage`: which ways through a kernel's IR its programs took, and what its masks hid.

A flag for each block, each way of a branch and each side of a mask: set as they are met, never
counted, so that it costs a launch next to nothing. Lines are those of the source before anything
was moved out of loops.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fa_verify.ttir.syntax.ir import Block, Location, Module, Op

__all__ = ["Coverage", "Ran", "merged"]

Line = tuple[str, int]  # a file and a line in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What of the sources of some kernels ran.

    Attributes:
        ran: Lines with an operation that ran.
        compiled: Lines with an operation, whether it ran or not.
        ways: Line and way: "then", "else", "loop", "no loop"; "shown" and "hidden" where a mask let
            an access through or not. All that there are, True for those taken.
    """

    ran: frozenset[Line] = frozenset()
    compiled: frozenset[Line] = frozenset()
    ways: dict[tuple[Line, str], bool] = field(default_factory=dict)


class Coverage:
    """The flags of one kernel.

    Attributes:
        flags: One for each number that `block` and `way` gave, 0 until it is met.
    """

    def __init__(self, module: Module, place: Callable[[Location], Line]) -> None:
        """Note where each block's operations were written."""
        self.flags = bytearray()
        self._place = place
        self._names: list[tuple[Line, str]] = []
        self._blocks: dict[int, frozenset[Line]] = {}
        blocks = [
            block
            for function in module.functions.values()
            for block in (*function.body.blocks, *_inner(function.walk()))
        ]
        files = {op.location.file for block in blocks for op in block.ops}  # but for Triton's own
        self._lines: dict[Block, frozenset[Line]] = {
            block: frozenset(place(at) for op in block.ops for at in _frames(op.location, files))
            for block in blocks
        }

    def way(self, op: Op, name: str) -> int:
        """The number of one way of an operation."""
        self.flags.append(0)
        self._names.append((self._place(op.location), name))
        return len(self.flags) - 1

    def block(self, block: Block, op: Op | None = None, name: str = "") -> int:
        """The number of a block; of an operation's way, if it is one."""
        number = self.way(op or block.ops[0], name)
        self._blocks[number] = self._lines.get(block, frozenset())
        return number

    def loop(self, op: Op) -> Callable[[int, int], None]:
        """What hears of the fewest and the most turns that programs took of a loop."""
        ran = self.block(op.regions[0].blocks[0], op, "loop")
        skipped = self.way(op, "no loop")

        def met(fewest: int, most: int) -> None:
            self.flags[ran] |= most > 0
            self.flags[skipped] |= not fewest

        return met

    def clear(self) -> None:
        """Forget what was met."""
        self.flags[:] = bytes(len(self.flags))

    def ran(self, flags: bytes) -> Ran:
        """What some flags mean."""
        ways: defaultdict[tuple[Line, str], bool] = defaultdict(bool)
        for key, flag in zip(self._names, flags, strict=True):
            if key[1]:
                ways[key] |= bool(flag)
        blocks = self._blocks.items()
        return Ran(
            ran=frozenset().union(*(lines for number, lines in blocks if flags[number])),
            compiled=frozenset().union(*(lines for _, lines in blocks)),
            ways=dict(ways),
        )


def _frames(location: Location, files: set[str]) -> Iterable[Location]:
    """Where it was written, and the calls in these files that led there: their lines ran too."""
    yield location
    for file, line, column in location.calls:
        if file in files:
            yield replace(location, file=file, line=line, column=column, calls=())


def _inner(ops: Iterable[Op]) -> Iterable[Block]:
    return (block for op in ops for region in op.regions for block in region.blocks)


def merged(several: Iterable[Ran]) -> Ran:
    """What ran in any of them."""
    found = list(several)
    ways: defaultdict[tuple[Line, str], bool] = defaultdict(bool)
    for one in found:
        for key, taken in one.ways.items():
            ways[key] |= taken
    return Ran(
        ran=frozenset().union(*(one.ran for one in found)),
        compiled=frozenset().union(*(one.compiled for one in found)),
        ways=dict(ways),
    )
