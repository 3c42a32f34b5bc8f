"""The deterministic bound of the forward pass: o and lse. Equations of docs/bounds.md."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.inputs import SMALL, Inputs, expm1_bound, spread, with_column
from fa_verify.bounds.model import FLUSH, LARGEST, SLACK, U, Model
from fa_verify.reference import tiles

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Forward", "forward_det", "forward_tile", "reach"]


@dataclasses.dataclass(frozen=True, slots=True)
class Forward:
    """Exact values and bounds before the rounding of o, (heads, group, seqlen_q[, head_dim_v]), float64."""

    o: Tensor
    lse: Tensor
    o_bound: Tensor
    lse_bound: Tensor

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
class ForwardTile:
    """One tile's exact values and bounds, (heads, rows[, head_dim_v]).

    Attributes:
        rest: o_bound before the hull, without what the cast of P accounts for (if asked for).
        p_cast: What the cast of P accounts for: that much times v, per key (if asked for).
        x: S - m in float64, -inf where hidden (if asked for).
    """

    o: Tensor
    lse: Tensor
    o_bound: Tensor
    lse_bound: Tensor
    rest: Tensor | None = None
    p_cast: Tensor | None = None
    x: Tensor | None = None


def reach(model: Model, given: Inputs) -> float:
    """At least every h of the problem, by Cauchy-Schwarz; inf where float32 will not do; (B10)."""
    size = model.scale * given.raw
    h = model.logit * given.raw + 6 * U * size + model.exponentials
    h = SLACK * (h + model.logit_floor(given.largest))
    return h if h <= SMALL and not given.overflows(model.scale) else math.inf


def forward_det(model: Model, given: Inputs) -> Forward:
    """Bound o and lse of every row."""
    problem = model.problem
    o = given.q.new_zeros(*given.q.shape[:3], problem.head_dim_v)
    lse = given.q.new_full(given.q.shape[:3], -torch.inf)
    result = Forward(o, lse, torch.zeros_like(o), torch.zeros_like(lse))
    top = reach(model, given)
    for tile in tiles(problem, given.q.device):
        q = given.q[tile.heads, :, tile.rows].flatten(1, 2)
        k, v = given.k[tile.heads, tile.keys], given.v[tile.heads, tile.keys]
        hidden = None if tile.hidden is None else tile.hidden.repeat(problem.group, 1)
        part = forward_tile(model, given, q, k, v, hidden, top)
        for field in ("o", "lse", "o_bound", "lse_bound"):
            value = getattr(part, field).unflatten(1, (problem.group, -1))
            getattr(result, field)[tile.heads, :, tile.rows] = value
    return result


def forward_tile(  # noqa: PLR0913 -- the operands of attention
    model: Model,
    given: Inputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
    top: float,
    *,
    parts: bool = False,
) -> ForwardTile:
    """Bound the rows of one tile, all of whose visible keys are in it.

    Args:
        model: Coefficients.
        given: The whole problem's ranges.
        q: (heads, rows, head_dim) float64.
        k: (heads, keys, head_dim) float64.
        v: (heads, keys, head_dim_v) float64.
        hidden: (rows, keys) bool or None.
        top: At least every h; inf if that is not known to be at most 1/4.
        parts: Also return what the cast of P accounts for.
    """
    problem, fast = model.problem, top <= SMALL
    x = torch.bmm(q * problem.scale, k.mT)
    if problem.softcap:
        x.div_(problem.softcap).tanh_().mul_(problem.softcap)
    if hidden is not None:
        x.masked_fill_(hidden, -torch.inf)
    m = x.amax(-1, keepdim=True)
    empty = m == -torch.inf
    m.masked_fill_(empty, 0.0)
    x.sub_(m)

    # h: error of the exponent of p, as a multiple of |q||k|^T, |S - m| and 1; (B7).
    work = torch.float32 if fast else torch.float64
    constant = SLACK * (model.exponentials + model.logit_floor(given.largest))
    left = with_column(q.abs().mul_(SLACK * model.logit).add_(SLACK * model.prescale_tiny), constant)
    right = with_column(k.abs(), 1.0)
    low = x.to(work).clamp_(min=-1000.0 if fast else -1e30)
    h = torch.baddbmm(low, left.to(work), right.mT.to(work), beta=-3 * U * SLACK)
    if not fast and given.overflows(model.scale):
        h.masked_fill_(torch.bmm(q.abs(), k.abs().mT) * max(1.0, 1.45 * model.scale) >= LARGEST, torch.inf)

    row_top: Tensor | float = top
    unknown = None
    kept = x.clone() if parts else None
    if fast:
        p64 = x.exp_()
        p = p64.float()
        gain = p * expm1_bound(h)
    else:
        gain = spread(x, h, hidden)
        if hidden is not None:
            h.masked_fill_(hidden, 0.0)
        row_top = h.amax(-1, keepdim=True)
        unknown = _p_overflows(model, given, x + m, hidden)
        p = p64 = x.exp()
    total = p64.sum(-1, keepdim=True).masked_fill_(empty, 1.0)
    o = torch.bmm(p64, v).div_(total)
    lse = torch.where(empty, -torch.inf, m + total.log())

    # Rows, with l = total: everything below is relative to exp(m).
    gain, cast, he = _with_cast(model, p, gain, h, row_top)
    he /= total
    spread_lse = _lse_spread(he, row_top)
    if not fast:
        other = _about_the_top(x, h, hidden)
        other, other_cast, other_he = _with_cast(model, p, other, h, row_top)
        other_he /= total
        better = other_he < he
        gain, he = torch.where(better, other, gain), torch.where(better, other_he, he)
        if cast is not None and other_cast is not None:
            cast = torch.where(better, other_cast, cast)
    accumulate = SLACK * model.long_dot(k.shape[1], k.shape[1])
    loss = gain if cast is None else gain + cast
    loss = (p + gain if cast is None else p + loss).mul_(accumulate).add_(loss)
    floor = FLUSH * k.shape[1] * max(1.0, given.largest_v)
    magnitude = v.abs().to(work)
    weight = torch.bmm(loss, magnitude).double().div_(total)
    normal = model.denominator
    nu = SLACK * ((1 + 6 * U) / (1 - normal) - 1) if normal < 1 else math.inf
    g = torch.where(he < 0.5, 1 / (1 - he), torch.inf)  # noqa: PLR2004 -- (B11)
    size = o.abs()
    bound = (weight + size * he) * g * (1 + nu) + nu * size
    bound.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    bound *= SLACK
    linear = bound + floor
    bound = torch.minimum(bound, SLACK * _hull(model, o, v, accumulate + nu))
    if unknown is not None:
        bound.masked_fill_(unknown, torch.inf)
        spread_lse.masked_fill_(unknown, torch.inf)
    bound += floor
    if given.largest_v * k.shape[1] >= LARGEST:  # (B9): a partial sum may overflow
        bound.masked_fill_(v.abs().sum(1, keepdim=True) >= LARGEST, torch.inf)
    lse_bound = spread_lse + SLACK * (normal + 6 * U * (lse.abs() + m.abs())) + 2.0**-22
    result = ForwardTile(
        o=o,
        lse=lse.squeeze(-1),
        o_bound=bound.masked_fill_(empty, 0.0),
        lse_bound=lse_bound.masked_fill_(empty, 0.0).squeeze(-1),
    )
    if not parts or cast is None:
        return result
    share = (cast.double() * g).mul_(SLACK * (1 + nu)).div_(total).masked_fill_(empty, 0.0)
    return dataclasses.replace(result, rest=linear - torch.bmm(share, v.abs()), p_cast=share, x=kept)


def _p_overflows(model: Model, given: Inputs, s: Tensor, hidden: Tensor | None) -> Tensor:
    """Rows in which fma(s, c, -round(m c)) may be so far above 0 that P, l or acc overflows; (B9)."""
    size = s.abs()
    if hidden is not None:
        size.masked_fill_(hidden, 0.0)
    limit = LARGEST / (s.shape[-1] * max(1.0, given.largest_v))
    if model.p is not None:
        limit = min(limit, model.p.format.largest)
    return size.amax(-1, keepdim=True) * (U * SLACK) >= math.log(max(1.0, limit))


def _with_cast(
    model: Model, p: Tensor, gain: Tensor, h: Tensor, top: Tensor | float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """P e, the error of the cast of P where it is not in P e, and the rows' sums of P e; (B15)."""
    cast = _cast_error(model, p, gain, h, top)
    if model.arithmetic.l_from_rounded_p and cast is not None:
        gain, cast = gain + cast, None  # the denominator has the cast too
    return gain, cast, gain.sum(-1, keepdim=True).double()


def _cast_error(model: Model, p: Tensor, gain: Tensor, h: Tensor, top: Tensor | float) -> Tensor | None:
    """What casting P may change, relative to exp(m) of the row; (B12)."""
    if model.p is None:
        return None
    high = p + gain
    unit = SLACK * model.p.unit
    if model.p.format.emin <= -126:  # noqa: PLR2004 -- subnormals are in the floor
        return high.mul_(unit)
    # The value cast is at least p e^-(h+top): its running maximum is the final one, or below it.
    if isinstance(top, float):
        tiny: Tensor | float = model.p.tiny * math.exp(3 * top)
        linear = high.clamp(min=tiny / unit).mul_(unit)
    else:
        tiny = model.p.tiny * (2 * h + top).exp_()
        linear = torch.maximum(high * unit, tiny)
    return torch.minimum(linear, high)


def _lse_spread(he: Tensor, top: Tensor | float) -> Tensor:
    """min(-log(1 - he), max_j h_j): the log-sum-exp moves by no more; (B13)."""
    sure = torch.where(he < 1, -torch.log1p(-he), torch.inf)
    return sure if isinstance(top, float) else torch.minimum(sure, top)


def _about_the_top(x: Tensor, h: Tensor, hidden: Tensor | None) -> Tensor:
    """P e with every key's error measured against the largest key's, whose own is then 0; (B14)."""
    best = x.argmax(-1, keepdim=True)
    return spread(x, h + h.gather(-1, best), hidden).scatter_(-1, best, 0.0)


def _hull(model: Model, o: Tensor, v: Tensor, rest: float) -> Tensor:
    """Distance to the far end of V's range, plus what can leave the range; (B16)."""
    low, high = v.amin(1, keepdim=True), v.amax(1, keepdim=True)
    if model.p is not None:
        rest += model.p.unit + v.shape[1] * model.p.tiny
        if model.arithmetic.l_from_rounded_p:
            rest += model.p.unit + v.shape[1] * model.p.tiny
    outside = 1.02 * rest * torch.maximum(low.abs(), high.abs())
    return torch.maximum(high - o, o - low) + outside
