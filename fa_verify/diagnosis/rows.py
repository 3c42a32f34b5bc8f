"""Hypotheses with a number a row: a wrong denominator, a wrong delta, one key that is missing.

A row has as many elements as head_dim, so one fitted number leaves the others to tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis import model
from fa_verify.diagnosis.knobs import RIGHT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.diagnosis.predictions import Backward

__all__ = ["denominator", "missing_key", "other_delta"]

_LEAST_COLUMNS = 8  # fewer leave too little to tell once a number was fitted
_ROWS = 64  # that are looked at for a missing key
_NEAR = 0.05  # how near a key's weight must come to what lse lost


def denominator(evidence: Evidence) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """O is a factor a row times what it should be."""
    seen = evidence.seen.get("o")
    if seen is None or seen.got.shape[-1] < _LEAST_COLUMNS or not bool(seen.wrong.any()):
        return
    rows = seen.wrong.any(dim=-1, keepdim=True)
    reference = seen.reference
    norm = (reference * reference).sum(dim=-1, keepdim=True)
    factor = (seen.got * reference).sum(dim=-1, keepdim=True) / norm
    factor = torch.where(rows & torch.isfinite(factor), factor, torch.ones_like(factor))
    found = {"o": reference * factor}
    lse = evidence.seen.get("lse")
    text = "the softmax denominator l is wrong: each wrong row of o is a number times what is due"
    if lse is not None and not bool(lse.wrong.any()):
        text += ", though lse is right"
        found["lse"] = lse.reference
    yield text, found


def missing_key(evidence: Evidence) -> Iterator[int]:
    """Keys whose loss from every row that sees them would explain what lse lost."""
    lse, problem = evidence.seen.get("lse"), evidence.problem
    if lse is None or problem.terms:  # other logits, or another sum
        return
    lost = lse.wrong & (lse.got < lse.reference) & torch.isfinite(lse.got)
    places = lost.nonzero()[:_ROWS]
    if not len(places):
        return
    keys = model.visible(problem, RIGHT, problem.seqlen_k)
    candidates = torch.ones(problem.seqlen_k, dtype=torch.bool)
    candidates[[0, -1]] = False  # these have causes of their own
    for batch, head, row in places.tolist():
        q = evidence.q[batch : batch + 1, head : head + 1, row : row + 1]
        k = evidence.k[batch : batch + 1, [head // problem.group]]
        scores = model.logits(problem, q, k, RIGHT)[0][0, 0, 0]
        weight = torch.exp(scores - lse.reference[batch, head, row])
        share = -torch.expm1(lse.got[batch, head, row] - lse.reference[batch, head, row])
        candidates &= keys[row] & ((weight - share).abs() <= _NEAR * share)
    found = candidates.nonzero().flatten().tolist()
    if len(found) <= 2:
        yield from found


def other_delta(predict: Backward) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Gradients that fit dS = P (dP - x) with some x a row in place of delta."""
    evidence, lse, right = predict.evidence, predict.lse, predict.right.values
    problem, seen = evidence.problem, evidence.seen
    if "dq" not in seen or problem.head_dim < _LEAST_COLUMNS or not evidence.wrong("dq"):
        return
    if not bool(torch.isfinite(seen["dq"].got).all()):
        return  # no number in place of delta makes NaN of numbers
    heads = torch.arange(problem.heads_q) // problem.group
    k = evidence.k[:, heads]
    scores, slope = model.logits(problem, evidence.q, k, RIGHT, predict.beside)
    hidden = ~model.visible(problem, RIGHT, problem.seqlen_k) | torch.isinf(lse)[..., None]
    p = torch.exp(scores - lse[..., None]).masked_fill(hidden, 0.0) * slope * problem.scale
    step = p @ k
    error = torch.nan_to_num(seen["dq"].got - right["dq"], nan=0.0, posinf=0.0, neginf=0.0)
    norm = (step * step).sum(dim=-1)
    x = torch.where(norm > 0, (error * step).sum(dim=-1) / norm, torch.zeros_like(norm))
    x = torch.where(seen["dq"].wrong.any(dim=-1), x, torch.zeros_like(x))
    found = {"dq": right["dq"] + x[..., None] * step}
    text = (
        "delta is not sum(do * o) of these rows: it is stale, another's, or not summed to the end"
    )
    if evidence.wrong("dk"):
        dk = (p * x[..., None]).mT @ evidence.q
        shape = (problem.batch, problem.heads_kv, problem.group, *dk.shape[2:])
        found["dk"] = right["dk"] + dk.reshape(shape).sum(dim=2)
    elif "dk" in seen:
        text = f"in dq, {text}"
        found["dk"] = right["dk"]
    yield text, found
