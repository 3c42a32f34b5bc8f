"""The deterministic bound of the backward pass: dq, dk and dv. Equations of docs/bounds.md."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify.bounds.formats import Cast
from fa_verify.bounds.inputs import SMALL, Inputs, expm1_bound, spread, with_column
from fa_verify.bounds.model import FLUSH, LARGEST, SLACK, U, Model
from fa_verify.reference import tiles

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.bounds.rows import Rows

__all__ = ["Backward", "BackwardTile", "backward_det", "backward_tile", "reach"]


@dataclasses.dataclass(frozen=True, slots=True)
class Backward:
    """Exact gradients and bounds before their rounding, by key/value head, float64."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_bound: Tensor
    dk_bound: Tensor
    dv_bound: Tensor

    def joined(self, other: Backward) -> Backward:
        """Bounds about our values that also hold whatever holds about the other's; (B20)."""
        bounds = (
            torch.maximum(
                getattr(self, f"{x}_bound"),
                (getattr(self, x) - getattr(other, x)).abs() + getattr(other, f"{x}_bound"),
            )
            for x in ("dq", "dk", "dv")
        )
        return Backward(self.dq, self.dk, self.dv, *bounds)


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardTile:
    """One tile of the matrices that the gradients and their bounds are products of.

    All are (heads, rows, keys); p and ds are float64 and exact, ds with the scale. The others are
    at least the errors of one element as it enters the product for dv (``v``), dq and dk
    (``q``, ``k``), and the parts of them that the casts account for.
    """

    p: Tensor
    ds: Tensor
    slope: Tensor | None
    v: Tensor
    q: Tensor
    k: Tensor
    p_cast: Tensor | None
    ds_cast: Tensor | None


def reach(model: Model, given: Inputs, rows: Rows) -> float:
    """At least every h and lse error, by Cauchy-Schwarz; inf where float32 will not do; (B10)."""
    if not rows.lse.numel():
        return 0.0
    lse = rows.lse.abs().amax()
    error = lse.new_zeros(()) if rows.lse_error is None else rows.lse_error.amax()
    highest, uncertain = torch.stack((lse, error)).tolist()
    h = (model.logit + 3 * U * model.scale) * given.raw + 7 * U * highest
    h = SLACK * (h + uncertain + model.arithmetic.exp2_ulps * U + model.logit_floor(given.largest))
    fine = h <= SMALL and not given.overflows(model.scale)
    return h if fine and given.value < LARGEST else math.inf  # of inf, NaN: not fine


def backward_det(model: Model, given: Inputs, rows: Rows) -> Backward:
    """Bound dq, dk and dv, tile by tile."""
    problem = model.problem
    assert given.do is not None
    exact = [torch.zeros_like(x) for x in (given.q, given.k, given.v)]
    bounds = [torch.zeros_like(x) for x in (given.q, given.k, given.v)]
    peaks = exact
    huge = _may_overflow(model, given, rows)
    if huge:
        peaks = [torch.zeros_like(x) for x in exact]
    top = reach(model, given, rows)
    work = torch.float32 if top <= SMALL else torch.float64
    for tile in tiles(problem, given.q.device):
        heads, keys = tile.heads, tile.keys
        q, do = (x[heads, :, tile.rows].flatten(1, 2) for x in (given.q, given.do))
        k, v = given.k[heads, keys], given.v[heads, keys]
        hidden = None if tile.hidden is None else tile.hidden.repeat(problem.group, 1)
        row = rows.part(heads, tile.rows)
        part = backward_tile(model, given, row, q, k, v, do, hidden, top)
        size_q, size_k, size_do = (x.abs().to(work) for x in (q, k, do))
        dq = torch.bmm(part.ds, k)
        dq_bound = torch.bmm(part.q, size_k).double()
        dq_bound += _common(model, row, part, dq, k)
        exact[0][heads, :, tile.rows] = dq.unflatten(1, (problem.group, -1))
        bounds[0][heads, :, tile.rows] = dq_bound.unflatten(1, (problem.group, -1))
        exact[1][heads, keys] += torch.bmm(part.ds.mT, q)
        bounds[1][heads, keys] += torch.bmm(part.k.mT, size_q)
        exact[2][heads, keys] += torch.bmm(part.p.mT, do)
        bounds[2][heads, keys] += torch.bmm(part.v.mT, size_do)
        if huge:
            size_ds = part.ds.abs() * max(1.0, 1 / model.scale) if model.scale else part.p * torch.inf
            peaks[0][heads, :, tile.rows] += torch.bmm(size_ds, k.abs()).unflatten(1, (problem.group, -1))
            peaks[1][heads, keys] += torch.bmm(size_ds.mT, q.abs())
            peaks[2][heads, keys] += torch.bmm(part.p.mT, do.abs())
    floors = _floors(model, given, rows)
    for value, bound, peak, floor in zip(exact, bounds, peaks, floors, strict=True):
        if value is not exact[2]:
            bound += 3 * U * value.abs()  # (B26): scaling
        bound.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        bound.mul_(SLACK)
        bound += floor
        if huge:
            bound.masked_fill_(~(peak < LARGEST), torch.inf)  # (B9); NaN: 0 * inf
    _mark_unknown(given, rows, bounds)
    return Backward(*exact, *bounds)


def _mark_unknown(given: Inputs, rows: Rows, bounds: list[Tensor]) -> None:
    """Say nothing about what a row without a finite P or dS may reach; (B9).

    A NaN of one row reaches dk and dv of every key, since 0 * NaN is NaN: of hidden keys too.
    """
    assert given.do is not None
    no_p, no_ds = rows.no_p, rows.no_ds
    if given.value >= LARGEST:  # dP may overflow, next to hidden keys too
        furthest = torch.linalg.vector_norm(given.v, dim=-1).amax(-1)
        overflows = torch.linalg.vector_norm(given.do, dim=-1) * furthest[:, None, None] >= LARGEST
        no_ds = overflows if no_ds is None else no_ds | overflows
    if no_ds is not None:
        bounds[0].masked_fill_(no_ds.unsqueeze(-1), torch.inf)
        bounds[1].masked_fill_(no_ds.any(-1).any(-1)[:, None, None], torch.inf)
    if no_p is not None:
        bounds[2].masked_fill_(no_p.any(-1).any(-1)[:, None, None], torch.inf)


def _may_overflow(model: Model, given: Inputs, rows: Rows) -> bool:
    """Whether a partial sum of a gradient may reach float32's largest number; (B9)."""
    rows_k = model.problem.group * model.problem.seqlen_q
    largest_ds = max(1.0, model.scale) * _peak_x(given, rows)
    length = max(rows_k, model.problem.seqlen_k)
    return length * max(given.largest_do, largest_ds * given.largest) >= LARGEST


def _peak_x(given: Inputs, rows: Rows) -> float:
    """At least every |dP - delta|."""
    return given.value + (float(rows.delta.abs().amax()) if rows.delta.numel() else 0.0)


def _floors(model: Model, given: Inputs, rows: Rows) -> list[Tensor]:
    """What subnormals and flushing to zero may cost dq, dk and dv where a key is in sight; (B27)."""
    problem = model.problem
    lo, hi = problem.mask.intervals(problem.seqlen_q, problem.seqlen_k)
    row_sees = torch.from_numpy(lo < hi).to(given.q)
    ends = np.zeros(problem.seqlen_k + 1)
    np.add.at(ends, lo, 1.0)
    np.add.at(ends, hi, -1.0)
    key_seen = torch.from_numpy((ends.cumsum()[:-1] > 0).astype(float)).to(given.q)
    one_ds = 1.0 + model.scale * (1.0 + problem.head_dim_v + _peak_x(given, rows))
    one_ds *= FLUSH * (1.0 + given.largest)
    rows_k = problem.group * problem.seqlen_q
    return [
        (row_sees * (one_ds * problem.seqlen_k)).unsqueeze(-1),
        (key_seen * (one_ds * rows_k)).unsqueeze(-1),
        (key_seen * (FLUSH * (1.0 + given.largest_do) * rows_k)).unsqueeze(-1),
    ]


def _common(model: Model, rows: Rows, part: BackwardTile, dq: Tensor, k: Tensor) -> Tensor | float:
    """What errors of lse and delta, common to a row, do to dq; (B24)."""
    if not _splits(model, rows):
        return 0.0
    weight = part.p if part.slope is None else part.p * part.slope
    shared = torch.bmm(weight, k).abs_().mul_(model.scale * rows.delta_error.unsqueeze(-1))
    if rows.lse_error is None:
        return shared
    growth = rows.lse_error.unsqueeze(-1)
    return shared * growth.exp() + dq.abs() * growth.expm1()


def _splits(model: Model, rows: Rows) -> bool:
    """Whether errors common to a row are large enough to be worth their own product."""
    return rows.lse_error is not None or not model.arithmetic.delta_from_stored_o


def backward_tile(  # noqa: PLR0913 -- the operands of attention
    model: Model,
    given: Inputs,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    hidden: Tensor | None,
    top: float,
) -> BackwardTile:
    """Bound the elements of P and dS of one tile.

    Args:
        model: Coefficients.
        given: The whole problem's ranges.
        rows: Row statistics of the tile, (heads, rows).
        q: (heads, rows, head_dim) float64; do likewise with head_dim_v.
        k: (heads, keys, head_dim) float64; v likewise with head_dim_v.
        v: See k.
        do: See q.
        hidden: (rows, keys) bool or None.
        top: At least every h; inf if that is not known to be at most 1/4.
    """
    problem, fast = model.problem, top <= SMALL
    work = torch.float32 if fast else torch.float64
    x = torch.bmm(q * problem.scale, k.mT)
    t = None
    if problem.softcap:
        t = x.div_(problem.softcap).tanh_()
        x = t * problem.softcap
    if hidden is not None:
        x.masked_fill_(hidden, -torch.inf)
    lse = rows.lse.unsqueeze(-1)
    x.sub_(lse)

    # h: error of the exponent of p; (B21).
    constant = model.arithmetic.exp2_ulps * U + model.logit_floor(given.largest)
    size_q, size_k = with_column(q.abs(), 0.0), with_column(k.abs(), 1.0).to(work)
    left = size_q.mul_(SLACK * model.logit).add_(SLACK * model.prescale_tiny)
    left[..., -1:] = SLACK * (constant + 4 * U * lse.abs())
    low = x.to(work).clamp(min=-1000.0 if fast else -1e30).abs_()
    h = torch.baddbmm(low, left.to(work), size_k.mT, beta=3 * U * SLACK)
    if fast:
        p64 = x.exp_()
        p = p64.float()
        gain = p * expm1_bound(h)
    else:
        if given.overflows(model.scale):
            raw = torch.bmm(q.abs(), k.abs().mT) * max(1.0, 1.45 * model.scale)
            h.masked_fill_(raw >= LARGEST, torch.inf)
        gain = spread(x, h, hidden)
        p = p64 = x.exp()
    own = gain
    if rows.lse_error is not None:  # (B22): the whole row is off by up to e^lse_error
        growth = rows.lse_error.unsqueeze(-1).to(work)
        gain = gain * growth.exp() + p * growth.expm1()
    high = p + gain

    # dV: the cast of P, then its products; (B23).
    p_cast = None if model.p is None else model.p.error(high)
    rows_k = problem.group * problem.seqlen_q
    accumulate_k = SLACK * model.long_dot(rows_k, rows_k)
    loss = gain if p_cast is None else gain + p_cast
    for_v = torch.add(loss, p + loss, alpha=accumulate_k)

    # dS = P o X, X = dP - delta; (B24).
    ds = torch.bmm(do, v.mT).sub_(rows.delta.unsqueeze(-1))
    size_x = ds.abs().to(work)
    ds.mul_(p64)
    splits, shared = _splits(model, rows), size_x
    dot = SLACK * model.dot(problem.head_dim_v)
    column = SLACK * rows.delta_error.unsqueeze(-1)
    left = with_column(do.abs().mul_(dot), 0.0 if splits else column).to(work)
    error = torch.baddbmm(size_x, left, with_column(v.abs(), 1.0).mT.to(work), beta=5 * U * SLACK)
    if splits:
        column = column.to(work)
        shared = (p + own) * error + own * (size_x + column)
        if rows.lse_error is not None:
            shared = shared * rows.lse_error.unsqueeze(-1).exp().to(work)
        error = error + column
    total = torch.addcmul(gain * size_x, high, error)
    size = ds.abs().to(work)
    slope = None
    if t is not None:  # (B6)
        slope = 1.0 - t * t
        h.mul_(1 / problem.softcap)
        flat = slope.to(work)
        factor = torch.addcmul(h * h, h, t.to(work).abs_(), value=2).add_(3 * U)
        extra = factor.mul_(size + total)
        total = total * flat + extra
        if splits:
            shared = shared * flat + extra
        size = size * flat
        ds.mul_(slope)
    ds.mul_(problem.scale)
    size.mul_(model.scale)
    total.mul_(model.scale)

    # dQ and dK: the cast of dS, then its products; (B25).
    high = size + total
    ds_cast = None if model.ds is None else _ds_cast(model, model.ds, high)
    accumulate_q = SLACK * model.long_dot(problem.seqlen_k, problem.seqlen_k)
    if ds_cast is not None:
        total, high = total + ds_cast, high + ds_cast
    for_k = torch.add(total, high, alpha=accumulate_k)
    for_q = for_k
    if splits:
        shared = shared * model.scale
        if ds_cast is not None:
            shared = shared + ds_cast
        for_q = torch.add(shared, high, alpha=accumulate_q)
    elif not _alike(accumulate_q, accumulate_k, model.ds):
        for_q = torch.add(total, high, alpha=accumulate_q)
    elif accumulate_q > accumulate_k:
        for_k = for_q = torch.add(total, high, alpha=accumulate_q)
    return BackwardTile(p64, ds, slope, for_v, for_q, for_k, p_cast, ds_cast)


def _alike(first: float, second: float, cast: Cast | None) -> bool:
    """Whether one matrix with the larger accumulation error will do for dq and dk."""
    return abs(first - second) <= 0.05 * (min(first, second) + (cast.unit if cast else 0.0))  # noqa: PLR2004


def _ds_cast(model: Model, cast: Cast, high: Tensor) -> Tensor:
    """Error of the cast of dS, in units of the scaled dS: cast after or before scaling, or either; (B25)."""
    when, scale = model.arithmetic.ds_scale, model.scale
    if when == "before":
        error = cast.error(high)
    elif when == "after":
        error = cast.error(high / scale).mul_(scale) if scale else torch.zeros_like(high)
    else:
        error = (high * cast.unit).clamp_(min=cast.tiny * max(1.0, scale))
        error = torch.minimum(error, high)
    if cast.format.emin > -126 and high.numel():  # noqa: PLR2004 -- others have float32's range
        unscaled = 1.0 if when == "before" or not scale else max(1.0 if when is None else 0.0, 1 / scale)
        if float(high.amax()) * unscaled >= cast.format.overflow:
            error.masked_fill_(high * unscaled >= cast.format.overflow, torch.inf)
    return error
