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

__all__ = ["MERGES", "Merging", "splits"]

_LN2 = math.log(2.0)
_MOST = 8  # splits that are tried
_BLOCKS = (16, 32, 64)  # keys of a page, or of a step of the loop, that are not split

MERGES = {
    "last left out": "the last split of the keys is left out of the merge",
    "first left out": "the first split of the keys is left out of the merge",
    "base": "the merge of the splits takes natural lse for base 2: log2(e) is missing",
    "other base": "the merge of the splits takes lse of base 2 for natural: one log2(e) too many",
    "maximum": "splits are merged by their row maxima: log(l) is missing from their lse",
    "largest": "the merged lse is the largest of the splits' own: the log of their sum is missing",
    "equal": "splits are merged with equal weights: their lse is not used",
    "l as it is": "the merge adds the splits' l without their weights",
    "acc as it is": "the merge adds the splits' acc without their weights",
    "bfloat16": "the splits' partial o is kept in bfloat16",
    "float16": "the splits' partial o is kept in float16",
}
_BASES = {"base": _LN2, "other base": 1 / _LN2}


def splits(evidence: Evidence) -> Iterator[tuple[int, int, bool]]:
    """Splits to try: how many, keys in each but the last, whether they were shared out one by one.

    Else whole blocks of keys were. Among so many widths one cuts the keys off anywhere.
    """
    keys = evidence.problem.seqlen_k
    known = set()
    for block in (1, *_BLOCKS):
        for count in range(1, _MOST + 1):
            blocks = math.ceil(keys / block)
            width = max(1, math.ceil(blocks / count)) * block
            if width * (count - 1) < keys and (width < keys or count == block == 1):
                count = -(-keys // width)  # noqa: PLW2901 - the others are empty
                if width not in known:
                    known.add(width)
                    yield count, width, block == 1


_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Merging:
    """What a kernel writes that splits the keys and merges the parts."""

    def __init__(self, evidence: Evidence, knobs: Knobs = RIGHT) -> None:
        """Take the inputs, and how a kernel that does it right rounds."""
        self._evidence, self._knobs = evidence, knobs
        self._parts: dict[int, list[_Part]] = {}

    def _of(self, width: int) -> list[_Part]:
        """O, lse and row maximum of each split of so many keys."""
        if width in self._parts:
            return self._parts[width]
        evidence = self._evidence
        problem = dataclasses.replace(evidence.problem, dtype="float32")  # parts are not rounded
        heads = model.key_heads(problem, RIGHT)
        scores, _ = model.logits(problem, evidence.q, evidence.k[:, heads], RIGHT)
        scores = scores.masked_fill(~model.visible(problem, RIGHT, problem.seqlen_k), -torch.inf)
        found = []
        for first in range(0, problem.seqlen_k, width):
            these = dataclasses.replace(self._knobs, keys_begin=first, keys_end=first + width)
            part = model.forward(problem, evidence.q, evidence.k, evidence.v, these)
            maximum = scores[..., first : first + width].max(dim=-1).values
            found.append((part["o"], part["lse"], maximum))
        return self._parts.setdefault(width, found)

    def __call__(self, width: int, how: str) -> dict[str, torch.Tensor]:
        """O and lse when splits of so many keys are merged in this way, a key of `MERGES`."""
        found = self._of(width)
        if len(found) > 1 and how in ("last left out", "first left out"):
            found = found[:-1] if how.startswith("last") else found[1:]
        o = torch.stack([part for part, _, _ in found])
        lse = torch.stack([maximum if how == "maximum" else own for _, own, maximum in found])
        if how in ("bfloat16", "float16"):
            o = o.to(getattr(torch, how)).to(torch.float64)
        m = lse.max(dim=0).values
        origin = _finite(m)
        weight = torch.exp((lse - origin) * _BASES.get(how, 1.0))
        weight = (~torch.isinf(lse)).double() if how == "equal" else weight
        if how in ("l as it is", "acc as it is"):  # parts that are not divided by their l
            top = torch.stack([maximum for _, _, maximum in found])
            origin = _finite(top.max(dim=0).values)
            sums = torch.exp(lse - _finite(top)).masked_fill(torch.isinf(lse), 0.0)
            parts, weight = o * sums[..., None], torch.exp(top - origin)
            weight = weight.masked_fill(torch.isinf(top), 0.0)
            weighted = (weight[..., None] * parts, parts)[how == "acc as it is"]
            l = (weight * sums, sums)[how == "l as it is"].sum(dim=0)  # noqa: E741
            return self._written(weighted.sum(dim=0), l, origin)
        l = weight.sum(dim=0)  # noqa: E741 - its name in every paper
        written = self._written((weight[..., None] * o).sum(dim=0), l, origin)
        return written | {"lse": m} if how == "largest" else written

    def _written(
        self,
        total: torch.Tensor,
        l: torch.Tensor,  # noqa: E741
        origin: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """O and lse of these sums."""
        empty = l == 0
        l = torch.where(empty, torch.ones_like(l), l)  # noqa: E741
        merged = (origin + torch.log(l)).masked_fill(empty, -torch.inf)
        form = getattr(torch, self._evidence.problem.dtype)
        return {"o": (total / l[..., None]).to(form).to(torch.float64), "lse": merged}


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isinf(x), torch.zeros_like(x), x)
