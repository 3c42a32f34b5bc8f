"""Which elements of P a kernel dropped, read off its results, where these are not those it says.

With no more keys than head_dim_v, o = W v gives W, the weights that met v; with no more queries,
dv = W^T dO does. Divided by P they are 0 or what dropout divides by.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify.case import Values
from fa_verify.diagnosis import model
from fa_verify.diagnosis.evidence import gather
from fa_verify.diagnosis.knobs import RIGHT
from fa_verify.diagnosis.predictions import Backward
from fa_verify.layouts import BHSD
from fa_verify.masks import FULL
from fa_verify.trial import Trial

if TYPE_CHECKING:
    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.problem import Problem

__all__ = ["other_draw"]

_DROPOUT = 0.25  # kept and dropped are told apart by their shares
_LENGTH = 16  # 256 elements; two draws differ in 96 of them, give or take 8
_HEADS = 2
_WIDTHS = (64, 32, 128, 16)
_APART = 0.25  # of what is divided by: nearer to 0 or to it an element counts as one of both
_CLEAR = 0.98  # share of elements that must be one of both
_NOISE = 2.0**-6  # of a row's largest weight: what is below says nothing, in any format
_SAME = 0.02  # share of elements in which a draw may differ from another by what noise does
_OTHER = 5.0  # standard deviations of the share kept, from which on it is another probability


def other_draw(trial: Trial) -> str:
    """The sentence for a kernel that drops other elements than `Kernel.dropout_keep` says."""
    problem = trial.case.problem
    small = None if not problem.dropout else _small(trial)
    if small is None or small.execution.error:
        return ""
    whole = gather(small)
    for where in ("the forward pass", "the backward pass")[: 1 + small.case.backward]:
        drawn = []
        for head in range(small.case.problem.heads_q):
            evidence = whole.part(0, head)
            problem, backward = evidence.problem, where.endswith("backward pass")
            kept = _kept(evidence, problem, backward=backward, trial=small)
            if kept is None:
                break
            drawn.append(kept)
            said = _says(kept, evidence, where)
            if said and head and _alike(kept, drawn[0]):
                said = f"{where} drops other elements than dropout_keep says: all heads the same"
            if said:
                return said
    return ""


def _small(trial: Trial) -> Trial | None:
    """The case as few heads with few rows and keys, and as many columns at least."""
    p, takes = trial.case.problem, trial.kernel.takes
    for width in (p.head_dim_v, *_WIDTHS):
        if width < _LENGTH:
            continue
        problem = dataclasses.replace(
            p.resized(_LENGTH, _LENGTH), batch=1, heads_q=_HEADS, heads_kv=_HEADS, head_dim=width,
            head_dim_v=width, mask=FULL, layout_q=BHSD, layout_k=BHSD, layout_v=BHSD,
            layout_do=BHSD, layout_bias=BHSD, bias="", alibi=False, sinks=False, lse_grad=False,
            softmax_scale=None, softcap=0.0, dropout=_DROPOUT,
        )  # fmt: skip
        if takes is None or takes.reason_against(problem) is None:
            case = dataclasses.replace(trial.case, problem=problem, values=Values())
            return Trial(trial.kernel, case, trial.setup, trial.backend, independent=False)
    return None


def _kept(
    evidence: Evidence, problem: Problem, *, backward: bool, trial: Trial | None = None
) -> torch.Tensor | None:
    """Which elements met v (or do), (seqlen_q, seqlen_k), where that can be told of nearly all."""
    lse = model.forward(problem, evidence.q, evidence.k, evidence.v)["lse"]
    scores, _ = model.logits(problem, evidence.q, evidence.k, RIGHT)
    p = torch.exp(scores - lse[..., None])[0, 0]
    if backward:
        if evidence.do is None or "dv" not in evidence.seen or trial is None:
            return None
        weights = (evidence.seen["dv"].got[0, 0] @ torch.linalg.pinv(evidence.do[0, 0])).mT
    else:
        weights = evidence.seen["o"].got[0, 0] @ torch.linalg.pinv(evidence.v[0, 0])
    ratio = weights / p * (1.0 - problem.dropout)
    telling = p > _NOISE * p.amax(dim=1, keepdim=True)
    near = torch.minimum(ratio.abs(), (ratio - 1).abs()) < _APART
    if not bool(torch.isfinite(ratio).all()) or float(near[telling].double().mean()) < _CLEAR:
        return None
    keep = ratio > 1 - _APART
    if backward and trial is not None and not _fits(trial, evidence, keep):
        return None
    return torch.where(telling, keep, evidence_keep(evidence))


def evidence_keep(evidence: Evidence) -> torch.Tensor:
    """What the kernel says that it keeps."""
    assert evidence.terms.keep is not None  # noqa: S101 - for mypy: the problem has dropout
    return evidence.terms.keep[0, 0]


def _fits(trial: Trial, evidence: Evidence, keep: torch.Tensor) -> bool:
    """Whether dq is that of the same draw."""
    predict = Backward(trial, evidence)
    weights = keep.double()[None, None] / (1.0 - evidence.problem.dropout)
    beside = dataclasses.replace(predict.beside, weights=weights, dp_weights=weights)
    found = predict(beside=beside).values["dq"]
    got, right = evidence.seen["dq"].got, evidence.seen["dq"].reference
    return float((got - found).abs().sum()) < _APART * float((got - right).abs().sum())


def _alike(kept: torch.Tensor, other: torch.Tensor) -> bool:
    return float((kept != other).double().mean()) <= _SAME


def _says(kept: torch.Tensor, evidence: Evidence, where: str) -> str:
    due, p = evidence_keep(evidence), evidence.problem.dropout
    if float((kept != due).double().mean()) <= _SAME:
        return ""
    share, number = float(kept.double().mean()), kept.numel()
    if float((kept == due).double().mean()) <= _SAME:
        return f"{where} keeps what dropout is to drop, and drops what it is to keep"
    text = f"{where} drops other elements of P than dropout_keep says"
    if abs(share - (1 - p)) > _OTHER * (p * (1 - p) / number) ** 0.5:
        return f"{text}: with another probability, it keeps {share:.0%} where {1 - p:.0%} is due"
    return f"{text}: another seed, counter or index enters its random numbers"
