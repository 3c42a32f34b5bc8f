"""Attention in operations on whole matrices, each of which rounds its result; (B74).

What such a kernel loses beside what every kernel does. Nothing where it is not declared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.formats import Cast
from fa_verify.bounds.model import LARGEST, SLACK, Model, U

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.bounds.beside import Beside
    from fa_verify.bounds.rows import Rows

__all__ = [
    "counts",
    "limit",
    "of_ds",
    "of_logits",
    "of_maximum",
    "of_product",
    "of_products",
    "scores",
]


def limit(model: Model) -> float:
    """From where on a logit may be infinite: what is stored may be up to 2% off; (B9)."""
    return min(LARGEST, model.out.overflow / 1.02) if model.arithmetic.eager else LARGEST


def counts(model: Model, x: Tensor) -> Tensor:
    """Which infinite logits matter: a hidden one that is stored is NaN once -inf is added; (B9)."""
    every = model.arithmetic.eager or model.halves("qk")
    return x.isnan().logical_not_() if every else x.isneginf().logical_not_()


def of_logits(model: Model, h: Tensor, x: Tensor, size: Tensor, beside: Beside) -> Tensor:
    """The error of a logit, with that of its rounded steps.

    Args:
        model: Coefficients.
        h: Without it.
        x: S less the row's maximum or lse, -inf where hidden.
        size: |S|.
        beside: Terms.
    """
    if not model.arithmetic.eager:
        return h
    problem, unit = model.problem, model.out.unit_roundoff
    size = size.nan_to_num(posinf=0.0)
    if beside.size is not None:
        size = size + beside.size / 4
    # The dot, the scale; x / c, tanh, c t; a bias; distances, slopes' products, and their sum.
    count = 2 + 3 * bool(problem.softcap) + bool(problem.bias) + 4 * problem.alibi
    lost = count * (unit * size + Cast(model.out).tiny * max(1.0, model.scale, problem.softcap))
    if problem.sinks:  # the maximum may be subtracted before exp is taken in float32
        count, lost = count + 1, lost + unit * x.abs().nan_to_num(posinf=0.0)
    return (h + SLACK * lost) / (1 - count * unit)


def of_products(model: Model, high: Tensor) -> Tensor:
    """Error of dP, which is rounded, and once more by dropout, with ``high`` at least its size."""
    count, out = 1 + bool(model.problem.dropout), model.out
    return SLACK * count * (out.unit_roundoff * high + Cast(out).tiny * model.kept)


def of_product(model: Model, p: Tensor, size: Tensor) -> Tensor:
    """Error of P dP, which a GPU rounds before P delta is subtracted; of what is at least each."""
    return SLACK * (model.out.unit_roundoff * p * size + Cast(model.out).tiny)


def of_ds(model: Model, cast: Cast, high: Tensor, size: Tensor, peak: Tensor) -> Tensor:
    """Error of dS, which is rounded once made, by the scale, and three times by a softcap.

    Args:
        model: Coefficients.
        cast: Of dS.
        high: At least |dS|, with the scale.
        size: Without it.
        peak: Without softcap's slope either.
    """
    cap, count = model.problem.softcap or 1.0, 2 + 3 * bool(model.problem.softcap)
    n = count * cast.unit
    tiny = cast.tiny * max(1.0, model.scale) * max(1.0, 1 / cap)
    error = high * (n / (1 - n)) + count * tiny
    most = torch.maximum(torch.maximum(high, size), peak * max(1.0, cap))
    return error.masked_fill_(most >= cast.format.overflow, torch.inf)


def scores(model: Model) -> int:
    """How often P is rounded before P V: dropout's factor comes after the first time."""
    return 1 + bool(model.arithmetic.eager and model.problem.dropout)


def of_maximum(  # noqa: PLR0917 -- what a tile's P and dS are known by
    model: Model, rows: Rows, sink: Tensor, p: Tensor, h: Tensor, ds: Tensor, error: Tensor
) -> tuple[Tensor, Tensor]:
    """What the maximum that is subtracted beside a sink passes on: all that dS misses 0 by.

    Args:
        model: Coefficients.
        rows: Row statistics of the tile, (heads, rows).
        sink: Of each row, likewise.
        p: P, (heads, rows, keys), as are those that follow.
        h: Error of its exponent.
        ds: dS without the scale or a softcap's slope.
        error: Of that.

    Returns:
        The error of dS that this adds, (heads, rows, keys), and of the sink's own, (heads, rows),
        with that of its exponent.
    """
    cast, high = Cast(model.out), ds.abs() + error
    x, none = p.log(), sink.isneginf()
    below = sink - rows.lse
    largest = x.amax(-1) if p.shape[-1] else torch.full_like(below, -torch.inf)
    lse_error = 0.0 if rows.lse_error is None else rows.lse_error
    own = 3 * cast.unit * (sink.abs() + (largest + rows.lse).abs().nan_to_num(posinf=0.0))
    most = (below + SLACK * own + lse_error).exp()
    off = most * (rows.delta.abs() + rows.delta_error) * -(-SLACK * own - lse_error).expm1()
    off = (off + most * rows.delta_error).masked_fill(none, 0.0)
    # dS adds up to 0. Each is off and rounded, then the sum is; in float32 it is added up.
    missed = (error + (cast.unit + U * (p.shape[-1] + 1)) * high + cast.tiny).sum(-1)
    missed = missed + off + cast.unit * most.masked_fill(none, 0.0) * rows.delta.abs() + cast.tiny
    missed = SLACK * (1 + 4 * cast.unit) * missed + 2 * cast.tiny
    # The maximum may be whichever is not surely below another.
    least = torch.maximum((x - h).nan_to_num(nan=-torch.inf).amax(-1), below - own)
    could = (x + h >= least.unsqueeze(-1)) & (p > 0)
    moved = torch.where(could, missed.unsqueeze(-1) + 2 * cast.unit * high, 0.0)
    return moved, off + torch.where(below + own >= least, missed, 0.0)
