"""arith.* operations: constants, integers with wrap-around, floats with one rounding each, casts."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.floats import CARRIER, RAW, Array, decode, encode, round_to, round_toward_zero
from fa_verify.ttir.values import Pointer, merge_terms, union_args

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.findings import Site
    from fa_verify.ttir.ir import Op, Type
    from fa_verify.ttir.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.machine import Machine

_NARROW = frozenset({"f16", "bf16", "f8E4M3FN", "f8E5M2", "f8E4M3FNUZ", "f8E5M2FNUZ"})
_INT32 = np.iinfo(np.int32)
_UNSIGNED: dict[Any, Any] = {
    np.dtype(np.int8): np.uint8, np.dtype(np.int16): np.uint16, np.dtype(np.int32): np.uint32,
    np.dtype(np.int64): np.uint64, np.dtype(np.bool_): np.bool_,
}  # fmt: skip


# -- constants
def parse_number(text: str, type_: Type) -> Any:
    """One literal of MLIR's constant syntax."""
    carrier = CARRIER[type_.scalar]
    if text in ("true", "false"):
        return carrier.type(text == "true")
    if type_.is_float:
        if text.lower().startswith("0x"):
            bits = int(text, 16)
            if type_.scalar == "f64":
                return carrier.type(struct.unpack("<d", struct.pack("<Q", bits))[0])
            if type_.scalar == "f32":
                return np.uint32(bits).view(np.float32)
            if type_.scalar == "bf16":
                return np.uint32(bits << 16).view(np.float32)
            if type_.scalar == "f16":
                return np.float32(np.uint16(bits).view(np.float16))
            msg = f"a constant of type {type_}"
            raise Unsupported(msg)
        return round_to(np.array([float(text)], np.float64), type_.scalar)[0]
    number = int(text, 0)
    width = carrier.itemsize * 8
    if carrier.kind == "b":
        return carrier.type(number & 1)
    number &= (1 << width) - 1
    return carrier.type(number - (1 << width) if number >> (width - 1) else number)


def constant(op: Op, low: Lowering) -> None:
    """arith.constant: fixed before anything runs; a splat keeps extent 1."""
    value = op.results[0]
    text = op.attrs["value"]
    carrier = CARRIER[value.type.scalar]
    shape = value.type.shape
    if not text.startswith("dense"):
        low.constant(value, np.array([parse_number(text, value.type)], carrier))
        return
    inner = text[6:-1].strip()
    if inner.startswith("["):
        items = [parse_number(x, value.type) for x in re.findall(r"[^\s,\[\]]+", inner)]
        low.constant(value, np.array(items, carrier).reshape((1, *shape)))
        return
    number = parse_number(inner, value.type)
    low.constant(value, np.full((1,) * (len(shape) + 1), number, carrier))


# -- floats
def _rounded(function: Callable[..., Array]) -> Rule:
    def rule(op: Op, low: Lowering) -> Step:
        scalar = op.results[0].type.scalar
        if scalar in _NARROW:
            return low.nary(op, lambda *xs: round_to(function(*xs), scalar))
        return low.nary(op, function)

    return rule


def _exact(function: Callable[..., Array]) -> Rule:
    def rule(op: Op, low: Lowering) -> Step:
        return low.nary(op, function)

    return rule


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip


def cmpf(op: Op, low: Lowering) -> Step:
    """arith.cmpf: o* false on NaN, u* true on NaN."""
    predicate = op.words[0]
    if predicate in ("false", "true"):
        return low.binary(op, lambda a, b: np.full(np.broadcast(a, b).shape, predicate == "true"))
    if predicate == "ord":
        return low.binary(op, lambda a, b: ~(np.isnan(a) | np.isnan(b)))
    if predicate == "uno":
        return low.binary(op, lambda a, b: np.isnan(a) | np.isnan(b))
    compare = _COMPARE[predicate[1:]]
    if predicate == "one":
        return low.binary(op, lambda a, b: (a < b) | (a > b))
    if predicate == "une" or predicate[0] == "o":
        return low.binary(op, compare)
    return low.binary(op, lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b))


# -- integers
def _unsigned(x: Array) -> Array:
    return x.view(_UNSIGNED[x.dtype])


def _as_unsigned(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def apply(a: Array, b: Array) -> Array:
        return function(_unsigned(a), _unsigned(b)).view(a.dtype)

    return apply


def _divsi(a: Array, b: Array) -> Array:
    if a.min(initial=0) >= 0 and b.min(initial=1) > 0:
        return a // b
    quotient = a // b
    off = (a - quotient * b != 0) & ((a < 0) != (b < 0))
    return quotient + off.astype(a.dtype)


def cmpi(op: Op, low: Lowering) -> Step:
    """arith.cmpi."""
    predicate = op.words[0]
    if predicate in ("eq", "ne"):
        return low.binary(op, _COMPARE[predicate])
    compare = _COMPARE[predicate[1:]]
    if op.operands[0].type.scalar == "i1":
        if predicate[0] == "s":  # true is -1
            return low.binary(op, lambda a, b: compare(b, a))
        return low.binary(op, compare)
    if predicate[0] == "u":
        return low.binary(op, lambda a, b: compare(_unsigned(a), _unsigned(b)))
    return low.binary(op, compare)


def addi(op: Op, low: Lowering) -> Step:
    """arith.addi; a sum that only feeds addresses stays a tuple of terms."""
    value = op.results[0]
    if value.type.scalar == "i1":
        return low.binary(op, np.logical_xor)
    dense = low.binary(op, np.add) if low.dense(value) else None
    if not low.lazy(value):
        if dense is None:
            raise AssertionError
        return dense
    left, right = low.terms(op.operands[0]), low.terms(op.operands[1])
    lazy = low.lazy_slot(value)

    def step(env: Env) -> None:
        env[lazy] = merge_terms(left(env) + right(env))
        if dense is not None:
            dense(env)

    return step


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


def muli(op: Op, low: Lowering) -> Step:
    """arith.muli; 32-bit products that become addresses are watched for wrap-around."""
    value = op.results[0]
    if value.type.scalar == "i1":
        return low.binary(op, np.logical_and)
    if value.type.scalar != "i32" or not low.feeds_address(value):
        return low.binary(op, np.multiply)
    machine, site = low.machine, low.site(op)

    def multiply(a: Array, b: Array) -> Array:
        bound = max(abs(int(a.max())), abs(int(a.min()))) * max(
            abs(int(b.max())), abs(int(b.min()))
        )
        if bound > _INT32.max:
            exact = a.astype(np.int64) * b
            wrong = (exact > _INT32.max) | (exact < _INT32.min)
            if wrong.any():
                machine.accesses.overflow(site, exact, wrong)
        return a * b

    return low.binary(op, multiply)


def _shift(function: Callable[[Array, Array], Array], *, signed: bool) -> Rule:
    def rule(op: Op, low: Lowering) -> Step:
        bits = op.results[0].type.bits

        def apply(a: Array, b: Array) -> Array:
            wide = _unsigned(b) >= bits
            left = a if signed else _unsigned(a)
            amount = np.where(wide, 0, b).astype(left.dtype)
            shifted = function(left, amount).view(a.dtype)
            if not wide.any():
                return shifted
            over = np.where(a < 0, -1, 0).astype(a.dtype) if signed else a.dtype.type(0)
            return np.where(wide, over, shifted)

        return low.binary(op, apply)

    return rule


def mulhiui(op: Op, low: Lowering) -> Step:
    """tt.mulhiui: the high half of an unsigned product."""
    if op.results[0].type.scalar == "i32":
        return low.binary(
            op,
            lambda a, b: (
                (_unsigned(a).astype(np.uint64) * _unsigned(b).astype(np.uint64)) >> np.uint64(32)
            ).astype(np.uint32).view(np.int32),
        )  # fmt: skip

    def high64(a: Array, b: Array) -> Array:
        a, b = _unsigned(a), _unsigned(b)
        low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
        a0, a1, b0, b1 = a & low32, a >> shift, b & low32, b >> shift
        middle = a1 * b0 + (a0 * b0 >> shift)
        other = a0 * b1 + (middle & low32)
        return (a1 * b1 + (middle >> shift) + (other >> shift)).view(np.int64)

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
            a, b = _unsigned(a), _unsigned(b)
        wide = (
            a.astype(np.int64 if signed else np.uint64),
            b.astype(np.int64 if signed else np.uint64),
        )
        product = wide[0] + wide[1] if add else wide[0] * wide[1]
        env[first] = product.astype(dtype)
        high = product >> type(product.flat[0])(bits)
        env[second] = high.astype(np.bool_) if add else high.astype(dtype)

    return step


# -- select and casts
def choose(op: Op, low: Lowering) -> Step:
    """arith.select, on arrays or on pointers lane by lane."""
    if op.results[0].type.scalar == "ptr":
        return low.nary(op, _choose_pointer)
    if op.results[0].type.scalar == "desc":
        msg = "a tensor descriptor chosen by select"
        raise Unsupported(msg)
    return low.nary(op, np.where)


def _choose_pointer(condition: Array, yes: Pointer, no: Pointer) -> Pointer:
    args = union_args([yes, no])
    (a, i), (b, j) = yes.select_arrays(args), no.select_arrays(args)
    condition = condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim))
    which = np.where(condition, i, j) if len(args) > 1 else None
    return Pointer(args, (np.where(condition, a, b),), which)


def extsi(op: Op, low: Lowering) -> Step:
    """arith.extsi; keeps lazy sums lazy (they are checked for wrap-around where they are used)."""
    value = op.results[0]
    dtype = CARRIER[value.type.scalar]

    def widen(x: Array) -> Array:
        return -x.astype(dtype) if x.dtype == np.bool_ else x.astype(dtype)

    dense = low.unary(op, widen) if low.dense(value) else None
    if not low.lazy(value):
        if dense is None:
            raise AssertionError
        return dense
    terms, lazy = low.terms(op.operands[0]), low.lazy_slot(value)
    machine, site = low.machine, low.site(op)

    def step(env: Env) -> None:
        env[lazy] = tuple([widen(t) for t in wrapped(terms(env), machine, site)])
        if dense is not None:
            dense(env)

    return step


def wrapped(terms: tuple[Array, ...], machine: Machine, site: Site) -> tuple[Array, ...]:
    """Terms whose sum as int64 equals their sum in their own width; a wrap-around is reported."""
    if len(terms) < 2 or terms[0].dtype.itemsize == 8:
        return terms
    highest = sum(int(t.max()) for t in terms)
    lowest = sum(int(t.min()) for t in terms)
    if lowest >= _INT32.min and highest <= _INT32.max:
        return terms
    exact = terms[0].astype(np.int64)
    for term in terms[1:]:
        exact = exact + term
    wrong = (exact > _INT32.max) | (exact < _INT32.min)
    if wrong.any():
        machine.accesses.overflow(site, exact, wrong)
    return (exact.astype(np.int32),)


def _cast(op: Op, low: Lowering) -> Step:
    dtype = CARRIER[op.results[0].type.scalar]
    return low.unary(op, lambda x: x.astype(dtype))


def extui(op: Op, low: Lowering) -> Step:
    """arith.extui."""
    dtype = CARRIER[op.results[0].type.scalar]
    return low.unary(op, lambda x: _unsigned(x).astype(dtype))


def trunci(op: Op, low: Lowering) -> Step:
    """arith.trunci: keeps the low bits."""
    dtype = CARRIER[op.results[0].type.scalar]
    if dtype.kind == "b":
        return low.unary(op, lambda x: (x & 1).astype(np.bool_))
    return low.unary(op, lambda x: x.astype(dtype))


def int_to_float(op: Op, low: Lowering) -> Step:
    """arith.sitofp and arith.uitofp, rounded once."""
    scalar = op.results[0].type.scalar
    unsigned = op.name == "arith.uitofp"
    wide = scalar == "f64" or scalar in _NARROW

    def convert(x: Array) -> Array:
        if x.dtype == np.bool_:
            x = x.astype(np.int8) if unsigned else -x.astype(np.int8)
        elif unsigned:
            x = _unsigned(x)
        real = x.astype(np.float64 if wide else np.float32)
        return real if scalar in ("f32", "f64") else _narrow_once(real, scalar)

    return low.unary(op, convert)


def _narrow_once(x: Array, scalar: str) -> Array:
    """Round float64 to a narrow format with a single rounding (round-to-odd in between)."""
    if scalar == "f16":
        return x.astype(np.float16).astype(np.float32)
    near = x.astype(np.float32)
    inexact = (near.astype(np.float64) != x) & np.isfinite(near)
    if inexact.any():  # Boldo and Melquiond 2008: rounding to odd makes the second rounding right
        bits = near.view(np.int32)
        too_big = np.abs(near).astype(np.float64) > np.abs(x)
        odd = np.where(too_big & (bits & 1 == 0), bits - 1, bits) | np.int32(1)
        near = np.where(inexact, odd.view(np.float32), near)
    return round_to(near, scalar)


def float_to_int(op: Op, low: Lowering) -> Step:
    """arith.fptosi and arith.fptoui: toward zero, saturating, NaN to 0 (PTX cvt.rzi)."""
    dtype = CARRIER[op.results[0].type.scalar]
    if dtype.kind == "b":
        return low.unary(op, lambda x: x != 0)
    target = np.dtype(_UNSIGNED[dtype]) if op.name == "arith.fptoui" else dtype
    bound = np.iinfo(target)

    def convert(x: Array) -> Array:
        cut = np.trunc(x.astype(np.float64))
        cut = np.where(np.isnan(cut), 0.0, cut)
        inside = np.clip(cut, float(bound.min), float(bound.max) if bound.bits < 64 else 2.0**62)
        whole = inside.astype(np.int64 if bound.bits < 64 or target.kind == "i" else np.uint64)
        if bound.bits == 64:
            whole = np.where(cut >= 2.0**62, _far(cut, bound.max, target), whole)
        return whole.astype(target).view(dtype)

    return low.unary(op, convert)


def _far(cut: Array, largest: int, target: np.dtype[Any]) -> Array:
    inside = cut < float(largest)
    return np.where(inside, np.where(inside, cut, 0.0).astype(target), target.type(largest))


def truncf(op: Op, low: Lowering) -> Step:
    """arith.truncf, and tt.fp_to_fp when it narrows."""
    scalar, source = op.results[0].type.scalar, op.operands[0].type.scalar
    if source == scalar:
        return low.unary(op, lambda x: x)
    rounding = " ".join([*op.words, *op.attrs.values()])
    if "rtz" in rounding or "toward_zero" in rounding:
        return low.unary(op, lambda x: round_toward_zero(x, scalar))
    if source == "f64" and scalar in _NARROW:
        return low.unary(op, lambda x: _narrow_once(x, scalar))
    return low.unary(op, lambda x: round_to(x, scalar))


def extf(op: Op, low: Lowering) -> Step:
    """arith.extf: exact."""
    if op.results[0].type.scalar == "f64":
        return low.unary(op, lambda x: x.astype(np.float64))
    return low.unary(op, lambda x: x)


def fp_to_fp(op: Op, low: Lowering) -> Step:
    """tt.fp_to_fp: widens exactly or narrows with the rounding it names."""
    narrow = op.results[0].type.bits <= op.operands[0].type.bits
    return truncf(op, low) if narrow else extf(op, low)


def bitcast(op: Op, low: Lowering) -> Step:
    """arith.bitcast and tt.bitcast: the same bits as another type of the same width."""
    source, target = op.operands[0].type, op.results[0].type
    if source.scalar == "ptr":  # the element type is taken from where the pointer is used
        same = (source.pointee or source).bits == (target.pointee or target).bits
        byte_bool = {"i1", "i8"} >= {
            (source.pointee or source).scalar,
            (target.pointee or target).scalar,
        }
        if not same and not byte_bool:
            msg = f"a pointer cast from {source} to {target}"
            raise Unsupported(msg)
        return low.unary(op, lambda x: x)
    if "i1" in (source.scalar, target.scalar):
        if source.scalar == target.scalar:
            return low.unary(op, lambda x: x)
        dtype = CARRIER[target.scalar]
        return low.unary(
            op, lambda x: (x & 1).astype(dtype) if dtype.kind == "b" else x.astype(dtype)
        )

    def convert(x: Array) -> Array:
        raw = encode(np.ascontiguousarray(x), source.scalar)
        return decode(raw.view(RAW[target.scalar]), target.scalar)

    return low.unary(op, convert)


def _clamp(x: Array, low: Array, high: Array) -> Array:
    return np.fmin(np.fmax(x, low), high)


def clampf(op: Op, low: Lowering) -> Step:
    """tt.clampf: NaN becomes the lower bound unless propagateNan asks otherwise."""
    if "all" in op.attrs.get("propagateNan", ""):
        return low.nary(op, lambda x, a, b: np.minimum(np.maximum(x, a), b))
    return low.nary(op, _clamp)


def _remf(a: Array, b: Array) -> Array:
    return np.fmod(a, b)


RULES: dict[str, Rule] = {
    "arith.constant": constant,
    "arith.addf": _rounded(np.add),
    "arith.subf": _rounded(np.subtract),
    "arith.mulf": _rounded(np.multiply),
    "arith.divf": _rounded(np.divide),
    "tt.precise_divf": _rounded(np.divide),
    "arith.remf": _rounded(_remf),
    "arith.negf": _exact(np.negative),
    "arith.maxnumf": _exact(np.fmax),
    "arith.minnumf": _exact(np.fmin),
    "arith.maximumf": _exact(np.maximum),
    "arith.minimumf": _exact(np.minimum),
    "arith.cmpf": cmpf,
    "tt.clampf": clampf,
    "arith.addi": addi,
    "arith.subi": lambda op, low: low.binary(
        op, np.logical_xor if op.results[0].type.scalar == "i1" else np.subtract
    ),
    "arith.muli": muli,
    "arith.divsi": _exact(_divsi),
    "arith.divui": _exact(_as_unsigned(np.floor_divide)),
    "arith.remsi": _exact(np.fmod),
    "arith.remui": _exact(_as_unsigned(np.remainder)),
    "arith.ceildivsi": _exact(lambda a, b: -((-a) // b)),
    "arith.floordivsi": _exact(np.floor_divide),
    "arith.andi": andi,
    "arith.ori": _exact(np.bitwise_or),
    "arith.xori": _exact(np.bitwise_xor),
    "arith.shli": _shift(np.left_shift, signed=False),
    "arith.shrsi": _shift(np.right_shift, signed=True),
    "arith.shrui": _shift(np.right_shift, signed=False),
    "arith.maxsi": _exact(np.maximum),
    "arith.minsi": _exact(np.minimum),
    "arith.maxui": _exact(_as_unsigned(np.maximum)),
    "arith.minui": _exact(_as_unsigned(np.minimum)),
    "arith.cmpi": cmpi,
    "arith.addui_extended": extended,
    "arith.mulsi_extended": extended,
    "arith.mului_extended": extended,
    "tt.mulhiui": mulhiui,
    "arith.select": choose,
    "arith.extsi": extsi,
    "arith.extui": extui,
    "arith.trunci": trunci,
    "arith.index_cast": _cast,
    "arith.sitofp": int_to_float,
    "arith.uitofp": int_to_float,
    "arith.fptosi": float_to_int,
    "arith.fptoui": float_to_int,
    "arith.truncf": truncf,
    "arith.extf": extf,
    "tt.fp_to_fp": fp_to_fp,
    "arith.bitcast": bitcast,
    "tt.bitcast": bitcast,
}
