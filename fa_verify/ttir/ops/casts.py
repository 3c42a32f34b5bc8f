"""Conversions between types: widening, narrowing with one rounding, reinterpreting bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.lowering.reuse import spare
from fa_verify.ttir.numbers.floats import (
    CARRIER,
    NARROW,
    RAW,
    SHORT,
    Array,
    decode,
    encode,
    narrow_once,
    round_to,
    round_toward_zero,
)
from fa_verify.ttir.numbers.shorts import shorten
from fa_verify.ttir.ops.integers import unsigned, wrapped
from fa_verify.ttir.ops.pointers import cast_pointer

if TYPE_CHECKING:
    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.syntax.ir import Op

_EXACT = 1 << 24  # float32 holds all integers up to here


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
    scalar = op.operands[0].type.scalar
    machine, site = low.machine, low.site(op)

    def step(env: Env) -> None:
        env[lazy] = tuple([widen(t) for t in wrapped(terms(env), scalar, machine, site)])
        if dense is not None:
            dense(env)

    return step


def _cast(op: Op, low: Lowering) -> Step:
    dtype = CARRIER[op.results[0].type.scalar]
    return low.unary(op, lambda x: x.astype(dtype))


def extui(op: Op, low: Lowering) -> Step:
    """arith.extui."""
    dtype = CARRIER[op.results[0].type.scalar]
    return low.unary(op, lambda x: unsigned(x).astype(dtype))


def trunci(op: Op, low: Lowering) -> Step:
    """arith.trunci: keeps the low bits."""
    dtype = CARRIER[op.results[0].type.scalar]
    if dtype.kind == "b":
        return low.unary(op, lambda x: (x & 1).astype(np.bool_))
    return low.unary(op, lambda x: x.astype(dtype))


def int_to_float(op: Op, low: Lowering) -> Step:
    """arith.sitofp and arith.uitofp, rounded once."""
    scalar = op.results[0].type.scalar
    from_unsigned = op.name == "arith.uitofp"
    wide = scalar == "f64" or scalar in NARROW

    def convert(x: Array) -> Array:
        if x.dtype == np.bool_:
            x = x.astype(np.int8) if from_unsigned else -x.astype(np.int8)
        elif from_unsigned:
            x = unsigned(x)
        if scalar in NARROW and _small(x):
            return round_to(x.astype(np.float32), scalar)
        real = x.astype(np.float64 if wide else np.float32)
        return real if scalar in ("f32", "f64") else narrow_once(real, scalar)

    return low.unary(op, convert)


def _small(x: Array) -> bool:
    """Whether float32 holds all these integers."""
    return x.dtype.itemsize < 4 or bool(x.min(initial=0) >= -_EXACT and x.max(initial=0) <= _EXACT)


def float_to_int(op: Op, low: Lowering) -> Step:
    """arith.fptosi and arith.fptoui as PTX's cvt.rzi: toward zero, saturating.

    LLVM makes 8-bit integers from the low byte of 16-bit ones. NaN is 0, but if either side has 64
    bits it is the pattern with only the top bit set (PTX ISA, cvt, "integer notes").
    """
    dtype = CARRIER[op.results[0].type.scalar]
    if dtype.kind == "b":
        return low.unary(op, lambda x: x != 0)
    size = max(dtype.itemsize, 2)
    target = np.dtype(f"{'u' if op.name == 'arith.fptoui' else 'i'}{size}")
    least, most = np.iinfo(target).min, np.iinfo(target).max
    top_bit = size == 8 or op.operands[0].type.scalar == "f64"
    invalid = np.array(1 << (8 * size - 1) if top_bit else 0, np.uint64).astype(target)

    def convert(x: Array) -> Array:
        cut = np.trunc(x.astype(np.float64))
        above, below = cut >= float(most + 1), cut < float(least)
        nan = np.isnan(cut)
        whole = np.where(above | below | nan, 0.0, cut).astype(target)
        whole = np.where(above, target.type(most), np.where(below, target.type(least), whole))
        return np.where(nan, invalid, whole).astype(dtype)

    return low.unary(op, convert)


def truncf(op: Op, low: Lowering) -> Step:
    """arith.truncf, and tt.fp_to_fp when it narrows."""
    scalar, source = op.results[0].type.scalar, op.operands[0].type.scalar
    if source == scalar:
        return low.unary(op, lambda x: x)
    rounding = " ".join([*op.words, *op.attrs.values()])
    if "rtz" in rounding or "toward_zero" in rounding:
        return low.unary(op, lambda x: round_toward_zero(x, scalar))
    if source == "f64" and scalar in NARROW:
        return low.unary(op, lambda x: narrow_once(x, scalar))
    a, result = low.slot(op.operands[0]), low.slot(op.results[0])
    if low.short(op.results[0]):
        return low.unary(op, lambda x: shorten(x, scalar))
    last = [low.slot(x) for x in low.last_uses(op)]

    def step(env: Env) -> None:
        out = spare(env, last, env[a].shape)
        env[result] = round_to(env[a], scalar, out)

    return step


def extf(op: Op, low: Lowering) -> Step:
    """arith.extf: exact."""
    if op.results[0].type.scalar == "f64":
        return low.unary(op, lambda x: x.astype(np.float64))
    return low.unary(op, lambda x: x)


def _e5m2_to_bf16(x: Array) -> Array:
    """By a shift and a product with 2**112: infinities and NaN become numbers from 65536 on.

    As Triton's code for sm_90 has it (ElementwiseOpToLLVM.cpp, Fp8E5M2_to_Bf16).
    """
    special = ~np.isfinite(x)
    if not special.any():
        return x
    raw = encode(np.ascontiguousarray(x), "f8E5M2")
    number = np.float32(65536) * (1 + (raw & 3).astype(np.float32) / 4)
    return np.where(special, np.copysign(number, x), x)


def fp_to_fp(op: Op, low: Lowering) -> Step:
    """tt.fp_to_fp: widens exactly or narrows with the rounding it names."""
    if (op.operands[0].type.scalar, op.results[0].type.scalar) == ("f8E5M2", "bf16"):
        return low.unary(op, _e5m2_to_bf16)
    narrow = op.results[0].type.bits <= op.operands[0].type.bits
    return truncf(op, low) if narrow else extf(op, low)


def bitcast(op: Op, low: Lowering) -> Step:
    """arith.bitcast and tt.bitcast: the same bits as another type of the same width."""
    source, target = op.operands[0].type, op.results[0].type
    if source.scalar == "ptr":
        return cast_pointer(op, low)
    if "i1" in (source.scalar, target.scalar):
        if source.scalar == target.scalar:
            return low.unary(op, lambda x: x)
        dtype = CARRIER[target.scalar]
        return low.unary(
            op, lambda x: (x & 1).astype(dtype) if dtype.kind == "b" else x.astype(dtype)
        )

    low.takes_short(op)
    short = SHORT[target.scalar] if low.short(op.results[0]) else None

    def convert(x: Array) -> Array:
        raw = encode(np.ascontiguousarray(x), source.scalar).view(RAW[target.scalar])
        return decode(raw, target.scalar) if short is None else raw.view(short)

    return low.unary(op, convert)


RULES: dict[str, Rule] = {
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
