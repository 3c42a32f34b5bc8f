"""Where NaN that a wrong address loads surely reaches a result, and where that hangs on the blocks.

A hidden key's weight is 0, and 0 times NaN is NaN, but a kernel may skip the block or mask the
product: there nothing can be predicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["unclear_gradients", "unclear_output"]


def unclear_output(
    seen: torch.Tensor, x: Mapping[str, torch.Tensor], o: torch.Tensor
) -> torch.Tensor:
    """Where NaN of the predicted o came from hidden keys alone.

    Args:
        seen: Who sees whom, (seqlen_q, seqlen_k).
        x: q, k and v as loaded, with as many heads as q.
        o: The prediction.
    """
    scores = _any(x["q"])[..., None] | _any(x["k"])[..., None, :]
    sure = (scores & seen).any(dim=-1)[..., None] | _through(seen, torch.isnan(x["v"]))
    return torch.isnan(o) & ~sure


def unclear_gradients(
    seen: torch.Tensor, x: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The same of predicted gradients; x holds do too."""
    scores = _any(x["q"])[..., None] | _any(x["k"])[..., None, :]
    pairs = (scores | _any(x["do"])[..., None] | _any(x["v"])[..., None, :]) & seen
    keys = (scores & seen).any(dim=-2)[..., None] | _through(seen.mT, torch.isnan(x["do"]))
    sure = {"dq": pairs.any(dim=-1)[..., None], "dk": pairs.any(dim=-2)[..., None], "dv": keys}
    found = {}
    for name, value in values.items():
        of = sure[name]
        if of.shape[1] != value.shape[1]:  # summed over the query heads of each key head
            of = of.reshape(len(of), value.shape[1], -1, *of.shape[2:]).any(dim=2)
        found[name] = torch.isnan(value) & ~of
    return found


def _any(x: torch.Tensor) -> torch.Tensor:
    return torch.isnan(x).any(dim=-1)


def _through(seen: torch.Tensor, nan: torch.Tensor) -> torch.Tensor:
    """Rows that see a NaN of a column."""
    return seen.double() @ nan.double() > 0
