"""Edits of single expressions: operands, constants, comparisons, selects, casts."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from fa_verify.ttir.mutation.changes import Change
from fa_verify.ttir.mutation.proofs import (
    fits,
    neutral,
    only_its_size,
    only_rounded_to,
    same,
    same_quotient,
)
from fa_verify.ttir.mutation.rows import hidden_again, never_seen, never_taken
from fa_verify.ttir.mutation.surgery import literal, number
from fa_verify.ttir.ops.choice import parse_number
from fa_verify.ttir.syntax.ir import Type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.ttir.mutation.changes import Facts, Operator
    from fa_verify.ttir.mutation.surgery import Surgery
    from fa_verify.ttir.syntax.ir import Op, Value

__all__ = ["OPERATORS"]

_ORDERED = frozenset({
    "arith.subi", "arith.subf", "arith.divsi", "arith.divui", "arith.divf", "tt.precise_divf",
    "arith.remsi", "arith.remui", "arith.remf",
})  # fmt: skip
_BINARY = _ORDERED | {
    "arith.addi", "arith.addf", "arith.muli", "arith.mulf", "arith.andi", "arith.ori",
    "arith.maxsi", "arith.minsi", "arith.maxui", "arith.minui", "arith.maxnumf", "arith.minnumf",
    "arith.maximumf", "arith.minimumf",
}  # fmt: skip
_LIMITS = frozenset({
    "arith.maxsi", "arith.minsi", "arith.maxnumf", "arith.minnumf", "arith.maximumf",
    "arith.minimumf",
})  # fmt: skip
_SIGNS = {
    "arith.addi": "+", "arith.addf": "+", "arith.subi": "-", "arith.subf": "-", "arith.muli": "*",
    "arith.mulf": "*", "arith.divsi": "/", "arith.divui": "/", "arith.divf": "/",
    "tt.precise_divf": "/", "arith.remsi": "%", "arith.remui": "%", "arith.remf": "%",
    "arith.andi": "&", "arith.ori": "|",
}  # fmt: skip
_UNARY = {
    "arith.negf": "a minus sign",
    "math.absf": "an absolute value",
    "math.absi": "an absolute value",
}


def _shown(op: Op) -> str:
    """An operation as a person writes it."""
    sign = _SIGNS.get(op.name)
    return (
        f"a {sign} b"
        if sign
        else op.name.partition(".")[2].rstrip("fsui").removesuffix("num") + "(a, b)"
    )


def dropped_operand(op: Op, facts: Facts) -> Iterator[Change]:
    """`a + b` becomes `a`, or `b`; a pointer is not moved on; `-a` becomes `a`."""
    if op.name in _BINARY:
        for index, name in enumerate("ab"):
            kept = op.operands[index]
            yield Change(
                operator="drop-operand",
                label=f"keep-{name}",
                says=f"{_shown(op)} is only {name}",
                apply=partial(_forward, kept),
                proof=neutral(op, index, facts.numbering)
                or (never_taken(op, index, facts) if op.name in _LIMITS else ""),
            )
    elif op.name == "tt.addptr":
        yield Change(
            operator="drop-operand",
            label="keep-pointer",
            says="an offset is left out of an address",
            apply=partial(_forward, op.operands[0]),
        )
    elif op.name in _UNARY:
        yield Change(
            operator="drop-operand",
            label="keep-a",
            says=f"{_UNARY[op.name]} is left out",
            apply=partial(_forward, op.operands[0]),
        )


def _forward(kept: Value, op: Op, surgery: Surgery) -> None:
    surgery.forward(op.results[0], kept)


def swapped_operands(op: Op, facts: Facts) -> Iterator[Change]:
    """`a - b` becomes `b - a`; the arms of a select change places."""
    if op.name in _ORDERED:
        yield Change(
            operator="swap-operands",
            label="swap",
            says=f"{_shown(op)} is {_shown(op).translate(str.maketrans('ab', 'ba'))}",
            apply=partial(_swap, 0, 1),
            proof=same(op.operands[0], op.operands[1], facts.numbering) or only_its_size(op),
        )


def _swap(first: int, second: int, op: Op, surgery: Surgery) -> None:
    a, b = op.operands[first], op.operands[second]
    surgery.replace(op, first, b)
    surgery.replace(op, second, a)


def select(op: Op, facts: Facts) -> Iterator[Change]:
    """A select always takes one arm, or the wrong one."""
    if op.name != "arith.select":
        return
    equal = same(op.operands[1], op.operands[2], facts.numbering)
    for index, name in ((1, "first"), (2, "second")):
        yield Change(
            operator="drop-select",
            label=f"always-{name}",
            says=f"a choice always takes its {name} value",
            apply=partial(_forward, op.operands[index]),
            proof=equal
            or (hidden_again(op.results[0], op.operands[0], facts) if name == "first" else ""),
        )
    yield Change(
        operator="drop-select",
        label="swap",
        says="the two values of a choice are in each other's place",
        apply=partial(_swap, 1, 2),
        proof=equal,
    )


_EDGE = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
_OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
_RELATIONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def comparison(op: Op, facts: Facts) -> Iterator[Change]:
    """`<` becomes `<=`, or its opposite; of integers, the limit also moves the other way."""
    del facts
    if op.name not in ("arith.cmpi", "arith.cmpf"):
        return
    word = op.words[0]
    relation = word[-2:]
    prefix = word.removesuffix(relation)
    if relation not in _OPPOSITE:
        return
    shown = _RELATIONS[relation]
    for kind, table in (("edge", _EDGE), ("opposite", _OPPOSITE)):
        other = table.get(relation)
        if other is None:
            continue
        new = prefix
        if op.name == "arith.cmpf" and kind == "opposite":  # NaN keeps its answer
            new = "u" if other == "ne" else "o"
        yield Change(
            operator="flip-comparison",
            label=kind,
            says=f"a {shown} b is a {_RELATIONS[other]} b",
            apply=partial(_predicate, new + other),
        )
    if op.name == "arith.cmpi" and relation in _EDGE and op.operands[1].type.scalar != "i1":
        # What "edge" does moves the limit one way; this moves it the other.
        shift = -1 if relation in ("lt", "ge") else 1
        shift = -shift if relation in ("ge", "le") else shift
        yield Change(
            operator="shift-comparison",
            label=f"{shift:+d}",
            says=f"a {shown} b is a {shown} b {'-' if shift < 0 else '+'} 1",
            apply=partial(_shift, 1, shift),
        )


def _predicate(word: str, op: Op, surgery: Surgery) -> None:
    del surgery
    op.words[0] = word


def _shift(index: int, by: int, op: Op, surgery: Surgery) -> None:
    old = op.operands[index]
    one = surgery.constant(op, old.type, literal(old.type, by))
    surgery.replace(op, index, surgery.before(op, "arith.addi", (old, one), old.type))


# Whose constants are dealt with elsewhere, or are no number that was written.
_NOT_CONSTANT = frozenset({"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.assert", "tt.call"})


def constant(op: Op, facts: Facts) -> Iterator[Change]:
    """A whole constant is one more, a float a tenth more; 0.0 is 1.0, inf is 0.0."""
    if op.name == "tt.make_range":
        yield Change(
            operator="change-constant",
            label="range",
            says="indices begin at one more",
            apply=_range,
        )
    if op.name in _NOT_CONSTANT or op.name.startswith(("cf.", "tt.return")):
        return
    for index, operand in enumerate(op.operands):
        text = number(operand)
        if text is None or (op.name == "scf.for" and index < 3):  # bounds: `loops`
            continue
        old = parse_number(text, Type(operand.type.scalar))
        if op.name == "tt.load" and index == 2 and not old:  # "drop-other" is more than that
            continue
        new = _other_number(old, operand.type)
        yield Change(
            operator="change-constant",
            label=f"operand-{index}",
            says=f"the constant {_plain(old)} is {_plain(new)}",
            apply=partial(_constant, index, new),
            proof=_unread(op, index, old, new, facts),
        )


def _unread(op: Op, index: int, old: object, new: float, facts: Facts) -> str:
    """Why it does not matter that a constant is another one."""
    if op.name == "tt.load":
        return never_seen(op, facts) if index == 2 else ""
    if op.name == "arith.select" and index == 2:
        return hidden_again(op.results[0], op.operands[0], facts)
    if op.name not in _LIMITS:
        return ""
    looser = new >= float(old) if "min" in op.name else new <= float(old)  # type: ignore[arg-type]
    return same_quotient(op, index) or (never_taken(op, 1 - index, facts) if looser else "")


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _other_number(old: object, type_: Type) -> bool | int | float:
    if type_.scalar == "i1":
        return not bool(old)
    if type_.is_int:
        return int(old) + 1  # type: ignore[call-overload, no-any-return]
    value = float(old)  # type: ignore[arg-type]
    if not math.isfinite(value):
        return 0.0
    return value * 1.1 if value else 1.0


def _constant(index: int, new: float, op: Op, surgery: Surgery) -> None:
    type_ = op.operands[index].type
    surgery.replace(op, index, surgery.constant(op, type_, literal(type_, new)))


def _range(op: Op, surgery: Surgery) -> None:
    del surgery
    for name in ("start", "end"):
        first, *rest = op.attrs[name].split()
        op.attrs[name] = " ".join([str(int(first) + 1), *rest])


_ROUNDED = frozenset({
    "arith.addf", "arith.subf", "arith.mulf", "arith.divf", "arith.negf", "arith.maxnumf",
    "tt.precise_divf", "math.exp", "math.exp2", "math.log", "math.log2", "math.sqrt", "math.fma",
    "tt.reduce",
})  # fmt: skip


def cast(op: Op, facts: Facts) -> Iterator[Change]:
    """A float32 result is rounded to the narrow format; 64-bit arithmetic is done in 32 bits."""
    if op.name in _ROUNDED and op.results[0].type.scalar == "f32":
        narrow = facts.narrow.scalar
        yield Change(
            operator="add-cast",
            label="round",
            says=f"a float32 result is rounded to {narrow}",
            apply=partial(_through, "arith.truncf", "arith.extf", narrow),
            proof=only_rounded_to(op.results[0], narrow),
        )
    if op.name in ("arith.addi", "arith.muli") and op.results[0].type.scalar == "i64":
        yield Change(
            operator="drop-cast",
            label="32-bit",
            says="64-bit arithmetic is done in 32 bits",
            apply=partial(_through, "arith.trunci", "arith.extsi", "i32"),
            proof=fits(op.results[0], 32),
        )


def _through(narrow: str, widen: str, scalar: str, op: Op, surgery: Surgery) -> None:
    surgery.round_trip(op.results[0], narrow, widen, scalar)


OPERATORS: tuple[Operator, ...] = (
    dropped_operand,
    swapped_operands,
    select,
    comparison,
    constant,
    cast,
)
