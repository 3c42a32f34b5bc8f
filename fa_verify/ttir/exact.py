"""Results rounded in a stated direction, found by rational arithmetic: exact, and slow."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.floats import Array

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
    """A b + c in float64, rounded once."""

    def one(x: float, y: float, z: float) -> float:
        if not all(np.isfinite(v) for v in (x, y, z)):
            return x * y + z
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        return float(exact) if exact else x * y + z  # the sign of zero is that of the sum

    return np.asarray(np.frompyfunc(one, 3, 1)(a, b, c)).astype(np.float64)


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
