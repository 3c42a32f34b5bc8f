"""`Evidence`: what the values of a failing trial say, on the CPU and small enough to simulate."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify.checks.comparison import Comparison, comparisons, empty_rows

if TYPE_CHECKING:
    from fa_verify.problem import Problem
    from fa_verify.trial import Trial

__all__ = ["Evidence", "Observation", "gather"]

# A dense float64 model of 2^21 logits takes 16 MB and about 50 ms a hypothesis, of a hundred.
_MAX_LOGITS = 1 << 21


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One tensor: what came out, what should have, and which elements are wrong.

    Attributes:
        got: float64.
        reference: float64; conditional on the observed o and lse for gradients, as the check was.
        det: Its bound; inf where it says nothing.
        written: False where nobody wrote.
        wrong: Outside the bound (the probabilistic one where nothing else is), NaN or inf where a
            number is due, or a wrong fully masked row.
    """

    got: torch.Tensor
    reference: torch.Tensor
    det: torch.Tensor
    written: torch.Tensor
    wrong: torch.Tensor

    def of_sequence(self, index: int) -> Observation:
        """The part of one sequence."""
        one = slice(index, index + 1)
        return Observation(
            **{f.name: getattr(self, f.name)[one] for f in dataclasses.fields(Observation)}
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Inputs and observations of a trial, all float64 on the CPU.

    Attributes:
        problem: Of one sequence when the whole was too large to simulate.
        q, k, v, do: The inputs; do is None for a forward pass.
        seen: Observations by name.
        whole: Nothing was left out.
        small: Small enough to simulate.
    """

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor | None
    seen: dict[str, Observation]
    whole: bool
    small: bool

    def wrong(self, *names: str) -> bool:
        """Whether any of these tensors has a wrong element."""
        return any(name in self.seen and bool(self.seen[name].wrong.any()) for name in names)


def gather(trial: Trial) -> Evidence:
    """Collect the evidence of a trial that has run."""
    problem = trial.case.problem
    seen = {name: _observation(trial, part) for name, part in comparisons(trial).items()}
    x = {name: tensor.cpu().to(torch.float64) for name, tensor in trial.pristine.named()}
    x.setdefault("do", torch.empty(0))
    logits = problem.heads_q * problem.seqlen_q * problem.seqlen_k
    whole = problem.batch * logits <= _MAX_LOGITS
    if not whole:
        chosen = _worst_sequence(seen)
        problem = dataclasses.replace(problem, batch=1)
        seen = {name: observation.of_sequence(chosen) for name, observation in seen.items()}
        x = {name: tensor[chosen : chosen + 1] for name, tensor in x.items()}
    return Evidence(
        problem=problem,
        q=x["q"],
        k=x["k"],
        v=x["v"],
        do=x["do"] if x["do"].ndim == 4 else None,
        seen=seen,
        whole=whole,
        small=logits <= _MAX_LOGITS,
    )


def _observation(trial: Trial, part: Comparison) -> Observation:
    wrong = (part.ratio > 1) | part.broken
    if trial.independent and not bool(wrong.any()):  # the probabilistic bound alone saw it
        wrong = part.ratio_prob > 1
    if part.name in ("o", "lse", "dq"):
        empty = torch.zeros_like(wrong)
        empty[:, :, empty_rows(trial.case.problem, wrong.device)] = True
        wrong |= empty & part.written & (part.got != part.reference)
    return Observation(
        got=part.got.cpu(),
        reference=part.reference.cpu(),
        det=part.bounded.det.cpu(),
        written=part.written.cpu(),
        wrong=wrong.cpu(),
    )


def _worst_sequence(seen: dict[str, Observation]) -> int:
    """The sequence with most wrong elements."""
    counts = [o.wrong.flatten(1).sum(dim=1) for o in seen.values()]
    return int(torch.stack(counts).sum(dim=0).argmax()) if counts else 0
