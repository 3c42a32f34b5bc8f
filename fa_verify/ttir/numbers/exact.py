"""Float64 results rounded once, or in a stated direction: exact, the latter slow."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.numbers.floats import Array

# How far the exact result is from a candidate r: any number of the same sign.
_EXCESS: dict[str, Callable[..., Fraction]] = {
    "add": lambda r, a, b: a + b - r,
    "sub": lambda r, a, b: a - b - r,
    "mul": lambda r, a, b: a * b - r,
    "div": lambda r, a, b: (a - r * b) * b,
    "rcp": lambda r, a: (1 - r * a) * a,
    "sqrt": lambda r, a: a - r * r,
    "fma": lambda r, a, b, c: a * b + c - r,
    "from": lambda r, a: a - r,
}


def exact_fma(a: Array, b: Array, c: Array) -> Array:
    """A b + c in float64, rounded once: error-free transformations (Boldo and Melquiond 2008).

    Where those could overflow or lose bits to underflow, rational arithmetic.
    """
    a, b, c = np.broadcast_arrays(a, b, c)
    product, tail = _product(a, b)
    low, low_error = _sum(c, tail)
    high, high_error = _sum(product, low)
    rest, left = _sum(low_error, high_error)
    bits = rest.view(np.int64)
    odd = (left != 0) & (bits & 1 == 0)  # round the correction to odd: the last rounding decides
    rest = np.where(odd, bits + np.where((left > 0) == (rest > 0), 1, -1), bits).view(np.float64)
    result: Array = high + rest
    largest = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.maximum(np.abs(product), np.abs(c)))
    small = (np.abs(product) < 2.0**-900) & (a != 0) & (b != 0)
    unsafe = ~(largest < 2.0**990) | small | (result == 0)
    if unsafe.any():
        result[unsafe] = np.frompyfunc(_rational_fma, 3, 1)(a[unsafe], b[unsafe], c[unsafe])
    return result


def _sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Sum and its rounding error (Knuth)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """Product and its rounding error (Dekker)."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = [(h, x - h) for x in (a, b) for h in [_upper(x)]]
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def _upper(x: Array) -> Array:
    """Upper 26 bits of the significand (Veltkamp)."""
    scaled = x * 134217729.0  # 2^27 + 1
    upper: Array = scaled - (scaled - x)
    return upper


def _rational_fma(x: float, y: float, z: float) -> float:
    if not all(np.isfinite(v) for v in (x, y, z)):
        return x * y + z
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if not exact:
        return x * y + z  # the sign of zero is that of the sum
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def excess(operation: str, result: Array, *operands: Array) -> Array:
    """-1, 0 or 1: whether the exact result lies below, at or above each float of `result`."""
    compare = _EXCESS[operation]

    def sign(*numbers: float) -> int:
        if not all(np.isfinite(x) for x in numbers):
            return 0
        gap = compare(*[Fraction(x) for x in numbers])
        return (gap > 0) - (gap < 0)

    signs = np.frompyfunc(sign, 1 + len(operands), 1)
    plain = [x.astype(object) if x.dtype.kind in "iu" else x.astype(float) for x in operands]
    return np.asarray(signs(result.astype(float), *plain)).astype(np.int8)


def directed(mode: str, result: Array, error: Array) -> Array:
    """Turn results that are one of the two neighbours of the exact ones to rn, rz, rd or ru."""
    if mode == "rn":
        return result
    infinity = result.dtype.type(np.inf)
    down = np.where(error < 0, np.nextafter(result, -infinity), result)
    up = np.where(error > 0, np.nextafter(result, infinity), result)
    if mode == "rz":
        positive = (result > 0) | ((result == 0) & (error > 0))
        return np.where(positive, down, up)
    return down if mode == "rd" else up
