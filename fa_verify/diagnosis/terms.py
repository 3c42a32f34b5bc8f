"""Causes that only a problem with a bias, ALiBi, sinks, dropout or a gradient of lse has."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis.beside import Beside, signed
from fa_verify.diagnosis.hypothesis import Hypothesis, Prediction
from fa_verify.diagnosis.knobs import RIGHT, Knobs
from fa_verify.diagnosis.strides import slips

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.diagnosis.predictions import Backward, Forward
    from fa_verify.inputs import Inputs

__all__ = ["for_backward", "for_forward"]

_Variant = tuple[str, Beside, Knobs]
_LN2 = 0.6931471805599453
_MOST_SINKS = 8  # times that one may be counted: once a split, or a block


def for_forward(predict: Forward) -> Iterator[Hypothesis]:
    """Causes of a wrong o or lse."""
    evidence = predict.evidence
    for sentence, beside, knobs in (
        *_shared(evidence, predict.trial.pristine),
        *_of_forward(predict),
    ):
        yield Hypothesis(sentence, functools.partial(predict, knobs, beside=beside))
    if evidence.terms.sinks is not None:
        yield Hypothesis(
            "lse is without the sink, which o has", functools.partial(_bare_lse, predict)
        )


def for_backward(predict: Backward) -> Iterator[tuple[str, Beside, Knobs]]:
    """Causes of wrong gradients, given the observed o and lse."""
    given, right = predict.evidence.terms, predict.beside
    if right.dlse is not None:
        yield "the gradient of lse is ignored", dataclasses.replace(right, dlse=None), RIGHT
        other = dataclasses.replace(right, dlse=-right.dlse)
        yield "the gradient of lse has the wrong sign", other, RIGHT
    if given.keep is not None:
        assert right.weights is not None  # noqa: S101 - for mypy: made of keep
        kept, p = given.keep.double(), predict.evidence.problem.dropout
        for sentence, weights, dp_weights in (
            ("dP is multiplied by the probability of being dropped", right.weights, kept * p),
            ("dP is divided by the probability of being dropped", right.weights, kept / p),
            ("dv is multiplied by the probability of being dropped", kept * p, right.weights),
            ("dv is divided by the probability of being dropped", kept / p, right.weights),
            ("P is multiplied by the probability of being dropped", kept * p, kept * p),
            ("P is divided by the probability of being dropped", kept / p, kept / p),
            ("dP is not divided by the probability of being kept", right.weights, kept),
            ("dv is not divided by the probability of being kept", kept, right.weights),
            ("nothing is divided by the probability of being kept", kept, kept),
            ("dropout is missing from dP", right.weights, None),
            ("dropout is missing from dv", None, right.weights),
            ("dropout is ignored", None, None),
        ):
            beside = dataclasses.replace(right, weights=weights, dp_weights=dp_weights)
            yield sentence, beside, RIGHT
    yield from _shared(predict.evidence, predict.trial.pristine)


def _of_forward(predict: Forward) -> Iterator[_Variant]:
    """What only the forward pass can get wrong."""
    given, right = predict.evidence.terms, predict.beside
    if right.sinks is not None:
        text = "acc is not rescaled for the sink"
        yield text, right, Knobs(sink_rescales_acc=False)
        text = "the sink does not enter the running maximum: "
        yield f"{text}its exponential overflows", right, Knobs(sink_in_maximum=False)
        bare = Knobs(sink_in_maximum=False, guarded_sink=False)
        yield f"{text}rows that see no key compute exp(-inf - -inf)", right, bare
        text = "the sink enters the running maximum, but is not counted in l"
        for guarded in (True, False):  # a kernel may take l = 0 for 1
            yield text, right, Knobs(sink_in_sum=False, empty_by_l=guarded)
    if given.keep is not None:
        text = "dropout comes before the denominator l, which sums what is kept"
        yield text, right, Knobs(l_of_kept=True)
        kept = dataclasses.replace(right, weights=given.keep.double())
        yield "o is not divided by the probability of being kept", kept, RIGHT
        yield "dropout is ignored", dataclasses.replace(right, weights=None), RIGHT
        other = 1.0 / predict.evidence.problem.dropout
        flipped = dataclasses.replace(right, weights=given.keep.double() * other)
        yield "o is divided by the probability of being dropped", flipped, RIGHT


def _shared(evidence: Evidence, x: Inputs) -> Iterator[_Variant]:
    """What a kernel may have in the place of its terms."""
    given, p = evidence.terms, evidence.problem
    of = functools.partial(Beside.of, p)
    right = of(given)
    if given.bias is not None:
        for sentence, bias in _biases(evidence, given.bias, x):
            yield sentence, of(dataclasses.replace(given, bias=bias)), RIGHT
        if p.softcap:
            yield "the bias is added before the softcap", right, Knobs(bias_before_cap=True)
    if given.slopes is not None:
        for sentence, slopes in _slopes(evidence, given.slopes):
            yield sentence, of(dataclasses.replace(given, slopes=slopes)), RIGHT
        if p.softcap and given.bias is None:
            yield "ALiBi is added before the softcap", right, Knobs(bias_before_cap=True)
        text = "ALiBi's distance keeps its sign: it grows to one side, and falls to the other"
        yield text, of(given, signed(p)), RIGHT
        text = (
            "ALiBi's distance keeps the opposite sign: it falls to one side, and grows to the other"
        )
        yield text, of(given, -signed(p)), RIGHT
        rows, keys = torch.arange(p.seqlen_q)[:, None], torch.arange(p.seqlen_k)
        for sentence, distance in (
            ("ALiBi's distance is |i - j|: the diagonal's shift is missing", rows - keys),
            (
                "ALiBi's distance is to the bottom-right diagonal, not the mask's",
                rows + p.seqlen_k - p.seqlen_q - keys,
            ),
        ):
            yield sentence, of(given, distance.abs().double()), RIGHT
    if given.sinks is not None:
        for sentence, sinks in _sinks(evidence, given.sinks):
            yield sentence, of(dataclasses.replace(given, sinks=sinks)), RIGHT
    if given.keep is not None:
        nothing = dataclasses.replace(given, keep=torch.ones_like(given.keep))
        yield "dropout drops nothing, but divides by what it keeps", of(nothing), RIGHT


def _biases(
    evidence: Evidence, bias: torch.Tensor, x: Inputs
) -> Iterator[tuple[str, torch.Tensor]]:
    yield "the bias is ignored", torch.zeros_like(bias)
    yield "the bias has the wrong sign", -bias
    scaled = bias.double() * evidence.problem.scale
    yield "the bias is added before the logits are scaled", scaled
    yield "the bias is taken in base 2: the factor log2(e) is missing", bias.double() * _LN2
    yield (
        "the bias is taken to be natural: the factor log2(e) is one too many",
        bias.double() / _LN2,
    )
    if evidence.whole and x.bias is not None:
        for sentence, _, load in slips("bias", x.bias):
            yield sentence, load()


def _slopes(evidence: Evidence, slopes: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "ALiBi is ignored", torch.zeros_like(slopes)
    yield "ALiBi's slopes have the wrong sign", -slopes
    scale = evidence.problem.scale
    yield "ALiBi is added before the logits are scaled", slopes.double() * scale
    yield (
        "ALiBi's slopes are taken in base 2: the factor log2(e) is missing",
        slopes.double() * _LN2,
    )
    text = "ALiBi's slopes are multiplied by log2(e) once too often: log2(e) is one too many"
    yield text, slopes.double() / _LN2
    if evidence.whole:
        yield "ALiBi's slopes are those of the next head", slopes.roll(-1)
        yield "ALiBi's slopes are those of the head before", slopes.roll(1)
        yield "ALiBi's slopes are all those of the first head", slopes[:1].expand_as(slopes)
        text = "ALiBi's slope of query head h is that of its key head's number"
        yield text, slopes[torch.arange(len(slopes)) // evidence.problem.group]


def _sinks(evidence: Evidence, sinks: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "the sink is missing", torch.full_like(sinks, -torch.inf)
    yield "the sink is scaled as logits are", sinks.double() * evidence.problem.scale
    yield "the sink is taken in base 2: the factor log2(e) is missing", sinks.double() * _LN2
    for count in range(2, _MOST_SINKS + 1):
        yield f"the sink is counted {count} times", sinks.double() + math.log(count)
    if evidence.whole:
        yield "the sinks are those of the next head", sinks.roll(-1)
        yield "the sinks are all that of the first head", sinks[:1].expand_as(sinks)
        text = "the sink of query head h is that of its key head's number"
        yield text, sinks[torch.arange(len(sinks)) // evidence.problem.group]


def _bare_lse(predict: Forward) -> Prediction:
    bare = dataclasses.replace(predict.beside, sinks=None)
    lse = predict(beside=bare).values["lse"]
    return Prediction(predict.right.values | {"lse": lse})
