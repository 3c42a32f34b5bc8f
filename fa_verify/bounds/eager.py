"""Attention in operations on whole matrices, each of which rounds its result; (B74).

What such a kernel loses beside what every kernel does. Nothing where it is not declared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.formats import Cast
from fa_verify.bounds.model import LARGEST, SLACK, Model

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.bounds.beside import Beside

__all__ = ["counts", "limit", "of_ds", "of_logits", "of_products", "scores"]


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
