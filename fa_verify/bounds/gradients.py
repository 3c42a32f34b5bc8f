"""Elements of P and dS in the backward, and how far a right kernel's may be; docs/bounds.md."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds import eager
from fa_verify.bounds.further import stored_logits
from fa_verify.bounds.inputs import SMALL, Block, Inputs, expm1_bound, spread
from fa_verify.bounds.model import LARGEST, SLACK, Model, U

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.bounds.formats import Cast
    from fa_verify.bounds.rows import Rows

__all__ = ["BackwardTile", "backward_tile", "splits"]


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardTile:
    """One tile of the matrices that the gradients and their bounds are products of.

    All are (heads, rows, keys). p, dropped and ds are float64 and exact, ds with the scale. The
    others are at least as large as what they bound.

    Attributes:
        p: P.
        dropped: P as dropout leaves it, p itself without.
        ds: d loss / d (q k^T).
        slope: Derivative of softcap; None without one.
        v: Error of an element as it enters the product for dv; likewise q for dq and k for dk.
        p_cast: The part of it that the cast of P accounts for; None without one.
        ds_cast: The part of it that the cast of dS accounts for; None without one.
        size: |dS|, with its error.
        p_off: How far P may be before its cast.
        ds_off: How far dS may be, with the scale.
        logits: The gradient of the logits after the softcap, exact, and how far it may be as it
            is summed for the gradient of a bias; None without a bias.
        sink: How much further off than elsewhere a sink's own dS may be, (heads, rows); None: none.
    """

    p: Tensor
    dropped: Tensor
    ds: Tensor
    slope: Tensor | None
    v: Tensor
    q: Tensor
    k: Tensor
    p_cast: Tensor | None
    ds_cast: Tensor | None
    size: Tensor
    p_off: Tensor
    ds_off: Tensor
    logits: tuple[Tensor, Tensor] | None = None
    sink: Tensor | None = None


def splits(model: Model, rows: Rows) -> bool:
    """Whether errors common to a row are large enough to be worth their own product; (B24)."""
    return rows.lse_error is not None or not model.arithmetic.delta_from_stored_o


def backward_tile(
    model: Model, given: Inputs, rows: Rows, block: Block, top: float
) -> BackwardTile:
    """Bound the elements of P and dS of one tile.

    Args:
        model: Coefficients.
        given: The whole problem's ranges.
        rows: Row statistics of the tile, (heads, rows).
        block: The tile's operands.
        top: At least every h; inf if that is not known to be at most 1/4.
    """
    near = _probabilities(model, given, rows, block, top)
    p_off = near.gain
    p_cast = None if model.p is None else model.p.error_below(near.high)
    rows_k = model.problem.group * model.problem.seqlen_q
    accumulate_k = SLACK * model.long_dot(rows_k, rows_k)
    dropped, own_cast = near.p, p_cast
    if block.beside.weights is None:
        loss = near.gain if p_cast is None else near.gain + p_cast
        for_v = torch.add(loss, near.near + loss, alpha=accumulate_k)  # (B23)
    else:
        dropped = near.p * block.beside.weights
        if model.p is not None and p_cast is not None:  # either side of the division
            after = model.p.error(near.high * model.kept)
            before = p_cast * model.kept
            twice = eager.scores(model) > 1
            p_cast = before + after if twice else torch.maximum(before, after)
            own_cast = p_cast / model.kept
        for_v, p_cast = _dropped(model, block.beside.weights, near, p_cast, accumulate_k)

    if own_cast is not None and model.arithmetic.ds_from_rounded_p:
        gain, own = near.gain + own_cast, near.own + own_cast
        near = dataclasses.replace(near, own=own, gain=gain, high=near.near + gain)
    scores = _scores(model, rows, block, near)
    logits = None
    if model.problem.bias:
        logits = (scores.logits.clone(), stored_logits(model, scores.logits, scores.off))
    total = ds_off = scores.error * model.scale
    high = scores.size * model.scale
    ds_cast = None if model.ds is None else _ds_cast(model, model.ds, high, scores)
    shared = None if scores.shared is None else scores.shared * model.scale
    if ds_cast is not None:
        total, high = total + ds_cast, high + ds_cast
        shared = None if shared is None else shared + ds_cast
    accumulate_q = SLACK * model.long_dot(model.problem.seqlen_k, model.problem.seqlen_k)
    if shared is None and _alike(accumulate_q, accumulate_k, model.ds):
        for_q = for_k = torch.add(total, high, alpha=max(accumulate_q, accumulate_k))
    else:
        for_q = torch.add(total if shared is None else shared, high, alpha=accumulate_q)
        for_k = torch.add(total, high, alpha=accumulate_k)
    ds = scores.ds.mul_(model.problem.scale)
    return BackwardTile(
        *(near.p, dropped, ds, scores.slope, for_v, for_q, for_k, p_cast, ds_cast, high, p_off),
        *(ds_off, logits, scores.sink),
    )


def _dropped(
    model: Model, weights: Tensor, near: _Probabilities, cast: Tensor | None, accumulate: float
) -> tuple[Tensor, Tensor | None]:
    """Error of P as it enters the product for dv, and the cast's part of it; (B62)."""
    weights = weights.to(near.near.dtype)
    loss = (near.gain + (SLACK * model.keep_error) * near.high) * weights
    if cast is not None:
        cast = cast * (weights > 0)
        loss += cast
    return torch.add(loss, near.near * weights + loss, alpha=accumulate), cast


@dataclasses.dataclass(frozen=True, slots=True)
class _Probabilities:
    """P = exp(S - lse), and how far the kernel's may be; (B21), (B22).

    Attributes:
        p: Exact, float64.
        t: tanh of softcap; None without one.
        near: p in the working precision, as are all that follow.
        h: Error of the exponent, lse apart.
        own: Error of P from h.
        gain: Error of P from h and from the row's lse.
        high: P + gain.
    """

    p: Tensor
    t: Tensor | None
    near: Tensor
    h: Tensor
    own: Tensor
    gain: Tensor
    high: Tensor


def _probabilities(
    model: Model, given: Inputs, rows: Rows, block: Block, top: float
) -> _Probabilities:
    fast = top <= SMALL
    work = torch.float32 if fast else torch.float64
    x, t = block.logits(model.problem.scale, model.problem.softcap)
    lse = rows.lse.unsqueeze(-1)
    x.sub_(lse)
    constant = model.arithmetic.exp2_ulps * U + model.logit_floor(given.largest)
    of_row = SLACK * (constant + 4 * U * lse.abs())
    if model.arithmetic.eager:  # P is the forward pass's own, whose log l is not taken
        of_row = of_row + SLACK * 8 * U * lse.abs() + 2.0**-22
    low = x.to(work).clamp(min=-1000.0 if fast else -1e30).abs_()
    h = block.logit_errors(model, of_row, low, 3 * U * SLACK)
    if block.beside.size is not None:
        h.add_(block.beside.size.to(work), alpha=U * SLACK)  # (B60)
    if model.arithmetic.eager:
        h = eager.of_logits(model, h, x, (x + lse).abs(), block.beside)
    if given.overflows(model):
        h.masked_fill_(block.overflows(model), torch.inf)
    if fast:
        p = x.exp_()
        near = p.float()
        own = gain = expm1_bound(h).mul_(near)
    else:
        own = gain = spread(x, h, block.hidden)
        p = near = x.exp_()
    if rows.lse_error is not None:
        growth = rows.lse_error.unsqueeze(-1).to(work)
        gain = gain * growth.exp() + near * growth.expm1()
    high = near + gain
    limit = LARGEST if model.p is None else min(LARGEST, model.p.format.largest)
    gain = gain.masked_fill(high >= limit, torch.inf)  # (B9): P itself may overflow
    return _Probabilities(p, t, near, h, own, gain, high)


@dataclasses.dataclass(frozen=True, slots=True)
class _Scores:
    """dS before the scale, and how far the kernel's may be; (B24).

    Attributes:
        ds: Exact, float64, softcap's slope included.
        slope: That slope; None without a softcap.
        error: Of an element of dS.
        shared: The same without what the row's errors of lse and delta do, which (B24) adds to dq
            once per row; None: not taken apart.
        size: |dS| + error.
        logits: dS without softcap's slope, exact; where there is none, ds itself.
        off: Error of that.
        sink: As in `BackwardTile`.
    """

    ds: Tensor
    slope: Tensor | None
    error: Tensor
    shared: Tensor | None
    size: Tensor
    logits: Tensor
    off: Tensor
    sink: Tensor | None


def _scores(model: Model, rows: Rows, block: Block, near: _Probabilities) -> _Scores:
    work = near.h.dtype
    x, weights = torch.bmm(block.do, block.v.mT), block.beside.weights
    x = x if weights is None else x.mul_(weights)
    products = x.abs() if model.arithmetic.eager else None
    x = x.sub_(rows.delta.unsqueeze(-1))
    size_x = x.abs().to(work)
    ds = x.mul_(near.p)
    column = (SLACK * rows.delta_error.unsqueeze(-1)).to(work)
    split = splits(model, rows)
    dot = model.dot(model.problem.head_dim_v)
    if weights is None:
        left, right = block.do.abs().mul_(SLACK * dot).to(work), block.v.abs().to(work)
        error = torch.baddbmm(size_x, left, right.mT, beta=5 * U * SLACK)
    else:  # (B62): the factor is in dP, or delta is divided by it
        high = torch.bmm(block.do.abs(), block.v.abs().mT).mul_(weights)
        error = high.mul_(SLACK * (dot + model.keep_error + 3 * U)).to(work)
        error.add_(size_x, alpha=5 * U * SLACK)
        own = (SLACK * (model.keep_error + 3 * U)) * rows.delta.abs().unsqueeze(-1)
        error += own.to(work)
    if model.halves(""):
        error.add_(model.half_tiny(model.problem.head_dim_v) * model.kept)  # (B75)
    if not split:
        error.add_(column)
    apart: Tensor | float = 0.0
    if products is not None:
        error += eager.of_products(model, products + error)
        apart = eager.of_product(model, near.high, products + error)
    shared = None
    if split:
        shared = (near.near + near.own) * error + near.own * (size_x + column) + apart
        if rows.lse_error is not None:
            shared = shared * rows.lse_error.unsqueeze(-1).exp().to(work)
        error.add_(column)
    total = torch.addcmul(near.gain * size_x + apart, near.high, error)
    size, of_sink = ds.abs().to(work), None
    if model.arithmetic.eager and block.beside.sink is not None:
        moved, of_sink = eager.of_maximum(model, rows, block.beside.sink, near.p, near.h, ds, total)
        total = total + moved
        shared = None if shared is None else shared + moved
    if near.t is None:
        return _Scores(ds, None, total, shared, size.add_(total), ds, total, of_sink)
    before, off = ds.clone() if model.problem.bias else ds, total
    slope = 1.0 - near.t * near.t
    flat = slope.to(work)
    h = near.h / model.problem.softcap
    extra = torch.addcmul(h * h, h, near.t.abs().to(work), value=2).add_(3 * U)  # (B6)
    extra *= size + total
    total = total * flat + extra
    shared = None if shared is None else shared * flat + extra
    size = size * flat + total
    return _Scores(ds.mul_(slope), slope, total, shared, size, before, off, of_sink)


def _alike(first: float, second: float, cast: Cast | None) -> bool:
    """Whether one matrix with the larger accumulation error will do for dq and dk."""
    return abs(first - second) <= 0.05 * (min(first, second) + (cast.unit if cast else 0.0))


def _ds_cast(model: Model, cast: Cast, high: Tensor, scores: _Scores) -> Tensor:
    """Error of the cast of dS, before or after scaling or either, in scaled units; (B25)."""
    when, scale, unscaled = model.arithmetic.ds_scale, model.scale, scores.size
    if model.arithmetic.eager:
        return eager.of_ds(model, cast, high, unscaled, scores.logits.abs() + scores.off)
    if when == "before":
        error = cast.error_below(high)
    elif when == "after":
        error = cast.error_below(unscaled).mul_(scale)
    else:
        error = (high * cast.unit).clamp_(min=cast.tiny * max(1.0, scale))
        error = torch.minimum(error, high)
    if cast.format.emin > -126 and high.numel():  # the others have float32's range
        for value in {"before": (high,), "after": (unscaled,), None: (high, unscaled)}[when]:
            if not float(value.amax()) < cast.format.overflow:
                error.masked_fill_(~(value < cast.format.overflow), torch.inf)
    return error
