"""Value families: what the elements of each tensor look like, and which bugs each one sees.

NumPy only; float64 out, rounded to the storage dtype later. Same stream and shapes, same values.
Shapes are (batch, heads, seqlen, head_dim); query head h reads key head ``h // group``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["DO_FAMILIES", "QK_FAMILIES", "TERM_FAMILIES", "V_FAMILIES", "Facts", "stream"]

Array = npt.NDArray[np.float64]
Shape = tuple[int, int, int, int]
Pair = tuple[Array, Array]
Rng = np.random.Generator
_TENSORS = ("qk", "v", "do", "bias", "slopes", "sinks", "dlse", "dropout")
_WIDE_TOP = 2.0**112  # 2^16 products of this with numbers near 1 stay below float32's 2^128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a family must know of the problem.

    Attributes:
        scale: The softmax scale in force.
        largest: Largest finite number of the storage dtype.
        smallest_normal: Smallest normal number of the storage dtype.
        unit_roundoff: 2^-precision of the storage dtype.
    """

    scale: float
    largest: float
    smallest_normal: float
    unit_roundoff: float

    @classmethod
    def of(cls, dtype: str, scale: float) -> Facts:
        """The facts of "float16", "bfloat16" or "float32".

        >>> Facts.of("float16", 1.0).largest
        65504.0
        """
        precision, least, most = {
            "float16": (11, -14, 15),
            "bfloat16": (8, -126, 127),
            "float32": (24, -126, 127),
        }[dtype]
        return cls(
            scale=scale,
            largest=(2.0 - 2.0 ** (1 - precision)) * 2.0**most,
            smallest_normal=2.0**least,
            unit_roundoff=2.0**-precision,
        )

    @property
    def gain(self) -> float:
        """What a product q k must be for one unit of logit, within reason for scales near 0."""
        magnitude = min(max(abs(self.scale), 1e-2), 1e2)
        return math.copysign(1.0 / magnitude, self.scale)

    @property
    def top(self) -> float:
        """The largest magnitude whose dots with numbers near 1 stay finite in float32."""
        return min(self.largest, _WIDE_TOP)


def stream(seed: int, tensor: str) -> Rng:
    """The stream of "qk", "v", "bias", ...: changing one tensor's shape leaves the others alone."""
    key = np.random.SeedSequence(seed % 2**64, spawn_key=(_TENSORS.index(tensor),))
    return np.random.Generator(np.random.PCG64(key))


def _signs(rng: Rng, shape: tuple[int, ...]) -> Array:
    return rng.integers(0, 2, shape).astype(np.float64) * 2.0 - 1.0


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
    k = _signs(for_k, shape_k)
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
    q[..., axis] = shift * facts.gain * _signs(shared, shape_q[:3])
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


def _mixed(rng: Rng, shape: Shape, least: float, most: float) -> Array:
    return _signs(rng, shape) * np.exp2(rng.uniform(least, most, shape))


def mixed(rng: Rng, shape_q: Shape, shape_k: Shape, _facts: Facts) -> Pair:
    """Magnitudes 2^-20 to 2^3 side by side: absorbed addends, float16 subnormals beside ones."""
    for_q, for_k = rng.spawn(2)
    return _mixed(for_q, shape_q, -20.0, 3.0), _mixed(for_k, shape_k, -20.0, 3.0)


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
    return _signs(rng, shape) * rng.uniform(0.25, 0.9, shape) * facts.top


def v_heavy_tails(rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """Student t, 2 degrees of freedom, clipped at 1000: one key's outlier leaking into a row."""
    return np.clip(rng.standard_t(2.0, shape), -1e3, 1e3)


def v_zeros(_rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """Exact zeros: o is 0 to the bit; anything that was never written shows."""
    return np.zeros(shape)


def v_mixed(rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """Magnitudes 2^-20 to 2^3: absorbed addends and subnormal outputs."""
    return _mixed(rng, shape, -20.0, 3.0)


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
    return _mixed(rng, shape, -20.0, 3.0)


def do_small(rng: Rng, shape: Shape, _facts: Facts) -> Array:
    """Normal times 2^-10, as after a mean loss: dS flushed or rounded as float16 subnormals."""
    return rng.standard_normal(shape) * 2.0**-10


def do_near_max(rng: Rng, shape: Shape, facts: Facts) -> Array:
    """Up to an eighth of the dtype's maximum (dS beyond it has no right answer): casts of dP."""
    return _signs(rng, shape) * rng.uniform(0.03, 0.125, shape) * facts.top


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
    """Normal, and -inf at three keys of ten (`fa_verify.inputs` leaves each row one)."""
    hidden = rng.random(shape) < (0.3 if shape[3] > 1 else 0.0)
    return np.where(hidden, -np.inf, rng.standard_normal(shape))


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
