"""Which cells a tile of pointers reaches, and what is wrong with reaching them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.engine.control import selection
from fa_verify.ttir.memory.cells import Cells, Planner, Touched, differs, elementwise, outside
from fa_verify.ttir.memory.tiles import by_run, first_rows, reinterpret, spread
from fa_verify.ttir.memory.values import Pointer, take
from fa_verify.ttir.numbers.shorts import any_nan, is_short, widen
from fa_verify.ttir.sanitizer.races import Races
from fa_verify.ttir.sanitizer.reports import Reports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.memory.argument import Argument
    from fa_verify.ttir.memory.cells import Access
    from fa_verify.ttir.memory.values import Selection, Terms
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.sanitizer.findings import Findings, Site
    from fa_verify.ttir.sanitizer.readback import ReadBack
    from fa_verify.ttir.sanitizer.regions import Reading

Line = tuple[str, int]  # a file and a line in it


@dataclass(slots=True, eq=False)
class Wrap:
    """32-bit arithmetic of one line that wrapped: the first program, the exact value, how often."""

    site: Site
    program_id: tuple[int, int, int]
    value: int
    count: int


@dataclass(slots=True)
class Claim:
    """Values that are claimed to be contiguous, where first they were not, and how often."""

    program_id: tuple[int, int, int]
    detail: str
    count: int = 0


class Reach:
    """What one launch's memory operations reach, and whoever looks at it."""

    def __init__(self, machine: Machine, findings: Findings, *, sanitize: bool) -> None:
        """Work for `machine`, reporting to `findings` when `sanitize`."""
        self.machine, self.sanitize = machine, sanitize
        self.planner = Planner()
        self.findings = findings
        self.races = Races(machine, findings)
        self.reports = Reports(machine, findings)
        self.reading: Reading | None = None
        self.read_back: ReadBack | None = None
        self.watch_wraps = sanitize
        self.wraps: dict[Line, Wrap] = {}
        self.claims: dict[Site, Claim] = {}
        self.believed: Callable[[Site, Array, tuple[int, ...]], None] | None = None  # hears claims
        self.nans: dict[int, dict[int, tuple[Argument, int]]] = {}  # by operation and program

    def halves(
        self, access: Access, terms: Terms, masks: Terms, *values: Any, ordered: bool
    ) -> Iterator[tuple[Selection, list[Any]]] | None:
        """Programs that see their whole tile, then the others, where this makes windows of a tile.

        Yields the programs, and their terms, masks and values. While one half is being dealt with,
        only its programs are lanes.

        Args:
            access: The operation.
            terms: Addresses.
            masks: Masks.
            values: Whatever else there is a row of for each program, or one for all.
            ordered: Only if programs then still come in order.
        """
        whole = self.planner.whole(masks)
        rest = tuple([m for m in masks if not differs(m)])
        if whole is None or self.planner.windows(terms, rest, access.shape) is None:
            return None
        if ordered and np.count_nonzero(whole[1:] != whole[:-1]) > 1:
            return None
        return self._in_turns(whole, rest, terms, masks, values)

    def _in_turns(
        self, whole: Array, rest: Terms, terms: Terms, masks: Terms, values: Sequence[Any]
    ) -> Iterator[tuple[Selection, list[Any]]]:
        lanes = self.machine.lanes
        halves = [
            (selection(keep), m) for keep, m in ((whole, rest), (~whole, masks)) if keep.any()
        ]
        if not whole[0]:
            halves.reverse()
        for chosen, left in halves:
            self.machine.lanes = lanes.take(chosen)
            yield chosen, [take(x, chosen) for x in (terms, left, *values)]
            self.machine.lanes = lanes

    def resolve(
        self, access: Access, arg: Argument, addresses: tuple[Terms, Terms], kind: str,
        found: Cells | None,
    ) -> Cells:  # fmt: skip
        """Describe a tile's legal cells; whatever lies outside is reported and masked off.

        `found` is the tile as windows, if it can be described so. The result's `index` is safe to
        use as it is: masked-off entries are moved inside.
        """
        terms, masks = addresses
        cells = found or elementwise(terms, masks)
        if access.sides is not None:
            self._note_sides(access.sides, cells)
        bad = outside(arg, cells)
        if bad is None:
            return cells
        wrong = bad if cells.valid is None else bad & cells.valid
        if cells.axis is not None and wrong.any():  # look again, element by element
            cells = elementwise(terms, masks)
            bad = outside(arg, cells)
            if bad is None:
                return cells
            wrong = bad if cells.valid is None else bad & cells.valid
        if wrong.any():
            if self.sanitize:
                self.reports.outside(access, arg, cells, wrong, kind)
            cells.valid = ~bad if cells.valid is None else cells.valid & ~bad
        cells.index = np.where(bad, 0, cells.index)
        if cells.axis is not None and arg.size < cells.length:
            cells.length = 0
        return cells

    def _note_sides(self, sides: tuple[int, int], cells: Cells) -> None:
        """Remember what a mask has done."""
        flags, valid, (shown, hidden) = self.machine.coverage.flags, cells.valid, sides
        if not flags[hidden] and (valid is not None or cells.length < cells.full):
            flags[hidden] = 1
        if not flags[shown] and cells.length and (valid is None or valid.any()):
            flags[shown] = 1

    def touch(
        self, access: Access, arg: Argument, cells: Cells, *others: Array, everyone: bool = False
    ) -> tuple[Touched, list[Array]]:
        """Flatten the valid cells, and `others`, arrays shaped like cells.index (+ the run).

        Args:
            access: The operation.
            arg: The argument.
            cells: Legal cells.
            others: What belongs to each cell.
            everyone: Count an access that is the same for all programs once for each of them.
        """
        index, valid = cells.index, cells.valid
        count = None if valid is None else first_rows(valid)
        if count is not None:  # cutting costs a fraction of choosing
            index, valid = index[:, :count], None
            others = tuple([o[:, :count] for o in others])
        shapes = [index.shape, *[o.shape[: index.ndim] for o in others]]
        lanes = self.machine.lanes.linear
        alike = valid is None and all(shape == index.shape for shape in shapes)
        whole = count in (None, *index.shape[1:2]) and (not everyone or len(index) == lanes.size)
        if alike and whole:
            program = lanes[: index.shape[0]] + np.int32(1)
            program = program.repeat(index.size // program.size)
            tails = [o.reshape((-1, *o.shape[index.ndim :])) for o in others]
            return Touched(access, arg, cells, index.reshape(-1), program), tails
        if count is not None:
            shapes.append((1, count))
        if valid is not None:
            shapes.append(valid.shape)
        if everyone:
            shapes.append((lanes.size, *(1,) * (index.ndim - 1)))
        shape = np.broadcast_shapes(*shapes)
        program = (lanes + np.int32(1))[: shape[0]].reshape((-1,) + (1,) * (len(shape) - 1))
        program, index = spread(program, shape), spread(index, shape)
        wide = [spread(o, shape + o.shape[index.ndim :]) for o in others]
        if valid is None:
            tails = [o.reshape((-1, *o.shape[len(shape) :])) for o in wide]
            return Touched(access, arg, cells, index.reshape(-1), program.reshape(-1)), tails
        valid = spread(valid, shape)
        return Touched(access, arg, cells, index[valid], program[valid]), [o[valid] for o in wide]

    def check_written(self, access: Access, arg: Argument, cells: Cells, shadow: Array) -> None:
        """Report reads of elements that nobody wrote."""
        if cells.index.size == 0 or cells.length == 0:
            return
        written = cells.of(arg, shadow)[cells.index]
        if written.all():
            return
        touched, (written,) = self.touch(access, arg, cells, written)
        missing = ~written
        if missing.any():
            self.reports.unwritten(touched, missing)

    def places(self, access: Access, cells: Cells) -> list[Array]:
        """Places in the tile, if it matters where an element was stored from."""
        if self.read_back is None:
            return []
        return [by_run(access, cells, self.read_back.places(access))]

    def look_at_read(self, access: Access, arg: Argument, cells: Cells) -> None:
        """Tell those who look for races and for what is read back."""
        places = self.places(access, cells)
        touched, places = self.touch(access, arg, cells, *places, everyone=True)
        self.races.read(touched)
        if self.read_back is not None:
            self.read_back.loaded(touched, places[0])

    def look_for_nan(self, access: Access, touched: Touched, values: Array) -> None:
        """Remember the first NaN that each program stores by an operation."""
        if is_short(values):
            if not any_nan(values):
                return
            values = widen(values)
        elif not np.isnan(values.min()):
            return
        seen = self.nans.setdefault(id(access), {})
        nan = np.isnan(values.reshape(values.shape[0], -1))
        runs = np.flatnonzero(nan.any(axis=1))
        programs, first = np.unique(touched.program[runs], return_index=True)
        for i in np.argsort(first):
            run = runs[first[i]]
            offset = int(touched.index[run] + np.argmax(nan[run]))
            seen.setdefault(int(programs[i]) - 1, (touched.arg, offset))

    @staticmethod
    def parts(access: Access, pointer: Pointer) -> Iterator[tuple[Argument, Array | None]]:
        """The arguments a pointer points into, each with the lanes that do (None: all)."""
        for number, arg in enumerate(pointer.args):
            seen = arg if arg.scalar == access.scalar else reinterpret(arg, access.scalar)
            if pointer.which is None:
                yield seen, None
            elif (mine := pointer.which == number).any():
                yield seen, mine

    def claimed(self, lane: int, site: Site, count: int, detail: str) -> None:
        """Remember that what is claimed to be contiguous is not; `claims` tells if that matters."""
        program = self.machine.position(int(self.machine.lanes.linear[lane]))
        self.claims.setdefault(site, Claim(program, detail)).count += count
        self.findings.noted += 1  # see `wrapped`

    def wrapped(self, site: Site, exact: Array, wrong: Array, result: Array) -> Array:
        """Remember that arithmetic for addresses wrapped where `wrong`; return its result."""
        lane = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        program = self.machine.position(int(self.machine.lanes.linear[int(lane[0])]))
        found = self.wraps.setdefault(
            (site.file, site.line), Wrap(site, program, int(exact[lane]), 0)
        )
        found.count += int(np.count_nonzero(wrong))
        self.findings.noted += 1  # nothing that depends on it may be taken from an earlier launch
        return result
