"""Families of q and k, drawn together since what counts is their products."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fa_verify.values.facts import magnitudes, signs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fa_verify.values.facts import Array, Facts, Pair, Rng, Shape

__all__ = ["QK_FAMILIES"]


def _pair(rng: Rng, shape_q: Shape, shape_k: Shape) -> tuple[Rng, Array, Array]:
    """A stream for what q and k share, and normal q and k from streams of their own."""
    shared, for_q, for_k = rng.spawn(3)
    return shared, for_q.standard_normal(shape_q), for_k.standard_normal(shape_k)


def _axis(rng: Rng, head_dim: int) -> int:
    """One coordinate of head_dim, to carry a term of the logits that nothing else disturbs."""
    return int(rng.integers(0, head_dim))


def _to_heads(k: Array, shape_q: Shape) -> Array:
    """What each query head reads of a key-head array."""
    return np.repeat(k, shape_q[1] // k.shape[1], axis=1)


def normal(rng: Rng, shape_q: Shape, shape_k: Shape, _facts: Facts) -> Pair:
    """Standard normal: wrong indexing, masks and strides."""
    _, q, k = _pair(rng, shape_q, shape_k)
    return q, k


def uniform_positive(rng: Rng, shape_q: Shape, shape_k: Shape, _facts: Facts) -> Pair:
    """Uniform in [0, 1): sums without cancellation, so a lost tail shifts every logit one way."""
    for_q, for_k = rng.spawn(2)
    return for_q.random(shape_q), for_k.random(shape_k)


def constant(rng: Rng, shape_q: Shape, shape_k: Shape, _facts: Facts) -> Pair:
    """One number in q, one in k: all logits tie, so padded keys in the denominator stand out."""
    numbers = (1.0, 0.5, -0.75, 0.3, -1.0)
    q, k = rng.choice(numbers), rng.choice(numbers)
    return np.full(shape_q, q), np.full(shape_k, k)


def equal_keys(rng: Rng, shape_q: Shape, shape_k: Shape, _facts: Facts) -> Pair:
    """One key repeated: P is uniform, o the mean of the visible v; wrong counts of keys show."""
    _, q, k = _pair(rng, shape_q, (*shape_k[:2], 1, shape_k[3]))
    return q, np.broadcast_to(k, shape_k).copy()


def one_hot(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts) -> Pair:
    """Each query picks one key by about 30: rescaling of a stale accumulator, P near 0 and 1."""
    shared, for_q, for_k = rng.spawn(3)
    k = signs(for_k, shape_k)
    if 0 in shape_k:
        return np.zeros(shape_q), k
    keys = _to_heads(k, shape_q)
    picked = shared.integers(0, shape_k[2], shape_q[:3])
    q = np.take_along_axis(keys, picked[..., None], axis=2) * (30.0 * facts.gain / shape_q[3])
    return q + 0.1 * for_q.standard_normal(shape_q), k


def dominant_key(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts) -> Pair:
    """One key of a head takes every row by about 20 (a sink): dropped or double-counted keys."""
    shared, q, k = _pair(rng, shape_q, shape_k)
    axis = _axis(shared, shape_q[3])
    q[..., axis] = 1.0
    k[..., axis] = 0.0
    if shape_k[2]:
        # First and last keys are where sinks and tails live; anything in between otherwise.
        where = shared.integers(0, shape_k[2], shape_k[:2])
        edge = shared.integers(0, 3, shape_k[:2])
        where = np.where(edge == 0, 0, np.where(edge == 1, shape_k[2] - 1, where))
        np.put_along_axis(k[..., axis], where[..., None], 20.0 * facts.gain, axis=2)
    return q, k


def alternating_signs(rng: Rng, shape_q: Shape, shape_k: Shape, _facts: Facts) -> Pair:
    """Signs alternate along keys and head_dim: dots that cancel, so a tail not masked is large."""
    for_q, for_k = rng.spawn(2)
    parity = np.add.outer(np.arange(shape_k[2]), np.arange(shape_k[3])) % 2
    return 1.0 + for_q.random(shape_q), (1.0 + for_k.random(shape_k)) * (1.0 - 2.0 * parity)


def heavy_tails(rng: Rng, shape_q: Shape, shape_k: Shape, _facts: Facts) -> Pair:
    """Student t, 2 degrees of freedom, clipped at 1000: outliers that set a row's maximum."""
    for_q, for_k = rng.spawn(2)
    q, k = for_q.standard_t(2.0, shape_q), for_k.standard_t(2.0, shape_k)
    return np.clip(q, -1e3, 1e3), np.clip(k, -1e3, 1e3)


def _row_shift(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts, shift: float) -> Pair:
    shared, q, k = _pair(rng, shape_q, shape_k)
    axis = _axis(shared, shape_q[3])
    q[..., axis] = shift * facts.gain * signs(shared, shape_q[:3])
    k[..., axis] = 1.0
    return q, k


def row_shift(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts) -> Pair:
    """All logits of a row moved by 120 up or down: exp overflows, a maximum that starts at 0."""
    return _row_shift(rng, shape_q, shape_k, facts, 120.0)


def row_shift_far(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts) -> Pair:
    """All logits of a row moved by 1000: -1000 read as masked, finite stand-ins for -inf."""
    return _row_shift(rng, shape_q, shape_k, facts, 1000.0)


def near_ties(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts) -> Pair:
    """Keys one unit in the last place apart: comparisons, maxima and merges that assume order."""
    shared, q, k = _pair(rng, shape_q, (*shape_k[:2], 1, shape_k[3]))
    steps = shared.integers(-1, 2, shape_k).astype(np.float64)
    return q, k * (1.0 + 2.0 * facts.unit_roundoff * steps)


def subnormal_p(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts) -> Pair:
    """Most keys 9 to 18 below the maximum: P in float16's subnormals, flushed or not."""
    shared, q, k = _pair(rng, shape_q, shape_k)
    axis = _axis(shared, shape_q[3])
    below = shared.uniform(-18.0, -9.0, shape_k[:3])
    on_top = shared.random(shape_k[:3]) < 1.0 / 32.0
    on_top[..., :1] = True  # causal rows see the first key first
    q, k = 0.1 * q, 0.1 * k
    q[..., axis] = 1.0
    k[..., axis] = np.where(on_top, 0.0, below) * facts.gain
    return q, k


def near_max(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts) -> Pair:
    """One of q, k near the dtype's maximum, the other tiny: overflow in casts and pre-scaling."""
    shared, q, k = _pair(rng, shape_q, shape_k)
    top = facts.top
    large, small = (q, k) if shared.random() < 0.5 else (k, q)
    np.copyto(large, np.copysign(np.clip(0.25 + 0.5 * np.abs(large), 0.0, 1.0), large) * top)
    np.copyto(small, small / top)
    return q, k


def zeros(rng: Rng, shape_q: Shape, shape_k: Shape, _facts: Facts) -> Pair:
    """Zero q, zero k or zero rows in both: 0/0, log 0, tests of a row for == 0."""
    shared, q, k = _pair(rng, shape_q, shape_k)
    kind = int(shared.integers(0, 4))
    if kind in (0, 3):
        q *= 0.0 if kind == 0 else (shared.random((*shape_q[:3], 1)) < 0.5)
    if kind in (1, 3):
        k *= 0.0 if kind == 1 else (shared.random((*shape_k[:3], 1)) < 0.5)
    if kind == 2:
        q, k = np.zeros(shape_q), np.zeros(shape_k)
    return q, k


def mixed(rng: Rng, shape_q: Shape, shape_k: Shape, _facts: Facts) -> Pair:
    """Magnitudes 2^-20 to 2^3 side by side: absorbed addends, float16 subnormals beside ones."""
    for_q, for_k = rng.spawn(2)
    return magnitudes(for_q, shape_q, -20.0, 3.0), magnitudes(for_k, shape_k, -20.0, 3.0)


def two_level(rng: Rng, shape_q: Shape, shape_k: Shape, _facts: Facts) -> Pair:
    """Two distinct keys a head: equal P round alike and their errors add up (biased casts)."""
    return _repeated(rng, shape_q, shape_k, 2)


def duplicates(rng: Rng, shape_q: Shape, shape_k: Shape, _facts: Facts) -> Pair:
    """Eight distinct keys a head, anywhere: reductions that count a tie once."""
    return _repeated(rng, shape_q, shape_k, 8)


def _repeated(rng: Rng, shape_q: Shape, shape_k: Shape, distinct: int) -> Pair:
    shared, q, some = _pair(rng, shape_q, (*shape_k[:2], distinct, shape_k[3]))
    picked = shared.integers(0, distinct, shape_k[:3])
    return q, np.take_along_axis(some, picked[..., None], axis=2)


def drifting_periodic(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts) -> Pair:
    """Keys repeat each block, 1/64 higher: equal roundings of P that a final maximum hides."""
    shared = rng.spawn(1)[0]
    period = int(shared.choice((16, 32, 64, 128)))
    _, q, some = _pair(rng, shape_q, (*shape_k[:2], period, shape_k[3]))
    axis = _axis(shared, shape_q[3])
    keys = np.arange(shape_k[2])
    k = some[:, :, keys % period]
    q[..., axis] = 1.0
    k[..., axis] = keys // period * (facts.gain / 64.0)
    return q, k


def _ramp(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts, sign: float) -> Pair:
    shared, q, k = _pair(rng, shape_q, shape_k)
    axis = _axis(shared, shape_q[3])
    step = shared.choice((1.0 / 64.0, 1.0 / 16.0, 0.25), (*shape_k[:2], 1))
    q, k = 0.5 * q, 0.5 * k
    q[..., axis] = 1.0
    k[..., axis] = sign * facts.gain * step * np.arange(shape_k[2])
    return q, k


def increasing(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts) -> Pair:
    """Logits rise along the keys: the running maximum moves each block, every rescale counts."""
    return _ramp(rng, shape_q, shape_k, facts, 1.0)


def decreasing(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts) -> Pair:
    """Logits fall along the keys: the first block wins; a reversed order rescales each block."""
    return _ramp(rng, shape_q, shape_k, facts, -1.0)


def tiny(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts) -> Pair:
    """Numbers about the smallest normal: flushes to zero, products that underflow."""
    _, q, k = _pair(rng, shape_q, shape_k)
    return q * facts.smallest_normal, k * facts.smallest_normal


def huge(rng: Rng, shape_q: Shape, shape_k: Shape, facts: Facts) -> Pair:
    """Logits in the thousands: exp of a difference of large numbers, float16 logits overflow."""
    _, q, k = _pair(rng, shape_q, shape_k)
    size = min(math.sqrt(facts.largest) / 4.0, 1024.0)
    return q * size, k * size


QK_FAMILIES: Mapping[str, Callable[[Rng, Shape, Shape, Facts], Pair]] = {
    "normal": normal,
    "uniform-positive": uniform_positive,
    "constant": constant,
    "equal-keys": equal_keys,
    "one-hot": one_hot,
    "dominant-key": dominant_key,
    "alternating-signs": alternating_signs,
    "heavy-tails": heavy_tails,
    "row-shift": row_shift,
    "row-shift-far": row_shift_far,
    "near-ties": near_ties,
    "subnormal-p": subnormal_p,
    "near-max": near_max,
    "zeros": zeros,
    "mixed": mixed,
    "two-level": two_level,
    "duplicates": duplicates,
    "drifting-periodic": drifting_periodic,
    "increasing": increasing,
    "decreasing": decreasing,
    "tiny": tiny,
    "huge": huge,
}
