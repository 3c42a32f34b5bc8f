"""`Evidence`: what the values of a failing trial say, on the CPU and small enough to simulate."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify.checks.observed import comparisons, empty_rows

if TYPE_CHECKING:
    from fa_verify.checks.comparison import Comparison
    from fa_verify.problem import Problem
    from fa_verify.terms import Terms
    from fa_verify.trial import Trial

__all__ = ["SUMMED", "Evidence", "Observation", "gather"]

# A dense float64 model of 2^17 logits takes some milliseconds a hypothesis, of some hundreds. What
# is larger is cut down to its worst sequence, then to its worst key head; what is larger still is
# simulated up to 2^21, one hypothesis after the other until there is no more time.
_WANTED = 1 << 17
_MAX_LOGITS = 1 << 21
SUMMED = ("dbias", "dsinks")
"""Gradients that are sums over sequences, or over heads."""


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

    def part(self, sequence: slice, heads: slice = slice(None)) -> Observation:
        """The part of some sequences and heads."""
        return Observation(
            **{f.name: getattr(self, f.name)[sequence, heads] for f in dataclasses.fields(self)}
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Inputs and observations of a trial, all float64 on the CPU.

    Attributes:
        problem: Of one sequence, or one key head of it, when the whole was too large to simulate.
        q, k, v, do: The inputs as float64, of fp8 scaled; do is None for a forward pass.
        terms: What the problem has beside them, in their own formats.
        seen: Observations by name, of what belongs to a sequence and a head.
        whole: Nothing was left out.
        small: Small enough to simulate.
    """

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor | None
    terms: Terms
    seen: dict[str, Observation]
    whole: bool
    small: bool

    @property
    def wrongs(self) -> int:
        """How many elements are wrong."""
        return sum(int(observation.wrong.sum()) for observation in self.seen.values())

    @property
    def finite(self) -> bool:
        """Whether all wrong elements are numbers."""
        return all(bool(torch.isfinite(o.got[o.wrong]).all()) for o in self.seen.values())

    @property
    def logits(self) -> int:
        """What a simulation costs."""
        p = self.problem
        return p.batch * p.heads_q * p.seqlen_q * p.seqlen_k

    def wrong(self, *names: str) -> bool:
        """Whether any of these tensors has a wrong element."""
        return any(name in self.seen and bool(self.seen[name].wrong.any()) for name in names)

    def narrowed(self) -> Evidence:
        """The worst key head alone; itself where there is but one."""
        problem = self.problem
        if problem.batch * problem.heads_kv <= 1:
            return self
        return self.part(*_worst(self.seen, problem))

    def part(self, sequence: int, head: int | None) -> Evidence:
        """One sequence of it, and one key head of that unless that is None."""
        problem, one = self.problem, slice(sequence, sequence + 1)
        group = kv = slice(None)
        heads = (problem.heads_q, problem.heads_kv)
        if head is not None:
            group = slice(head * problem.group, (head + 1) * problem.group)
            kv, heads = slice(head, head + 1), (problem.group, 1)
        of = {name: kv if name in ("k", "v", "dk", "dv") else group for name in (*self.seen, *"kv")}
        return dataclasses.replace(
            self,
            problem=dataclasses.replace(problem, batch=1, heads_q=heads[0], heads_kv=heads[1]),
            q=self.q[one, group],
            k=self.k[one, kv],
            v=self.v[one, kv],
            do=None if self.do is None else self.do[one, group],
            terms=self.terms.part(one, group, kv),
            seen={name: seen.part(one, of[name]) for name, seen in self.seen.items()},
            whole=False,
        )


def gather(trial: Trial) -> Evidence:
    """Collect the evidence of a trial that has run.

    Of fp8 it has the numbers themselves: a problem of o's dtype, without scales.
    """
    problem, x = trial.case.problem, trial.pristine
    q, k, v = (
        tensor.cpu().to(torch.float64) for tensor in trial.terms.operands(problem, x.q, x.k, x.v)
    )
    none = dict.fromkeys(("q_scale", "k_scale", "v_scale"))
    found = Evidence(
        problem=dataclasses.replace(problem, fp8=""),
        q=q,
        k=k,
        v=v,
        do=None if x.do is None else x.do.cpu().to(torch.float64),
        terms=dataclasses.replace(trial.terms.to("cpu"), **none),
        seen={
            name: _observation(trial, part)
            for name, part in comparisons(trial).items()
            if name not in SUMMED
        },
        whole=True,
        small=True,
    )
    if found.logits > _WANTED:
        sequence, head = _worst(found.seen, problem)
        of_one = found.logits // problem.batch
        found = found.part(sequence, None if of_one <= _WANTED else head)
    return dataclasses.replace(found, small=found.logits <= _MAX_LOGITS)


def _observation(trial: Trial, part: Comparison) -> Observation:
    wrong = (part.ratio > 1) | part.broken
    if trial.independent and not bool(wrong.any()):  # the probabilistic bound alone saw it
        wrong = part.ratio_prob > 1
    if part.name in ("o", "lse", "dq"):
        empty = torch.zeros_like(wrong)
        empty[:, :, empty_rows(trial.case.problem, wrong.device)] = True
        if part.name == "lse":  # a sink is a number like any other
            empty &= part.reference.isneginf()
        wrong |= empty & part.written & (part.got != part.reference)
    return Observation(
        got=part.got.cpu(),
        reference=part.reference.cpu(),
        det=part.bounded.det.cpu(),
        written=part.written.cpu(),
        wrong=wrong.cpu(),
    )


def _worst(seen: dict[str, Observation], problem: Problem) -> tuple[int, int]:
    """The sequence and the key head in it with most wrong elements."""
    counts = torch.zeros(problem.batch, problem.heads_kv, dtype=torch.int64)
    for observation in seen.values():
        wrong = observation.wrong.flatten(2).sum(dim=2)
        counts += wrong.reshape(problem.batch, problem.heads_kv, -1).sum(dim=2)
    return divmod(int(counts.argmax()), problem.heads_kv)
