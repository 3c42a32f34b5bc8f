"""Hypotheses: each known defect with what a kernel that has it would have written."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal

import torch

from fa_verify.diagnosis import model
from fa_verify.diagnosis.addressing import read_by, written_by
from fa_verify.diagnosis.defects import gradients, loops, online, row_loops, shared, skips
from fa_verify.diagnosis.factors import multiples, scale_in_lse
from fa_verify.diagnosis.model import RIGHT, Knobs
from fa_verify.inputs import SPARSE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.problem import Problem
    from fa_verify.trial import Trial

__all__ = ["Hypothesis", "Prediction", "for_backward", "for_forward"]

Strides = tuple[int, ...]


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
    more = (knobs.scores_dtype, knobs.dp_dtype, knobs.delta_dtype, knobs.prescaled)
    return any(formats) or any(more)


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
    sources = (
        shared(problem),
        online(trial, problem),
        skips(trial, problem),
        loops(trial, problem),
    )
    for source in sources:
        for sentence, knobs in source:
            yield Hypothesis(
                sentence,
                predictor(knobs),
                addressing=knobs.kv_head != "divide",
                rounding=_rounds(knobs),
            )
    for scale in scale_in_lse(evidence):
        text = f"softmax_scale is {scale:.5g} instead of {problem.scale:.5g}"
        yield Hypothesis(text, predictor(Knobs(scale=scale)))
    for text, values in multiples(evidence, ("o", "lse"), problem.scale):
        yield Hypothesis(text, functools.partial(Prediction, values))


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
    for mine, theirs in (("k", "v"), ("v", "k"), ("q", "k"), ("k", "q")):
        tensor, strides = getattr(x, mine), getattr(x, theirs).stride()

        def read(name: str = mine, strides: tuple[int, ...] = strides) -> Prediction:
            loaded = read_by(getattr(x, name).cpu(), strides)
            mixed = {"q": evidence.q, "k": evidence.k, "v": evidence.v, name: loaded}
            return Prediction(model.forward(problem, mixed["q"], mixed["k"], mixed["v"], knobs))

        if tensor.stride()[:3] != strides[:3]:
            text = f"{mine} is addressed with {theirs}'s strides"
            yield Hypothesis(text, read, addressing=True)
        if theirs in ("q", "k") and tensor.stride(3) != 1:
            text = f"the columns of {mine} are taken to be contiguous"
            strides = (*tensor.stride()[:3], 1)
            yield Hypothesis(text, functools.partial(read, mine, strides), addressing=True)


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
            if _moves_mask(knobs):
                capped = dataclasses.replace(knobs, capped_p=True)
                yield Hypothesis(text, predictor(capped))
    yield from _one_kernel(trial, evidence, predictor)
    for text, values in multiples(evidence, ("dq", "dk", "dv"), problem.scale):
        yield Hypothesis(text, functools.partial(Prediction, values))
    if problem.shape_k == problem.shape_v:
        yield Hypothesis("dk and dv are returned in each other's place", _swapped(predictor(RIGHT)))


def _one_kernel(
    trial: Trial, evidence: Evidence, predictor: Callable[[Knobs], Callable[[], Prediction]]
) -> Iterator[Hypothesis]:
    """Causes in the kernel of dq, or in that of dk and dv, where the other's results are right."""
    problem = evidence.problem
    sides = (
        (("dq",), ("dk", "dv"), [*loops(trial, problem), *skips(trial, problem)]),
        (("dk", "dv"), ("dq",), [*loops(trial, problem), *row_loops(trial, problem)]),
    )
    for names, others, causes in sides:
        if evidence.wrong(*others):
            continue
        for sentence, knobs in [*causes, *shared(problem)]:
            text = f"in {' and '.join(names)}, {sentence}"
            part = _only(names, predictor(RIGHT), predictor(knobs))
            yield Hypothesis(text, part, addressing=knobs.kv_head != "divide")


def _moves_mask(knobs: Knobs) -> bool:
    """Whether other keys are visible than should be: their P, given a right lse, may exceed 1."""
    moved = (knobs.shift, knobs.left, knobs.right, not knobs.masked, knobs.right_end is not None)
    return any(moved)


def _only(
    names: tuple[str, ...], right: Callable[[], Prediction], wrong: Callable[[], Prediction]
) -> Callable[[], Prediction]:
    """What a kernel writes that goes wrong in some gradients alone."""

    def predict() -> Prediction:
        values, other = right().values, wrong()
        return Prediction(
            {name: other.values[name] if name in names else values[name] for name in values},
            {name: free for name, free in other.free.items() if name in names},
        )

    return predict


def _swapped(right: Callable[[], Prediction]) -> Callable[[], Prediction]:
    def predict() -> Prediction:
        values = right().values
        return Prediction({"dq": values["dq"], "dk": values["dv"], "dv": values["dk"]})

    return predict


def _backward_addresses(
    trial: Trial,
    evidence: Evidence,
    predictor: Callable[[Knobs, torch.Tensor, torch.Tensor | None], Callable[[], Prediction]],
) -> Iterator[Hypothesis]:
    outputs, x = trial.execution.outputs, trial.pristine
    if outputs is None or x.do is None or evidence.do is None or not x.do.numel():
        return
    yield from _stored_elsewhere(trial, evidence, predictor)
    yield from _loaded_elsewhere(trial, evidence)
    for name, other in (("o", outputs.o), ("q", x.q)):
        strides = tuple(other.stride())
        if strides[:3] != tuple(x.do.stride())[:3] or strides[3] != x.do.stride(3):
            loaded = read_by(x.do.cpu(), strides)
            text = f"do is addressed with {name}'s strides"
            yield Hypothesis(text, predictor(RIGHT, loaded, None), addressing=True)
            delta = (evidence.do * evidence.seen["o"].got).sum(dim=-1)
            apart = f"{text}, though not for delta"
            yield Hypothesis(apart, predictor(RIGHT, loaded, delta), addressing=True)


def _stored_elsewhere(
    trial: Trial,
    evidence: Evidence,
    predictor: Callable[[Knobs, torch.Tensor, torch.Tensor | None], Callable[[], Prediction]],
) -> Iterator[Hypothesis]:
    """Gradients stored by the strides of another tensor of their shape, or of a contiguous one."""
    grads, x, do = trial.execution.grads, trial.pristine, evidence.do
    if grads is None or do is None:
        return
    for name, other in (("dq", x.q), ("dk", x.k), ("dv", x.v)):
        tensor = getattr(grads, name)
        strides = {f"{name[1:]}'s": tuple(other.stride())}
        strides["a contiguous tensor's"] = tuple(torch.empty(other.shape, device="meta").stride())
        for whose, wrong in strides.items():
            if wrong == tuple(tensor.stride()) or max(wrong) >= SPARSE or not tensor.numel():
                continue

            def written(name: str = name, wrong: Strides = wrong) -> Prediction:
                values = predictor(RIGHT, do, None)().values
                right = tuple(getattr(grads, name).stride())
                value, free, holes = written_by(values[name], wrong, right)
                return Prediction(values | {name: value}, {name: free}, {name: holes})

            yield Hypothesis(f"{name} is addressed with {whose} strides", written, addressing=True)


def _loaded_elsewhere(trial: Trial, evidence: Evidence) -> Iterator[Hypothesis]:
    """Inputs of the backward pass loaded by another's strides."""
    problem, x, do = evidence.problem, trial.pristine, evidence.do
    if do is None:
        return
    o = evidence.seen["o"].got
    lse = evidence.seen["lse"].got if "lse" in evidence.seen else None
    knobs = _declared(trial, problem, RIGHT)
    for mine, theirs in (("v", "k"), ("k", "v"), ("q", "k"), ("k", "q")):
        tensor, strides = getattr(x, mine), tuple(getattr(x, theirs).stride())
        if lse is None or tuple(tensor.stride()) == strides:
            continue

        def read(
            name: str = mine, strides: Strides = strides, lse: torch.Tensor = lse
        ) -> Prediction:
            mixed = {"q": evidence.q, "k": evidence.k, "v": evidence.v}
            mixed[name] = read_by(getattr(x, name).cpu(), strides)
            tensors = (mixed["q"], mixed["k"], mixed["v"], do)
            return Prediction(model.backward(problem, tensors, o, lse, knobs))

        text = f"in the backward pass, {mine} is addressed with {theirs}'s strides"
        yield Hypothesis(text, read, addressing=True)
