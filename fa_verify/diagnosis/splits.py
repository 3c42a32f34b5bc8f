"""A model of split keys: each split's part of o and lse, and merges that go wrong."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis import model
from fa_verify.diagnosis.knobs import RIGHT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.diagnosis.knobs import Knobs

__all__ = ["MERGES", "merged", "splits"]

_LN2 = math.log(2.0)
_MOST = 8  # splits that are tried

MERGES = {
    "last left out": "the last split of the keys is left out of the merge",
    "first left out": "the first split of the keys is left out of the merge",
    "base": "the merge of the splits takes natural lse for base 2: log2(e) is missing",
    "maximum": "splits are merged by their row maxima: log(l) is missing from their lse",
    "equal": "splits are merged with equal weights: their lse is not used",
    "bfloat16": "the splits' partial o is kept in bfloat16",
    "float16": "the splits' partial o is kept in float16",
}


def splits(evidence: Evidence) -> Iterator[tuple[int, int]]:
    """(number of splits, keys in each but the last) to try."""
    keys = evidence.problem.seqlen_k
    for count in range(1, _MOST + 1):
        width = max(1, -(-keys // count))
        if width * (count - 1) < keys:
            yield count, width


def merged(
    evidence: Evidence, width: int, how: str, knobs: Knobs = RIGHT
) -> dict[str, torch.Tensor]:
    """O and lse when the keys are split and the parts are merged in this way.

    Args:
        evidence: The inputs.
        width: Keys a split.
        how: A key of `MERGES`.
        knobs: How a kernel that does it right rounds.
    """
    problem = dataclasses.replace(evidence.problem, dtype="float32")  # the parts are not rounded
    form = evidence.problem.dtype
    scores, _ = model.logits(problem, evidence.q, evidence.k[:, _heads(evidence)], RIGHT)
    scores = scores.masked_fill(~model.visible(problem, RIGHT, problem.seqlen_k), -torch.inf)
    parts, weights = [], []
    for first in range(0, problem.seqlen_k, width):
        these = dataclasses.replace(knobs, keys_begin=first, keys_end=first + width)
        part = model.forward(problem, evidence.q, evidence.k, evidence.v, these)
        parts.append(part["o"])
        maximum = scores[..., first : first + width].max(dim=-1).values
        weights.append(maximum if how == "maximum" else part["lse"])
    if len(parts) > 1 and how in ("last left out", "first left out"):
        kept = slice(0, -1) if how.startswith("last") else slice(1, None)
        parts, weights = parts[kept], weights[kept]
    if how in ("bfloat16", "float16"):
        parts = [x.to(getattr(torch, how)).to(torch.float64) for x in parts]
    o, lse = torch.stack(parts), torch.stack(weights)
    m = lse.max(dim=0).values
    origin = torch.where(torch.isinf(m), torch.zeros_like(m), m)
    weight = torch.exp((lse - origin) * (_LN2 if how == "base" else 1.0))
    weight = (~torch.isinf(lse)).double() if how == "equal" else weight
    l = weight.sum(dim=0)  # noqa: E741 - its name in every paper
    empty = l == 0
    l = torch.where(empty, torch.ones_like(l), l)  # noqa: E741
    total = (weight[..., None] * o).sum(dim=0) / l[..., None]
    found = (origin + torch.log(l)).masked_fill(empty, -torch.inf)
    return {"o": total.to(getattr(torch, form)).to(torch.float64), "lse": found}


def _heads(evidence: Evidence) -> torch.Tensor:
    return torch.arange(evidence.problem.heads_q) // evidence.problem.group
