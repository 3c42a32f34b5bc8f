"""What is wrong with a gradient that is summed over sequences or heads: of a bias, of sinks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from fa_verify import bounds
from fa_verify.checks.observed import comparisons
from fa_verify.diagnosis.evidence import gather
from fa_verify.diagnosis.predictions import Backward
from fa_verify.layouts import BHSD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from fa_verify.checks.comparison import Comparison
    from fa_verify.trial import Trial

__all__ = ["summed"]

_FEW = 4  # elements: fewer, the more so if they add up to 0, are any others times a factor
_NEAR = 4.0  # bounds: as near as a right kernel's errors, generously (`fa_verify.diagnosis.score`)
_ALIKE = 0.02  # how far the factors of two cases may be apart, relatively
_AXES = {"b": "sequences", "h": "heads", "q": "queries", "k": "keys"}


def summed(trials: Sequence[Trial], name: str) -> str:
    """The sentence that fits every trial whose gradient of this name is wrong; else ""."""
    found = [(trial, comparisons(trial).get(name)) for trial in trials]
    wrong = [(trial, part) for trial, part in found if part is not None and _is_wrong(part)]
    sentences = [list(_sentences(trial, part, name)) for trial, part in wrong]
    for sentence in sentences[0] if sentences else ():
        if all(sentence in others for others in sentences):
            return sentence
    factors = [_factor(part) for _, part in wrong]
    known = [x for x in factors if x is not None]
    if not known or len(known) < len(factors) or max(known) - min(known) > _ALIKE * abs(known[0]):
        return ""
    return f"{name} is {known[0]:.4g} times what it should be"


def _is_wrong(part: Comparison) -> bool:
    error = (part.got - part.reference).abs()
    return bool(part.judged.logical_and(~(error <= part.bounded.det)).any())


def _sentences(trial: Trial, part: Comparison, name: str) -> Iterator[str]:
    """All that explains one trial, whatever the numbers."""
    told = part.judged & (part.reference.abs() > 2 * _NEAR * part.bounded.det)
    if bool(told.any()):
        got, reference, det = (x[told] for x in (part.got, part.reference, part.bounded.det))
        if bool((got == 0).all()):
            yield f"{name} is 0: it is not computed"
        if bool(((got + reference).abs() <= _NEAR * det).all()):
            yield f"{name} is negated"
    near = _NEAR * part.bounded.det
    for sentence, value in _otherwise(trial, part, name):
        if bool(((part.got - value).abs() <= near)[part.judged].all()):
            yield sentence
    if name == "dbias":
        near = _NEAR * part.bounded.det
        for axis, place, value in _unsummed(trial):
            if bool(((part.got - value).abs() <= near)[part.judged].all()):
                yield f"dbias is not summed over the {_AXES[axis]}: it is that of the {place} one"


def _otherwise(trial: Trial, part: Comparison, name: str) -> Iterator[tuple[str, Tensor]]:
    """The gradient as a kernel computes it that leaves a term out, or takes one too many in."""
    p, x, seen = trial.case.problem, trial.pristine, trial.execution.outputs
    if x.do is None or seen is None or seen.lse is None:
        return
    if p.lse_grad and trial.terms.dlse is not None:
        bare = dataclasses.replace(trial.terms, dlse=None)
        bounded = bounds.bound_backward(
            dataclasses.replace(p, lse_grad=False), trial.kernel.arithmetic, x.q, x.k, x.v, x.do,
            terms=bare, o=seen.o, lse=seen.lse,
        )  # fmt: skip
        for other in bounded:
            if other.name == name:
                yield f"{name} lacks the gradient of lse", other.reference
    if name == "dbias" and p.softcap:
        evidence = gather(trial)
        if evidence.whole and evidence.small:
            ds, slope = Backward(trial, evidence).ds()
            axes = [axis for axis, kept in enumerate(_AXES) if kept not in p.bias]
            capped = (ds * slope).sum(axes, keepdim=True).to(part.reference)
            yield "dbias is multiplied by the softcap's derivative, which comes before it", capped


def _unsummed(trial: Trial) -> Iterator[tuple[str, str, Tensor]]:
    """The gradient of a bias where one axis is not summed over, and of which place it is then."""
    p, x, terms = trial.case.problem, trial.pristine, trial.terms
    seen = trial.execution.outputs
    if terms.bias is None or x.do is None or seen is None or seen.lse is None:
        return
    full = dataclasses.replace(p, bias="".join(_AXES), layout_bias=BHSD)
    spread = dataclasses.replace(terms, bias=terms.bias.expand(full.shape_bias).contiguous())
    bounded = bounds.bound_backward(
        full, trial.kernel.arithmetic, x.q, x.k, x.v, x.do, terms=spread, o=seen.o, lse=seen.lse
    )
    (each,) = (part.reference for part in bounded if part.name == "dbias")
    shared = [axis for axis in _AXES if axis not in p.bias]
    for axis in shared:
        at = list(_AXES).index(axis)
        if each.shape[at] > 1:
            for place, index in (("first", 0), ("last", each.shape[at] - 1)):
                one = each.narrow(at, index, 1)
                yield axis, place, one.sum([list(_AXES).index(x) for x in shared], keepdim=True)


def _factor(part: Comparison) -> float | None:
    """What the right gradient is multiplied by; None if it is not, or too few elements say so."""
    told = part.judged & (part.reference.abs() > 2 * _NEAR * part.bounded.det)
    got, reference, det = (x[told] for x in (part.got, part.reference, part.bounded.det))
    if len(got) < _FEW:
        return None
    factor = float((got * reference / det.square()).sum() / (reference / det).square().sum())
    near = bool(((got - factor * reference).abs() <= _NEAR * det * max(1.0, abs(factor))).all())
    return factor if near else None
