"""The deterministic bound of the forward pass: o and lse. Equations of docs/bounds.md."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.inputs import (
    SMALL,
    Block,
    Inputs,
    expm1_bound,
    keeps,
    spread,
    with_column,
)
from fa_verify.bounds.model import FLUSH, LARGEST, SLACK, Model, U
from fa_verify.reference import grouped, tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["CastPart", "Forward", "ForwardTile", "forward_det", "forward_tile", "reach"]


@dataclasses.dataclass(frozen=True, slots=True)
class Forward:
    """Exact values and bounds before the rounding of o, float64.

    All are (heads, group, seqlen_q), o and o_bound with head_dim_v.

    Attributes:
        tile: The one tile, if one holds the whole problem and is small enough to be kept.
    """

    o: Tensor
    lse: Tensor
    o_bound: Tensor
    lse_bound: Tensor
    tile: ForwardTile | None = None

    def joined(self, other: Forward) -> Forward:
        """Bounds about our values that also hold whatever holds about the other's; (B20)."""
        lse_gap = torch.where(self.lse == other.lse, 0.0, (self.lse - other.lse).abs())
        return Forward(
            self.o,
            self.lse,
            torch.maximum(self.o_bound, (self.o - other.o).abs() + other.o_bound),
            torch.maximum(self.lse_bound, lse_gap + other.lse_bound),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CastPart:
    """What the cast of P does to o.

    Attributes:
        rest: (heads, rows, head_dim_v), the bound without the cast and without the hull.
        errors: (heads, rows, keys), what the cast adds: at most ``errors @ |v|``.
        x: (heads, rows, keys), S - m, -inf where hidden.
    """

    rest: Tensor
    errors: Tensor
    x: Tensor


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """One tile's exact values and bounds, (heads, rows[, head_dim_v]).

    Attributes:
        share: ``share()`` is the part that the cast of P has in it; None: there is none, or it was
            not asked for.
    """

    o: Tensor
    lse: Tensor
    o_bound: Tensor
    lse_bound: Tensor
    share: Callable[[], CastPart] | None = None

    @functools.cached_property
    def cast(self) -> CastPart:
        """That part."""
        assert self.share is not None  # noqa: S101 -- there is a cast, and it was asked for
        return self.share()


def reach(model: Model, given: Inputs) -> float:
    """At least every h of the problem, by Cauchy-Schwarz; inf where float32 will not do; (B10)."""
    size = model.scale * given.raw + given.extent.addend
    h = model.logit * given.raw + 6 * U * size + model.exponentials
    h += U * (
        given.extent.ulps * given.extent.addend
        + 14 * given.extent.sink
        + 8 * size * model.problem.sinks
    )
    h += float(model.merge(size)) + 12 * U * size * model.arithmetic.merged_by_lse
    h = SLACK * (h + model.logit_floor(given.largest) + model.prescale_floor(given.largest))
    return h if h <= SMALL and not given.overflows(model) else math.inf


def forward_det(model: Model, given: Inputs) -> Forward:
    """Bound o and lse of every row."""
    problem, top, result = model.problem, reach(model, given), None
    for tile in tiles(problem, given.q.device):
        kept = keeps(problem, tile)
        part = forward_tile(model, given, given.block(tile), top, parts=kept)
        if kept:
            return Forward(
                grouped(problem, part.o),
                grouped(problem, part.lse),
                grouped(problem, part.o_bound),
                grouped(problem, part.lse_bound),
                part,
            )
        result = result or _nowhere(model, given)
        result.o[tile.heads, :, tile.rows] = grouped(problem, part.o)
        result.lse[tile.heads, :, tile.rows] = grouped(problem, part.lse)
        result.o_bound[tile.heads, :, tile.rows] = grouped(problem, part.o_bound)
        result.lse_bound[tile.heads, :, tile.rows] = grouped(problem, part.lse_bound)
    return result or _nowhere(model, given)


def _nowhere(model: Model, given: Inputs) -> Forward:
    """What rows have that see no key."""
    o = given.q.new_zeros(*given.q.shape[:3], model.problem.head_dim_v)
    lse = given.q.new_full(given.q.shape[:3], -torch.inf)
    result = Forward(o, lse, torch.zeros_like(o), torch.zeros_like(lse))
    if given.terms.sinks is not None:
        _blind(model, given.terms.sinks, result)
    return result


@dataclasses.dataclass(frozen=True, slots=True)
class _Spread:
    """P relative to exp(m), and how far the kernel's may be from it; (B7), (B10) to (B15).

    Attributes:
        p: exp(S - m).
        gain: P e.
        cast: What the cast of P may change, where that is not in gain.
        he: Sum of gain over l, (heads, rows, 1) float64.
        lse: Bound of the log-sum-exp's error from this alone, (heads, rows, 1).
    """

    p: Tensor
    gain: Tensor
    cast: Tensor | None
    he: Tensor
    lse: Tensor


def forward_tile(
    model: Model, given: Inputs, block: Block, top: float, *, parts: bool = False
) -> ForwardTile:
    """Bound the rows of one tile, all of whose visible keys are in it.

    Args:
        model: Coefficients.
        given: The whole problem's ranges.
        block: The tile's operands.
        top: At least every h; inf if that is not known to be at most 1/4.
        parts: What the cast of P accounts for will be asked for.
    """
    v, keys, fast = block.v, block.k.shape[1], top <= SMALL
    sink, hidden, weights = block.beside.sink, block.hidden, block.beside.weights
    x, _ = block.logits(model.problem.scale, model.problem.softcap)
    own = m = x.amax(-1, keepdim=True)
    if sink is not None:
        x, v, hidden, weights = _with_sink(block, x, sink)
        m = x.amax(-1, keepdim=True)
    empty = m == -torch.inf
    m.masked_fill_(empty, 0.0)
    furthest = None if fast else _furthest(x, hidden)
    x.sub_(m)
    h = _exponent_error(model, given, block, x[..., :keys], merge := model.merge(m), top)
    if sink is not None:
        own, sink = (y.masked_fill(y == -torch.inf, 0.0) for y in (own, sink.unsqueeze(-1)))
        h = with_column(h, SLACK * model.sink_error(own.abs(), sink))
    p = x.exp() if parts or not fast else x.exp_()
    total = p.sum(-1, keepdim=True).masked_fill_(empty, 1.0)
    o = torch.bmm(p if weights is None else p * weights, v).div_(total)
    lse = torch.where(empty, -torch.inf, m + total.log())
    if furthest is None:
        near = _spread_fast(model, h, p, total, top)
    else:
        near = _spread_slow(model, _Slow(x, h, total, hidden, furthest * (U * SLACK)))

    # (B11): everything is relative to exp(m) until it is divided by l = total.
    accumulate = SLACK * model.value_dot(keys)
    loss = near.gain if near.cast is None else near.gain + near.cast
    loss = (near.p + loss).mul_(accumulate + SLACK * model.value_error).add_(loss)
    loss = loss if weights is None else loss.mul_(weights)
    weight = torch.bmm(loss, v.abs().to(loss.dtype)).double().div_(total)
    nu, g = _normalisation(model), torch.where(near.he < 0.5, 1 / (1 - near.he), torch.inf)
    size = o.abs()
    # What is common to a row does not cancel where parts are merged by lse; (B67).
    bound = ((weight + size * near.he) * g * (1 + nu) + (nu + merge) * size).mul_(SLACK)
    bound.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    largest_v = given.largest_v * model.kept
    floor = FLUSH * keys * max(1.0, largest_v, model.storage.largest * bool(model.problem.fp8))
    linear = bound + floor
    bound = torch.minimum(bound, SLACK * _hull(model, o, v, accumulate + nu + merge)) + floor
    lse_bound = near.lse + SLACK * (model.denominator + _logarithm(lse, m, own, sink)) + 2.0**-22
    if largest_v * keys >= LARGEST:  # (B9): a partial sum may overflow
        bound.masked_fill_(v.abs().sum(1, keepdim=True) * model.kept >= LARGEST, torch.inf)
    if furthest is not None:
        unknown = _unknown(model, given, furthest, h.isinf() & (x > -torch.inf))
        bound.masked_fill_(unknown, torch.inf)
        lse_bound.masked_fill_(unknown, torch.inf)
    result = ForwardTile(
        o=o,
        lse=lse.squeeze(-1),
        o_bound=bound.masked_fill_(empty, 0.0),
        lse_bound=lse_bound.masked_fill_(empty, 0.0).squeeze(-1),
    )
    cast = near.cast
    if not parts or cast is None:
        return result

    def share() -> CastPart:
        errors = (cast.double() * g).mul_(SLACK * (1 + nu)).div_(total).masked_fill_(empty, 0.0)
        errors = errors if weights is None else errors.mul_(weights)
        return CastPart(linear - torch.bmm(errors, v.abs()), errors, x)

    return dataclasses.replace(result, share=share)


def _with_sink(
    block: Block, x: Tensor, sink: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Logits, values, what is hidden and dropout's factors of keys and a sink; (B61).

    A sink is one more key, whose value is 0.
    """
    none, hidden, weights = sink.isneginf().unsqueeze(-1), block.hidden, block.beside.weights
    hidden = torch.zeros_like(x, dtype=torch.bool) if hidden is None else hidden.expand(x.shape)
    return (
        with_column(x, sink.unsqueeze(-1)),
        torch.nn.functional.pad(block.v, (0, 0, 0, 1)),
        torch.cat((hidden, none), -1),
        None if weights is None else with_column(weights, 1.0),
    )


def _blind(model: Model, sinks: Tensor, result: Forward) -> None:
    """Of rows that see no key, lse is the sink; (B61)."""
    problem = model.problem
    sink = sinks.double().view(problem.heads_kv, problem.group).repeat(problem.batch, 1)
    none, size = sink.isneginf(), sink.abs()
    error = model.sink_error(torch.zeros_like(sink), sink) + model.denominator + 16 * U * size
    bound = (SLACK * error + 2.0**-22).masked_fill(none, 0.0)
    result.lse.copy_(sink[..., None].expand_as(result.lse))
    result.lse_bound.copy_(bound[..., None].expand_as(result.lse))


def _logarithm(lse: Tensor, m: Tensor, own: Tensor, sink: Tensor | None) -> Tensor:
    """Error of m + log l, and with a sink of own + log l, own the keys' maximum; (B13), (B61)."""
    error = 6 * U * (lse.abs() + m.abs()) + 4 * U * (lse - m).abs()
    return error if sink is None else error + U * (10 * own.abs() + 4 * lse.abs())


def _exponent_error(  # noqa: PLR0917 -- what the forward pass has at hand
    model: Model, given: Inputs, block: Block, x: Tensor, merge: Tensor | float, top: float
) -> Tensor:
    """h: error of the exponent of p, a multiple of |q||k|^T, of |S - m| and of 1; (B7), (B67)."""
    work = torch.float32 if top <= SMALL else torch.float64
    constant = SLACK * (model.exponentials + model.logit_floor(given.largest) + merge)
    of_distance = 9 if model.arithmetic.merged_by_lse else 3
    left, right = (side.to(work) for side in block.logit_errors(model, constant))
    low = x.to(work).clamp(min=-1000.0 if top <= SMALL else -1e30)
    h = torch.baddbmm(low, left, right.mT, beta=-of_distance * U * SLACK)
    if block.beside.size is not None:
        h.add_(block.beside.size.to(work), alpha=U * SLACK)  # (B60)
    if given.overflows(model):
        h.masked_fill_(block.overflows(model), torch.inf)
    return h


def _spread_fast(model: Model, h: Tensor, p: Tensor, total: Tensor, top: float) -> _Spread:
    """For h <= top <= 1/4, in float32."""
    p = p.float()
    depth: Tensor | float = math.exp(3 * top)
    if model.arithmetic.p_normalised:
        depth = (depth * total).float()
    gain, cast = _with_cast(model, p, expm1_bound(h).mul_(p), depth)
    he = gain.sum(-1, keepdim=True).double() / total
    return _Spread(p, gain, cast, he, -torch.log1p(-he))  # (B13)


@dataclasses.dataclass(frozen=True, slots=True)
class _Slow:
    """What the bound for any h is computed from, float64.

    Attributes:
        x: S - m, -inf where hidden.
        h: Error of the exponent.
        total: l.
        hidden: As in `Block`.
        residual: How far above or below 0 the exponent of the largest key may be, by rows.
    """

    x: Tensor
    h: Tensor
    total: Tensor
    hidden: Tensor | None
    residual: Tensor


def _spread_slow(model: Model, given: _Slow) -> _Spread:
    """For any h, in float64."""
    x, total, hidden = given.x, given.total, given.hidden
    h = given.h if hidden is None else given.h.masked_fill(hidden, 0.0)
    p, top = x.exp(), h.amax(-1, keepdim=True)
    divided = total if model.arithmetic.p_normalised else 1.0
    gain, cast = _with_cast(model, p, spread(x, h, hidden), (2 * h + top).exp_() * divided)
    he = gain.sum(-1, keepdim=True) / total
    lse = torch.where(he < 1, -torch.log1p(-he), torch.inf)  # (B13)
    if not model.arithmetic.l_from_rounded_p:
        lse = torch.minimum(lse, top)
    # (B14): measure every key's error against the largest key's, whose own is then 0.
    best = x.argmax(-1, keepdim=True)
    both = h + h.gather(-1, best)
    other = spread(x, both, hidden).scatter_(-1, best, 0.0)
    above = (x + both).scatter_(-1, best, 0.0).amax(-1, keepdim=True) + given.residual
    depth = torch.add(above, both, alpha=2).scatter_(-1, best, above)
    other, other_cast = _with_cast(model, p, other, depth.exp_() * divided)
    other_he = other.sum(-1, keepdim=True) / total
    better = other_he < he
    gain, he = torch.where(better, other, gain), torch.where(better, other_he, he)
    if cast is not None and other_cast is not None:
        cast = torch.where(better, other_cast, cast)
    return _Spread(p, gain, cast, he, lse)


def _with_cast(
    model: Model, p: Tensor, gain: Tensor, depth: Tensor | float
) -> tuple[Tensor, Tensor | None]:
    """P e, and the error of the cast of P where that is not in P e; (B12), (B15).

    Args:
        model: Coefficients.
        p: exp(S - m).
        gain: P e.
        depth: At least (P + P e) over the smallest number that may be cast in its place.
    """
    if model.p is None:
        return gain, None
    high = p + gain
    unit = SLACK * model.p.unit
    if model.p.format.emin <= -126:  # subnormals are in the floor
        cast = high.mul_(unit)
    elif isinstance(depth, float):
        cast = torch.minimum(high.clamp(min=model.p_tiny * depth / unit).mul_(unit), high)
    else:
        cast = torch.minimum(torch.maximum(high * unit, model.p_tiny * depth), high)
    if model.arithmetic.l_from_rounded_p:  # the denominator has the cast too
        return gain + cast, cast if model.problem.dropout else None
    return gain, cast


def _furthest(s: Tensor, hidden: Tensor | None) -> Tensor:
    """The largest |S| that each row sees, (heads, rows, 1)."""
    size = s.abs()
    if hidden is not None:
        size.masked_fill_(hidden, 0.0)
    return size.amax(-1, keepdim=True)


def _normalisation(model: Model) -> float:
    """Relative error of the division by l; (B11)."""
    normal = model.denominator
    return SLACK * ((1 + 6 * U) / (1 - normal) - 1) if normal < 1 else math.inf


def _unknown(model: Model, given: Inputs, furthest: Tensor, infinite: Tensor) -> Tensor:
    """Rows of which nothing is said, (heads, rows, 1): P, l or acc may overflow, or a logit; (B9).

    Args:
        model: Coefficients.
        given: The whole problem's ranges.
        furthest: The largest logit that each row sees, (heads, rows, 1).
        infinite: Which logits in sight have no bound, (heads, rows, keys).
    """
    limit = LARGEST / (infinite.shape[-1] * max(1.0, given.largest_v * model.kept))
    limit = min(limit, model.p_overflow)
    # In the fma form the exponent of the largest key is off by as much.
    unknown = furthest * (U * SLACK) >= math.log(max(1.0, limit))
    # A logit may be inf, and inf - inf NaN.
    return unknown | infinite.any(-1, keepdim=True) if given.overflows(model) else unknown


def _hull(model: Model, o: Tensor, v: Tensor, rest: Tensor | float) -> Tensor:
    """Distance to the far end of V's range, plus what can leave the range; (B16), (B62)."""
    low, high = v.amin(1, keepdim=True), v.amax(1, keepdim=True)
    if model.problem.dropout:
        high = torch.maximum(low.abs(), high.abs()) * model.kept
        low = -high
    rest = rest + model.value_error
    rest = rest + SLACK * model.blocks(v.shape[1]) * U  # acc's own roundings when it is rescaled
    if model.p is not None:
        rest = rest + (model.p.unit + min(1.0, v.shape[1] * model.p_tiny))
    outside = 1.02 * rest * torch.maximum(low.abs(), high.abs())
    return torch.maximum(high - o, o - low) + outside
