"""Gradients that are products of the wrong factor: dv of dS, dq and dk of dP less delta alone."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis import model
from fa_verify.diagnosis.hypothesis import Hypothesis, Prediction
from fa_verify.diagnosis.knobs import RIGHT
from fa_verify.diagnosis.logits import rounded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.diagnosis.predictions import Backward

__all__ = ["crossed"]


def crossed(predict: Backward) -> Iterator[Hypothesis]:
    """Causes that one factor stands in another's place, or is missing."""
    scale = predict.evidence.problem.scale
    for factor in dict.fromkeys((1.0, scale)):  # dS may have the scale already
        known = functools.partial(_dv_of_ds, predict, factor)
        yield Hypothesis("dv is made of dS in the place of P", known, name="dv of dS")
    if predict.beside.weights is None:
        known = functools.partial(_without_p, predict)
        yield Hypothesis("dS lacks the factor P: it is dP - delta", known)


def _dv_of_ds(predict: Backward, factor: float) -> Prediction:
    ds, slope = predict.ds()
    dv = _summed(predict, (factor * ds * slope).mT @ predict.inputs["do"])
    return Prediction(predict.right.values | {"dv": dv})


def _without_p(predict: Backward) -> Prediction:
    problem, x = predict.evidence.problem, predict.inputs
    heads = model.key_heads(problem, RIGHT)
    dp = x["do"] @ x["v"][:, heads].mT
    hidden = ~model.visible(problem, RIGHT, problem.seqlen_k) | torch.isinf(predict.lse)[..., None]
    _, slope = predict.ds()
    ds = ((dp - predict.delta[..., None]) * slope * problem.scale).masked_fill(hidden, 0.0)
    dq = rounded(ds @ x["k"][:, heads], problem.dtype)
    return Prediction(predict.right.values | {"dq": dq, "dk": _summed(predict, ds.mT @ x["q"])})


def _summed(predict: Backward, per_head: torch.Tensor) -> torch.Tensor:
    """The sum over the query heads of each key head, as it is stored."""
    problem = predict.evidence.problem
    shape = (problem.batch, problem.heads_kv, problem.group, *per_head.shape[2:])
    return rounded(per_head.reshape(shape).sum(dim=2), problem.dtype)
