"""ex2, rcp, rsqrt and sqrt `.approx.ftz.f32` as an H200 computes them, to the bit.

The hardware looks up three coefficients by the high bits of the significand and evaluates a
quadratic in the low bits, whose square lacks its lowest columns; the sum is truncated to 24 bits
(Oberman and Siu 2005, "A high-performance area-efficient multifunction interpolator"). The numbers
in `special_tables` were found from, and reproduce, the results for all significands on an H200
(benchmarks/fit_special_functions.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.numbers.special_tables import TABLES

if TYPE_CHECKING:
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.numbers.special_tables import Table

_FRACTION = (1 << 23) - 1
_NAN = np.float32(np.nan)


@lru_cache
def squares(low_bits: int, column: int) -> Array:
    """Squares of all numbers of `low_bits` bits without the columns below 2**column."""
    low = np.arange(1 << low_bits, dtype=np.int64)
    bits = [low >> i & 1 for i in range(low_bits)]
    total = np.zeros_like(low)
    for i in range(low_bits):
        for j in range(max(column - 1 - i, i + 1), low_bits):
            total += (bits[i] & bits[j]) << (i + j + 1)
        if 2 * i >= column:
            total += bits[i] << (2 * i)
    return total


@lru_cache
def _rows(table: Table) -> tuple[Array, ...]:
    numbers = np.array(table.text.split(), np.int64).reshape(-1, 3)
    return tuple(np.ascontiguousarray(column) for column in numbers.T)


def _significand(name: str, position: Array) -> Array:
    """24-bit results for significands given as segment and low bits."""
    table = TABLES[name]
    constant, linear, quadratic = _rows(table)
    bits = table.low_bits
    segment, low = position >> bits, position & ((1 << bits) - 1)
    total = (constant.take(segment) << (2 * bits + 1 - table.resolution)) + table.bias
    total += linear.take(segment) * low << (bits + 1)
    total += quadratic.take(segment) * squares(bits, table.column).take(low)
    result: Array = total >> (2 * bits + 1)
    return result


def _parts(x: Array) -> tuple[Array, Array]:
    """Unbiased exponent and fraction bits, int64."""
    bits = x.view(np.int32).astype(np.int64)
    return (bits >> 23 & 255) - 127, bits & _FRACTION


def _scaled(significand: Array, exponent: Array) -> Array:
    """Significand times 2**exponent in float32; subnormal results are exact or will be flushed."""
    result: Array = np.ldexp(significand.astype(np.float64), exponent).astype(np.float32)
    return result


def exp2(x: Array) -> Array:
    """ex2.approx.ftz.f32.

    The argument is cut to 23 fraction bits, and the integer part and fraction of a negative one are
    those of its ones' complement: an error of one unit, but for integers (an assumption: measured
    on zero only).
    """
    fixed = np.trunc(np.clip(np.nan_to_num(x), -256, 256).astype(np.float64) * 2.0**23)
    whole = fixed.astype(np.int64)
    whole -= (x < 0) & (whole & _FRACTION != 0)
    power = _scaled(_significand("exp2", whole & _FRACTION), (whole >> 23) - 23)
    power = np.where(power < np.float32(2.0**-126), np.float32(0), power)
    return np.where(np.isnan(x), _NAN, power)


def reciprocal(x: Array) -> Array:
    """rcp.approx.ftz.f32."""
    exponent, fraction = _parts(x)
    inverse = np.copysign(_scaled(_significand("reciprocal", fraction), -24 - exponent), x)
    inverse = np.where(exponent == -127, np.copysign(np.float32(np.inf), x), inverse)
    inverse = np.where(np.isinf(x), np.copysign(np.float32(0), x), inverse)
    inverse = np.where(np.abs(inverse) < np.float32(2.0**-126), np.copysign(0, x), inverse)
    return np.where(np.isnan(x), _NAN, inverse).astype(np.float32)


def _root(name: str, x: Array) -> tuple[Array, Array]:
    """Significand of a root, and half the exponent of its argument."""
    exponent, fraction = _parts(x)
    odd = exponent & 1
    return _significand(name, odd << 23 | fraction), exponent - odd >> 1


def rsqrt(x: Array) -> Array:
    """rsqrt.approx.ftz.f32."""
    significand, half = _root("rsqrt", x)
    whole = (x.view(np.int32) & np.int32(0xFFFFFF)) == np.int32(0x800000)  # an even power of two
    root = _scaled(np.where(whole, 1 << 24, significand), -24 - half)
    root = np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(np.inf), x), root)
    root = np.where(x == np.float32(np.inf), np.float32(0), root)
    return np.where((x <= -np.float32(2.0**-126)) | np.isnan(x), _NAN, root)


def sqrt(x: Array) -> Array:
    """sqrt.approx.ftz.f32."""
    significand, half = _root("sqrt", x)
    root = _scaled(significand, half - 23)
    root = np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), root)
    root = np.where(x == np.float32(np.inf), x, root)
    return np.where((x <= -np.float32(2.0**-126)) | np.isnan(x), _NAN, root)


def divide(a: Array, b: Array) -> Array:
    """div.full.f32: a product with the reciprocal, scaled where that would leave the range."""
    magnitude = np.abs(b)
    scale = np.where(magnitude > np.float32(2.0**126), np.float32(0.25), np.float32(1))
    scale = np.where(magnitude < np.float32(2.0**-126), np.float32(2.0**24), scale)
    result: Array = (a * scale) * reciprocal(b * scale)
    return result


def exp2_gradual(x: Array) -> Array:
    """ex2.approx.f32: where the result would be subnormal, the square of that of half x."""
    low = x < np.float32(-126)
    if not low.any():
        return exp2(x)
    half = exp2(np.where(low, x * np.float32(0.5), x))
    return np.where(low, half * half, half)
