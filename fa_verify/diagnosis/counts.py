"""Hypotheses with a whole number read off lse: terms too many in l, keys that no loop reaches.

lse = log l, so that exp(lse) less what is due counts what was added with weight exp(0).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis import model
from fa_verify.diagnosis.hypothesis import Prediction
from fa_verify.diagnosis.knobs import RIGHT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.diagnosis.predictions import Forward

__all__ = ["keys_reached", "ones_added", "padded"]

_NEAR = 0.1  # how near to a whole number a count must come
_UNCERTAIN = 0.05  # error of a count, from where on a row tells nothing
_MOST_SPLITS = 16
_EPS = 2.0**-22  # relative error of lse, and absolute of exp(lse) where lse is near 0
_LOOK = 64  # rows whose lost keys are looked for
_NEAR_LSE = 4.0  # bounds: as near as a right kernel's errors, generously


def _ones(evidence: Evidence) -> torch.Tensor | None:
    """How many terms exp(0) too many each row's l has; None where no whole numbers come out."""
    lse = evidence.seen.get("lse")
    if lse is None or not bool(lse.wrong.any()):
        return None
    due, got = torch.exp(lse.reference), torch.exp(lse.got)
    extra = got - due
    sure = torch.isfinite(extra) & (_EPS * (1 + lse.got.abs()) * got < _UNCERTAIN)
    count = extra.round().clamp(min=0)
    fits = (extra - count).abs() <= _NEAR
    if not bool((lse.wrong & sure).any()) or not bool(fits[sure].all()):
        return None
    count = torch.where(sure, count, torch.nan)
    # Rows that cannot tell have as many as the rows of their head that can, if these agree.
    known = torch.nan_to_num(count, nan=-1.0).amax(dim=-1, keepdim=True).clamp(min=0)
    return torch.where(sure, count, known)


def _with_ones(evidence: Evidence, count: torch.Tensor) -> Prediction:
    """O and lse with these terms in l, which have no value."""
    seen = evidence.seen
    lse = torch.logaddexp(seen["lse"].reference, torch.log(count))
    values = {"lse": lse}
    if "o" in seen:
        share = torch.exp(seen["lse"].reference - lse)
        values["o"] = seen["o"].reference * torch.nan_to_num(share)[..., None]
    return Prediction(values)


def padded(evidence: Evidence, blocks: Sequence[int]) -> Iterator[tuple[int, Prediction]]:
    """Blocks whose padding of each document's keys is what l has too many, and the prediction."""
    count = _ones(evidence)
    if count is None:
        return
    problem = evidence.problem
    whole = ((problem.seqlen_q, problem.seqlen_k),)
    for block in blocks:
        lengths = torch.tensor(problem.mask.documents or whole)
        due = (-lengths[:, 1] % block).repeat_interleave(lengths[:, 0]).double()
        # A band hides some of them from some rows.
        if bool((count <= due).all()) and bool((count == due)[..., due > 0].any()):
            yield block, _with_ones(evidence, count)


def ones_added(evidence: Evidence) -> Iterator[Prediction]:
    """What is written where some splits of the keys enter a merge with lse = 0 and o = 0."""
    count = _ones(evidence)
    if count is not None and bool((count <= _MOST_SPLITS).all()) and bool((count > 0).any()):
        yield _with_ones(evidence, count)


def keys_reached(predict: Forward) -> Iterator[tuple[int, Prediction]]:
    """Keys from which on all are left out, by what the lse of one row lost, and the prediction."""
    evidence, problem = predict.evidence, predict.evidence.problem
    lse = evidence.seen.get("lse")
    if lse is None or problem.mask.documents:
        return
    lost = lse.wrong & (lse.got < lse.reference)
    places = lost.nonzero()[:_LOOK]
    if not len(places):
        return
    scores, _ = model.logits(
        problem, evidence.q, evidence.k[:, model.key_heads(problem, RIGHT)], RIGHT, predict.beside
    )
    seen = model.visible(problem, RIGHT, problem.seqlen_k)
    scores = scores.masked_fill(~seen, -torch.inf)
    errors = torch.zeros(problem.seqlen_k, dtype=torch.float64)  # of an end, in units of the bound
    for batch, head, row in places.tolist():
        sums = torch.logcumsumexp(scores[batch, head, row], dim=0)
        if predict.beside.sinks is not None:
            sums = torch.logaddexp(sums, predict.beside.sinks[head])
        sums = torch.cat([torch.tensor([-torch.inf], dtype=torch.float64), sums[:-1]])
        got = lse.got[batch, head, row]
        far = torch.where(sums == got, 0.0, (sums - got).abs()) / lse.det[batch, head, row]
        errors = torch.maximum(errors, torch.nan_to_num(far, nan=torch.inf))
    if float(errors.min()) <= _NEAR_LSE:
        end = int(errors.flip(0).argmin())
        end = problem.seqlen_k - 1 - end  # of those alike the last: hidden keys are lost by none
        yield end, predict(dataclasses.replace(RIGHT, keys_end=end))
