"""Causes that only a problem with a bias, ALiBi, sinks, dropout or a gradient of lse has.

Each is the exact result for other terms. What else a kernel may get wrong is tried where it also
fails on problems without terms: the model of blockwise attention knows none.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from fa_verify import bounds, reference
from fa_verify.diagnosis.hypothesis import Hypothesis, Prediction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.terms import Terms
    from fa_verify.trial import Trial

__all__ = ["for_backward", "for_forward", "right_backward", "right_forward"]


def right_forward(evidence: Evidence) -> Prediction:
    """What a right kernel writes."""
    return _forward(evidence, evidence.terms)


def right_backward(trial: Trial, evidence: Evidence) -> Prediction:
    """What a right backward pass writes, given the observed o and lse."""
    return _backward(trial, evidence, evidence.terms)


def for_forward(evidence: Evidence) -> Iterator[Hypothesis]:
    """Causes of a wrong o or lse."""
    for sentence, terms in _other_terms(evidence):
        yield Hypothesis(sentence, functools.partial(_forward, evidence, terms))
    if evidence.terms.sinks is not None:
        yield Hypothesis(
            "lse is without the sink, which o has", functools.partial(_bare_lse, evidence)
        )


def for_backward(trial: Trial, evidence: Evidence) -> Iterator[Hypothesis]:
    """Causes of wrong gradients, given the observed o and lse."""
    if evidence.do is None or not {"o", "lse"} <= set(evidence.seen):
        return
    text = "the gradients are right for the o and lse that the forward pass wrote"
    yield Hypothesis(text, functools.partial(right_backward, trial, evidence), follows=True)
    given = evidence.terms
    if given.dlse is not None:
        for sentence, dlse in (
            ("the gradient of lse is ignored", torch.zeros_like(given.dlse)),
            ("the gradient of lse has the wrong sign", -given.dlse),
        ):
            other = dataclasses.replace(given, dlse=dlse)
            yield Hypothesis(sentence, functools.partial(_backward, trial, evidence, other))
    for sentence, terms in _other_terms(evidence):
        text = f"in the backward pass, {sentence}"
        yield Hypothesis(text, functools.partial(_backward, trial, evidence, terms))


def _other_terms(evidence: Evidence) -> Iterator[tuple[str, Terms]]:
    """What a kernel may have in the place of its terms."""
    given, p = evidence.terms, evidence.problem
    if given.bias is not None:
        yield "the bias is ignored", dataclasses.replace(given, bias=torch.zeros_like(given.bias))
        scaled = given.bias.double() * p.scale
        yield (
            "the bias is added before the logits are scaled",
            dataclasses.replace(given, bias=scaled),
        )
        if p.softcap:
            capped = dataclasses.replace(given, bias=_capped(evidence, given.bias))
            yield "the bias is added before the softcap", capped
    if given.slopes is not None:
        first = given.slopes[:1].expand_as(given.slopes)
        for sentence, slopes in (
            ("ALiBi is ignored", torch.zeros_like(given.slopes)),
            ("ALiBi's slopes have the wrong sign", -given.slopes),
            ("ALiBi's slopes are those of the next head", given.slopes.roll(-1)),
            ("ALiBi's slopes are those of the head before", given.slopes.roll(1)),
            ("ALiBi's slopes are all those of the first head", first),
        ):
            yield sentence, dataclasses.replace(given, slopes=slopes)
    if given.sinks is not None:
        for sentence, sinks in (
            ("the sink is missing", torch.full_like(given.sinks, -torch.inf)),
            ("the sinks are those of the next head", given.sinks.roll(-1)),
            ("the sinks are all that of the first head", given.sinks[:1].expand_as(given.sinks)),
        ):
            yield sentence, dataclasses.replace(given, sinks=sinks)
    if given.keep is not None:
        nothing = dataclasses.replace(given, keep=torch.ones_like(given.keep))
        yield "dropout drops nothing, but divides by what it keeps", nothing


def _capped(evidence: Evidence, bias: torch.Tensor) -> torch.Tensor:
    """What a bias comes to where it is added before the softcap, of each logit."""
    e, p = evidence, evidence.problem
    k = e.k.double().repeat_interleave(p.group, 1)
    logits = (e.q.double() @ k.mT).mul_(p.scale)
    shift = torch.tanh((logits + bias.double()) / p.softcap) - torch.tanh(logits / p.softcap)
    return shift.mul_(p.softcap)


def _forward(evidence: Evidence, terms: Terms) -> Prediction:
    e = evidence
    found = reference.forward(e.problem, e.q, e.k, e.v, terms)
    return Prediction({"o": _rounded(found.o, e.problem.dtype), "lse": found.lse})


def _bare_lse(evidence: Evidence) -> Prediction:
    bare = dataclasses.replace(evidence.terms, sinks=None)
    lse = _forward(evidence, bare).values["lse"]
    return Prediction(_forward(evidence, evidence.terms).values | {"lse": lse})


def _backward(trial: Trial, evidence: Evidence, terms: Terms) -> Prediction:
    e = evidence
    assert e.do is not None  # noqa: S101 - for mypy: there are gradients
    tensors = (x.to(getattr(torch, e.problem.dtype)) for x in (e.q, e.k, e.v, e.do))
    q, k, v, do = tensors
    o, lse = (e.seen[name].got for name in ("o", "lse"))
    arithmetic = trial.kernel.arithmetic
    found = bounds.bound_backward(e.problem, arithmetic, q, k, v, do, terms=terms, o=o, lse=lse)
    values = {x.name: _rounded(x.reference, e.problem.dtype) for x in found[:3]}
    return Prediction(values)


def _rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.to(getattr(torch, dtype)).to(torch.float64)
