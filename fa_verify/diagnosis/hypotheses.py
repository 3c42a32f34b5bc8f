"""The hypotheses on one case: each known defect with what a kernel with it would have written."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal

import torch

from fa_verify.diagnosis import model, rows
from fa_verify.diagnosis import splits as split_keys
from fa_verify.diagnosis.addressing import read_by, written_by
from fa_verify.diagnosis.factors import fitted, multiples, scale_in_lse
from fa_verify.diagnosis.gradients import gradients
from fa_verify.diagnosis.hypothesis import Hypothesis, Prediction
from fa_verify.diagnosis.knobs import RIGHT, Knobs
from fa_verify.diagnosis.places import misplaced, zeros
from fa_verify.diagnosis.shared import operands, shared, skips
from fa_verify.diagnosis.softmax import formats, loops, loops_over_rows, softmax
from fa_verify.diagnosis.strides import loads, stores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fa_verify.diagnosis.cause import Cause
    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.problem import Problem
    from fa_verify.trial import Trial

__all__ = ["for_backward", "for_forward", "right_backward", "right_forward"]


def _declared(trial: Trial, problem: Problem, knobs: Knobs) -> Knobs:
    """The knobs with the kernel's declared rounding of P and dS, and the backend's of operands."""
    arithmetic = trial.kernel.arithmetic
    return dataclasses.replace(
        knobs,
        p_dtype=knobs.p_dtype or _format(arithmetic.p_dtype, problem),
        ds_dtype=knobs.ds_dtype or _format(arithmetic.ds_dtype, problem),
        tf32=knobs.tf32 or (_tf32(trial) if problem.dot_precision == "tf32" else ""),
    )


def _format(declared: str, problem: Problem) -> str:
    form = problem.dtype if declared == "input" else declared
    return "" if form == "float32" else form


def _tf32(trial: Trial) -> Literal["truncate", "nearest"]:
    return "nearest" if trial.setup.float_model == "tf32-rna" else "truncate"


class _Forward:
    """Predictions of o and lse for one trial."""

    def __init__(self, trial: Trial, evidence: Evidence) -> None:
        self.trial, self.evidence = trial, evidence
        self.inputs = {"q": evidence.q, "k": evidence.k, "v": evidence.v}

    def __call__(
        self, knobs: Knobs = RIGHT, loaded: dict[str, torch.Tensor] | None = None
    ) -> Prediction:
        problem = self.evidence.problem
        x = self.inputs | (loaded or {})
        used = _declared(self.trial, problem, knobs)
        values = model.forward(problem, x["q"], x["k"], x["v"], used)
        free = {}
        if knobs.head_dim_v is not None and knobs.head_dim_v < problem.head_dim_v:
            free["o"] = torch.zeros_like(values["o"], dtype=torch.bool)
            free["o"][..., knobs.head_dim_v :] = True
        lost = model.key_heads(problem, knobs) >= problem.heads_kv  # what they read nobody knows
        if bool(lost.any()):
            for name, value in values.items():
                free[name] = torch.zeros_like(value, dtype=torch.bool)
                free[name][:, lost] = True
        return Prediction(values, free)

    def hypothesis(self, cause: Cause) -> Hypothesis:
        return Hypothesis(
            cause.sentence,
            functools.partial(self, cause.knobs),
            name=cause.name,
            addressing=cause.knobs.kv_head != "divide",
            rounding=cause.knobs.rounds,
        )


class _Backward:
    """Predictions of dq, dk and dv for one trial, given the o and lse that it observed."""

    def __init__(self, trial: Trial, evidence: Evidence) -> None:
        self.trial, self.evidence = trial, evidence
        assert evidence.do is not None  # noqa: S101 - for mypy: there are gradients
        self.inputs = {"q": evidence.q, "k": evidence.k, "v": evidence.v, "do": evidence.do}
        self.o = evidence.seen["o"].got
        self.lse = evidence.seen["lse"].got if "lse" in evidence.seen else self._lse()

    def _lse(self) -> torch.Tensor:
        e = self.evidence
        return model.forward(e.problem, e.q, e.k, e.v)["lse"]

    def __call__(
        self,
        knobs: Knobs = RIGHT,
        delta: torch.Tensor | None = None,
        loaded: dict[str, torch.Tensor] | None = None,
    ) -> Prediction:
        problem = self.evidence.problem
        x = self.inputs | (loaded or {})
        used = _declared(self.trial, problem, knobs)
        tensors = (x["q"], x["k"], x["v"], x["do"])
        values = model.backward(problem, tensors, self.o, self.lse, used, delta=delta)
        free = {}
        if knobs.head_dim is not None:
            for name in ("dq", "dk"):
                free[name] = torch.zeros_like(values[name], dtype=torch.bool)
                free[name][..., knobs.head_dim :] = True
        return Prediction(values, free)

    def hypotheses(self, cause: Cause, where: str) -> Iterator[Hypothesis]:
        """One for the cause, and one for a kernel that keeps P at 1 or below, as many do."""
        name = f"{where} {cause.name}" if cause.name else ""
        for knobs in (cause.knobs, dataclasses.replace(cause.knobs, capped_p=True)):
            yield Hypothesis(
                f"{where} {cause.sentence}",
                functools.partial(self, knobs),
                name=name,
                addressing=knobs.kv_head != "divide",
                rounding=knobs.rounds,
            )
            if not knobs.exceeds:
                return


def right_forward(trial: Trial, evidence: Evidence) -> Prediction:
    """What a right kernel writes."""
    return _Forward(trial, evidence)()


def right_backward(trial: Trial, evidence: Evidence) -> Prediction:
    """What a right backward pass writes, given the observed o and lse."""
    return _Backward(trial, evidence)()


def for_forward(trial: Trial, evidence: Evidence) -> Iterator[Hypothesis]:
    """Causes of a wrong o or lse."""
    problem, config = evidence.problem, trial.execution.config
    predict = _Forward(trial, evidence)
    if evidence.whole:
        yield from _forward_addresses(trial, predict)
    yield from _by_values(evidence, ("o", "lse"))
    for key in rows.missing_key(evidence):
        text = f"key {key} is left out"
        yield Hypothesis(text, functools.partial(predict, Knobs(without=(key, key + 1))))
    for source in (
        shared(problem, whole=evidence.whole),
        softmax(config, problem),
        skips(config, problem),
        loops(config, problem),
        operands(problem),
        formats(config, problem),
    ):
        yield from map(predict.hypothesis, source)
    for count, width in split_keys.splits(evidence):
        for how, sentence in split_keys.MERGES.items():
            yield Hypothesis(
                f"{sentence} ({count} splits)",
                functools.partial(_merged, evidence, width, how),
                name=sentence,
                rounding=how in ("bfloat16", "float16"),
                fitted=True,
            )
    for scale in scale_in_lse(evidence):
        text = f"softmax_scale is {scale:.5g} instead of {problem.scale:.5g}"
        known = functools.partial(predict, Knobs(scale=scale))
        yield Hypothesis(text, known, name="another scale", fitted=True)
    for sentence, values in rows.denominator(evidence):
        known_values = functools.partial(Prediction, values)
        yield Hypothesis(sentence, known_values, name="denominator", fitted=True)


def _merged(evidence: Evidence, width: int, how: str) -> Prediction:
    return Prediction(split_keys.merged(evidence, width, how))


def _by_values(evidence: Evidence, names: tuple[str, ...]) -> Iterator[Hypothesis]:
    """What the results themselves say: factors, other places, zeros."""
    for text, values in multiples(evidence, names):
        yield Hypothesis(text, functools.partial(Prediction, values))
    for text, values in fitted(evidence, names):
        name = "a factor in a tail" if text.startswith("columns") else "a factor"
        yield Hypothesis(text, functools.partial(Prediction, values), name=name, fitted=True)
    for name, text, values in misplaced(evidence, names):
        yield Hypothesis(text, functools.partial(Prediction, values), name=name, fitted=True)
    for text, values in zeros(evidence, names):
        yield Hypothesis(text, functools.partial(Prediction, values), name="zeros", fitted=True)


def _forward_addresses(trial: Trial, predict: _Forward) -> Iterator[Hypothesis]:
    outputs, x = trial.execution.outputs, trial.pristine
    if outputs is None or "o" not in predict.evidence.seen:
        return
    right = tuple(outputs.o.stride())
    for sentence, wrong in stores("o", outputs.o, {"q": x.q, "k": x.k, "v": x.v}):

        def written(wrong: tuple[int, ...] = wrong) -> Prediction:
            values = predict().values
            o, free, holes = written_by(values["o"], wrong, right)
            return Prediction(values | {"o": o}, {"o": free}, {"o": holes})

        yield Hypothesis(sentence, written, addressing=True)
    if predict.evidence.problem.head_dim == predict.evidence.problem.head_dim_v:
        crossed = {"k": read_by(x.k.cpu(), x.v.stride()), "v": read_by(x.v.cpu(), x.k.stride())}
        text = "k and v are addressed with each other's strides"
        yield Hypothesis(text, functools.partial(predict, loaded=crossed), addressing=True)
    for sentence, name, loaded in loads(x, ("q", "k", "v")):
        yield Hypothesis(
            sentence, functools.partial(predict, loaded={name: loaded}), addressing=True
        )


def for_backward(trial: Trial, evidence: Evidence) -> Iterator[Hypothesis]:
    """Causes of wrong gradients, given the observed o and lse."""
    problem, config = evidence.problem, trial.execution.config
    if evidence.do is None or "o" not in evidence.seen:
        return
    predict = _Backward(trial, evidence)
    yield Hypothesis(
        "the gradients are right for the o and lse that the forward pass wrote",
        predict,
        follows=True,
    )
    yield from _by_values(evidence, ("dq", "dk", "dv"))
    if evidence.whole:
        yield from _backward_addresses(trial, predict)
    sources = (
        gradients(problem),
        shared(problem, whole=evidence.whole),
        skips(config, problem),
        loops(config, problem),
        operands(problem),
    )
    for source in sources:
        for cause in source:
            yield from predict.hypotheses(cause, "in the backward pass,")
    yield from _first_block(predict)
    yield from _one_kernel(predict, config)
    for text, values in rows.other_delta(evidence, predict().values, predict.lse):
        known = functools.partial(Prediction, values)
        yield Hypothesis(text, known, name="another delta", fitted=True)
    if problem.shape_k == problem.shape_v:
        yield Hypothesis("dk and dv are returned in each other's place", _swapped(predict))


def _first_block(predict: _Backward) -> Iterator[Hypothesis]:
    keys = predict.evidence.problem.seqlen_k
    for block in (16, 32, 64, 128):
        if block < keys:
            at = torch.arange(keys) % block
            loaded = {"k": predict.evidence.k[:, :, at], "v": predict.evidence.v[:, :, at]}
            text = f"in the backward pass, every block of {block} keys reads the first block's k, v"
            yield Hypothesis(text, functools.partial(predict, loaded=loaded))


_SIDES = (
    (("dq",), ("dk", "dv")),
    (("dk", "dv"), ("dq",)),
    (("dk",), ("dq", "dv")),
    (("dv",), ("dq", "dk")),
)


def _one_kernel(predict: _Backward, config: str) -> Iterator[Hypothesis]:
    """Causes in the kernel of dq, or in that of dk and dv, where the other's results are right."""
    problem = predict.evidence.problem
    for names, others in _SIDES:
        if predict.evidence.wrong(*others) or not all(map(predict.evidence.wrong, names)):
            continue
        causes = [
            *gradients(problem),
            *shared(problem, whole=predict.evidence.whole),
            *loops(config, problem),
        ]
        causes += loops_over_rows(config, problem) if "dq" not in names else []
        causes += [*skips(config, problem), *operands(problem)]
        for cause in causes:
            where = f"in {' and '.join(names)},"
            for hypothesis in predict.hypotheses(cause, where):
                part = _only(names, predict, hypothesis.predict)
                yield dataclasses.replace(hypothesis, predict=part)


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


def _backward_addresses(trial: Trial, predict: _Backward) -> Iterator[Hypothesis]:
    outputs, grads, x = trial.execution.outputs, trial.execution.grads, trial.pristine
    evidence = predict.evidence
    if outputs is None or grads is None or evidence.do is None:
        return
    for name, other in (("dq", x.q), ("dk", x.k), ("dv", x.v)):
        tensor = getattr(grads, name)
        right = tuple(tensor.stride())
        for sentence, wrong in stores(name, tensor, {name[1:]: other}):

            def written(
                name: str = name, wrong: tuple[int, ...] = wrong, right: tuple[int, ...] = right
            ) -> Prediction:
                values = predict().values
                value, free, holes = written_by(values[name], wrong, right)
                return Prediction(values | {name: value}, {name: free}, {name: holes})

            yield Hypothesis(sentence, written, addressing=True)
    delta = (evidence.do * evidence.seen["o"].got).sum(dim=-1)
    for sentence, name, loaded in loads(x, ("q", "k", "v", "do"), outputs.o):
        wrongly = functools.partial(predict, loaded={name: loaded})
        yield Hypothesis(f"in the backward pass, {sentence}", wrongly, addressing=True)
        if name == "do":
            apart = functools.partial(predict, delta=delta, loaded={name: loaded})
            text = f"in the backward pass, {sentence}, though not for delta"
            yield Hypothesis(text, apart, addressing=True)
        for names, others in _SIDES[:2]:
            if evidence.wrong(*others) or not evidence.wrong(*names):
                continue
            part = _only(names, predict, wrongly)
            yield Hypothesis(f"in {' and '.join(names)}, {sentence}", part, addressing=True)
