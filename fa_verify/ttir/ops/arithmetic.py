"""Floating-point arithmetic, each operation rounded once to its type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify.ttir.lowering.lower import COMPARE
from fa_verify.ttir.lowering.reuse import elementwise
from fa_verify.ttir.numbers import shorts
from fa_verify.ttir.numbers.floats import NARROW, SHORT, Array, flush, fma, round_to
from fa_verify.ttir.numbers.shorts import compute, is_few, is_short, shorten, widen
from fa_verify.ttir.numbers.special_functions import divide

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.lowering.lower import Lowering, Rule, Step
    from fa_verify.ttir.syntax.ir import Op

# Each rounds once on 16-bit tensors, as `numbers.shorts` says.
_TORCH: dict[Callable[..., Array], Callable[..., torch.Tensor]] = {
    np.add: torch.add, np.subtract: torch.sub, np.multiply: torch.mul, np.divide: torch.div,
}  # fmt: skip


def _rounded(function: Callable[..., Array]) -> Rule:
    def rule(op: Op, low: Lowering) -> Step | None:
        scalar = op.results[0].type.scalar
        if scalar == "f32" and low.floats.subnormals == "flush":
            return low.nary(op, lambda *xs: flush(function(*[flush(x) for x in xs])))
        if scalar not in NARROW:
            chosen = function
        elif scalar in SHORT and function in _TORCH:
            chosen = _short(op, low, function)
        else:

            def chosen(*xs: Array, **out: Array | None) -> Array:
                fresh = function(*xs, **out)
                return round_to(fresh, scalar, fresh)

        places = isinstance(function, np.ufunc)  # it takes `out`
        return elementwise(op, low, chosen) if places else low.nary(op, chosen)

    return rule


def _short(op: Op, low: Lowering, function: Callable[..., Array]) -> Callable[..., Array]:
    """An operation on 16-bit tiles, short or not."""
    low.takes_short(op)
    scalar, keep = op.results[0].type.scalar, low.short(op.results[0])
    rounded = _TORCH[function]

    def apply(x: Array, y: Array, out: Array | None = None) -> Array:
        if is_short(x) or is_short(y):
            result = function(x, y) if is_few(x, y) else compute(rounded, x, y, scalar, out)
            return result if keep else widen(result)
        fresh = function(x, y, out=out)
        return shorten(fresh, scalar) if keep else round_to(fresh, scalar, fresh)

    return apply


def quotient(op: Op, low: Lowering) -> Step | None:
    """arith.divf; Triton divides fp16 and bf16 in float32."""
    if op.results[0].type.scalar != "f64" and low.floats.functions == "stepwise":
        return _rounded(divide)(op, low)
    return _rounded(np.divide)(op, low)


def _remainder(a: Array, b: Array) -> Array:
    """A - trunc(a / b) b, fused, as LLVM expands it for NVPTX: no remainder if a / b is large."""
    if a.dtype == np.float64:
        return np.fmod(a, b)
    left = fma(-np.trunc(a / b), b, a)
    return np.where(np.isinf(b), a, left)


def sign(function: np.ufunc, short: Callable[..., Array]) -> Rule:
    """Operations on the sign bit: `function`, and what it is on short tiles."""

    def apply(x: Array, out: Array | None = None) -> Array:
        return short(x, out) if is_short(x) else function(x, out=out)

    def rule(op: Op, low: Lowering) -> Step:
        low.takes_short(op)
        return elementwise(op, low, apply)

    return rule


def _exact(function: np.ufunc) -> Rule:
    def rule(op: Op, low: Lowering) -> Step:
        return elementwise(op, low, function)

    return rule


def cmpf(op: Op, low: Lowering) -> Step:
    """arith.cmpf: o* false on NaN, u* true on NaN."""
    predicate = op.words[0]
    if predicate in ("false", "true"):
        return low.binary(op, lambda a, b: np.full(np.broadcast(a, b).shape, predicate == "true"))
    if predicate == "ord":
        return low.binary(op, lambda a, b: ~(np.isnan(a) | np.isnan(b)))
    if predicate == "uno":
        return low.binary(op, lambda a, b: np.isnan(a) | np.isnan(b))
    compare = COMPARE[predicate[1:]]
    if predicate == "one":
        return low.binary(op, lambda a, b: (a < b) | (a > b))
    if predicate == "une" or predicate[0] == "o":
        return low.binary(op, compare)
    return low.binary(op, lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b))


def _clamp(x: Array, low: Array, high: Array) -> Array:
    return np.fmin(np.fmax(x, low), high)


def clampf(op: Op, low: Lowering) -> Step:
    """tt.clampf: NaN becomes the lower bound unless propagateNan asks otherwise."""
    if "all" in op.attrs.get("propagateNan", ""):
        return low.nary(op, lambda x, a, b: np.minimum(np.maximum(x, a), b))
    return low.nary(op, _clamp)


RULES: dict[str, Rule] = {
    "arith.addf": _rounded(np.add),
    "arith.subf": _rounded(np.subtract),
    "arith.mulf": _rounded(np.multiply),
    "arith.divf": quotient,
    "tt.precise_divf": _rounded(np.divide),
    "arith.remf": _rounded(_remainder),
    "arith.negf": sign(np.negative, shorts.negative),
    "arith.maxnumf": _exact(np.fmax),
    "arith.minnumf": _exact(np.fmin),
    "arith.maximumf": _exact(np.maximum),
    "arith.minimumf": _exact(np.minimum),
    "arith.cmpf": cmpf,
    "tt.clampf": clampf,
}
