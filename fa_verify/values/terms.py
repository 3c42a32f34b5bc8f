"""Families of what a problem has beside q, k and v: bias, slopes, sinks, gradient of lse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fa_verify.values.facts import Array, Facts, Rng

__all__ = ["SEED_BITS", "TERM_FAMILIES"]

SEED_BITS = {"narrow": 31, "wide": 63}
"""Bits of dropout's seed, by its family: an int32's, and an int64's."""


def _b_normal(rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """Standard normal: wrong indexing, strides and axes."""
    return rng.standard_normal(shape)


def _b_large(rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """Normal times 30: it decides who wins, so a bias that is left out of a maximum shows."""
    return 30.0 * rng.standard_normal(shape)


def _b_constant(rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """One number: P stays as it was and lse moves by it."""
    return np.full(shape, rng.choice((1.0, -2.5, 8.0)))


def _b_mask(rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """0, or -10000 as who has no mask writes it: far below whatever a kernel takes for masked."""
    return np.where(rng.random(shape) < 0.3, -1e4, 0.0)


def _b_hides(rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """Normal, and -inf at three keys of ten, or at all up to one, as padding on the left has it.

    So whole blocks are hidden, before a running maximum has seen a key. `fa_verify.inputs` leaves
    each row one key.
    """
    along = shape[3] > 1
    hidden = rng.random(shape) < (0.3 if along else 0.0)
    numbers = rng.standard_normal(shape)
    padded = rng.random((*shape[:2], 1, 1)) < 0.5
    padding = rng.integers(0, shape[3] if along else 1, (*shape[:2], 1, 1)) * padded
    return np.where(hidden | (np.arange(shape[3]) < padding), -np.inf, numbers)


def _s_geometric(_rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """2^(-8 (h + 1) / heads), ALiBi's own."""
    (heads,) = shape
    return np.asarray(np.exp2(-8.0 * np.arange(1, heads + 1) / heads))


def _s_signed(rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """Normal, some of them 0: slopes of either sign, which an order of heads cannot imitate."""
    return np.where(rng.random(shape) < 0.2, 0.0, 0.3 * rng.standard_normal(shape))


def _s_steep(rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """Up to 4 a key: only the nearest keys count, and far ones underflow."""
    return rng.uniform(1.0, 4.0, shape)


def _n_normal(rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """Standard normal, a key among others."""
    return rng.standard_normal(shape)


def _n_high(rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """15 to 40: the sink takes nearly all; o is small, and a maximum without it overflows."""
    return rng.uniform(15.0, 40.0, shape)


def _n_low(rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """-1000 to -100: as if there were none, but for rows that see no key."""
    return rng.uniform(-1000.0, -100.0, shape)


def _n_off(rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """-inf for half of the heads, which have no sink, and normal for the others."""
    return np.where(rng.random(shape) < 0.5, -np.inf, rng.standard_normal(shape))


def _l_zeros(_rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """Exact zeros: nothing may change."""
    return np.zeros(shape)


def _l_spikes(rng: Rng, shape: tuple[int, ...], _facts: Facts) -> Array:
    """Normal times 50 in one row of eight, 0 in the others: gradients that leak between rows."""
    return np.where(rng.random(shape) < 0.125, 50.0 * rng.standard_normal(shape), 0.0)


TERM_FAMILIES: Mapping[str, Mapping[str, Callable[[Rng, tuple[int, ...], Facts], Array]]] = {
    "bias": {
        "normal": _b_normal,
        "large": _b_large,
        "constant": _b_constant,
        "mask": _b_mask,
        "hides": _b_hides,
    },
    "slopes": {"geometric": _s_geometric, "signed": _s_signed, "steep": _s_steep},
    "sinks": {"normal": _n_normal, "high": _n_high, "low": _n_low, "off": _n_off},
    "dlse": {"normal": _n_normal, "zeros": _l_zeros, "spikes": _l_spikes},
}
"""Families of the bias, of ALiBi's slopes, of the sinks and of lse's gradient."""
