"""libdevice's sinf and cosf, step by step, as Triton compiles tl.sin and tl.cos for sm_90.

The argument is reduced by pi/2 in three fused steps, or, from 105615 on, by the bits of 2/pi that
matter (Payne and Hanek 1983); then a polynomial for the quadrant. Read off the PTX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.numbers.floats import constants, flush, fma

if TYPE_CHECKING:
    from fa_verify.ttir.numbers.floats import Array

_TWO_OVER_PI, _LARGE = constants("3F22F983 47CE4780")
_HALF_PI = constants("BFC90FDA B3A22168 A7C234C5")  # three parts, negated
_SINE = constants("B94D4153 3C0885E4 BE2AAAA8")
_COSINE_TOP, _COSINE_NEXT = constants("37CBAC00 BAB607ED")
_COSINE = constants("3D2AAABB BEFFFFFF")
_TWO_OVER_PI_BITS = 0xA2F9836E_4E441529_FC2757D1_F534DDC0_DB629599_3C439041
_WORD, _LONG = (1 << 32) - 1, (1 << 64) - 1


def _fma(a: Array, b: Array, c: Array) -> Array:
    return flush(fma(flush(a), b, flush(c)))


def _reduced_far(x: float) -> tuple[int, float]:
    """Quadrant and remainder of a large number, in integers."""
    bits = int(np.float32(x).view(np.uint32))
    shift = (bits >> 23 & 255) - 128
    product = (bits << 8 & _WORD | 0x80000000) * _TWO_OVER_PI_BITS
    window = product >> 32 * (4 - (shift >> 5)) << (shift & 31) >> 32 & _LONG
    quadrant, rest = window >> 62, window << 2 & _LONG
    quadrant += rest >> 63
    upper = rest >> 63
    signed = rest ^ _LONG if upper else rest
    remainder = float(np.float32(np.float64(signed) * np.float64(np.pi / 2 * 2.0**-64)))
    negative = bits >> 31
    if upper != negative:
        remainder = -remainder
    return (-quadrant if negative else quadrant), remainder


def _reduced(x: Array) -> tuple[Array, Array]:
    """Quadrant (int32) and what is left of x, within pi/4 of zero."""
    near = np.where(np.abs(x) < _LARGE, x, np.float32(0))
    quadrant = np.rint(near * _TWO_OVER_PI) + np.float32(0)  # an integer: never -0
    rest = near
    for part in _HALF_PI:
        rest = _fma(quadrant, part, rest)
    quadrants = quadrant.astype(np.int32)
    for at in zip(*np.nonzero((np.abs(x) >= _LARGE) & np.isfinite(x)), strict=True):
        quadrants[at], rest[at] = _reduced_far(x[at])
    return quadrants, np.where(np.isfinite(x), rest, np.float32(np.nan))


def _value(quadrant: Array, x: Array) -> Array:
    """Sine of x + quadrant pi/2."""
    square = flush(x * x)
    even = quadrant & 1 == 0
    start = np.where(even, x, np.float32(1))
    scaled = flush(square * start) + np.float32(0)  # fused with +0
    total = np.where(even, _SINE[0], _fma(square, _COSINE_TOP, _COSINE_NEXT))
    for sine, cosine in zip(_SINE[1:], _COSINE, strict=True):
        total = _fma(total, square, np.where(even, sine, cosine))
    result = _fma(total, scaled, start)
    return np.where(quadrant & 2 == 0, result, np.float32(0) - result)


def sin(x: Array) -> Array:
    """__nv_sinf under --ftz."""
    return _value(*_reduced(x))


def cos(x: Array) -> Array:
    """__nv_cosf under --ftz."""
    quadrant, rest = _reduced(x)
    return _value(quadrant + 1, rest)
