"""Families of v, and of do, the gradient of o."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.values.facts import magnitudes, signs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fa_verify.values.facts import Array, Facts, Rng, Shape

__all__ = ["DO_FAMILIES", "V_FAMILIES"]


def v_normal(rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """Standard normal: wrong indexing and strides."""
    return rng.standard_normal(shape)


def v_ones(_rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """All ones: o must be 1 wherever a key is visible, so any wrong denominator shows."""
    return np.ones(shape)


def v_zero_mean(rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """Neighbouring keys cancel (x, -x): a lost or padded key is not hidden by a mean."""
    v = rng.standard_normal(shape)
    pairs = shape[2] // 2 * 2
    v[:, :, 1:pairs:2] = -v[:, :, 0:pairs:2]
    return v


def v_indicator(rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """v[j, d] = 1 for the keys j of group d, blocks or residues: o shows P without cancellation."""
    keys = np.arange(shape[2])
    residues = bool(rng.integers(0, 2))
    group = keys % shape[3] if residues else keys * shape[3] // max(1, shape[2])
    return np.broadcast_to((group[:, None] == np.arange(shape[3])) * 1.0, shape).copy()


def v_offset(rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """One sign, 1 to 2: accumulation errors and biased casts add up instead of cancelling."""
    return 1.0 + rng.random(shape)


def v_near_max(rng: Rng, shape: Shape, facts: Facts) -> Array:
    """A quarter to nine tenths of the dtype's maximum: o in range, unnormalised sums outside."""
    return signs(rng, shape) * rng.uniform(0.25, 0.9, shape) * facts.top


def v_heavy_tails(rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """Student t, 2 degrees of freedom, clipped at 1000: one key's outlier leaking into a row."""
    return np.clip(rng.standard_t(2.0, shape), -1e3, 1e3)


def v_zeros(_rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """Exact zeros: o is 0 to the bit; anything that was never written shows."""
    return np.zeros(shape)


def v_mixed(rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """Magnitudes 2^-20 to 2^3: absorbed addends and subnormal outputs."""
    return magnitudes(rng, shape, -20.0, 3.0)


def do_normal(rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """Standard normal: wrong indexing and strides of do."""
    return rng.standard_normal(shape)


def do_ones(_rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """All ones (o.sum().backward()): sums over dv dO equal the column sums of P."""
    return np.ones(shape)


def do_one_hot_row(rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """One query row a head, the rest exact zeros: gradients that leak from row to row."""
    do = np.zeros(shape)
    if shape[2]:
        row = rng.integers(0, shape[2], (*shape[:2], 1, 1))
        np.put_along_axis(do, row, rng.standard_normal((*shape[:2], 1, shape[3])), axis=2)
    return do


def do_zeros(_rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """Exact zeros: all gradients are 0 to the bit; a gradient never written shows."""
    return np.zeros(shape)


def do_mixed(rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """Magnitudes 2^-20 to 2^3: dS in float16's subnormals beside ordinary numbers."""
    return magnitudes(rng, shape, -20.0, 3.0)


def do_small(rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """Normal times 2^-10, as after a mean loss: dS flushed or rounded as float16 subnormals."""
    return rng.standard_normal(shape) * 2.0**-10


def do_near_max(rng: Rng, shape: Shape, facts: Facts) -> Array:
    """Up to an eighth of the dtype's maximum (dS beyond it has no right answer): casts of dP."""
    return signs(rng, shape) * rng.uniform(0.03, 0.125, shape) * facts.top


V_FAMILIES: Mapping[str, Callable[[Rng, Shape, Facts], Array]] = {
    "normal": v_normal,
    "ones": v_ones,
    "zero-mean": v_zero_mean,
    "indicator": v_indicator,
    "offset": v_offset,
    "near-max": v_near_max,
    "heavy-tails": v_heavy_tails,
    "zeros": v_zeros,
    "mixed": v_mixed,
}

DO_FAMILIES: Mapping[str, Callable[[Rng, Shape, Facts], Array]] = {
    "normal": do_normal,
    "ones": do_ones,
    "one-hot-row": do_one_hot_row,
    "zeros": do_zeros,
    "mixed": do_mixed,
    "small": do_small,
    "near-max": do_near_max,
}
