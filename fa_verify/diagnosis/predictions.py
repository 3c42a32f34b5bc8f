"""`Forward` and `Backward`: what a kernel with a suspected defect would have written."""

from __future__ import annotations

import dataclasses
import functools
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import torch

from fa_verify.diagnosis import model, scales
from fa_verify.diagnosis.addressing import read_by
from fa_verify.diagnosis.beside import Beside
from fa_verify.diagnosis.hypothesis import Hypothesis, Prediction
from fa_verify.diagnosis.knobs import RIGHT, Knobs
from fa_verify.diagnosis.splits import Merging
from fa_verify.diagnosis.spread import unclear_gradients, unclear_output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fa_verify.diagnosis.cause import Cause
    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.problem import Problem
    from fa_verify.trial import Trial

__all__ = ["Backward", "Forward"]

_AS_GIVEN: Mapping[str, Callable[[], torch.Tensor]] = MappingProxyType({})


def _declared(trial: Trial, problem: Problem, knobs: Knobs) -> Knobs:
    """The knobs with the kernel's declared rounding of P and dS, and the backend's of operands."""
    arithmetic = trial.kernel.arithmetic
    return dataclasses.replace(
        knobs,
        p_lift=knobs.p_lift or arithmetic.p_scale,
        p_dtype=knobs.p_dtype or _format(arithmetic.p_dtype, trial.case.problem),
        ds_dtype=knobs.ds_dtype or _format(arithmetic.ds_dtype, trial.case.problem),
        tf32=knobs.tf32 or (_tf32(trial) if problem.dot_precision == "tf32" else ""),
    )


def _format(declared: str, problem: Problem) -> str:
    form = problem.storage if declared == "input" else declared
    return "" if form == "float32" else form


def _tf32(trial: Trial) -> Literal["truncate", "nearest"]:
    return "nearest" if trial.setup.float_model == "tf32-rna" else "truncate"


def _past_the_last(trial: Trial, problem: Problem, knobs: Knobs) -> dict[str, torch.Tensor]:
    """K and v with what lies where query heads look for key heads that do not exist."""
    if not bool((model.key_heads(problem, knobs) >= problem.heads_kv).any()):
        return {}
    given = {"k": trial.pristine.k.cpu(), "v": trial.pristine.v.cpu()}
    return {
        name: scales.scaled(trial, name, read_by(x, x.stride(), heads=problem.heads_q))
        for name, x in given.items()
    }


def _by_query_head(
    problem: Problem, knobs: Knobs, x: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    heads = model.key_heads(problem, knobs)
    return x | {name: x[name][:, heads] for name in ("k", "v")}


def _broken_alike(values: dict[str, torch.Tensor], evidence: Evidence) -> dict[str, torch.Tensor]:
    """The same with what is there where both are no numbers: inf or NaN hangs on an order."""
    found = dict(values)
    for name, value in values.items():
        odd = ~torch.isfinite(value)
        if name in evidence.seen and bool(odd.any()):
            got = evidence.seen[name].got
            found[name] = torch.where(odd & ~torch.isfinite(got), got, value)
    return found


class Forward:
    """Predictions of o and lse for one trial."""

    def __init__(self, trial: Trial, evidence: Evidence) -> None:
        self.trial, self.evidence = trial, evidence
        self.inputs = {"q": evidence.q, "k": evidence.k, "v": evidence.v}
        self.beside = Beside.of(evidence.problem, evidence.terms)

    def __call__(
        self,
        knobs: Knobs = RIGHT,
        loaded: Mapping[str, Callable[[], torch.Tensor]] = _AS_GIVEN,
        beside: Beside | None = None,
    ) -> Prediction:
        """What is written with these knobs, and with these inputs in place of those given."""
        problem = self.evidence.problem
        x = self.inputs | {name: load() for name, load in loaded.items()}
        x |= _past_the_last(self.trial, problem, knobs)
        if len(loaded) > 1 and x["k"].shape[1] > problem.heads_kv:  # each query head has its own
            problem = dataclasses.replace(problem, heads_kv=problem.heads_q)
        used = _declared(self.trial, problem, knobs)
        values = model.forward(problem, x["q"], x["k"], x["v"], used, beside or self.beside)
        free = {}
        if knobs.head_dim_v is not None and knobs.head_dim_v < problem.head_dim_v:
            free["o"] = torch.zeros_like(values["o"], dtype=torch.bool)
            free["o"][..., knobs.head_dim_v :] = True
        stray = any(bool(torch.isnan(x[name]).any()) for name in "qkv")
        bias = (beside or self.beside).bias
        if bias is not None and bool(torch.isnan(bias).any()):  # read outside: it may be hidden
            free = {name: torch.isnan(value) for name, value in values.items()}
            return Prediction(values, free, stray=True)
        overflows = knobs.tanh_overflows or knobs.products_dtype or knobs.scores_dtype
        if stray or overflows:  # whatever a maximum makes of NaN
            free["lse"] = torch.isnan(values["o"]).any(dim=-1)
        if stray:
            seen = model.visible(problem, knobs, problem.seqlen_k)
            free["o"] = unclear_output(seen, _by_query_head(problem, knobs, x), values["o"])
        return Prediction(values, free, stray=stray)

    @functools.cached_property
    def right(self) -> Prediction:
        """What a right forward pass writes."""
        return self()

    @functools.cached_property
    def _merging(self) -> Merging:
        return Merging(self.evidence, _declared(self.trial, self.evidence.problem, RIGHT))

    def merged(self, width: int, how: str) -> Prediction:
        """What a kernel writes that splits the keys and merges the parts wrongly."""
        return Prediction(self._merging(width, how))

    def hypothesis(self, cause: Cause) -> Hypothesis:
        """That this cause is at work."""
        return Hypothesis(
            cause.sentence,
            functools.partial(self, cause.knobs),
            name=cause.name,
            addressing=cause.knobs.strays,
            rounding=cause.knobs.rounds,
        )


class Backward:
    """Predictions of dq, dk and dv for one trial, given the o and lse that it observed."""

    def __init__(self, trial: Trial, evidence: Evidence) -> None:
        self.trial, self.evidence = trial, evidence
        assert evidence.do is not None  # noqa: S101 - for mypy: there are gradients
        self.inputs = {"q": evidence.q, "k": evidence.k, "v": evidence.v, "do": evidence.do}
        self.beside = Beside.of(evidence.problem, evidence.terms)
        self.o = evidence.seen["o"].got
        self.lse = evidence.seen["lse"].got if "lse" in evidence.seen else self._lse()
        self.delta = (evidence.do * self.o).sum(dim=-1)

    @functools.cached_property
    def right(self) -> Prediction:
        """What a right backward pass writes."""
        return self()

    def _lse(self) -> torch.Tensor:
        e = self.evidence
        return model.forward(e.problem, e.q, e.k, e.v, beside=self.beside)["lse"]

    def __call__(
        self,
        knobs: Knobs = RIGHT,
        delta: torch.Tensor | None = None,
        loaded: Mapping[str, Callable[[], torch.Tensor]] = _AS_GIVEN,
        beside: Beside | None = None,
        lse: torch.Tensor | None = None,
    ) -> Prediction:
        """What is written with these knobs, and this delta, lse, inputs in place of the right."""
        problem = self.evidence.problem
        x = self.inputs | {name: load() for name, load in loaded.items()}
        used = _declared(self.trial, problem, knobs)
        x |= _past_the_last(self.trial, problem, knobs)
        tensors = (x["q"], x["k"], x["v"], x["do"])
        given = self.lse if lse is None else lse
        values = model.backward(
            problem, tensors, self.o, given, used, beside or self.beside, delta=delta
        )
        values = _broken_alike(values, self.evidence)
        free = {}
        stray = any(bool(torch.isnan(tensor).any()) for tensor in tensors)
        if delta is not None and bool(torch.isnan(delta).any()):  # read outside: it may be hidden
            free = {name: torch.isnan(value) for name, value in values.items()}
        if stray:
            seen = model.visible(problem, knobs, problem.seqlen_k)
            free = unclear_gradients(seen, _by_query_head(problem, knobs, x), values)
        broken = ~torch.isfinite(self.o).all(dim=-1)
        if bool(broken.any()):  # delta of such a row is NaN: what of it arrives hangs on the mask
            heads = broken.any(dim=2).reshape(len(broken), problem.heads_kv, -1).any(dim=2)
            lost = {"dq": broken[..., None], "dk": heads[..., None, None]}
            for name, where in (lost | {"dv": lost["dk"]}).items():
                free[name] = where.expand_as(values[name]) | free.get(name, torch.tensor(0).bool())
        if knobs.head_dim is not None:
            for name in ("dq", "dk"):
                free[name] = free.get(name, torch.zeros_like(values[name], dtype=torch.bool))
                free[name][..., knobs.head_dim :] = True
        return Prediction(values, free, stray=stray)

    def ds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """DS of a right kernel before the softcap's derivative, and that derivative."""
        problem = self.evidence.problem
        x = _by_query_head(problem, RIGHT, self.inputs)
        scores, slope = model.logits(problem, x["q"], x["k"], RIGHT, self.beside)
        hidden = ~model.visible(problem, RIGHT, problem.seqlen_k) | torch.isinf(self.lse)[..., None]
        p = torch.exp(scores - self.lse[..., None]).masked_fill(hidden, 0.0)
        dp = x["do"] @ x["v"].mT
        dp = dp if self.beside.dp_weights is None else dp * self.beside.dp_weights
        delta = self.delta if self.beside.dlse is None else self.delta - self.beside.dlse
        return (p * (dp - delta[..., None])).masked_fill(hidden, 0.0), slope.expand_as(p)

    def addressed(
        self,
        sentence: str,
        loaded: Mapping[str, Callable[[], torch.Tensor]],
        delta: torch.Tensor | None = None,
    ) -> Iterator[Hypothesis]:
        """Inputs that are loaded wrongly, likewise by kernels that keep P at 1 or below."""
        for knobs in (RIGHT, dataclasses.replace(RIGHT, capped_p=True)):
            known = functools.partial(self, knobs, delta=delta, loaded=loaded)
            yield Hypothesis(sentence, known, addressing=True)

    def hypotheses(self, cause: Cause, where: str) -> Iterator[Hypothesis]:
        """One for the cause, and one for a kernel that keeps P at 1 or below, as many do."""
        name = f"{where} {cause.name}" if cause.name else ""
        for knobs in (cause.knobs, dataclasses.replace(cause.knobs, capped_p=True)):
            yield Hypothesis(
                f"{where} {cause.sentence}",
                functools.partial(self, knobs),
                name=name,
                addressing=knobs.strays,
                rounding=knobs.rounds,
            )
            if not knobs.exceeds:
                return
