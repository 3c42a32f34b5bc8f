"""Edits of accesses: masks, what masked lanes read, atomics, and whose strides make an address."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fa_verify.ttir.lowering.lower import MASK_OPERAND
from fa_verify.ttir.mutation.changes import Change
from fa_verify.ttir.mutation.proofs import always_true
from fa_verify.ttir.mutation.rows import never_seen
from fa_verify.ttir.mutation.surgery import literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.ttir.mutation.changes import Facts, Operator
    from fa_verify.ttir.mutation.surgery import Surgery
    from fa_verify.ttir.syntax.ir import Op, Value

__all__ = ["OPERATORS"]

_GARBAGE = (1 << 30) + 7  # what an integer lane that is not read may hold


def _what(op: Op) -> str:
    return op.name.removeprefix("tt.").replace("_rmw", "").replace("_", " ")


def mask(op: Op, facts: Facts) -> Iterator[Change]:
    """An access has no mask."""
    position = MASK_OPERAND.get(op.name)
    if position is None or len(op.operands) <= position:
        return
    yield Change(
        operator="drop-mask",
        label="all-true",
        says=f"the mask is dropped from the {_what(op)} of {facts.argument(op.operands[0])}",
        apply=partial(_all_true, position),
        proof=always_true(op.operands[position]),
    )


def _all_true(position: int, op: Op, surgery: Surgery) -> None:
    type_ = op.operands[position].type
    surgery.replace(op, position, surgery.constant(op, type_, literal(type_, True)))


def other(op: Op, facts: Facts) -> Iterator[Change]:
    """Lanes that a mask hides read garbage, as they do where `other` is left out."""
    if op.name != "tt.load" or len(op.operands) < 3 or op.operands[2].type.scalar == "ptr":
        return
    yield Change(
        operator="drop-other",
        label="garbage",
        says=f"other is dropped from the load of {facts.argument(op.operands[0])}: "
        "lanes that its mask hides hold garbage",
        apply=_garbage,
        proof=always_true(op.operands[1]) or never_seen(op, facts),
    )


def _garbage(op: Op, surgery: Surgery) -> None:
    type_ = op.operands[2].type
    content: object = float("nan") if type_.is_float else _GARBAGE % (1 << (type_.bits - 1))
    if type_.scalar == "i1":
        content = True
    surgery.replace(op, 2, surgery.constant(op, type_, literal(type_, content)))


def atomic(op: Op, facts: Facts) -> Iterator[Change]:
    """An atomic whose result nobody reads becomes a store, or nothing."""
    if op.name != "tt.atomic_rmw" or any(x.users for x in op.results):
        return
    where = facts.argument(op.operands[0])
    yield Change(
        operator="drop-atomic",
        label="store",
        says=f"an atomic on {where} is a store",
        apply=_store,
    )
    yield Change(
        operator="drop-atomic",
        label="nothing",
        says=f"an atomic on {where} is left out",
        apply=_nothing,
    )


def _store(op: Op, surgery: Surgery) -> None:
    surgery.before(op, "tt.store", op.operands, None)
    surgery.remove(op)


def _nothing(op: Op, surgery: Surgery) -> None:
    surgery.remove(op)


def argument(op: Op, facts: Facts) -> Iterator[Change]:
    """An integer argument is read in place of the one before it: another tensor's stride."""
    for index, operand in enumerate(op.operands):
        wrong = _next(operand, facts)
        if wrong is not None:
            names = facts.arguments
            yield Change(
                operator="wrong-argument",
                label=f"operand-{index}",
                says=f"{names[wrong]} is used in place of {names[operand]}",
                apply=partial(_instead, index, wrong),
            )


def _next(value: Value, facts: Facts) -> Value | None:
    """The integer argument after this one, of its type."""
    if value not in facts.integers:
        return None
    alike = [x for x in facts.integers if x.type == value.type]
    after = alike[(alike.index(value) + 1) % len(alike)]
    return None if after is value else after


def _instead(index: int, wrong: Value, op: Op, surgery: Surgery) -> None:
    surgery.replace(op, index, wrong)


OPERATORS: tuple[Operator, ...] = (mask, other, atomic, argument)
