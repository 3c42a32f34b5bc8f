"""NVIDIA's libdevice by function name, without its source: each from what it computes.

Elementary functions are within 2 units in the last place of the exact value, the special functions
on float32 are computed in float64 and rounded, those on float64 are torch's or Python's (a few
units; Bessel functions see `bessel`). libdevice's own errors are of the
same size (CUDA C++ Programming Guide, "Mathematical Functions"), so results agree to their sum, not
to the bit. The fast_ functions are the exact ones. Integer functions and those with a named
rounding are exact.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fa_verify.ttir.numbers import bessel
from fa_verify.ttir.numbers.exact import directed, exact_fma, excess
from fa_verify.ttir.numbers.floats import Array, as_torch, fma
from fa_verify.ttir.ops.functions import FUNCTIONS as MATH
from fa_verify.ttir.ops.integers import unsigned

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[..., Any]

_SPECIAL = torch.special


def _wide(function: Function) -> Function:
    """Computed in float64, rounded to the type of its operand."""

    def apply(*xs: Array) -> Array:
        with np.errstate(all="ignore"):
            result: Array = function(*[x.astype(np.float64) for x in xs])
        return result.astype(xs[-1].dtype)

    return apply


def _torch(function: Callable[..., torch.Tensor]) -> Function:
    return _wide(lambda *xs: function(*[as_torch(np.ascontiguousarray(x)) for x in xs]).numpy())


def _python(function: Callable[..., float]) -> Function:
    def safe(*xs: float) -> float:
        try:
            return function(*xs)
        except OverflowError:
            return math.inf
        except ValueError:
            return math.nan

    def apply(*xs: Array) -> Array:
        numbers = np.asarray(np.frompyfunc(safe, len(xs), 1)(*xs))
        return numbers.astype(np.float64)

    return _wide(apply)


def _of_order(function: Callable[[int, Array], Array]) -> Function:
    """A function of an integer order and a number, order by order."""

    def apply(n: Array, x: Array) -> Array:
        orders, wide = np.broadcast_arrays(n, x.astype(np.float64))
        result = np.empty_like(wide)
        for order in np.unique(orders):
            mine = orders == order
            result[mine] = function(int(order), wide[mine])
        return result.astype(x.dtype)

    return apply


def _half_turns(x: Array) -> tuple[Array, Array]:
    """X as a whole number and what is left, at most 1/2; both exact."""
    nearest = np.rint(x)
    return nearest, x - nearest


def _sinpi(x: Array) -> Array:
    turns, rest = _half_turns(x)
    far = np.copysign(np.cos(np.pi * (0.5 - np.abs(rest))), rest)
    value = np.where(np.abs(rest) <= 0.25, np.sin(np.pi * rest), far)
    return np.where(np.fmod(turns, 2) == 0, value, -value)


def _cospi(x: Array) -> Array:
    turns, rest = _half_turns(x)
    far = np.sin(np.pi * (0.5 - np.abs(rest)))
    value = np.where(np.abs(rest) <= 0.25, np.cos(np.pi * rest), far)
    return np.where(np.fmod(turns, 2) == 0, value, -value)


def _remainder(a: float, b: float) -> float:
    return math.remainder(a, b)


def _gamma(x: float) -> float:
    if x == 0:
        return math.copysign(math.inf, x)
    return math.gamma(x)


def _logb(x: Array) -> Array:
    exponent = np.frexp(x)[1] - 1.0
    special = np.where(x == 0, -np.inf, np.where(np.isinf(x), np.inf, np.nan))
    return np.where(np.isfinite(x) & (x != 0), exponent, special).astype(x.dtype)


def _ilogb(x: Array) -> Array:
    exponent = np.frexp(x)[1] - 1
    smallest, largest = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    found = np.where(np.isinf(x), largest, exponent)
    return np.where((x == 0) | np.isnan(x), smallest, found).astype(np.int32)


def _power(a: Array, n: Array) -> Array:
    return np.power(a.astype(np.float64), n.astype(np.float64)).astype(a.dtype)


def _norm(*xs: Array) -> Array:
    """Without overflow on the way."""
    largest = np.maximum.reduce([np.abs(x) for x in xs])
    scale = np.where((largest == 0) | ~np.isfinite(largest), 1.0, largest)
    norm: Array = scale * np.sqrt(np.add.reduce([np.square(x / scale) for x in xs]))
    return norm


# -- integers
def _byte_perm(a: Array, b: Array, selector: Array) -> Array:
    whole = unsigned(a).astype(np.uint64) | unsigned(b).astype(np.uint64) << np.uint64(32)
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), np.uint64)
    for i in range(4):
        which = unsigned(selector).astype(np.uint64) >> np.uint64(4 * i) & np.uint64(7)
        result |= (whole >> which * np.uint64(8) & np.uint64(255)) << np.uint64(8 * i)
    return result.astype(np.uint32).view(np.int32)


def _reversed_bits(x: Array) -> Array:
    bits, width = unsigned(x), 8 * x.itemsize
    one, result = bits.dtype.type(1), np.zeros_like(bits)
    for place in range(width):
        result |= (bits >> bits.dtype.type(place) & one) << bits.dtype.type(width - 1 - place)
    return result.view(x.dtype)


def _integers(function: Function, *, signed: bool) -> Function:
    """On Python integers, the low bits kept."""

    def apply(*xs: Array) -> Array:
        dtype = xs[0].dtype
        given = [(x if signed else unsigned(x)).astype(object) for x in xs]
        mask = (1 << 8 * dtype.itemsize) - 1
        wide = np.asarray(function(*given)) & mask
        return wide.astype(f"u{dtype.itemsize}").view(dtype)

    return apply


def _24(x: Any) -> Any:
    """The low 24 bits as a signed number."""
    return ((x & 0xFFFFFF) ^ 0x800000) - 0x800000


def _double_words(x: Array, word: int) -> Array:
    return np.ascontiguousarray(x).view(np.int32).reshape(*x.shape, 2)[..., word]


def _from_words(high: Array, low: Array) -> Array:
    pair = np.stack(np.broadcast_arrays(low, high), axis=-1)
    return np.ascontiguousarray(pair).view(np.float64)[..., 0]


def _view(kind: type) -> Function:
    return lambda x: np.ascontiguousarray(x).view(kind)


_NEAREST: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "rcp": np.reciprocal, "sqrt": np.sqrt,
    "fma": lambda a, b, c: fma(a, b, c) if a.dtype == np.float32 else exact_fma(a, b, c),
}  # fmt: skip
_FFS = _integers(np.frompyfunc(lambda x: (x & -x).bit_length(), 1, 1), signed=False)
_FAST = ("exp", "log", "log2", "log10", "sin", "cos", "tan")
_TABLE: dict[str, Function] = {
    **MATH,
    **{f"fast_{name}f": MATH[name] for name in _FAST},
    "fast_exp10f": _wide(lambda x: np.power(10.0, x)), "fast_powf": _wide(np.power),
    "fast_fdividef": np.divide,
    # elementary
    "exp10": _wide(lambda x: np.power(10.0, x)), "pow": _wide(np.power), "powi": _power,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "fmod": np.fmod,
    "remainder": _python(_remainder), "hypot": np.hypot, "fmax": np.fmax, "fmin": np.fmin,
    "fdim": lambda a, b: np.where(a > b, a - b, np.where(np.isnan(a) | np.isnan(b), np.nan, 0)),
    "ldexp": np.ldexp, "scalbn": np.ldexp, "logb": _logb, "ilogb": _ilogb,
    "nextafter": np.nextafter, "rint": np.rint, "nearbyint": np.rint, "fabs": np.abs,
    "abs": np.abs, "llabs": np.abs, "llrint": lambda x: _to_integer("rn", x, np.dtype(np.int64)),
    "llround": lambda x: _to_integer("rz", MATH["round"](x), np.dtype(np.int64)),
    "saturate": lambda x: np.clip(np.where(np.isnan(x), 0, x), 0, 1),
    "sinpi": _wide(_sinpi), "cospi": _wide(_cospi),
    "rcbrt": _wide(lambda x: 1 / np.cbrt(x)), "rhypot": _wide(lambda a, b: 1 / np.hypot(a, b)),
    "norm3d": _wide(_norm), "norm4d": _wide(_norm), "rnorm3d": _wide(lambda *xs: 1 / _norm(*xs)),
    "rnorm4d": _wide(lambda *xs: 1 / _norm(*xs)), "frsqrt_rn": _wide(lambda x: 1 / np.sqrt(x)),
    "fma": _NEAREST["fma"],
    # special
    "erfinv": _torch(_SPECIAL.erfinv), "lgamma": _torch(_SPECIAL.gammaln),
    "erfcx": _torch(_SPECIAL.erfcx), "tgamma": _python(_gamma),
    "erfcinv": _torch(lambda x: -_SPECIAL.ndtri(x / 2) / math.sqrt(2)),
    "normcdf": _torch(_SPECIAL.ndtr), "normcdfinv": _torch(_SPECIAL.ndtri),
    "cyl_bessel_i0": _torch(_SPECIAL.i0), "cyl_bessel_i1": _torch(_SPECIAL.i1),
    "j0": _wide(partial(bessel.j, 0)), "j1": _wide(partial(bessel.j, 1)), "jn": _of_order(bessel.j),
    "y0": _wide(partial(bessel.y, 0)), "y1": _wide(partial(bessel.y, 1)), "yn": _of_order(bessel.y),
    # questions
    "isnanf": np.isnan, "isnand": np.isnan, "isinff": np.isinf, "isinfd": np.isinf,
    "finitef": np.isfinite, "isfinited": np.isfinite, "signbitf": np.signbit,
    "signbitd": np.signbit,
    # bits
    "float_as_int": _view(np.int32), "float_as_uint": _view(np.int32),
    "int_as_float": _view(np.float32), "uint_as_float": _view(np.float32),
    "double_as_longlong": _view(np.int64), "longlong_as_double": _view(np.float64),
    "double2hiint": lambda x: _double_words(x, 1), "double2loint": lambda x: _double_words(x, 0),
    "hiloint2double": _from_words,
    "rcp64h": lambda x: (np.reciprocal(x).view(np.int64) & -(1 << 32)).view(np.float64),
    # integers
    "popc": MATH["ctpop"], "clz": MATH["ctlz"], "brev": _reversed_bits, "ffs": _FFS,
    "byte_perm": _byte_perm,
    "mulhi": _integers(lambda a, b: a * b >> 32, signed=True),
    "umulhi": _integers(lambda a, b: a * b >> 32, signed=False),
    "mul64hi": _integers(lambda a, b: a * b >> 64, signed=True),
    "umul64hi": _integers(lambda a, b: a * b >> 64, signed=False),
    "mul24": _integers(lambda a, b: _24(a) * _24(b), signed=True),
    "umul24": _integers(lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF), signed=False),
    "hadd": _integers(lambda a, b: a + b >> 1, signed=True),
    "uhadd": _integers(lambda a, b: a + b >> 1, signed=False),
    "rhadd": _integers(lambda a, b: a + b + 1 >> 1, signed=True),
    "urhadd": _integers(lambda a, b: a + b + 1 >> 1, signed=False),
    "sad": _integers(lambda a, b, c: abs(a - b) + c, signed=True),
    "usad": _integers(lambda a, b, c: abs(a - b) + c, signed=False),
}  # fmt: skip

# -- with a rounding in the name
_ARITHMETIC = re.compile(r"^[fd]?(add|sub|mul|div|rcp|sqrt|fma)f?_(rn|rz|rd|ru)$")
_CONVERSION = re.compile(
    r"^(float|double|int|uint|ll|ull)2(float|double|int|uint|ll|ull)_(rn|rz|rd|ru)$"
)
_TYPES: dict[str, np.dtype[Any]] = {
    "float": np.dtype(np.float32), "double": np.dtype(np.float64), "int": np.dtype(np.int32),
    "uint": np.dtype(np.uint32), "ll": np.dtype(np.int64), "ull": np.dtype(np.uint64),
}  # fmt: skip
_WHOLE: dict[str, Function] = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}


def _to_integer(mode: str, x: Array, target: np.dtype[Any]) -> Array:
    """Saturating; NaN becomes 0 (PTX cvt)."""
    bounds, whole = np.iinfo(target), _WHOLE[mode](x.astype(np.float64))

    def one(v: float) -> int:
        if math.isnan(v):
            return 0
        return (
            min(max(int(v), bounds.min), bounds.max)
            if math.isfinite(v)
            else (bounds.max if v > 0 else bounds.min)
        )

    return np.asarray(np.frompyfunc(one, 1, 1)(whole)).astype(target)


def _convert(source: str, target: str, mode: str) -> Function:
    dtype = _TYPES[target]

    def apply(x: Array) -> Array:
        x = unsigned(x) if source.startswith("u") else x
        if dtype.kind != "f":
            whole = _to_integer(mode, x, dtype)
            return whole.view(f"i{dtype.itemsize}")
        nearest = x.astype(dtype)
        return nearest if mode == "rn" else directed(mode, nearest, excess("from", nearest, x))

    return apply


def _arithmetic(operation: str, mode: str) -> Function:
    nearest = _NEAREST[operation]

    def apply(*xs: Array) -> Array:
        result: Array = nearest(*xs)
        return result if mode == "rn" else directed(mode, result, excess(operation, result, *xs))

    return apply


def find(symbol: str) -> Function | None:
    """The function of a symbol such as __nv_expf; None if libdevice has none of that name."""
    name = symbol.removeprefix("__nv_")
    if match := _ARITHMETIC.match(name):
        return _arithmetic(match[1], match[2])
    if match := _CONVERSION.match(name):
        return _convert(match[1], match[2], match[3])
    for candidate in (name, name.removesuffix("f"), name.removesuffix("ll")):
        if candidate in _TABLE:
            return _TABLE[candidate]
    return None
