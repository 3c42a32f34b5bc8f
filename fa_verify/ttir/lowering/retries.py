"""Loads that a compare-and-swap checks: the first half of an atomic update of one's own making.

    old = tl.load(p)                              # may be out of date, which does no harm:
    while not done:
        seen = tl.atomic_cas(p, old, f(old))      # nothing is written unless p still holds it
        done = seen == old
        old = seen

Such a load is one whose value reaches, unchanged, what a compare-and-swap through the same pointer
expects, and goes nowhere else unchecked: into what that operation writes, and into comparisons
with what it returned. Whoever stores it, takes an address or a way by it, still reads it plainly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.ttir.lowering.flows import handed_on
from fa_verify.ttir.lowering.hoist import is_pure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fa_verify.ttir.syntax.ir import Function, Op, Value

_CASTS = frozenset({"arith.bitcast", "tt.bitcast"})
_STEPS = frozenset({"tt.addptr", "tt.broadcast", "tt.expand_dims", "tt.splat"})
_EQUALITIES = frozenset({"eq", "ne", "oeq", "ueq", "one", "une"})
_LOOPS = frozenset({"scf.for", "scf.if", "scf.while"})
_ENDS = frozenset({"scf.condition", "scf.yield"})
_DECIDING = {"scf.for": 3, "scf.if": 1, "scf.condition": 1}  # operands that choose a way

Flow = dict["Value", list["Value"]]


def checked(function: Function) -> frozenset[Op]:
    """All loads of a function that a compare-and-swap checks before anything depends on them."""
    ops = list(function.walk())
    swaps = [op for op in ops if op.name == "tt.atomic_cas" and op.results[0].users]
    if not swaps:
        return frozenset()
    copied = _flow(ops)
    return frozenset(
        op
        for op in ops
        if op.name == "tt.load" and _is_checked(op.results[0], _through(op, swaps), copied)
    )


def _through(load: Op, swaps: Iterable[Op]) -> list[Op]:
    """The compare-and-swaps through the pointer of a load."""
    return [op for op in swaps if _same_place(op.operands[0], load.operands[0])]


def _same_place(one: Value, other: Value) -> bool:
    """Whether two pointers are the same but for the type of what they point to."""
    one, other = _uncast(one), _uncast(other)
    if one is other:
        return True
    first, second = one.producer, other.producer
    if first is None or second is None or first.name != second.name or first.name not in _STEPS:
        return False
    return (
        _width(one) == _width(other)
        and _same_place(first.operands[0], second.operands[0])
        and first.operands[1:] == second.operands[1:]
    )


def _uncast(value: Value) -> Value:
    while value.producer is not None and value.producer.name in _CASTS:
        value = value.producer.operands[0]
    return value


def _width(pointer: Value) -> int | None:
    return pointer.type.pointee.bits if pointer.type.pointee is not None else None


def _flow(ops: Iterable[Op]) -> Flow:
    """Where each value is handed on to as it is."""
    flow: Flow = {}
    for op in ops:
        pairs = [(op.operands[0], op.results[0])] if op.name in _CASTS else handed_on(op)
        last = _last_turn(op) if op.name == "scf.while" and _entered(op) else {}
        for source, value in pairs:
            flow.setdefault(last.get(value, source), []).append(value)
    return flow


def _entered(loop: Op) -> bool:
    """Whether constants alone decide that a loop begins; `while not done` does."""
    before = loop.regions[0].blocks[0]
    first = dict(zip(before.args, loop.operands, strict=True))
    open_ = [before.ops[-1].operands[0]]
    while open_:
        value = open_.pop()
        op = first.get(value, value).producer
        if op is None or not op.name.startswith("arith."):
            return False
        open_ += op.operands
    return True


def _last_turn(loop: Op) -> dict[Value, Value]:
    """What the results of a loop that has begun are: values of its last turn, none from before."""
    before, after = (region.blocks[0] for region in loop.regions)
    following = dict(zip(before.args, after.ops[-1].operands, strict=True))
    ending = zip(before.ops[-1].operands[1:], loop.results, strict=True)
    return {result: following[value] for value, result in ending if value in following}


def _copies(values: Iterable[Value], copied: Flow) -> set[Value]:
    found: set[Value] = set()
    open_ = list(values)
    while open_:
        value = open_.pop()
        if value not in found:
            found.add(value)
            open_ += copied.get(value, ())
    return found


def _is_checked(loaded: Value, swaps: list[Op], copied: Flow) -> bool:
    same = _copies([loaded], copied)
    swaps = [op for op in swaps if op.operands[1] in same]
    if not swaps:
        return False
    seen = _copies([op.results[0] for op in swaps], copied)
    reached: set[Value] = set()
    open_ = [loaded]
    while open_:
        value = open_.pop()
        if value in reached:
            continue
        reached.add(value)
        open_ += copied.get(value, ())
        for user in value.users:
            if user in swaps and all(
                value is not x for x in (user.operands[0], *user.operands[3:])
            ):
                continue
            if is_pure(user):
                open_ += [] if _compares(user, seen) else user.results
            elif not _hands_on(user, value):
                return False
    return True


def _compares(op: Op, seen: set[Value]) -> bool:
    """Whether an operation asks if something equals what a compare-and-swap returned."""
    equality = op.name in ("arith.cmpi", "arith.cmpf") and not _EQUALITIES.isdisjoint(op.words)
    return equality and not seen.isdisjoint(op.operands)


def _hands_on(op: Op, value: Value) -> bool:
    """Whether an operation does nothing with a value but hand it on."""
    if op.name not in _LOOPS | _ENDS:
        return False
    return all(value is not x for x in op.operands[: _DECIDING.get(op.name, 0)])
