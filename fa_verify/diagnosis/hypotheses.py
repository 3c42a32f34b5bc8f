"""The hypotheses on one case: each known defect with what a kernel with it would have written."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis import counts, rows, scales, terms
from fa_verify.diagnosis import splits as split_keys
from fa_verify.diagnosis.addressing import read_by, written_by
from fa_verify.diagnosis.cause import sizes
from fa_verify.diagnosis.factors import fitted, multiples, scale_in_lse
from fa_verify.diagnosis.gradients import gradients
from fa_verify.diagnosis.hypothesis import Hypothesis, Prediction
from fa_verify.diagnosis.knobs import Knobs
from fa_verify.diagnosis.places import misplaced, zeros
from fa_verify.diagnosis.predictions import Backward, Forward
from fa_verify.diagnosis.shared import operands, shared, skips
from fa_verify.diagnosis.softmax import formats, loops, loops_over_rows, softmax
from fa_verify.diagnosis.strides import loads, stores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.trial import Trial

__all__ = ["SYMPTOMS", "for_backward", "for_forward", "right_backward", "right_forward"]


_ZEROS, _DENOMINATOR = "zeros", "denominator"
SYMPTOMS = (_ZEROS, _DENOMINATOR)  # keys of what says how results are wrong, and not why


def right_forward(trial: Trial, evidence: Evidence) -> Prediction:
    """What a right kernel writes."""
    return Forward(trial, evidence)()


def right_backward(trial: Trial, evidence: Evidence) -> Prediction:
    """What a right backward pass writes, given the observed o and lse."""
    return Backward(trial, evidence)()


def for_forward(trial: Trial, evidence: Evidence) -> Iterator[Hypothesis]:
    """Causes of a wrong o or lse."""
    problem, config = evidence.problem, trial.execution.config
    predict = Forward(trial, evidence)
    if evidence.whole and trial.case.problem.fp8:
        for text, loaded in scales.slips(trial):
            yield Hypothesis(text, functools.partial(predict, loaded=loaded), addressing=True)
    if evidence.whole:
        yield from _forward_addresses(trial, predict)
    yield from _by_values(evidence, predict.right.values)
    yield from terms.for_forward(predict)
    for key in rows.missing_key(evidence):
        text = f"key {key} is left out"
        known = functools.partial(predict, Knobs(without=(key, key + 1)))
        yield Hypothesis(text, known, fitted=True)
    for source in (
        shared(problem, whole=evidence.whole),
        softmax(config, problem),
        skips(config, problem),
        loops(config, problem),
        operands(problem),
        formats(config, problem),
        scales.lifts(trial),
    ):
        yield from map(predict.hypothesis, source)
    yield from _counted(predict, config)
    for count, width, even in () if problem.terms else split_keys.splits(evidence):
        for how, sentence in split_keys.MERGES.items():
            if "left out" in how and not even:
                continue
            yield Hypothesis(
                f"{sentence} ({count} splits)",
                functools.partial(predict.merged, width, how),
                name=sentence,
                rounding=how in ("bfloat16", "float16"),
                fitted=True,
            )
    for end, found in counts.keys_reached(predict):
        text = (
            f"keys from {end} of {evidence.problem.seqlen_k} on are left out: the loop over keys, "
            "the splits or the table of pages ends too early"
        )
        yield Hypothesis(text, functools.partial(_as_is, found), name="later keys", fitted=True)
    for scale in scale_in_lse(evidence):
        text = f"softmax_scale is {scale:.5g} instead of {problem.scale:.5g}"
        known = functools.partial(predict, Knobs(scale=scale))
        yield Hypothesis(text, known, name="another scale", fitted=True)
    for sentence, values in rows.denominator(evidence):
        known_values = functools.partial(Prediction, values)
        yield Hypothesis(sentence, known_values, name=_DENOMINATOR, fitted=True)


def _counted(predict: Forward, config: str) -> Iterator[Hypothesis]:
    """What l and lse say of how many keys there were, too many or too few."""
    evidence = predict.evidence
    for block, found in counts.padded(evidence, sizes(config, evidence.problem.seqlen_k)):
        text = f"zero-padded keys count in the softmax denominator (blocks of {block})"
        yield Hypothesis(text, functools.partial(_as_is, found))
    if predict.trial.kernel.arithmetic.merged_by_lse or "merge" in config or "combine" in config:
        text = "a split without keys enters the merge, with lse = 0 where -inf is due"
        for found in counts.ones_added(evidence):
            yield Hypothesis(text, functools.partial(_as_is, found))


def _as_is(found: Prediction) -> Prediction:
    return found


def _by_values(evidence: Evidence, right: dict[str, torch.Tensor]) -> Iterator[Hypothesis]:
    """What the results themselves say: factors, other places, zeros."""
    names = tuple(name for name in right if name in evidence.seen)
    for text, values in multiples(evidence.problem.group, {name: right[name] for name in names}):
        yield Hypothesis(text, functools.partial(Prediction, values))
    for text, values in fitted(evidence, names, right):
        name = "a factor in a tail" if text.startswith("columns") else "a factor"
        yield Hypothesis(text, functools.partial(Prediction, values), name=name, fitted=True)
    for name, text, values in misplaced(evidence, names):
        yield Hypothesis(text, functools.partial(Prediction, values), name=name, fitted=True)
    for text, values in zeros(evidence, names):
        yield Hypothesis(text, functools.partial(Prediction, values), name=_ZEROS, fitted=True)


def _forward_addresses(trial: Trial, predict: Forward) -> Iterator[Hypothesis]:
    outputs, x = trial.execution.outputs, trial.pristine
    if outputs is None or "o" not in predict.evidence.seen:
        return
    right = tuple(outputs.o.stride())
    for sentence, wrong in stores("o", outputs.o, {"q": x.q, "k": x.k, "v": x.v}):

        def written(wrong: tuple[int, ...] = wrong) -> Prediction:
            values = predict.right.values
            o, free, holes = written_by(values["o"], wrong, right)
            return Prediction(values | {"o": o}, {"o": free}, {"o": holes})

        yield Hypothesis(sentence, written, addressing=True)
    for text, of_k, of_v in (
        ("k and v are addressed with each other's strides", x.v.stride(), x.k.stride()),
        (
            "the rows of k and v are addressed with each other's stride",
            (*x.k.stride()[:2], x.v.stride(2), x.k.stride(3)),
            (*x.v.stride()[:2], x.k.stride(2), x.v.stride(3)),
        ),
    ):
        crossed = {
            name: functools.partial(_read_scaled, trial, name, wrong)
            for name, wrong in (("k", of_k), ("v", of_v))
        }
        yield Hypothesis(text, functools.partial(predict, loaded=crossed), addressing=True)
    steps = sizes(trial.execution.config, x.k.shape[2])
    for sentence, name, load in loads(x, ("q", "k", "v"), blocks=steps):

        def loaded(name: str = name, load: Callable[[], torch.Tensor] = load) -> torch.Tensor:
            return scales.scaled(trial, name, load())

        yield Hypothesis(
            sentence, functools.partial(predict, loaded={name: loaded}), addressing=True
        )


def _read_scaled(trial: Trial, name: str, wrong: tuple[int, ...]) -> torch.Tensor:
    stored = getattr(trial.pristine, name)
    return scales.scaled(trial, name, read_by(stored.cpu(), wrong))


def for_backward(trial: Trial, evidence: Evidence) -> Iterator[Hypothesis]:
    """Causes of wrong gradients, given the observed o and lse."""
    problem, config = evidence.problem, trial.execution.config
    if evidence.do is None or "o" not in evidence.seen:
        return
    predict = Backward(trial, evidence)
    text = "the gradients are right for the o and lse that the forward pass wrote"
    yield Hypothesis(text, lambda: predict.right, follows=True)
    yield Hypothesis(text, functools.partial(predict, Knobs(capped_p=True)), follows=True)
    yield from _by_values(evidence, predict.right.values)
    if evidence.whole:
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
    yield from _first_block(predict)
    yield from _one_kernel(predict, config)
    yield from _heads_of_rows(predict)
    for text, values in rows.other_delta(predict):
        known = functools.partial(Prediction, values)
        yield Hypothesis(text, known, name="another delta", fitted=True)
    if problem.shape_k == problem.shape_v:
        yield Hypothesis("dk and dv are returned in each other's place", _swapped(predict.right))


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


def _heads_of_rows(predict: Backward) -> Iterator[Hypothesis]:
    """What belongs to a row of a query head is read at another head of its group."""
    problem, do = predict.evidence.problem, predict.evidence.do
    if problem.group == 1 or do is None:
        return
    delta = (do * predict.o).sum(dim=-1)
    heads = torch.arange(problem.heads_q) // problem.group
    for text, at in (
        ("the first head of the group", heads * problem.group),
        ("the query head with the key head's number", heads),
    ):
        for what, lse, given in (
            ("lse and delta", predict.lse[:, at], delta[:, at]),
            ("lse", predict.lse[:, at], None),
            ("delta", predict.lse, delta[:, at]),
        ):
            wrong = functools.partial(predict.given(lse), delta=given)
            sentence = f"{what} {'is' if ' ' not in what else 'are'} read at {text}"
            yield Hypothesis(f"in the backward pass, {sentence}", wrong)
            for names, others in _SIDES[:2]:
                if not predict.evidence.wrong(*others):
                    part = _only(names, predict.right, wrong)
                    yield Hypothesis(f"in {' and '.join(names)}, {sentence}", part)


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
    delta = (evidence.do * evidence.seen["o"].got).sum(dim=-1)
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
