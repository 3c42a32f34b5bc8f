"""Hypotheses on one forward pass: each known defect, and what a kernel with it had written."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from fa_verify.diagnosis import counts, mistaken, packed, rows, scales, terms
from fa_verify.diagnosis import splits as split_keys
from fa_verify.diagnosis.addressing import read_by, written_by
from fa_verify.diagnosis.cause import sizes
from fa_verify.diagnosis.factors import fitted, multiples, scale_in_lse
from fa_verify.diagnosis.hypothesis import Hypothesis, Prediction
from fa_verify.diagnosis.knobs import Knobs
from fa_verify.diagnosis.places import misplaced, zeros
from fa_verify.diagnosis.predictions import Forward
from fa_verify.diagnosis.shared import operands, shared, skips
from fa_verify.diagnosis.softmax import formats, loops, softmax
from fa_verify.diagnosis.strides import loads, stores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.trial import Trial

__all__ = ["SYMPTOMS", "by_values", "for_forward", "right_forward"]


_ZEROS, _DENOMINATOR = "zeros", "denominator"
SYMPTOMS = (_ZEROS, _DENOMINATOR)  # keys of what says how results are wrong, and not why


def right_forward(trial: Trial, evidence: Evidence) -> Prediction:
    """What a right kernel writes."""
    return Forward(trial, evidence)()


def for_forward(trial: Trial, evidence: Evidence) -> Iterator[Hypothesis]:
    """Causes of a wrong o or lse."""
    problem, config = evidence.problem, trial.execution.config
    predict = Forward(trial, evidence)
    yield from _loaded(trial, predict)
    yield from by_values(evidence, predict.right.values)
    yield from _blind_rows(predict)
    yield from terms.for_forward(predict)
    for text, knobs, beside in packed.diagonals(problem, predict.beside) if evidence.whole else ():
        yield Hypothesis(text, functools.partial(predict, knobs, beside=beside))
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
    both = (*mistaken.one_of_both(trial, evidence), *mistaken.packed(evidence))
    for text, loaded in both if evidence.whole else ():
        yield Hypothesis(text, functools.partial(predict, loaded=loaded), addressing=True)
    yield from _counted(predict, config)
    yield from _merged(predict)
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


def _blind_rows(predict: Forward) -> Iterator[Hypothesis]:
    """Lse of rows that see no key."""
    lse = predict.right.values["lse"]
    if bool(lse.isneginf().any()):
        values = predict.right.values | {"lse": lse.masked_fill(lse.isneginf(), 0.0)}
        text = "rows that see no key are not treated apart: their lse is 0, and not -inf"
        yield Hypothesis(text, functools.partial(_as_is, Prediction(values)))


def _loaded(trial: Trial, predict: Forward) -> Iterator[Hypothesis]:
    """What else may be read in the place of q, k and v."""
    evidence = predict.evidence
    for text, loaded in mistaken.operands(predict.inputs):
        yield Hypothesis(text, functools.partial(predict, loaded=loaded))
    if not evidence.whole:
        return
    slips = scales.slips(trial) if trial.case.problem.fp8 else ()
    for text, loaded in slips:
        yield Hypothesis(text, functools.partial(predict, loaded=loaded), addressing=True)
    yield from _forward_addresses(trial, predict)


def _merged(predict: Forward) -> Iterator[Hypothesis]:
    """Splits of the keys that are merged wrongly."""
    evidence = predict.evidence
    for count, width, even in () if evidence.problem.terms else split_keys.splits(evidence):
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


def by_values(evidence: Evidence, right: dict[str, torch.Tensor]) -> Iterator[Hypothesis]:
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
