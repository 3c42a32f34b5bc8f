"""Edits that only mend: a factor put in, another size or index, a sum where a store is."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from fa_verify.ttir.mutation.changes import Change

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.ttir.mutation.changes import Facts, Operator
    from fa_verify.ttir.mutation.surgery import Surgery
    from fa_verify.ttir.syntax.ir import Op, Value

__all__ = ["OPERATORS"]

_PARTS = {"arith.divsi": "/", "arith.remsi": "%"}  # that take an index apart
_WIDER = frozenset({"arith.extsi", "tt.splat", "tt.expand_dims", "tt.broadcast"})


def factor(op: Op, facts: Facts) -> Iterator[Change]:
    """A product is multiplied by a number that is an argument, such as a scale."""
    if op.name != "tt.dot" or op.results[0].type.scalar != "f32":
        return
    for value, name in facts.arguments.items():
        if value.type.scalar == "f32" and not value.type.shape:
            yield Change(
                operator="add-factor",
                label=name,
                says=f"a product is multiplied by {name}",
                apply=partial(_multiplied, value),
            )


def _multiplied(value: Value, op: Op, surgery: Surgery) -> None:
    """What a product adds to is left alone."""
    product, place = op.results[0], surgery.following(op)
    scaled = product
    zero = surgery.constant(op, product.type, _zero(product))
    added = op.operands[2]
    surgery.replace(op, 2, zero)
    tile = surgery.before(place, "tt.splat", (value,), product.type)
    scaled = surgery.before(place, "arith.mulf", (product, tile), product.type)
    total = surgery.before(place, "arith.addf", (scaled, added), product.type)
    assert scaled.producer is not None  # noqa: S101 - for mypy: an operation made it
    surgery.forward(product, total, but=scaled.producer)


def _zero(value: Value) -> str:
    return "dense<0.000000e+00>" if value.type.shape else "0.000000e+00"


def summed(op: Op, facts: Facts) -> Iterator[Change]:
    """A store of float32 numbers adds to what is there."""
    if op.name == "tt.store" and op.operands[1].type.scalar == "f32":
        yield Change(
            operator="add-atomic",
            label="fadd",
            says=f"the store of {facts.argument(op.operands[0])} adds to what is there",
            apply=_added,
        )


def _added(op: Op, surgery: Surgery) -> None:
    words = ("fadd", "acq_rel", "gpu")
    surgery.before(op, "tt.atomic_rmw", op.operands, op.operands[1].type, words=words)
    surgery.remove(op)


def quotient(op: Op, facts: Facts) -> Iterator[Change]:
    """A quotient is the remainder, or a remainder the quotient, of another size."""
    if op.name not in _PARTS:
        return
    divisor = _plain(op.operands[1])
    other = next(name for name in _PARTS if name != op.name)
    for value, name in facts.arguments.items():
        if value is divisor or value.type != divisor.type or "stride" in name:
            continue
        yield Change(
            operator="other-quotient",
            label=name,
            says=f"a {_PARTS[op.name]} b is a {_PARTS[other]} {name}",
            apply=partial(_taken_apart, other, value),
        )


def _taken_apart(name: str, value: Value, op: Op, surgery: Surgery) -> None:
    divisor = _like(value, op.operands[1], op, surgery)
    new = surgery.before(op, name, (op.operands[0], divisor), op.results[0].type)
    surgery.forward(op.results[0], new)


def _plain(value: Value) -> Value:
    """A number before it is made wider, or a tile of it."""
    while value.producer is not None and value.producer.name in _WIDER:
        value = value.producer.operands[0]
    return value


def _like(value: Value, wanted: Value, op: Op, surgery: Surgery) -> Value:
    """A value with the casts that another went through."""
    steps = []
    while wanted.producer is not None and wanted.producer.name in _WIDER:
        steps.append(wanted.producer)
        wanted = wanted.producer.operands[0]
    for step in reversed(steps):
        attrs = dict(step.attrs)
        value = surgery.before(op, step.name, (value,), step.results[0].type, attrs=attrs)
    return value


def index(op: Op, facts: Facts) -> Iterator[Change]:
    """What is multiplied by an argument for an address is another index of the kernel."""
    if op.name != "arith.muli" or op.results[0].type.shape:
        return
    for at, operand in enumerate(op.operands):
        if _plain(op.operands[1 - at]) not in facts.arguments or operand in facts.arguments:
            continue
        alike = {name: x for x, name in _indices(op, facts) if x.type == operand.type}
        for name, other in alike.items():
            if other is not operand:
                yield Change(
                    operator="other-index",
                    label=f"operand-{at}-{name}",
                    says=f"{name} is used in place of {_name(operand)}",
                    apply=partial(_instead, at, other),
                )


def _indices(op: Op, facts: Facts) -> Iterator[tuple[Value, str]]:
    """Whole numbers computed before an operation, in its block or around it, that have names."""
    owner: Op | None = op
    while owner is not None:
        outer = facts.owners.get(owner)
        blocks = (
            [block for region in outer.regions for block in region.blocks]
            if outer is not None
            else facts.module.entry.body.blocks
        )
        for block in blocks:
            if owner in block.ops:
                for earlier, behind in pairwise(block.ops[: block.ops.index(owner) + 1]):
                    for value in earlier.results:
                        last = _name(value) != _name(behind.results[0] if behind.results else None)
                        if value.type.is_int and not value.type.shape and last and _name(value):
                            yield value, _name(value)
        owner = outer


def _name(value: Value | None) -> str:
    """The variable that a value is, or is a step towards; "" where Triton does not say."""
    name = "" if value is None else value.name.removeprefix("%").partition("#")[0]
    name = name.rpartition("_")[0] if name.rpartition("_")[2].isdigit() else name
    return "" if name.isdigit() or name.startswith(("c0", "c1", "cst", "true", "false")) else name


def _instead(at: int, value: Value, op: Op, surgery: Surgery) -> None:
    surgery.replace(op, at, value)


OPERATORS: tuple[Operator, ...] = (factor, summed, quotient, index)
