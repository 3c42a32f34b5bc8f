"""math.* operations, to within a couple of float32 ulp of exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fa_verify.ttir.lowering.reuse import elementwise
from fa_verify.ttir.numbers import approximate, shorts
from fa_verify.ttir.numbers.exact import exact_fma
from fa_verify.ttir.numbers.floats import Array, as_torch, fma, round_to
from fa_verify.ttir.ops.arithmetic import sign

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.lowering.lower import Lowering, Rule, Step
    from fa_verify.ttir.syntax.ir import Op


def _torch(function: Callable[..., torch.Tensor]) -> Callable[..., Array]:
    def apply(*xs: Array) -> Array:
        return function(*[as_torch(np.ascontiguousarray(x)) for x in xs]).numpy()

    return apply


def _rsqrt(x: Array) -> Array:
    inverse: Array = x.dtype.type(1) / np.sqrt(x)
    return inverse


def _fma(a: Array, b: Array, c: Array) -> Array:
    return a * b + c if a.dtype == np.float64 else fma(a, b, c)


def _ones(x: Array) -> Array:
    bits: Array = x.view(f"u{x.dtype.itemsize}")
    return np.bitwise_count(bits).astype(x.dtype)


def _leading_zeros(x: Array) -> Array:
    """Zeros above the highest one: the ones above it once all below it are ones."""
    bits = x.view(f"u{x.dtype.itemsize}")
    for shift in (1, 2, 4, 8, 16, 32):
        if shift < 8 * x.dtype.itemsize:
            bits = bits | bits >> bits.dtype.type(shift)
    return _ones(~bits.view(x.dtype))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "exp2": approximate.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2,
    "log10": np.log10, "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": _rsqrt, "sin": np.sin,
    "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "atan2": np.arctan2,
    "erf": _torch(torch.erf), "erfc": _torch(torch.erfc), "floor": np.floor,
    "ceil": np.ceil, "trunc": np.trunc, "roundeven": np.rint,
    "round": lambda x: np.copysign(np.floor(np.abs(x) + x.dtype.type(0.5)), x), "absf": np.abs,
    "absi": np.abs, "fma": _fma, "powf": np.power, "copysign": np.copysign, "cbrt": np.cbrt,
    "ctlz": _leading_zeros, "ctpop": _ones,
}  # fmt: skip


def _elementwise(name: str) -> Rule:
    function = FUNCTIONS[name]

    def rule(op: Op, low: Lowering) -> Step | None:
        scalar = op.results[0].type.scalar
        if name == "absf":
            return sign(np.abs, shorts.absolute)(op, low)
        if op.results[0].type.is_float and scalar not in ("f32", "f64"):
            return low.nary(op, lambda *xs: round_to(function(*xs), scalar))
        if scalar == "f32" and low.floats.functions == "approximate":
            chosen = approximate.APPROXIMATE.get(name, function)
        elif scalar == "f32" and low.floats.functions == "stepwise":
            chosen = approximate.STEPWISE.get(name, function)
        else:
            chosen = function
        in_place = isinstance(chosen, np.ufunc) or chosen in approximate.IN_PLACE
        if in_place and scalar in ("f32", "f64"):
            return elementwise(op, low, chosen)
        return low.nary(op, chosen)

    return rule


def multiply_add(op: Op, low: Lowering) -> Step:
    """math.fma, and what `contraction` made one (there with signs)."""
    scalar, negate = op.results[0].type.scalar, op.attrs.get("negate", "")

    def apply(a: Array, b: Array, c: Array) -> Array:
        if negate == "product":
            a = -a
        elif negate:
            c = -c
        return exact_fma(a, b, c) if scalar == "f64" else fma(a, b, c, scalar)

    return low.nary(op, apply)


def _precise_sqrt(op: Op, low: Lowering) -> Step:
    return low.unary(op, np.sqrt)


_NAMES = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan",
    "asin", "acos", "atan", "sinh", "cosh", "tanh", "atan2", "erf", "erfc", "floor", "ceil",
    "trunc",
    "round", "roundeven", "absf", "absi", "powf", "copysign", "cbrt", "ctlz", "ctpop",
)  # fmt: skip
RULES: dict[str, Rule] = {
    **{f"math.{name}": _elementwise(name) for name in _NAMES},
    "math.fma": multiply_add,
    "tt.precise_sqrt": _precise_sqrt,
}
