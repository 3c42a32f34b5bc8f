"""Explanation by simulation: which known defect predicts what was observed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis.hypotheses import for_backward, for_forward
from fa_verify.diagnosis.score import Fit, fit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.diagnosis.hypotheses import Hypothesis, Prediction
    from fa_verify.trial import Trial

__all__ = ["SIMULATED", "Explanation", "backward", "forward"]

SIMULATED = "a model with this defect"  # in the text of every cause that a simulation found

# A right hypothesis explains all but the elements where a rounding flips; chance agreement of a
# wrong one is far below. Accumulators in 16 bits are the hardest: each step's rounding depends on
# the float32 sum before it, so some rows drift; hence 0.9.
_LEAST_EXPLAINED = 0.9
_LEAST_GAIN = 1.5  # on the wrong elements alone
_LEAST_MERIT = 3.0
_MANY = 1000.0
_CLEARLY_BETTER = 1.25  # below that the simpler (earlier) of two hypotheses is named


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """The best hypothesis and how well it fits."""

    hypothesis: Hypothesis
    fit: Fit

    @property
    def text(self) -> str:
        """The sentence with its evidence."""
        gain = f"{self.fit.gain:.2g}" if self.fit.gain < _MANY else f"over {_MANY:g}"
        return (
            f"{self.hypothesis.sentence} ({SIMULATED} comes {gain} times closer than "
            f"the reference and agrees with {100 * self.fit.explained:.3g}% of all elements)"
        )


def forward(trial: Trial, evidence: Evidence) -> Explanation | None:
    """The best explanation of a wrong o or lse, if any fits."""
    if not evidence.small:
        return None
    return _best(for_forward(trial, evidence), evidence)


def backward(
    trial: Trial, evidence: Evidence, *, like: Explanation | None = None
) -> Explanation | None:
    """The best explanation of wrong gradients, if any fits.

    Args:
        trial: The trial.
        evidence: Its evidence.
        like: What explains the forward pass: the same cause goes before others.
    """
    if not evidence.small:
        return None
    hypotheses = list(for_backward(trial, evidence))
    if like is not None:
        hypotheses.sort(key=lambda h: not h.sentence.endswith(like.hypothesis.sentence))
    return _best(hypotheses, evidence)


def _best(hypotheses: Iterable[Hypothesis], evidence: Evidence) -> Explanation | None:
    best: Explanation | None = None
    broken = any(bool((o.wrong & ~torch.isfinite(o.got)).any()) for o in evidence.seen.values())
    for hypothesis in hypotheses:
        if broken and hypothesis.rounding:
            continue  # no format makes NaN of numbers, and NaN agrees with any NaN
        prediction = hypothesis.predict()
        found = fit(evidence.seen, prediction.values, prediction.free, evidence.problem.dtype)
        if _holes_agree(prediction, evidence):  # no value is wrong there, and none is by chance so
            found = dataclasses.replace(found, gain=_MANY, overall=_MANY)
        accepted = (
            found.explained >= _LEAST_EXPLAINED
            and found.gain >= _LEAST_GAIN
            and found.merit >= _LEAST_MERIT
        )
        if accepted and (best is None or _better(found, best.fit)):
            best = Explanation(hypothesis, found)
    return best


def _better(found: Fit, best: Fit) -> bool:
    """Clearly nearer, or as near and with far fewer elements left unexplained."""
    if found.merit > _CLEARLY_BETTER * best.merit:
        return True
    left, was = 1 - found.explained, 1 - best.explained
    return found.merit * _CLEARLY_BETTER >= best.merit and left < was / 4


def _holes_agree(prediction: Prediction, evidence: Evidence) -> bool:
    """Whether nobody wrote exactly where the hypothesis says so, and it says so somewhere."""
    return any(
        bool(holes.any()) and torch.equal(holes, ~evidence.seen[name].written)
        for name, holes in prediction.holes.items()
    )
