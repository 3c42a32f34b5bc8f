"""Hypotheses: each known defect with what a kernel that has it would have written."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import torch

from fa_verify.diagnosis import model
from fa_verify.diagnosis.addressing import read_by, written_by
from fa_verify.diagnosis.defects import gradients, online, shared, skips
from fa_verify.diagnosis.model import RIGHT, Knobs
from fa_verify.inputs import SPARSE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.problem import Problem
    from fa_verify.trial import Trial

__all__ = ["Hypothesis", "Prediction", "for_backward", "for_forward"]


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """Tensors by name, where each says nothing, and where nobody would have written it."""

    values: dict[str, torch.Tensor]
    free: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    holes: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Hypothesis:
    """A likely cause.

    Attributes:
        sentence: For the kernel's author.
        predict: What the kernel would have written.
        addressing: The cause is a wrong address, so it explains forbidden accesses as well.
        rounding: The cause is a format, which a looser declaration could allow.
        follows: The backward pass is right, given the o and lse that the forward pass wrote.
    """

    sentence: str
    predict: Callable[[], Prediction]
    addressing: bool = False
    rounding: bool = False
    follows: bool = False


def _declared(trial: Trial, problem: Problem, knobs: Knobs) -> Knobs:
    """The knobs with the kernel's declared rounding of P and dS, and the backend's of operands."""
    arithmetic = trial.kernel.arithmetic
    return dataclasses.replace(
        knobs,
        p_dtype=knobs.p_dtype or _format(arithmetic.p_dtype, problem),
        ds_dtype=knobs.ds_dtype or _format(arithmetic.ds_dtype, problem),
        tf32=knobs.tf32 or (_tf32(trial) if problem.dot_precision == "tf32" else ""),
    )


def _rounds(knobs: Knobs) -> bool:
    formats = (knobs.p_dtype, knobs.ds_dtype, knobs.acc_dtype, knobs.product_dtype, knobs.l_dtype)
    return any(formats)


def _format(declared: str, problem: Problem) -> str:
    form = problem.dtype if declared == "input" else declared
    return "" if form == "float32" else form


def _tf32(trial: Trial) -> Literal["truncate", "nearest"]:
    return "nearest" if trial.setup.float_model == "tf32-rna" else "truncate"


def for_forward(trial: Trial, evidence: Evidence) -> Iterator[Hypothesis]:
    """Causes of a wrong o or lse."""
    problem = evidence.problem

    def predictor(knobs: Knobs) -> Callable[[], Prediction]:
        def predict() -> Prediction:
            used = _declared(trial, problem, knobs)
            values = model.forward(problem, evidence.q, evidence.k, evidence.v, used)
            free = {}
            if knobs.head_dim_v is not None and knobs.head_dim_v < problem.head_dim_v:
                free["o"] = torch.zeros_like(values["o"], dtype=torch.bool)
                free["o"][..., knobs.head_dim_v :] = True
            return Prediction(values, free)

        return predict

    if evidence.whole and evidence.small:
        yield from _forward_addresses(trial, evidence)
    for source in (shared(problem), online(trial, problem), skips(trial, problem)):
        for sentence, knobs in source:
            yield Hypothesis(sentence, predictor(knobs), rounding=_rounds(knobs))


def _forward_addresses(trial: Trial, evidence: Evidence) -> Iterator[Hypothesis]:
    outputs, x = trial.execution.outputs, trial.pristine
    if outputs is None or "o" not in evidence.seen or not evidence.seen["o"].got.numel():
        return
    problem, right = evidence.problem, tuple(outputs.o.stride())
    knobs = _declared(trial, problem, RIGHT)
    for name, other in (("q", x.q), ("k", x.k), ("v", x.v)):
        wrong = (*other.stride()[:3], right[3])

        def written(wrong: tuple[int, ...] = wrong) -> Prediction:
            values = model.forward(problem, evidence.q, evidence.k, evidence.v, knobs)
            o, free, holes = written_by(values["o"], wrong, right)
            return Prediction(values | {"o": o}, {"o": free}, {"o": holes})

        if wrong != right and max(wrong) < SPARSE:
            yield Hypothesis(f"o is addressed with {name}'s strides", written, addressing=True)
    for mine, theirs in (("q", "k"), ("k", "q"), ("k", "v"), ("v", "k")):
        tensor, strides = getattr(x, mine), getattr(x, theirs).stride()

        def read(name: str = mine, strides: tuple[int, ...] = strides) -> Prediction:
            loaded = read_by(getattr(x, name).cpu(), strides)
            mixed = {"q": evidence.q, "k": evidence.k, "v": evidence.v, name: loaded}
            return Prediction(model.forward(problem, mixed["q"], mixed["k"], mixed["v"], knobs))

        if tensor.stride()[:3] != strides[:3]:
            text = f"{mine} is addressed with {theirs}'s strides"
            yield Hypothesis(text, read, addressing=True)


def for_backward(trial: Trial, evidence: Evidence) -> Iterator[Hypothesis]:
    """Causes of wrong gradients, given the observed o and lse."""
    problem = evidence.problem
    if evidence.do is None or "o" not in evidence.seen:
        return
    right = model.forward(problem, evidence.q, evidence.k, evidence.v)
    o = evidence.seen["o"].got
    lse = evidence.seen["lse"].got if "lse" in evidence.seen else right["lse"]
    do = evidence.do

    def predictor(
        knobs: Knobs, do: torch.Tensor = do, delta: torch.Tensor | None = None
    ) -> Callable[[], Prediction]:
        def predict() -> Prediction:
            used = _declared(trial, problem, knobs)
            tensors = (evidence.q, evidence.k, evidence.v, do)
            values = model.backward(problem, tensors, o, lse, used, delta=delta)
            free = {}
            if knobs.head_dim is not None:
                for name in ("dq", "dk"):
                    free[name] = torch.zeros_like(values[name], dtype=torch.bool)
                    free[name][..., knobs.head_dim :] = True
            return Prediction(values, free)

        return predict

    yield Hypothesis(
        "the gradients are right for the o and lse that the forward pass wrote",
        predictor(RIGHT),
        follows=True,
    )
    if evidence.whole and evidence.small:
        yield from _backward_addresses(trial, evidence, predictor)
    for source in (gradients(problem), shared(problem), skips(trial, problem)):
        for sentence, knobs in source:
            text = f"in the backward pass, {sentence}"
            yield Hypothesis(text, predictor(knobs), rounding=_rounds(knobs))


def _backward_addresses(
    trial: Trial,
    evidence: Evidence,
    predictor: Callable[[Knobs, torch.Tensor, torch.Tensor | None], Callable[[], Prediction]],
) -> Iterator[Hypothesis]:
    outputs, x = trial.execution.outputs, trial.pristine
    if outputs is None or x.do is None or evidence.do is None or not x.do.numel():
        return
    for name, other in (("o", outputs.o), ("q", x.q)):
        strides = tuple(other.stride())
        if strides[:3] != tuple(x.do.stride())[:3] or strides[3] != x.do.stride(3):
            loaded = read_by(x.do.cpu(), strides)
            text = f"do is addressed with {name}'s strides"
            yield Hypothesis(text, predictor(RIGHT, loaded, None), addressing=True)
            delta = (evidence.do * evidence.seen["o"].got).sum(dim=-1)
            apart = f"{text}, though not for delta"
            yield Hypothesis(apart, predictor(RIGHT, loaded, delta), addressing=True)
