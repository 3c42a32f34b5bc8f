"""`Asked`: one case as a witness for hypotheses about one pass."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis import hypotheses, hypotheses_of_gradients
from fa_verify.diagnosis.score import Fit, compared, fit

if TYPE_CHECKING:
    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.diagnosis.hypothesis import Hypothesis, Prediction
    from fa_verify.trial import Trial

__all__ = ["NAN_ALONE", "NEARER", "Asked", "Pass", "Witness"]

NEARER = 1.2  # times as near as a right kernel's results, on a case that is not the most telling
NAN_ALONE = 16.0  # the same where only NaN agrees, which any stray read gives: the least that tells
_LEAST_AGREEING = 0.99  # of a passing case
_REFUTED = Fit(explained=0.0, reproduced=0.0, gain=0.0, overall=0.0)
_STRAYS = ("out-of-bounds-read", "neighbour-read")
_SURE = 1000.0  # times as near, where nobody wrote exactly what a hypothesis says


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The forward or the backward pass: its tensors, and where its hypotheses come from."""

    names: tuple[str, ...]
    backward: bool

    def hypotheses(self, witness: Witness) -> list[Hypothesis]:
        """The hypotheses on one case."""
        find = hypotheses_of_gradients.for_backward if self.backward else hypotheses.for_forward
        return list(find(witness.trial, witness.evidence))

    def right(self, witness: Witness) -> Prediction:
        """What a right kernel writes."""
        find = hypotheses_of_gradients.right_backward if self.backward else hypotheses.right_forward
        return find(witness.trial, witness.evidence)

    def seen(self, witness: Witness) -> bool:
        """Whether the case has this pass."""
        found = witness.evidence.seen
        return self.names[0] in found and (not self.backward or "o" in found)

    def fails(self, witness: Witness) -> bool:
        """Whether it goes wrong there."""
        holes = any(name in witness.trial.execution.unwritten for name in self.names)
        return witness.evidence.wrong(*self.names) or holes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Witness:
    """One trial and its evidence; one that is `far` is no neighbour of the first."""

    trial: Trial
    evidence: Evidence
    far: bool = False


class Asked:
    """A case that hypotheses are asked about; each cause is simulated on it once.

    Attributes:
        witness: The case.
    """

    def __init__(self, which: Pass, witness: Witness) -> None:
        self._which, self.witness = which, witness
        self._compared = compared(witness.evidence.seen, witness.evidence.problem.dtype)
        self._known: dict[str, Fit | None] = {}

    @functools.cached_property
    def _strayed(self) -> bool:
        """Whether something was read that must not be; or nobody watched, for want of a launch."""
        trial = self.witness.trial
        seen = any(i.kind in _STRAYS for i in trial.execution.incidents)
        return seen or trial.backend.device != "cpu" or not self._launched

    @property
    def _launched(self) -> bool:
        """Whether a kernel was launched, so that its accesses were seen."""
        return bool(self.witness.trial.execution.config)

    @functools.cached_property
    def _clear(self) -> bool:
        return any(x.clear for x in self._compared.values())

    @property
    def tells(self) -> bool:
        """Whether anything here is wrong by more than a rounding of a subnormal number."""
        holes = any(not bool(seen.written.all()) for seen in self.witness.evidence.seen.values())
        return holes or any(bool(x.telling.any()) for x in self._compared.values())

    @functools.cached_property
    def _by_key(self) -> dict[str, list[Hypothesis]]:
        found: dict[str, list[Hypothesis]] = collections.defaultdict(list)
        for hypothesis in self._which.hypotheses(self.witness):
            found[hypothesis.key].append(hypothesis)
        return found

    @functools.cached_property
    def _right(self) -> Fit:
        """How well a right kernel's results fit."""
        right = self._which.right(self.witness)
        return fit(self._compared, right.values, right.free)

    def fit(self, hypothesis: Hypothesis) -> Fit | None:
        """How well the same cause fits this case; None where it cannot tell."""
        if hypothesis.key not in self._known:
            self._known[hypothesis.key] = self._best(hypothesis)
        return self._known[hypothesis.key]

    def _best(self, hypothesis: Hypothesis) -> Fit | None:
        same = self._by_key.get(hypothesis.key, [])
        evidence = self.witness.evidence
        if not same and (hypothesis.fitted or not evidence.whole):
            return None
        if not same:  # the cause has no effect there: a right kernel's results
            return self._right
        return max(map(self.simulated, same), key=lambda one: one.merit)

    def idle(self, hypothesis: Hypothesis) -> bool:
        """Whether the cause leaves a passing case as it was; what is fitted fits nothing there."""
        same = self._by_key.get(hypothesis.key, [])
        if hypothesis.fitted or not same:
            return True
        return any(self.simulated(one).explained >= _LEAST_AGREEING for one in same)

    def simulated(self, hypothesis: Hypothesis) -> Fit:
        """How well one hypothesis of this very case fits it."""
        evidence = self.witness.evidence
        prediction = hypothesis.predict()
        if prediction.stray and not self._strayed:
            return _REFUTED
        agree = _holes_agree(prediction, evidence)
        holes = any(bool(x.any()) for x in prediction.holes.values())
        if holes and self._launched and not agree:
            return _REFUTED
        found = fit(self._compared, prediction.values, prediction.free)
        if agree:  # no value is wrong there, and none is by chance so
            found = dataclasses.replace(found, gain=_SURE, overall=_SURE)
        if prediction.stray and not _numbers_agree(prediction, evidence):
            gain, overall = min(found.gain, NAN_ALONE), min(found.overall, 1.0)
            found = dataclasses.replace(found, gain=gain, overall=overall)
        if hypothesis.rounding and evidence.finite:  # a value that flips its rounding stays as far
            found = dataclasses.replace(found, reproduced=1.0)
        clear = self._clear and (found.clear or found.gain >= NEARER)
        if not hypothesis.rounding and not clear:  # nor does this case speak against it
            found = dataclasses.replace(found, gain=max(found.gain, NEARER))
        return found


def _numbers_agree(prediction: Prediction, evidence: Evidence) -> bool:
    """Whether a number is wrong where one is predicted."""
    return any(
        bool((seen.wrong & torch.isfinite(seen.got) & torch.isfinite(value)).any())
        for name, value in prediction.values.items()
        if (seen := evidence.seen.get(name)) is not None
    )


def _holes_agree(prediction: Prediction, evidence: Evidence) -> bool:
    """Whether nobody wrote exactly where the hypothesis says so, and it says so somewhere."""
    return any(
        bool(holes.any()) and torch.equal(holes, ~evidence.seen[name].written)
        for name, holes in prediction.holes.items()
    )
