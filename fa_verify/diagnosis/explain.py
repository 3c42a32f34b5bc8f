"""Explanation by simulation: which known defect predicts what was observed, on every case.

A suspected fault is kept when a model with it reproduces each failing case, and agrees with each
passing one: there it must be idle. What one case cannot tell apart another one may.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis import hypotheses
from fa_verify.diagnosis.score import Fit, fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.diagnosis.hypothesis import Hypothesis, Prediction
    from fa_verify.trial import Trial

__all__ = ["OR", "SIMULATED", "Explanation", "Pass", "Witness", "explain"]

SIMULATED = "a model with this defect"  # in the text of every cause that a simulation found
OR = "; or "  # before what explains the same as well

# A right hypothesis explains all but the elements where a rounding flips; chance agreement of a
# wrong one is far below. Accumulators in 16 bits are the hardest: each step's rounding depends on
# the float32 sum before it, so some rows drift; hence 0.9.
_LEAST_EXPLAINED = 0.9
_LEAST_REPRODUCED = 0.9  # of the wrong elements, where the cause is no rounding
_LEAST_AGREEING = 0.99  # of a passing case
_LEAST_GAIN = 1.5  # on the wrong elements alone
_LEAST_MERIT = 3.0
_NEARER = 1.2  # times as near as a right kernel's results, on a case that is not the most telling
_MANY = 1000.0
_CLEARLY_BETTER = 1.25  # below that the simpler (earlier) of two hypotheses is named
_MOST_KEPT = 24  # hypotheses that other cases are asked about
_FITTED = 8.0  # a number fitted to each case brings it nearer than the cause that explains them all
_MOST_NAMED = 2  # alternatives
_FOR_CONDITIONAL = 3  # failing cases of a cause that should have broken a passing one too
_GRACE = 2.0  # seconds for other cases when there is no more time for other hypotheses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The forward or the backward pass: its tensors, and where its hypotheses come from."""

    names: tuple[str, ...]
    backward: bool

    def hypotheses(self, witness: Witness) -> list[Hypothesis]:
        """The hypotheses on one case."""
        find = hypotheses.for_backward if self.backward else hypotheses.for_forward
        return list(find(witness.trial, witness.evidence))

    def right(self, witness: Witness) -> Prediction:
        """What a right kernel writes."""
        find = hypotheses.right_backward if self.backward else hypotheses.right_forward
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
    """One trial and its evidence."""

    trial: Trial
    evidence: Evidence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The best hypothesis, how well it fits, and what fits as well.

    Attributes:
        hypothesis: In the words of the first case that fails.
        fit: On the case that tells most.
        failing: Failing cases that it reproduces; passing: passing ones that it agrees with;
            negative: that it does not agree with all of.
        others: Sentences of what explains all of them as well.
    """

    hypothesis: Hypothesis
    fit: Fit
    failing: int
    passing: int
    others: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The sentence with its evidence."""
        gain = f"{self.fit.gain:.2g}" if self.fit.gain < _MANY else f"over {_MANY:g}"
        cases = "the failing case" if self.failing == 1 else f"{self.failing} failing cases"
        idle = f", and is idle on {self.passing} that pass" if self.passing > 0 else ""
        if self.passing < 0:
            idle = ", but would break others, which pass: only some cases have it"
        return (
            f"{self.hypothesis.sentence} ({SIMULATED} reproduces {cases}, {gain} times closer than "
            f"the reference, agrees with {100 * self.fit.explained:.3g}% of all elements{idle})"
            + "".join(f"{OR}{sentence}" for sentence in self.others)
        )


def explain(
    which: Pass, witnesses: Sequence[Witness], end: float, like: str = ""
) -> Explanation | None:
    """The best explanation of what is wrong in one pass, if any fits.

    Args:
        which: The pass.
        witnesses: The trial that is explained, then others.
        end: When to stop trying, on `time.process_time`.
        like: What explains the other pass: the same cause goes before others.
    """
    usable = [w for w in witnesses if w.evidence.small and which.seen(w)]
    failing = [w for w in usable if which.fails(w)]
    if not failing:
        return None
    passing = [w for w in usable if not which.fails(w)]
    lead = max(failing, key=_tells)
    found = which.hypotheses(lead)
    if like:
        found.sort(key=lambda h: not h.sentence.endswith(like))
    kept = _kept(found, lead, end)
    rest = [w for w in failing if w is not lead]
    index = {id(w): _by_key(which, w) for w in (*rest, *passing)}
    merits: list[tuple[float, Hypothesis, Fit]] = []
    conditional: list[tuple[float, Hypothesis, Fit]] = []
    for hypothesis, best in kept:
        if time.process_time() > end + _GRACE:
            break
        logs = [math.log(max(best.merit, 1e-9))]
        for w in rest:
            known = _on(which, w, index[id(w)], hypothesis)
            if known is None:
                continue
            if not _agrees(known, hypothesis):
                break
            logs.append(math.log(max(known.merit, 1e-9)))
        else:
            item = (math.exp(sum(logs) / len(logs)), hypothesis, best)
            if all(_idle(w, index[id(w)], hypothesis) for w in passing):
                merits.append(item)
            elif len(failing) >= _FOR_CONDITIONAL:
                conditional.append(item)
    if merits:
        return _chosen(merits, witnesses[0], which, (len(failing), len(passing)))
    if conditional:
        return _chosen(conditional, witnesses[0], which, (len(failing), -len(passing)))
    return None


def _tells(witness: Witness) -> tuple[bool, bool, int]:
    """How much a failing case tells: a whole one with many wrong elements that are numbers."""
    evidence = witness.evidence
    finite = all(bool(torch.isfinite(o.got[o.wrong]).all()) for o in evidence.seen.values())
    return evidence.whole, finite, evidence.wrongs


def _kept(found: list[Hypothesis], lead: Witness, end: float) -> list[tuple[Hypothesis, Fit]]:
    """The hypotheses that explain the case that tells most, best first, in their order."""
    kept: dict[str, tuple[int, Hypothesis, Fit]] = {}
    for place, hypothesis in enumerate(found):
        if time.process_time() > end:
            break
        known = _fit(hypothesis, lead.evidence)
        if known is None or not _accepted(known, hypothesis):
            continue
        other = kept.get(hypothesis.key)
        if other is None or _better(known, other[2]):
            kept[hypothesis.key] = (place, hypothesis, known)
    best = sorted(kept.values(), key=lambda item: -item[2].merit)[:_MOST_KEPT]
    return [(hypothesis, known) for _, hypothesis, known in sorted(best, key=lambda item: item[0])]


def _by_key(which: Pass, witness: Witness) -> dict[str, list[Hypothesis]]:
    found: dict[str, list[Hypothesis]] = collections.defaultdict(list)
    for hypothesis in which.hypotheses(witness):
        found[hypothesis.key].append(hypothesis)
    return found


def _on(
    which: Pass, witness: Witness, known: dict[str, list[Hypothesis]], hypothesis: Hypothesis
) -> Fit | None:
    """How well the same cause fits another case; None where that case cannot tell."""
    same = known.get(hypothesis.key, [])
    if not same and (hypothesis.fitted or not witness.evidence.whole):
        return None
    fits = [_fit(one, witness.evidence) for one in same]
    usable = [one for one in fits if one is not None]
    if not usable:  # the cause has no effect there: a right kernel's results
        right = which.right(witness)
        evidence = witness.evidence
        return fit(evidence.seen, right.values, right.free, evidence.problem.dtype)
    return max(usable, key=lambda one: one.merit)


def _idle(witness: Witness, known: dict[str, list[Hypothesis]], hypothesis: Hypothesis) -> bool:
    """Whether the cause leaves a passing case as it was; to one that is fitted, nothing fits."""
    same = known.get(hypothesis.key, [])
    if hypothesis.fitted or not same:
        return True
    fits = [_fit(one, witness.evidence) for one in same]
    return any(one is not None and one.explained >= _LEAST_AGREEING for one in fits)


def _fit(hypothesis: Hypothesis, evidence: Evidence) -> Fit | None:
    broken = any(bool((o.wrong & ~torch.isfinite(o.got)).any()) for o in evidence.seen.values())
    if broken and hypothesis.rounding:
        return None  # no format makes NaN of numbers, and NaN agrees with any NaN
    prediction = hypothesis.predict()
    found = fit(evidence.seen, prediction.values, prediction.free, evidence.problem.dtype)
    if _holes_agree(prediction, evidence):  # no value is wrong there, and none is by chance so
        found = dataclasses.replace(found, gain=_MANY, overall=_MANY)
    return found


def _accepted(found: Fit, hypothesis: Hypothesis) -> bool:
    """Whether one case alone speaks for the hypothesis."""
    enough = found.gain >= _LEAST_GAIN and found.merit >= _LEAST_MERIT
    return enough and _agrees(found, hypothesis)


def _agrees(found: Fit, hypothesis: Hypothesis) -> bool:
    """Whether the hypothesis reproduces a case, and no right kernel would as well."""
    if not hypothesis.rounding and found.reproduced < _LEAST_REPRODUCED:
        return False
    return found.explained >= _LEAST_EXPLAINED and found.gain >= _NEARER


def _chosen(
    merits: list[tuple[float, Hypothesis, Fit]],
    first: Witness,
    which: Pass,
    counts: tuple[int, int],
) -> Explanation:
    """The best; of those as good the earliest. What is fitted to each case must be far nearer."""
    top = max(merit for merit, _, _ in merits)
    exact = [item for item in merits if not item[1].fitted and item[0] * _FITTED >= top]
    if exact:
        merits, top = exact, max(merit for merit, _, _ in exact)
    near = [item for item in merits if item[0] * _CLEARLY_BETTER >= top]
    _, hypothesis, best = near[0]
    words = {h.key: h.sentence for h in which.hypotheses(first)}
    named = hypothesis.sentence if hypothesis.fitted else words.get(hypothesis.key, "")
    named = named or hypothesis.sentence
    others = [h.sentence for _, h, _ in near[1:]]
    return Explanation(
        hypothesis=dataclasses.replace(hypothesis, sentence=named),
        fit=best,
        failing=counts[0],
        passing=counts[1],
        others=tuple(dict.fromkeys(o for o in others if o != named))[:_MOST_NAMED],
    )


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
