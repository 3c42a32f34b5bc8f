"""Scales of fp8 operands: numbers become float8_e4m3fn times a float32 scale for each part.

NumPy only, as `fa_verify.values`. A family says how far a part's largest number lies below the
format's own, so that scales of neighbours differ, and what is rounded away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fa_verify.problem import Problem

__all__ = ["COARSE", "LARGEST", "SCALE_FAMILIES", "scaled"]

Array = npt.NDArray[np.float64]
Rng = np.random.Generator

LARGEST = 448.0
"""The largest number of float8_e4m3fn."""

COARSE = 3
"""The largest element of the family "coarse", whose elements are integers.

Sums of up to 256 products of them stay below 2^14: a Hopper's fp8 dots are exact, see (B69).
"""


def uneven(rng: Rng, most: Array) -> Array:
    """The largest number anywhere in the format's last six binades: a neighbour's scale shows."""
    return most / LARGEST * np.exp2(rng.uniform(0.0, 6.0, most.shape))


def even(_rng: Rng, most: Array) -> Array:
    """The largest number at 448, as quantisers do it: casts that saturate, scales much alike."""
    return most / LARGEST


def powers(rng: Rng, most: Array) -> Array:
    """Powers of two: scaling is exact."""
    exponent = np.ceil(np.log2(most / LARGEST)) + rng.integers(0, 6, most.shape)
    return np.asarray(np.exp2(exponent))


def ones(_rng: Rng, most: Array) -> Array:
    """All 1, which kernels must not take for granted; subnormals, and numbers cut off at 448."""
    return np.ones_like(most)


def coarse(rng: Rng, most: Array) -> Array:
    """Integers up to 1, 2 or 3: dots are exact, so bounds are as tight as in bfloat16."""
    return most / rng.integers(1, COARSE, most.shape, endpoint=True)


SCALE_FAMILIES: Mapping[str, Callable[[Rng, Array], Array]] = {
    "uneven": uneven,
    "even": even,
    "powers": powers,
    "ones": ones,
    "coarse": coarse,
}


def scaled(problem: Problem, name: str, x: Array, family: str, rng: Rng) -> tuple[Array, Array]:
    """A tensor as what is stored, not rounded to the format yet, and its scales.

    Args:
        problem: With fp8.
        name: "q", "k" or "v".
        x: Its numbers, (batch, heads, seqlen, dim).
        family: Of the scales.
        rng: Chooses them.
    """
    seqlen, rows = x.shape[2], problem.scaled_rows or max(1, x.shape[2])
    of_rows = np.abs(x).max(-1, initial=0.0)
    most = np.zeros(problem.shape_scale(name))
    if problem.fp8 == "tensor":
        most[:] = of_rows.max(initial=0.0)
    elif seqlen:
        most = np.maximum.reduceat(of_rows, np.arange(0, seqlen, rows), axis=2)
    scale = SCALE_FAMILIES[family](rng, np.where(most > 0, most, 1.0))
    scale = scale.astype(np.float32).astype(np.float64)  # as it is stored
    stored = x / scale.repeat(rows, axis=2)[:, :, :seqlen, None]
    if family == "coarse":
        stored = np.rint(stored)
    return np.clip(stored, -LARGEST, LARGEST), scale
