"""math.* operations and libdevice calls by name, to within a couple of float32 ulp of exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fa_verify.ttir import approximate
from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.floats import CARRIER, Array, as_torch, fma, round_to
from fa_verify.ttir.reuse import elementwise

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.ir import Op
    from fa_verify.ttir.lower import Lowering, Rule, Step


def _torch(function: Callable[..., torch.Tensor]) -> Callable[..., Array]:
    def apply(*xs: Array) -> Array:
        return function(*[as_torch(np.ascontiguousarray(x)) for x in xs]).numpy()

    return apply


def _rsqrt(x: Array) -> Array:
    inverse: Array = x.dtype.type(1) / np.sqrt(x)
    return inverse


def _fma(a: Array, b: Array, c: Array) -> Array:
    return a * b + c if a.dtype == np.float64 else fma(a, b, c)


def _leading_zeros(x: Array) -> Array:
    exponent = np.frexp(x.view(f"u{x.dtype.itemsize}").astype(np.float64))[1]
    return (8 * x.dtype.itemsize - exponent).astype(x.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "exp2": approximate.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2,
    "log10": np.log10, "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": _rsqrt, "sin": np.sin,
    "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "atan2": np.arctan2, "erf": _torch(torch.erf), "erfc": _torch(torch.erfc),
    "erfinv": _torch(torch.erfinv), "lgamma": _torch(torch.lgamma), "floor": np.floor,
    "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint, "nearbyint": np.rint, "roundeven": np.rint,
    "round": lambda x: np.copysign(np.floor(np.abs(x) + x.dtype.type(0.5)), x), "absf": np.abs,
    "absi": np.abs, "fabs": np.abs, "abs": np.abs, "fma": _fma, "pow": np.power, "powf": np.power,
    "fmod": np.fmod, "copysign": np.copysign, "fmax": np.fmax, "fmin": np.fmin, "cbrt": np.cbrt,
    "hypot": np.hypot, "fdim": lambda a, b: np.fmax(a - b, 0), "isnan": np.isnan, "isinf": np.isinf,
    "isnand": np.isnan, "isinfd": np.isinf, "finitef": np.isfinite, "isfinited": np.isfinite,
    "signbit": np.signbit, "saturate": lambda x: np.clip(np.nan_to_num(x, nan=0.0), 0, 1),
    "ldexp": np.ldexp, "exp10": lambda x: np.power(x.dtype.type(10), x), "remainder": np.fmod,
    "div_rn": np.divide, "fdiv_rn": np.divide, "fmul_rn": np.multiply, "fadd_rn": np.add,
    "fsub_rn": np.subtract, "frcp_rn": np.reciprocal, "sqrt_rn": np.sqrt, "fsqrt_rn": np.sqrt,
    "rsqrt_rn": _rsqrt, "fast_expf": np.exp, "fast_logf": np.log, "fast_sinf": np.sin,
    "fast_cosf": np.cos, "fast_tanf": np.tan, "fast_exp10f": lambda x: np.power(np.float32(10), x),
    "fast_log2f": np.log2, "fast_log10f": np.log10, "fast_powf": np.power,
    "fast_fdividef": np.divide, "float_as_int": lambda x: x.view(np.int32),
    "int_as_float": lambda x: x.view(np.float32), "popc": np.bitwise_count,
    "ffs": lambda x: np.where(x == 0, 0, np.bitwise_count((x & -x) - 1) + 1),
    "clz": _leading_zeros,
    "mulhi": lambda a, b: ((a.astype(np.int64) * b) >> 32).astype(np.int32),
    "i0": np.i0, "normcdf": _torch(torch.special.ndtr), "normcdfinv": _torch(torch.special.ndtri),
    "j0": _torch(torch.special.bessel_j0), "j1": _torch(torch.special.bessel_j1),
    "sinpi": lambda x: np.sin(np.pi * x.astype(np.float64)).astype(x.dtype),
    "cospi": lambda x: np.cos(np.pi * x.astype(np.float64)).astype(x.dtype),
    "ctlz": _leading_zeros,
    "ctpop": np.bitwise_count,
}  # fmt: skip


def _elementwise(name: str) -> Rule:
    function = FUNCTIONS[name]

    def rule(op: Op, low: Lowering) -> Step:
        scalar = op.results[0].type.scalar
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
        return a * b + c if scalar == "f64" else fma(a, b, c, scalar)

    return low.nary(op, apply)


def _precise_sqrt(op: Op, low: Lowering) -> Step:
    return low.unary(op, np.sqrt)


def libdevice(op: Op, low: Lowering) -> Step:
    """tt.extern_elementwise: libdevice's functions by name."""
    symbol = op.attrs.get("symbol", "").strip('"')
    name = symbol.removeprefix("__nv_")
    names = [name, name.removesuffix("f"), name.removesuffix("ll")]
    function = next((FUNCTIONS[n] for n in names if n in FUNCTIONS), None)
    if function is None:
        msg = f"the library function {symbol}"
        raise Unsupported(msg)
    scalar = op.results[0].type.scalar
    dtype = CARRIER[scalar]
    plain = scalar in ("f32", "f64") or not op.results[0].type.is_float
    found = function

    def apply(*xs: Array) -> Array:
        result: Array = found(*xs)
        if result.dtype == dtype:
            return result if plain else round_to(result, scalar)
        return result.astype(dtype)

    return low.nary(op, apply)


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
    "tt.extern_elementwise": libdevice,
}
