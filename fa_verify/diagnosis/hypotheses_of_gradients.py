"""Hypotheses on one backward pass, given the o and lse that it read."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis import mistaken, rows, terms
from fa_verify.diagnosis.addressing import added_by, read_by, written_by
from fa_verify.diagnosis.cause import sizes
from fa_verify.diagnosis.crossed import crossed
from fa_verify.diagnosis.gradients import gradients
from fa_verify.diagnosis.hypotheses import by_values
from fa_verify.diagnosis.hypothesis import Hypothesis, Prediction
from fa_verify.diagnosis.knobs import Knobs
from fa_verify.diagnosis.logits import rounded, summed
from fa_verify.diagnosis.predictions import Backward
from fa_verify.diagnosis.shared import operands, shared, skips
from fa_verify.diagnosis.softmax import loops, loops_over_rows
from fa_verify.diagnosis.strides import extent, loads, stores, sums
from fa_verify.inputs import SPARSE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.trial import Trial

__all__ = ["for_backward", "right_backward"]

_CAPPED = Knobs(capped_p=True)


def right_backward(trial: Trial, evidence: Evidence) -> Prediction:
    """What a right backward pass writes, given the observed o and lse."""
    return Backward(trial, evidence)()


def for_backward(trial: Trial, evidence: Evidence) -> Iterator[Hypothesis]:
    """Causes of wrong gradients, given the observed o and lse."""
    problem, config = evidence.problem, trial.execution.config
    if evidence.do is None or "o" not in evidence.seen:
        return
    predict = Backward(trial, evidence)
    text = "the gradients are right for the o and lse that the forward pass wrote"
    yield Hypothesis(text, lambda: predict.right, follows=True)
    yield Hypothesis(text, functools.partial(predict, Knobs(capped_p=True)), follows=True)
    yield from by_values(evidence, predict.right.values)
    for text, loaded in mistaken.operands(predict.inputs):
        yield from predict.addressed(f"in the backward pass, {text}", loaded)
    if evidence.whole:
        for text, loaded in mistaken.packed(evidence):
            yield from predict.addressed(f"in the backward pass, {text}", loaded)
        yield from _rows_of_heads(predict)
        yield from _backward_addresses(trial, predict)
    for sentence, beside, knobs in terms.for_backward(predict):
        known = functools.partial(predict, knobs, beside=beside)
        yield Hypothesis(f"in the backward pass, {sentence}", known)
    sources = (
        gradients(problem),
        shared(problem, whole=evidence.whole),
        skips(config, problem),
        loops(config, problem),
        loops_over_rows(config, problem),
        operands(problem),
    )
    for source in sources:
        for cause in source:
            yield from predict.hypotheses(cause, "in the backward pass,")
    yield from _sums_in_halves(predict, config)
    yield from crossed(predict)
    yield from _first_block(predict)
    yield from _one_kernel(predict, config)
    for text, values in rows.other_delta(predict):
        known = functools.partial(Prediction, values)
        yield Hypothesis(text, known, name="another delta", fitted=True)
    if problem.shape_k == problem.shape_v:
        yield Hypothesis("dk and dv are returned in each other's place", _swapped(predict.right))


def _rows_of_heads(predict: Backward) -> Iterator[Hypothesis]:
    """Lse or delta of another head, in all gradients or in those that one kernel writes."""
    evidence = predict.evidence
    of_lse, of_delta = (
        dict(mistaken.rows_of_heads(evidence, x)) for x in (predict.lse, predict.delta)
    )
    for text, lse in of_lse.items():
        delta = of_delta[text]
        for what, known in (
            ("lse", functools.partial(predict, lse=lse)),
            ("lse", functools.partial(predict, _CAPPED, lse=lse)),
            ("delta", functools.partial(predict, delta=delta)),
            ("lse and delta", functools.partial(predict, lse=lse, delta=delta)),
            ("lse and delta", functools.partial(predict, _CAPPED, lse=lse, delta=delta)),
        ):
            sentence = f"{what} {'are' if ' ' in what else 'is'} read at {text}"
            yield Hypothesis(f"in the backward pass, {sentence}", known, addressing=True)
            for names, rest in _SIDES[:2]:
                if not evidence.wrong(*rest):
                    where = f"in {' and '.join(names)}, {sentence}"
                    part = _only(names, predict.right, known)
                    yield Hypothesis(where, part, addressing=True)


def _sums_in_halves(predict: Backward, config: str) -> Iterator[Hypothesis]:
    """Delta, or the sum that is dq, in 16 bits."""
    problem = predict.evidence.problem
    products = predict.inputs["do"] * predict.o
    for form in ("float16", "bfloat16"):
        for how, delta in (
            ("rounded to", rounded(predict.delta, form)),
            ("summed in", summed(products, form)),
        ):
            text = f"in the backward pass, delta = sum(do * o) is {how} {form}"
            yield Hypothesis(text, functools.partial(predict, delta=delta), rounding=True)
    for block in sizes(config, problem.seqlen_k) if problem.dtype != "float32" else ():
        known = functools.partial(predict, Knobs(dq_dtype=problem.dtype, block_n=block))
        text = f"dq is added up in {problem.dtype} instead of float32 (blocks of {block} keys)"
        yield Hypothesis(text, known, name="dq in storage", rounding=True)


def _first_block(predict: Backward) -> Iterator[Hypothesis]:
    keys = predict.evidence.problem.seqlen_k
    for block in (16, 32, 64, 128):
        if block < keys:
            at = torch.arange(keys) % block
            loaded = {
                name: functools.partial(torch.index_select, predict.inputs[name], 2, at)
                for name in ("k", "v")
            }
            text = f"in the backward pass, every block of {block} keys reads the first block's k, v"
            yield from predict.addressed(text, loaded)


_SIDES = (
    (("dq",), ("dk", "dv")),
    (("dk", "dv"), ("dq",)),
    (("dk",), ("dq", "dv")),
    (("dv",), ("dq", "dk")),
)


def _one_kernel(predict: Backward, config: str) -> Iterator[Hypothesis]:
    """Causes in the kernel of dq, or in that of dk and dv, where the other's results are right."""
    problem = predict.evidence.problem
    for names, others in _SIDES:
        if predict.evidence.wrong(*others):  # where these are right too, the cause must be idle
            continue
        causes = [*gradients(problem), *shared(problem, whole=predict.evidence.whole)]
        causes += loops_over_rows(config, problem) if "dq" not in names else []
        causes += [*loops(config, problem), *skips(config, problem), *operands(problem)]
        for cause in causes:
            where = f"in {' and '.join(names)},"
            for hypothesis in predict.hypotheses(cause, where):
                part = _only(names, predict.right, hypothesis.predict)
                yield dataclasses.replace(hypothesis, predict=part)


def _only(
    names: tuple[str, ...], right: Prediction, wrong: Callable[[], Prediction]
) -> Callable[[], Prediction]:
    """What a kernel writes that goes wrong in some gradients alone."""

    def predict() -> Prediction:
        values, other = right.values, wrong()
        return Prediction(
            {name: other.values[name] if name in names else values[name] for name in values},
            {name: free for name, free in other.free.items() if name in names},
            stray=other.stray,
        )

    return predict


def _swapped(right: Prediction) -> Callable[[], Prediction]:
    def predict() -> Prediction:
        values = right.values
        return Prediction({"dq": values["dq"], "dk": values["dv"], "dv": values["dk"]})

    return predict


def _deltas(predict: Backward) -> Iterator[Hypothesis]:
    """Delta of o, or do, by each other's strides."""
    outputs, x = predict.trial.execution.outputs, predict.trial.pristine
    if outputs is None or x.do is None or not x.do.numel():
        return
    for whose, o in (("head", predict.o[:, :1]), ("sequence", predict.o[:1])):
        text = f"in the backward pass, delta takes o of the first {whose} for every {whose}"
        known = functools.partial(predict, delta=(o * predict.inputs["do"]).sum(dim=-1))
        if o.shape != predict.o.shape:
            yield Hypothesis(text, known, addressing=True)
    for name, wrong, right, theirs in (
        ("o", outputs.o, predict.evidence.do, "do"),
        ("do", x.do, predict.o, "o"),
    ):
        strides = tuple(x.do.stride() if name == "o" else outputs.o.stride())
        far = max(extent(wrong.shape, s) for s in (strides, wrong.stride()))
        if right is not None and strides != tuple(wrong.stride()) and far < SPARSE:
            delta = (read_by(wrong.cpu(), strides) * right).sum(dim=-1)
            text = f"in delta, {name} is addressed with {theirs}'s strides"
            known = functools.partial(predict, delta=delta)
            yield Hypothesis(f"in the backward pass, {text}", known, addressing=True)


def _sums(predict: Backward) -> Iterator[Hypothesis]:
    """Gradients that are added up at wrong places of a float32 sum."""
    problem = predict.evidence.problem
    shapes = {"dq": problem.shape_q, "dk": problem.shape_k, "dv": problem.shape_v}
    for name, sizes_ in shapes.items():
        for sentence, wrong in {
            item
            for other in shapes.values()
            for item in sums(name, torch.Size(sizes_), torch.Size(other))
        }:

            def written(name: str = name, wrong: tuple[int, ...] = wrong) -> Prediction:
                values = predict.right.values
                return Prediction(values | {name: added_by(values[name], wrong)})

            key = re.sub(r" of \d+ (\w+), not \d+", r" of other \1", sentence)
            yield Hypothesis(sentence, written, name=key, addressing=True)


def _backward_addresses(trial: Trial, predict: Backward) -> Iterator[Hypothesis]:
    outputs, grads, x = trial.execution.outputs, trial.execution.grads, trial.pristine
    evidence = predict.evidence
    if outputs is None or grads is None or evidence.do is None:
        return
    for name, others in (("dq", ("q",)), ("dk", ("k", "v")), ("dv", ("v", "k"))):
        tensor = getattr(grads, name)
        right = tuple(tensor.stride())
        for sentence, wrong in stores(name, tensor, {other: getattr(x, other) for other in others}):

            def written(
                name: str = name, wrong: tuple[int, ...] = wrong, right: tuple[int, ...] = right
            ) -> Prediction:
                values = predict.right.values
                value, free, holes = written_by(values[name], wrong, right)
                return Prediction(values | {name: value}, {name: free}, {name: holes})

            yield Hypothesis(sentence, written, addressing=True)
    yield from _sums(predict)
    yield from _deltas(predict)
    delta = predict.delta
    steps = sizes(trial.execution.config, x.k.shape[2])
    for sentence, name, loaded in loads(x, ("q", "k", "v", "do"), outputs.o, steps):
        wrongly = list(predict.addressed(f"in the backward pass, {sentence}", {name: loaded}))
        yield from wrongly
        if name == "do":
            text = f"in the backward pass, {sentence}, though not for delta"
            yield from predict.addressed(text, {name: loaded}, delta)
        for names, others in _SIDES[:2]:
            if evidence.wrong(*others):
                continue
            for hypothesis in wrongly:
                part = _only(names, predict.right, hypothesis.predict)
                text = f"in {' and '.join(names)}, {sentence}"
                yield dataclasses.replace(hypothesis, sentence=text, predict=part)
