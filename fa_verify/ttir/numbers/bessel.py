"""Bessel functions of integer order in float64, to some 1e-14 of the larger of 1 and the result.

Small arguments: downward recurrence (Miller), normalised by J0 + 2 (J2 + J4 + ...) = 1, and
Neumann's series for Y (Abramowitz and Stegun 9.1.46, 9.1.89). Large ones: torch's expansions (those
of torch 2.13 are off by 1e-7 between 2 and 20) and upward recurrence, stable up to the argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify.ttir.numbers.floats import as_torch

if TYPE_CHECKING:
    from fa_verify.ttir.numbers.floats import Array

_LARGE = 25.0
_EULER = 0.57721566490153286


def _table(x: Array, orders: int) -> Array:
    """J of orders 0 to `orders`, for 0 < x."""
    reach = int(max(float(x.max(initial=1.0)), orders))
    start = 2 * ((reach + 20 + int((60 * reach) ** 0.5)) // 2)
    table = np.zeros((start + 2, *x.shape))
    table[start] = 1e-300
    for k in range(start, 0, -1):
        table[k - 1] = 2 * k / x * table[k] - table[k + 1]
        big = np.abs(table[k - 1]) > 1e250
        if big.any():
            table[k - 1 :, big] *= 1e-250
    normalised: Array = table / (table[0] + 2 * table[2::2].sum(0))
    return normalised


def _asymptotic(kind: str, order: int, x: Array) -> Array:
    function = getattr(torch.special, f"bessel_{kind}{order}")
    result: Array = function(as_torch(np.ascontiguousarray(x))).numpy()
    return result


def _upward(below: Array, now: Array, x: Array, order: int) -> Array:
    """From orders 0 and 1 to `order`."""
    for k in range(1, order):
        below, now = now, 2 * k / x * now - below
    return now if order else below


def j(order: int, x: Array) -> Array:
    """J of an order."""
    if order < 0:
        return np.full_like(x, np.nan)
    size = np.abs(x)
    result = np.where(size == 0, float(order == 0), np.where(np.isnan(x), np.nan, 0.0))
    small = (size > 0) & (size < max(_LARGE, order))
    large = size >= max(_LARGE, order)
    if small.any():
        result[small] = _table(size[small], order)[order]
    if large.any():
        there = size[large]
        below, now = (_asymptotic("j", k, there) for k in (0, 1))
        result[large] = _upward(below, now, there, order)
    return np.where(x < 0, -result, result) if order % 2 else result


def y(order: int, x: Array) -> Array:
    """Y of an order; minus infinity at 0, NaN below."""
    if order < 0:
        return np.full_like(x, np.nan)
    result = np.where(x == 0, -np.inf, np.nan)
    small, large = (x > 0) & (x < _LARGE), x >= _LARGE
    if small.any():
        there = x[small]
        below, now = _neumann(there)
        result[small] = _upward(below, now, there, order)
    if large.any():
        there = x[large]
        below, now = (_asymptotic("y", k, there) for k in (0, 1))
        result[large] = _upward(below, now, there, order)
    return result


def _neumann(x: Array) -> tuple[Array, Array]:
    """Y0 from the J of even orders, and Y1 = -Y0'."""
    table = _table(x, 1)
    logarithm = np.log(x / 2) + _EULER
    y0, y1 = logarithm * table[0], logarithm * table[1] - table[0] / x
    for k in range(1, (len(table) - 1) // 2):
        sign = -1.0 if k % 2 else 1.0
        y0 -= 2 * sign / k * table[2 * k]
        y1 += sign / k * (table[2 * k - 1] - table[2 * k + 1])
    return y0 * 2 / np.pi, y1 * 2 / np.pi
