"""Integer arithmetic: wraps as hardware does, divides as C does, keeps address sums lazy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.lowering.lower import COMPARE
from fa_verify.ttir.memory.values import merge_terms
from fa_verify.ttir.numbers.floats import CARRIER, Array

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.memory.values import Terms
    from fa_verify.ttir.sanitizer.findings import Site
    from fa_verify.ttir.syntax.ir import Op

_INT32 = np.iinfo(np.int32)
UNSIGNED: dict[Any, Any] = {
    np.dtype(np.int8): np.uint8, np.dtype(np.int16): np.uint16, np.dtype(np.int32): np.uint32,
    np.dtype(np.int64): np.uint64, np.dtype(np.bool_): np.bool_,
}  # fmt: skip


def unsigned(x: Array) -> Array:
    """The same bits as unsigned integers."""
    return x.view(UNSIGNED[x.dtype])


def _nary(function: Callable[..., Array]) -> Rule:
    def rule(op: Op, low: Lowering) -> Step:
        return low.nary(op, function)

    return rule


def _as_unsigned(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def apply(a: Array, b: Array) -> Array:
        return function(unsigned(a), unsigned(b)).view(a.dtype)

    return apply


def _divsi(a: Array, b: Array) -> Array:
    if a.size == b.size == 1:
        positive = a.item() >= 0 and b.item() > 0
    else:
        positive = a.min(initial=0) >= 0 and b.min(initial=1) > 0
    if positive:
        return a // b
    quotient = a // b
    off = (a - quotient * b != 0) & ((a < 0) != (b < 0))
    toward_zero: Array = quotient + off.astype(a.dtype)
    return toward_zero


def cmpi(op: Op, low: Lowering) -> Step:
    """arith.cmpi."""
    predicate = op.words[0]
    if predicate in ("eq", "ne"):
        return low.binary(op, COMPARE[predicate])
    compare = COMPARE[predicate[1:]]
    if op.operands[0].type.scalar == "i1":
        if predicate[0] == "s":  # true is -1
            return low.binary(op, lambda a, b: compare(b, a))
        return low.binary(op, compare)
    if predicate[0] == "u":
        return low.binary(op, lambda a, b: compare(unsigned(a), unsigned(b)))
    return low.binary(op, compare)


def addi(op: Op, low: Lowering) -> Step:
    """arith.addi; a sum that only feeds addresses stays a tuple of terms."""
    value = op.results[0]
    if value.type.scalar == "i1":
        return low.binary(op, np.logical_xor)
    if not low.lazy(value):
        return low.binary(op, _watched(op, low, np.add, _sum_reach))
    dense = low.binary(op, np.add) if low.dense(value) else None
    left, right = low.terms(op.operands[0]), low.terms(op.operands[1])
    lazy = low.lazy_slot(value)

    def step(env: Env) -> None:
        env[lazy] = merge_terms(left(env) + right(env))
        if dense is not None:
            dense(env)

    return step


def subi(op: Op, low: Lowering) -> Step:
    """arith.subi."""
    if op.results[0].type.scalar == "i1":
        return low.binary(op, np.logical_xor)
    return low.binary(op, _watched(op, low, np.subtract, _sum_reach))


def andi(op: Op, low: Lowering) -> Step:
    """arith.andi; a conjunction that only masks stays a tuple of terms."""
    value = op.results[0]
    dense = low.binary(op, np.bitwise_and) if low.dense(value) else None
    if not low.lazy(value):
        if dense is None:
            raise AssertionError
        return dense
    left, right = low.terms(op.operands[0]), low.terms(op.operands[1])
    lazy = low.lazy_slot(value)

    def step(env: Env) -> None:
        env[lazy] = left(env) + right(env)
        if dense is not None:
            dense(env)

    return step


def _magnitude(x: Array) -> int:
    if x.size == 1:
        return abs(int(x.item()))
    return max(int(x.max()), -int(x.min()))


def muli(op: Op, low: Lowering) -> Step:
    """arith.muli; 32-bit products that become addresses are watched for wrap-around."""
    value = op.results[0]
    if value.type.scalar == "i1":
        return low.binary(op, np.logical_and)
    return low.binary(op, _watched(op, low, np.multiply, _product_reach))


def _shift(function: Callable[[Array, Array], Array], *, signed: bool) -> Rule:
    def rule(op: Op, low: Lowering) -> Step:
        bits = op.results[0].type.bits

        def apply(a: Array, b: Array) -> Array:
            wide = unsigned(b) >= bits
            left = a if signed else unsigned(a)
            amount = np.where(wide, 0, b).astype(left.dtype)
            shifted = function(left, amount).view(a.dtype)
            if not wide.any():
                return shifted
            over = np.where(a < 0, -1, 0).astype(a.dtype) if signed else a.dtype.type(0)
            return np.where(wide, over, shifted)

        watched = _watched(op, low, apply, _shift_reach) if op.name == "arith.shli" else apply
        return low.binary(op, watched)

    return rule


def mulhiui(op: Op, low: Lowering) -> Step:
    """tt.mulhiui: the high half of an unsigned product."""
    if op.results[0].type.scalar == "i32":
        return low.binary(
            op,
            lambda a, b: (
                (unsigned(a).astype(np.uint64) * unsigned(b).astype(np.uint64)) >> np.uint64(32)
            ).astype(np.uint32).view(np.int32),
        )  # fmt: skip

    def high64(a: Array, b: Array) -> Array:
        a, b = unsigned(a), unsigned(b)
        low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
        a0, a1, b0, b1 = a & low32, a >> shift, b & low32, b >> shift
        middle = a1 * b0 + (a0 * b0 >> shift)
        other = a0 * b1 + (middle & low32)
        high: Array = a1 * b1 + (middle >> shift) + (other >> shift)
        return high.view(np.int64)

    return low.binary(op, high64)


def extended(op: Op, low: Lowering) -> Step:
    """arith.addui_extended, mulsi_extended, mului_extended: both halves of a result."""
    a_s, b_s = low.slot(op.operands[0]), low.slot(op.operands[1])
    first, second = low.slot(op.results[0]), low.slot(op.results[1])
    bits = op.results[0].type.bits
    if bits > 32:
        msg = f"operation {op.name} on {bits} bits"
        raise Unsupported(msg, op=op.name)
    dtype = CARRIER[op.results[0].type.scalar]
    signed = op.name == "arith.mulsi_extended"
    add = op.name == "arith.addui_extended"

    def step(env: Env) -> None:
        a, b = env[a_s], env[b_s]
        if not signed:
            a, b = unsigned(a), unsigned(b)
        wide = (
            a.astype(np.int64 if signed else np.uint64),
            b.astype(np.int64 if signed else np.uint64),
        )
        product = wide[0] + wide[1] if add else wide[0] * wide[1]
        env[first] = product.astype(dtype)
        high = product >> type(product.flat[0])(bits)
        env[second] = high.astype(np.bool_) if add else high.astype(dtype)

    return step


def wrapped(terms: Terms, scalar: str, machine: Machine, site: Site) -> Terms:
    """Terms of a sum of type `scalar`, exact or wrapped as that type does, which is reported."""
    if scalar != "i32" or (len(terms) == 1 and terms[0].dtype == np.int32):
        return terms
    if sum([_magnitude(t) for t in terms]) <= _INT32.max:
        return terms
    exact = terms[0].astype(np.int64)
    for term in terms[1:]:
        exact = exact + term
    return (_check32(exact, exact.astype(np.int32), machine, site),)


def _check32(exact: Array, result: Array, machine: Machine, site: Site) -> Array:
    """The result of arithmetic for addresses, after a look at whether it wrapped."""
    wrong = (exact > _INT32.max) | (exact < _INT32.min)
    if machine.accesses.watch_wraps and wrong.any():
        return machine.accesses.wrapped(site, exact, wrong, result)
    return result


def _watched(
    op: Op, low: Lowering, function: Callable[[Array, Array], Array],
    reach: Callable[[Array, Array], int],
) -> Callable[[Array, Array], Array]:  # fmt: skip
    """`function`, looked at for wrap-around if it is a 32-bit one that makes addresses.

    `reach` bounds the magnitude of the result in cheap exact arithmetic.
    """
    value = op.results[0]
    if value.type.scalar != "i32" or not low.feeds_address(value):
        return function
    machine, site = low.machine, low.site(op)

    def apply(a: Array, b: Array) -> Array:
        result = function(a, b)
        if machine.accesses.watch_wraps and reach(a, b) > _INT32.max:
            exact = function(a.astype(np.int64), b.astype(np.int64))
            return _check32(exact, result, machine, site)
        return result

    return apply


def _sum_reach(a: Array, b: Array) -> int:
    return _magnitude(a) + _magnitude(b)


def _product_reach(a: Array, b: Array) -> int:
    return _magnitude(a) * _magnitude(b)


def _shift_reach(a: Array, b: Array) -> int:
    return _magnitude(a) << min(_magnitude(b), 31)


RULES: dict[str, Rule] = {
    "arith.addi": addi,
    "arith.subi": subi,
    "arith.muli": muli,
    "arith.divsi": _nary(_divsi),
    "arith.divui": _nary(_as_unsigned(np.floor_divide)),
    "arith.remsi": _nary(np.fmod),
    "arith.remui": _nary(_as_unsigned(np.remainder)),
    "arith.ceildivsi": _nary(lambda a, b: -((-a) // b)),
    "arith.floordivsi": _nary(np.floor_divide),
    "arith.andi": andi,
    "arith.ori": _nary(np.bitwise_or),
    "arith.xori": _nary(np.bitwise_xor),
    "arith.shli": _shift(np.left_shift, signed=False),
    "arith.shrsi": _shift(np.right_shift, signed=True),
    "arith.shrui": _shift(np.right_shift, signed=False),
    "arith.maxsi": _nary(np.maximum),
    "arith.minsi": _nary(np.minimum),
    "arith.maxui": _nary(_as_unsigned(np.maximum)),
    "arith.minui": _nary(_as_unsigned(np.minimum)),
    "arith.cmpi": cmpi,
    "arith.addui_extended": extended,
    "arith.mulsi_extended": extended,
    "arith.mului_extended": extended,
    "tt.mulhiui": mulhiui,
}
