"""Which iterations of loops a changed number adds, leaves out or moves, and whether that matters.

An iteration whose mask hides every lane adds nothing; a loop with masks does what one without does
where every mask is true. docs/mutation.md says what is taken for granted: whole numbers do not
wrap, and what hidden lanes read is finite. Lanes count only where they are stored, if what others
hold stays with them: rows past the end.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations, product
from typing import TYPE_CHECKING

from fa_verify.ttir.mutation.bodies import alike, unlike
from fa_verify.ttir.mutation.idle import adds_nothing, masks_of
from fa_verify.ttir.mutation.inequalities import ONE, at_least, minus, plus, times
from fa_verify.ttir.mutation.integers import Altered, Reading, either
from fa_verify.ttir.mutation.refutation import refuted
from fa_verify.ttir.mutation.rows import stays_within, stored_where
from fa_verify.ttir.mutation.surgery import number

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from fa_verify.ttir.mutation.changes import Facts
    from fa_verify.ttir.mutation.inequalities import Linear
    from fa_verify.ttir.mutation.rows import Condition
    from fa_verify.ttir.syntax.ir import Op, Value

__all__ = ["same_iterations"]

_TURN: Hashable = "turn"  # the number of an iteration


def same_iterations(altered: Altered, loops: Sequence[Op], facts: Facts) -> str:
    """Why loops whose bounds a changed number reaches do what they did; "" where nothing says."""
    if not 1 <= len(loops) <= 2 or not _in_a_row(loops, facts):
        return ""
    asked = _Iterations(altered, loops, facts)
    if not asked.aligned():
        return ""
    reasons = {asked.left_out(loop) for loop in loops}
    reasons |= {asked.moved(one, other) for one, other in permutations(loops, 2)}
    if "" in reasons:
        return ""
    return " and ".join(sorted(reasons - {_NEVER})) or "each loop takes the same steps"


_NEVER = "never"
_HIDDEN = "a step more or less is one whose mask hides every lane, which adds nothing"
_MOVED = "a step is taken in a loop that does the same, where every mask is true"
_STORED = " of those that are stored"


def _in_a_row(loops: Sequence[Op], facts: Facts) -> bool:
    """Whether they have one step, and each takes over what the one before it leaves, where it ends.

    Nothing but the next loop reads what a loop leaves.
    """
    steps = {number(loop.operands[2]) for loop in loops}
    if len(steps) != 1 or None in steps:
        return False
    for one, other in pairwise(loops):
        if facts.owners.get(one) is not facts.owners.get(other):
            return False
        if facts.numbering.of(one.operands[1]) is not facts.numbering.of(other.operands[0]):
            return False
        if other.operands[3:] != one.results:
            return False
        if any(set(x.users) != {other} for x in one.results):
            return False
    return True


class _Iterations:
    """The steps of loops, as they are and as they would be."""

    def __init__(self, altered: Altered, loops: Sequence[Op], facts: Facts) -> None:
        self._altered, self._loops, self._numbering = altered, loops, facts.numbering
        self._facts = facts
        (step,) = {int(number(loop.operands[2]) or 0) for loop in loops}
        self._step = step
        first = loops[0].operands[0]
        self._fixed = len(loops) == 1 and not altered.reaches(first)

    def aligned(self) -> bool:
        """Whether each loop begins at a multiple of the step, or takes no step."""
        if self._step <= 0:
            return False
        return self._fixed or all(
            refuted(self._unaligned(loop, altered), self._facts)
            for loop in self._loops
            for altered in (None, self._altered)
        )

    def _unaligned(self, loop: Op, altered: Altered | None) -> Callable[[Reading], None]:
        def build(reading: Reading) -> None:
            begin, end = (reading.value(x, (), altered) for x in loop.operands[:2])
            rest = minus(begin, times({_TURN: 1}, self._step))
            reading.facts += [at_least(end, begin, 1), at_least(rest, {}, 1)]
            reading.facts.append(at_least({ONE: self._step - 1}, rest))

        return build

    def _turn(self, reading: Reading) -> Linear:
        """The counter of an iteration."""
        counter = times({_TURN: 1}, self._step)
        if not self._fixed:
            return counter
        reading.facts.append({_TURN: 1})
        return plus(counter, reading.value(self._loops[0].operands[0]))

    def _taken(self, reading: Reading, loop: Op, altered: Altered | None, *, taken: bool) -> None:
        """A loop takes that iteration, or does not."""
        counter = self._turn(reading)
        begin, end = (reading.value(x, (), altered) for x in loop.operands[:2])
        late, early = at_least(counter, begin), at_least(end, counter, 1)
        if taken:
            reading.facts += [late, early]
        else:
            reading.either.append(either([at_least(begin, counter, 1)], [at_least(counter, end)]))

    def left_out(self, loop: Op) -> str:
        """Of iterations that only one of the two, as it is and as it would be, takes."""
        reason = _NEVER
        for mine, theirs in ((None, self._altered), (self._altered, None)):

            def build(
                reading: Reading, mine: Altered | None = mine, theirs: Altered | None = theirs
            ) -> None:
                self._taken(reading, loop, mine, taken=True)
                for other in self._loops:
                    self._taken(reading, other, theirs, taken=False)

            if refuted(build, self._facts):
                continue
            masks = masks_of(loop)
            if not adds_nothing(loop, masks):
                return ""
            false = {x for x in masks if self._never(x, loop, build, holds=True)}
            reason = _HIDDEN
            if not adds_nothing(loop, false):
                found = self._stored([(loop, masks - false)], build, holds=True)
                if not any(adds_nothing(loop, false | more) for (more,) in found):
                    return ""
                reason = _HIDDEN + _STORED
        return reason

    def moved(self, one: Op, other: Op) -> str:
        """Of iterations that one loop takes as it is, and another as it would be."""

        def build(reading: Reading) -> None:
            self._taken(reading, one, None, taken=True)
            self._taken(reading, other, self._altered, taken=True)

        if refuted(build, self._facts):
            return _NEVER
        masks = unlike((one, other), self._facts)
        if not alike((one, other), masks, self._facts):
            return ""
        true = [
            {x for x in found if self._never(x, loop, build, holds=False)}
            for loop, found in zip((one, other), masks, strict=True)
        ]
        if alike((one, other), true, self._facts):
            return _MOVED
        left = [(loop, a - b) for loop, a, b in zip((one, other), masks, true, strict=True)]
        for found in self._stored(left, build, holds=False):
            if alike((one, other), [a | b for a, b in zip(true, found, strict=True)], self._facts):
                return _MOVED + _STORED
        return ""

    def _stored(
        self, left: Sequence[tuple[Op, AbstractSet[Value]]], build: Callable[[Reading], None],
        *, holds: bool,
    ) -> Iterator[list[set[Value]]]:  # fmt: skip
        """Conditions of loops that hold, or fail, in no lane that is stored; others stay apart.

        Yields:
            Those of each loop, for one thing that stores ask of an axis.
        """
        for axis, asked in product((0, 1), stored_where(self._facts)):
            shown = replace(asked, axis=axis)
            yield [
                {
                    x
                    for x in conditions
                    if axis < len(x.type.shape)
                    and self._never(x, loop, build, holds=holds, shown=shown)
                    and stays_within(x, shown, self._facts)
                }
                for loop, conditions in left
            ]

    def _never(
        self, condition: Value, loop: Op, build: Callable[[Reading], None], *, holds: bool,
        shown: Condition | None = None,
    ) -> bool:  # fmt: skip
        """Whether a condition of a loop's body holds, or fails, in no lane (that is shown)."""

        def suppose(reading: Reading) -> None:
            build(reading)
            counter = loop.regions[0].blocks[0].args[0]
            reading.knows(counter, self._turn(reading))
            axes = tuple(range(len(condition.type.shape)))
            reading.assume(condition, axes, holds=holds)
            if shown is not None:
                sides = (
                    reading.value(x, tuple(shown.axis if n > 1 else None for n in x.type.shape))
                    for x in (shown.left, shown.right)
                )
                reading.compare(shown.relation, *sides, holds=True)

        return refuted(suppose, self._facts)
