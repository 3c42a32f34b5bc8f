"""float32 functions as Triton compiles them for sm_90: their steps, and which numbers they flush.

`APPROXIMATE` has the steps that cost nothing extra, with NumPy's exp2 and roots; `STEPWISE` has
all, with the hardware's own functions. Read off the PTX of Triton 3.6 to 3.9 (identical there):
exponentials and roots are single instructions, whose .ftz variants read and write subnormal numbers
as zero (PTX ISA, "Floating Point Instructions"); the others are libdevice's polynomials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.numbers import special_functions, trigonometry
from fa_verify.ttir.numbers.floats import constants, flush, fma

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.numbers.floats import Array

_SMALLEST = np.float32(2.0**-126)
_LOWEST = np.float32(-126)  # below it exp2 is subnormal
_LOG2E = np.float32(1.4426950408889634)


def exp2(x: Array, out: Array | None = None) -> Array:
    """NumPy's exp2; its float32 loop takes 40 times longer an element below -126, -inf included."""
    if x.dtype != np.float32 or x.min() >= _LOWEST:
        return np.exp2(x, out=out)
    low = x < _LOWEST
    power = np.where(low, x + np.float32(64), x)
    np.exp2(np.maximum(power, _LOWEST, out=power), out=power)
    power *= np.where(low, np.float32(2.0**-64), np.float32(1))
    return power


def _exp2_flushing(x: Array, out: Array | None = None) -> Array:
    """ex2.approx.ftz.f32 by NumPy's exp2; of a subnormal x it is 1 anyway."""
    if x.min() >= _LOWEST:
        return np.exp2(x, out=out)
    low = x < _LOWEST
    power = np.maximum(x, _LOWEST, out=out)
    np.exp2(power, out=power)
    power *= ~low
    return power


def _exp(x: Array, out: Array | None = None) -> Array:
    """ex2.approx.f32 of a rounded product."""
    scaled = np.multiply(x, _LOG2E, out=out)
    return exp2(scaled, out=scaled)


def _polynomial(x: Array, coefficients: Array) -> Array:
    """Horner's rule by fused multiply-adds, the highest power first."""
    total: Array = np.broadcast_to(coefficients[0], x.shape)
    for coefficient in coefficients[1:]:
        total = fma(total, x, coefficient)
    return total


_LOG = constants("BE055027 3E1039F6 BDF8CDCC 3E0F2955 BE2AD8B9 3E4CED0B BE7FFF22 3EAAAA78 BF000000")
_LOG2 = constants(
    "3DC6B27F BE2C7F30 3E2FCF2A BE374E43 3E520BF4 BE763C8B 3E93BF99 BEB8AA49 3EF6384A BF38AA3B"
)
_LN2, _LOG2E_LOW = constants("3F317218 3FB8AA3B")


def _split_exponent(x: Array, pivot: int) -> tuple[Array, Array]:
    """Exponent e and m near 0 of x = 2**e (1 + m)."""
    small = x < _SMALLEST
    scaled = np.where(small, x * np.float32(2.0**23), x)
    bits = scaled.view(np.int32)
    exponent = (bits + np.int32(pivot)) & np.int32(-8388608)
    mantissa = (bits - exponent).view(np.float32)
    start = np.where(small, np.float32(-23), np.float32(0))
    unit = np.array(2.0**-23, np.float32)
    return fma(exponent.astype(np.float32), unit, start), mantissa - np.float32(1)


def _special(x: Array, result: Array) -> Array:
    """Logarithms of zero, infinity and what has none."""
    result = np.where(x == 0, -np.float32(np.inf), result)
    result = np.where(x == np.float32(np.inf), x, result)
    return np.where((x < 0) | np.isnan(x), np.float32(np.nan), result)


def _log(x: Array) -> Array:
    e, m = _split_exponent(x, -1059760811)
    tail = m * _polynomial(m, _LOG)
    return _special(x, fma(e, _LN2, fma(tail, m, m)))


def _log2(x: Array) -> Array:
    e, m = _split_exponent(x, -1060439283)
    tail = m * (m * _polynomial(m, _LOG2))
    return _special(x, e + fma(m, _LOG2E_LOW, tail))


_ERF_NEAR = constants("38B1E96A BA574D20 3BAAD5EA BCDC1BE7 3DE718AF BEC093AC 3E0375D3")
_ERF_FAR = constants("3789CA3C B9F560B9 3BAC840B BD0C8162 3E1CF906 3F6A937E 3F20D842")
_ERF_LIMIT = constants("3F8060FE")[0]


def _erf(x: Array) -> Array:
    x = flush(x)
    magnitude = np.abs(x)
    near = flush(fma(_polynomial(x * x, _ERF_NEAR), x, x))
    exponent = fma(_polynomial(magnitude, _ERF_FAR), -magnitude, -magnitude)
    far = np.copysign(np.float32(1) - special_functions.exp2(exponent), x)
    return np.where(magnitude >= _ERF_LIMIT, far, near)


def _flushing(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def apply(x: Array) -> Array:
        return flush(function(flush(x)))

    return apply


def _rsqrt(x: Array) -> Array:
    return (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)


APPROXIMATE: dict[str, Callable[..., Array]] = {
    "exp": _exp,
    "exp2": _exp2_flushing,
    "sqrt": _flushing(np.sqrt),
    "rsqrt": _flushing(_rsqrt),
    "floor": _flushing(np.floor),
    "ceil": _flushing(np.ceil),
}
STEPWISE: dict[str, Callable[..., Array]] = APPROXIMATE | {
    "exp": lambda x: special_functions.exp2_gradual(x * _LOG2E),
    "exp2": special_functions.exp2,
    "sqrt": special_functions.sqrt,
    "rsqrt": special_functions.rsqrt,
    "log": _log,
    "log2": _log2,
    "erf": _erf,
    "sin": trigonometry.sin,
    "cos": trigonometry.cos,
}
IN_PLACE = frozenset({exp2, _exp2_flushing, _exp})  # take `out` as NumPy's own functions do
