"""What a changed integer reaches, and why that may come to nothing: three kinds of argument.

It is the same number whatever the kernel is given; where it is another, nothing is stored; it only
decides which steps loops take, and the steps that it adds, leaves out or moves do not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.ttir.lowering.lower import MASK_OPERAND
from fa_verify.ttir.mutation.inequalities import at_least
from fa_verify.ttir.mutation.integers import Altered, Reading, either
from fa_verify.ttir.mutation.loops import same_iterations
from fa_verify.ttir.mutation.refutation import refuted

if TYPE_CHECKING:
    from fa_verify.ttir.mutation.changes import Facts
    from fa_verify.ttir.syntax.ir import Op, Value

__all__ = ["comes_to_nothing"]

_WRITING = frozenset({
    "tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_store", "tt.descriptor_reduce",
})  # fmt: skip
_PROBE = "mutation.probe"
_BOUNDS = 2  # of a loop: where it begins and ends


def comes_to_nothing(mine: Value, other: Value, facts: Facts) -> str:
    """Why an integer or a condition may as well be another; "" where nothing says so.

    Args:
        mine: As it is.
        other: As it would be, computed of what `mine` does not reach.
        facts: Of the module.
    """
    if mine.type != other.type or not mine.type.is_int or (mine.type.shape and mine.type.bits > 1):
        return ""
    axes = tuple(range(len(mine.type.shape)))
    if refuted(lambda reading: _differ(reading, mine, other, axes), facts):
        return "it is the same, whatever the kernel is given"
    if axes:
        return ""
    return _steps_only(mine, other, facts) or _nothing_stored(mine, other, facts)


def _differ(reading: Reading, mine: Value, other: Value, axes: tuple[int, ...] = ()) -> None:
    """Suppose that two are unlike, in one lane."""
    if mine.type.scalar == "i1":
        reading.differ(mine, other, axes)
        return
    a, b = (reading.value(x, axes) for x in (mine, other))
    reading.either.append(either([at_least(a, b, 1)], [at_least(b, a, 1)]))


def _dependent(start: Value, facts: Facts) -> set[Value]:
    """All that depends on a value."""
    reached: set[Value] = set()
    pending = [start]
    while pending:
        for user in pending.pop().users:
            found = list(user.results)
            if user.name == "scf.yield":
                owner = facts.owners[user]
                found += owner.results
                found += owner.regions[0].blocks[0].args if owner.name == "scf.for" else []
            elif user.regions:
                found += facts.inside(user)
            pending += [x for x in found if x not in reached]
            reached.update(found)
    return reached


def _nothing_stored(mine: Value, other: Value, facts: Facts) -> str:
    """Every store's mask hides all lanes where the two are unlike."""
    masks = []
    for op in facts.module.entry.walk():
        if op.name in _WRITING:
            position = MASK_OPERAND.get(op.name)
            if position is None or len(op.operands) <= position:
                return ""
            masks.append(op.operands[position])

    def hidden(mask: Value) -> bool:
        def build(reading: Reading) -> None:
            _differ(reading, mine, other)
            reading.assume(mask, tuple(range(len(mask.type.shape))), holds=True)

        return refuted(build, facts)

    if not all(map(hidden, masks)) or not _dependent(mine, facts).isdisjoint(masks):
        return ""
    return "where it is another, nothing is stored"


def _steps_only(mine: Value, other: Value, facts: Facts) -> str:
    """It only decides where loops begin and end, by way of other numbers."""
    reached: set[Value] = set()
    loops: set[Op] = set()
    pending = [mine]
    while pending:
        value = pending.pop()
        for user in dict.fromkeys(value.users):
            if user.name == _PROBE:
                continue
            places = [place for place, x in enumerate(user.operands) if x is value]
            if user.name == "scf.for" and max(places) < _BOUNDS:
                loops.add(user)
            elif user.name.startswith("arith.") and not user.results[0].type.shape:
                pending += [x for x in user.results if x not in reached]
                reached.update(user.results)
            else:
                return ""
    order = [op for op in facts.module.entry.walk() if op in loops]
    return same_iterations(Altered(mine, other, reached), order, facts)
