"""Why an edit changes no result: what can be told from the IR alone. docs/mutation.md lists these.

Each function returns the argument in words, or "" where it finds none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fa_verify.ttir.mutation.surgery import number
from fa_verify.ttir.ops.choice import parse_number
from fa_verify.ttir.ops.tiles import integer
from fa_verify.ttir.syntax.ir import Type

if TYPE_CHECKING:
    from fa_verify.ttir.mutation.numbering import Numbering
    from fa_verify.ttir.syntax.ir import Op, Value

__all__ = [
    "RESHAPING",
    "absorbs",
    "always_true",
    "fits",
    "neutral",
    "only_its_size",
    "only_rounded_to",
    "same",
    "same_quotient",
    "whole_steps",
]

RESHAPING = frozenset({"tt.splat", "tt.broadcast", "tt.expand_dims"})
_MOST_PROGRAMS = (1 << 31) - 1  # CUDA C++ Programming Guide, "Technical Specifications"


def _known(value: Value) -> float | None:
    """The number that a value holds in every lane."""
    text = number(value)
    return None if text is None else float(parse_number(text, Type(value.type.scalar)))


# Which constant on the right, and on the left, leaves the other operand as it is. Not 0.0 of a
# float sum: -0.0 + 0.0 is 0.0.
_RIGHT = {
    "arith.addi": 0, "arith.subi": 0, "arith.subf": 0, "arith.muli": 1, "arith.mulf": 1,
    "arith.divsi": 1, "arith.divui": 1, "arith.divf": 1, "tt.precise_divf": 1, "arith.ori": 0,
}  # fmt: skip
_LEFT = {"arith.addi": 0, "arith.muli": 1, "arith.mulf": 1, "arith.ori": 0}
_IDEMPOTENT = ("andi", "ori", "maxsi", "minsi", "maxui", "minui", "maximumf", "minimumf")


def neutral(op: Op, kept: int, numbering: Numbering) -> str:
    """`x + 0`, `x * 1`, `x & true`, `min(x, x)`, a limit that is never reached."""
    dropped = op.operands[1 - kept]
    known = _known(dropped)
    wanted: float | None = (_RIGHT if kept == 0 else _LEFT).get(op.name)
    if op.name == "arith.andi" and known is not None:
        wanted = 1 if dropped.type.scalar == "i1" else -1
    if known is not None and known == wanted:
        return f"{number(dropped)} is neutral in {op.name.partition('.')[2]}"
    if op.name.partition(".")[2] in _IDEMPOTENT and same(op.operands[0], op.operands[1], numbering):
        return "both operands are the same"
    if op.name in ("arith.maxsi", "arith.minsi"):
        low, high = interval(op.operands[kept])
        other_low, other_high = interval(dropped)
        never = other_high <= low if op.name == "arith.maxsi" else other_low >= high
        if never:
            return "the other operand is never the one that is taken"
    return ""


def same(first: Value, second: Value, numbering: Numbering) -> str:
    """Both are computed alike of the same values, or one constant."""
    one = number(first)
    equal = numbering.of(first) is numbering.of(second) or (
        one is not None and one == number(second)
    )
    return "both operands are the same" if equal else ""


def absorbs(value: Value, factor: Value) -> str:
    """A constant that a product with another leaves as it is: 0 or inf times a number above 0."""
    one, other = _known(value), _known(factor)
    if one is None or other is None or not 0 < other < math.inf:
        return ""
    kept = one == 0 or math.isinf(one)  # with their signs, and whatever the format
    return f"{one:g} times {other:g} is {one:g}" if kept else ""


def fits(value: Value, bits: int) -> str:
    """An integer that fits fewer bits, by the ranges of what it is computed from."""
    low, high = interval(value)
    limit = 1 << (bits - 1)
    return f"it lies in {low:g} to {high:g}" if -limit <= low and high < limit else ""


def same_quotient(op: Op, index: int) -> str:
    """The constant limit c of a minimum or maximum is c + 1, and all that is made of it is x // n.

    Only where the limit is taken is the result another: c + 1 for c. Quotients round towards zero.
    """
    limit, name = _known(op.operands[index]), op.name
    if limit is None or name not in ("arith.maxsi", "arith.minsi") or not op.results[0].users:
        return ""
    for user in op.results[0].users:
        by = _known(user.operands[-1])
        if user.name != "arith.divsi" or user.operands[0] is not op.results[0] or not by:
            return ""
        if int(limit / by) != int((limit + 1) / by):
            return ""
    return "all that is made of the limit is a quotient, which stays the same"


def only_rounded_to(value: Value, scalar: str) -> str:
    """All that is made of a value is that it is rounded to a format: doing it twice is the same."""
    pending, seen = [value], set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if not current.users:
            return ""
        for user in current.users:
            if user.name in RESHAPING or user.name == "tt.trans":
                pending += user.results
            elif user.name != "arith.truncf" or user.results[0].type.scalar != scalar:
                return ""
    return f"its only readers round it to {scalar}, and rounding twice is rounding once"


def only_its_size(difference: Op) -> str:
    """All that is made of `a - b` is its absolute value, which is that of `b - a`."""
    pending = list(difference.results) if difference.name in ("arith.subi", "arith.subf") else []
    sized = 0
    while pending:
        for user in pending.pop().users:
            if user.name in RESHAPING or user.name == "tt.trans":
                pending += user.results
            elif user.name in ("math.absi", "math.absf"):
                sized += 1
            else:
                return ""
    return "its only readers take its absolute value" if sized else ""


def whole_steps(loop: Op) -> str:
    """A loop from and to multiples of its step: one less at the end is no step less."""
    lower, upper, step = loop.operands[:3]
    known = _known(step)
    if (
        known is not None
        and known > 1
        and _multiple(lower, int(known))
        and _multiple(upper, int(known))
    ):
        return f"the loop goes from a multiple of its step {int(known)} to another"
    return ""


def _multiple(value: Value, of: int) -> bool:  # noqa: PLR0911 - one an operation
    known = _known(value)
    if known is not None:
        return int(known) % of == 0
    op = value.producer
    if op is None:
        return False
    if op.name == "arith.muli":
        return any(_multiple(x, of) for x in op.operands)
    if op.name in ("arith.addi", "arith.subi", "arith.maxsi", "arith.minsi"):
        return all(_multiple(x, of) for x in op.operands)
    if op.name == "arith.select":
        return all(_multiple(x, of) for x in op.operands[1:])
    if op.name in ("arith.extsi", "arith.extui"):
        return _multiple(op.operands[0], of)
    if op.name == "scf.if" and len(op.regions) == 2:
        at = op.results.index(value)
        return all(_multiple(r.blocks[0].ops[-1].operands[at], of) for r in op.regions)
    return False


def always_true(mask: Value) -> str:
    """A mask that is true in every lane of every program, by the ranges of what it compares."""
    return "the mask is true in every lane" if _true(mask) else ""


def _true(mask: Value) -> bool:  # noqa: PLR0911 - one an operation
    if _known(mask) == 1:
        return True
    op = mask.producer
    if op is None:
        return False
    if op.name in RESHAPING:
        return _true(op.operands[0])
    if op.name == "arith.andi":
        return all(_true(x) for x in op.operands)
    if op.name == "arith.ori":
        return any(_true(x) for x in op.operands)
    if op.name != "arith.cmpi":
        return False
    (low_a, high_a), (low_b, high_b) = (interval(x) for x in op.operands)
    return {
        "slt": high_a < low_b,
        "sle": high_a <= low_b,
        "sgt": low_a > high_b,
        "sge": low_a >= high_b,
    }.get(op.words[0], False)


_ANYTHING = (-math.inf, math.inf)


def interval(value: Value) -> tuple[float, float]:  # noqa: PLR0911 - one an operation
    """The least and the most that an integer can be: anything of its type where it may wrap."""
    known = _known(value)
    if known is not None:
        return known, known
    limit = float(1 << (value.type.bits - 1))
    anything = (-limit, limit - 1) if value.type.is_int and value.type.bits > 1 else _ANYTHING
    op = value.producer
    if op is None:
        return anything
    if op.name == "tt.make_range":
        return integer(op, "start"), integer(op, "end") - 1
    if op.name == "tt.get_program_id":
        return 0, _MOST_PROGRAMS - 1
    if op.name in RESHAPING or op.name == "arith.extsi":
        return interval(op.operands[0])
    if op.name in ("arith.minsi", "arith.maxsi"):
        choose = min if op.name == "arith.minsi" else max
        (a, b), (c, d) = (interval(x) for x in op.operands)
        return choose(a, c), choose(b, d)
    if op.name in ("arith.addi", "arith.muli"):
        (a, b), (c, d) = (interval(x) for x in op.operands)
        products = [x * y for x in (a, b) for y in (c, d)]
        ends = (a + c, b + d) if op.name == "arith.addi" else (min(products), max(products))
        return ends if -limit <= ends[0] and ends[1] < limit else anything
    return anything
