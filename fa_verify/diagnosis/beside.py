"""`Beside`: what a model of attention has beside q, k and v, laid out over all logits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fa_verify.problem import Problem
    from fa_verify.terms import Terms

__all__ = ["NOTHING", "Beside", "distances"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Float64 tensors, (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k or 1) but for sinks.

    Attributes:
        bias: Added to the logits after the softcap.
        sinks: (heads_q,).
        weights: Factors of P where it meets v and do: 0, or what dropout divides by.
        dp_weights: The same of dP.
        dlse: Gradient of lse, (batch, heads_q, seqlen_q).
    """

    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    dp_weights: torch.Tensor | None = None
    dlse: torch.Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, terms: Terms, distance: torch.Tensor | None = None) -> Beside:
        """What a problem has.

        Args:
            problem: The problem.
            terms: Its tensors.
            distance: What ALiBi's slopes multiply, (seqlen_q, seqlen_k), if not as it should be.
        """
        bias = None if terms.bias is None else terms.bias.double()
        if terms.slopes is not None:
            distance = distances(problem) if distance is None else distance
            slanted = -terms.slopes.double()[None, :, None, None] * distance
            bias = slanted if bias is None else bias + slanted
        weights = None
        if terms.keep is not None:
            weights = terms.keep.double() / (1.0 - problem.dropout)
        return cls(
            bias=bias,
            sinks=None if terms.sinks is None else terms.sinks.double(),
            weights=weights,
            dp_weights=weights,
            dlse=None if terms.dlse is None else terms.dlse.double(),
        )

    def part(self, rows: slice, keys: slice) -> Beside:
        """What some rows and keys have."""
        return dataclasses.replace(
            self,
            bias=_part(self.bias, rows, keys),
            weights=_part(self.weights, rows, keys),
            dp_weights=_part(self.dp_weights, rows, keys),
            dlse=None if self.dlse is None else self.dlse[..., rows],
        )


def _part(x: torch.Tensor | None, rows: slice, keys: slice) -> torch.Tensor | None:
    if x is None:
        return None
    x = x[..., rows, :] if x.shape[-2] > 1 else x
    return x[..., keys] if x.shape[-1] > 1 else x


NOTHING = Beside()


def distances(problem: Problem) -> torch.Tensor:
    """How far each key is from each query's diagonal, (seqlen_q, seqlen_k)."""
    return signed(problem).abs()


def signed(problem: Problem) -> torch.Tensor:
    """The same with a sign: positive before the diagonal."""
    diagonals = problem.mask.diagonals(problem.seqlen_q, problem.seqlen_k)
    return (torch.from_numpy(diagonals)[:, None] - torch.arange(problem.seqlen_k)).double()
