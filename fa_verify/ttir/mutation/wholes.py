"""Edits of whole steps of an algorithm: reductions, products, loops, scale and mask."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fa_verify.ttir.mutation.changes import Change
from fa_verify.ttir.mutation.proofs import absorbs, whole_steps
from fa_verify.ttir.mutation.rows import hidden_again
from fa_verify.ttir.mutation.surgery import literal, number
from fa_verify.ttir.ops.choice import parse_number
from fa_verify.ttir.syntax.ir import Type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.ttir.mutation.changes import Facts, Operator
    from fa_verify.ttir.mutation.surgery import Surgery
    from fa_verify.ttir.syntax.ir import Op, Value

__all__ = ["OPERATORS"]

_SUMS = {"arith.addf", "arith.addi"}
_OTHER = {
    "arith.addf": "arith.maxnumf", "arith.addi": "arith.maxsi", "arith.maxnumf": "arith.addf",
    "arith.maximumf": "arith.addf", "arith.maxsi": "arith.addi", "arith.minnumf": "arith.maxnumf",
    "arith.minsi": "arith.maxsi",
}  # fmt: skip
_NAMES = {"addf": "a sum", "addi": "a sum", "minnumf": "a minimum", "minsi": "a minimum"}


def _named(name: str) -> str:
    return _NAMES.get(name.partition(".")[2], "a maximum")


def reduction(op: Op, facts: Facts) -> Iterator[Change]:
    """A sum is a maximum, a maximum a sum; the first element is left out."""
    del facts
    if op.name != "tt.reduce" or len(op.operands) != 1:
        return
    inner = op.regions[0].blocks[0].ops[0]
    other = _OTHER.get(inner.name)
    if other is None:
        return
    yield Change(
        operator="change-reduction",
        label=other.partition(".")[2],
        says=f"{_named(inner.name)} is {_named(other)}",
        apply=partial(_combine, other),
    )
    yield Change(
        operator="change-reduction",
        label="without-first",
        says=f"{_named(inner.name)} leaves out its first element",
        apply=partial(_without_first, inner.name),
    )


def _combine(other: str, op: Op, surgery: Surgery) -> None:
    del surgery
    op.regions[0].blocks[0].ops[0].name = other


def _without_first(combine: str, op: Op, surgery: Surgery) -> None:
    source = op.operands[0]
    type_, axis = source.type, int(op.attrs["axis"].split()[0])
    extent = type_.shape[axis]
    line = Type("i32", (extent,))
    value = surgery.before(
        op, "tt.make_range", (), line, attrs={"start": "0 : i32", "end": f"{extent} : i32"}
    )
    shape = [extent]
    for at in range(len(type_.shape)):
        if at != axis:
            shape.insert(at, 1)
            value = surgery.before(
                op, "tt.expand_dims", (value,), Type("i32", tuple(shape)),
                attrs={"axis": f"{at} : i32"},
            )  # fmt: skip
    zero = surgery.constant(op, value.type, literal(value.type, 0))
    first = surgery.before(
        op, "arith.cmpi", (value, zero), Type("i1", value.type.shape), words=("eq",)
    )
    first = surgery.before(op, "tt.broadcast", (first,), Type("i1", type_.shape))
    none = surgery.constant(op, type_, literal(type_, _neutral(combine, type_)))
    surgery.replace(op, 0, surgery.before(op, "arith.select", (first, none, source), type_))


def _neutral(combine: str, type_: Type) -> float | int:
    if combine in _SUMS:
        return 0.0 if type_.is_float else 0
    sign = 1 if "min" in combine else -1
    return sign * float("inf") if type_.is_float else sign * ((1 << (type_.bits - 1)) - 1)


def product(op: Op, facts: Facts) -> Iterator[Change]:
    """A dot in tf32, one whose sum is kept in the narrow format, one that adds to nothing."""
    if op.name != "tt.dot":
        return
    precision = op.attrs.get("inputPrecision", "ieee")
    if op.operands[0].type.scalar == "f32" and precision != "tf32":
        yield Change(
            operator="dot-precision",
            label="tf32",
            says=f"a product in {precision} is in tf32",
            apply=_precision,
        )
    if op.results[0].type.scalar == "f32":
        narrow = facts.narrow.scalar
        yield Change(
            operator="dot-accumulator",
            label="narrow",
            says=f"a product is accumulated in {narrow}",
            apply=partial(_rounded, narrow),
        )
    start = number(op.operands[2])
    if start is None or parse_number(start, Type(op.operands[2].type.scalar)) != 0:
        yield Change(
            operator="drop-operand",
            label="no-accumulator",
            says="a product is not added to what was accumulated",
            apply=_from_zero,
        )
        yield Change(
            operator="drop-operand",
            label="no-product",
            says="a product is not added",
            apply=_unchanged,
        )


def _precision(op: Op, surgery: Surgery) -> None:
    del surgery
    op.attrs["inputPrecision"] = "tf32"


def _rounded(narrow: str, op: Op, surgery: Surgery) -> None:
    surgery.round_trip(op.results[0], "arith.truncf", "arith.extf", narrow)


def _from_zero(op: Op, surgery: Surgery) -> None:
    type_ = op.operands[2].type
    zero = literal(type_, 0.0 if type_.is_float else 0)
    surgery.replace(op, 2, surgery.constant(op, type_, zero))


def _unchanged(op: Op, surgery: Surgery) -> None:
    surgery.forward(op.results[0], op.operands[2])


def loop(op: Op, facts: Facts) -> Iterator[Change]:
    """A loop ends or begins one early or late, or a whole step."""
    del facts
    if op.name != "scf.for":
        return
    for index, name, by, says in (
        (1, "end+1", 1, "ends one later"),
        (1, "end-1", -1, "ends one earlier"),
        (0, "begin+1", 1, "begins one later"),
    ):
        yield Change(
            operator="loop-bound",
            label=name,
            says=f"a loop {says}",
            apply=partial(_moved, index, by),
            proof=whole_steps(op) if name == "end-1" else "",
        )
    for index, name, how, says in (
        (1, "end+step", "arith.addi", "takes one step too many"),
        (1, "end-step", "arith.subi", "leaves out its last step"),
        (0, "begin+step", "arith.addi", "leaves out its first step"),
    ):
        if number(op.operands[2]) == "1" and name != "end-step":
            continue  # told above
        yield Change(
            operator="loop-bound",
            label=name,
            says=f"a loop {says}",
            apply=partial(_stepped, index, how),
        )


def _moved(index: int, by: int, op: Op, surgery: Surgery) -> None:
    old = op.operands[index]
    one = surgery.constant(op, old.type, literal(old.type, by))
    surgery.replace(op, index, surgery.before(op, "arith.addi", (old, one), old.type))


def _stepped(index: int, how: str, op: Op, surgery: Surgery) -> None:
    old, step = op.operands[index], op.operands[2]
    surgery.replace(op, index, surgery.before(op, how, (old, step), old.type))


def scale_and_mask(op: Op, facts: Facts) -> Iterator[Change]:
    """What is masked before it is scaled is masked after, or the other way round."""
    if op.name == "arith.select":
        for index in (1, 2):
            inner = op.operands[index].producer
            if inner is not None and inner.name == "arith.mulf" and number(op.operands[3 - index]):
                yield Change(
                    operator="reorder-scale-and-mask",
                    label=f"mask-first-{index}",
                    says="the mask is applied before the scale, which scales what it hides",
                    apply=partial(_mask_first, index, inner),
                    proof=absorbs(op.operands[3 - index], inner.operands[1])
                    or (hidden_again(op.results[0], op.operands[0], facts) if index == 1 else ""),
                )
    if op.name == "arith.mulf":
        for index in (0, 1):
            inner = op.operands[index].producer
            if inner is None or inner.name != "arith.select":
                continue
            for arm in (1, 2):
                if number(inner.operands[arm]):
                    yield Change(
                        operator="reorder-scale-and-mask",
                        label=f"scale-first-{index}-{arm}",
                        says="the mask is applied after the scale",
                        apply=partial(_scale_first, index, inner, arm),
                        proof=absorbs(inner.operands[arm], op.operands[1 - index])
                        or (
                            hidden_again(op.results[0], inner.operands[0], facts)
                            if arm == 2
                            else ""
                        ),
                    )


def _mask_first(index: int, inner: Op, op: Op, surgery: Surgery) -> None:
    """select(m, x * s, c) as select(m, x, c) * s."""
    x, scale = inner.operands
    operands: list[Value] = list(op.operands)
    operands[index] = x
    masked = surgery.before(op, "arith.select", operands, op.results[0].type)
    product = surgery.before(op, "arith.mulf", (masked, scale), op.results[0].type)
    surgery.forward(op.results[0], product)


def _scale_first(index: int, inner: Op, arm: int, op: Op, surgery: Surgery) -> None:
    """select(m, x, c) * s as select(m, x * s, c)."""
    type_ = op.results[0].type
    x = inner.operands[3 - arm]
    scaled = surgery.before(op, "arith.mulf", (x, op.operands[1 - index]), type_)
    operands: list[Value] = list(inner.operands)
    operands[3 - arm] = scaled
    surgery.forward(op.results[0], surgery.before(op, "arith.select", operands, type_))


OPERATORS: tuple[Operator, ...] = (reduction, product, loop, scale_and_mask)
