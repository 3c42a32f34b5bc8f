"""Explanation by simulation: which known defect predicts what was observed, on every case.

A suspected fault is kept when a model with it reproduces each failing case, and agrees with each
passing one: there it must be idle. What one case cannot tell apart another one may.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from typing import TYPE_CHECKING

from fa_verify.diagnosis.asked import NAN_ALONE, NEARER, Asked, Pass, Witness
from fa_verify.diagnosis.incidents import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.diagnosis.hypothesis import Hypothesis
    from fa_verify.diagnosis.score import Fit

__all__ = ["OR", "SIMULATED", "Explanation", "Pass", "Witness", "explain"]

SIMULATED = "a model with this defect"  # in the text of every cause that a simulation found
OR = "; or "  # before what explains the same as well

# A right hypothesis explains all but the elements where a rounding flips; chance agreement of a
# wrong one is far below. Accumulators in 16 bits are the hardest: each step's rounding depends on
# the float32 sum before it, so some rows drift; hence 0.9.
_LEAST_EXPLAINED = 0.9
_LEAST_REPRODUCED = 0.9  # of the wrong elements, where the cause is no rounding
_LEAST_GAIN = 1.5  # on the wrong elements alone
_LEAST_MERIT = 3.0
_MANY = 1000.0
_CLEARLY_BETTER = 1.25  # below that the simpler (earlier) of two hypotheses is named
_FAR_FEWER = 4.0  # times: elements left unexplained
_FLIPS = 1 / 512  # of all elements: a rounding that flips leaves so many of them unexplained
_MOST_KEPT = 24  # hypotheses that other cases are asked about
_FITTED = 8.0  # a number fitted to each case brings it nearer than the cause that explains them all
_MOST_NAMED = 2  # alternatives
_FOR_CONDITIONAL = 3  # failing cases of a cause that should have broken a passing one too
_CHEAPER = 4  # times fewer logits than the case that tells most: a case that sifts hypotheses
_SIEVES = 2  # of them
_GRACE = 2.0  # seconds for other cases when there is no more time for other hypotheses


_Items = list[tuple[float, "Hypothesis", "Fit"]]  # by their merit over all cases


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The best hypothesis, how well it fits, and what fits as well.

    Attributes:
        hypothesis: In the words of the first case that fails.
        fit: On the case that tells most.
        failing: Failing cases that it reproduces; passing: passing ones that it agrees with;
            negative: that it does not agree with all of.
        others: Sentences of what explains all of them as well.
        apart: Cases that fail likewise, but are no neighbours of the first, it does not explain.
        covers: The tensors that it says anything of.
    """

    hypothesis: Hypothesis
    fit: Fit
    failing: int
    passing: int
    others: tuple[str, ...] = ()
    apart: bool = False
    covers: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        """The sentence with its evidence."""
        gain = f"{self.fit.gain:.2g}" if self.fit.gain < _MANY else f"over {_MANY:g}"
        cases = "the failing case" if self.failing == 1 else f"{self.failing} failing cases"
        idle = f", and is idle on {self.passing} that pass" if self.passing > 0 else ""
        if self.passing < 0:
            idle = ", but would break others, which pass: only some cases have it"
        if self.apart:
            idle += "; further cases fail for another reason"
        return (
            f"{self.hypothesis.sentence} ({SIMULATED} reproduces {cases}, {gain} times closer than "
            f"the reference, agrees with {100 * self.fit.explained:.3g}% of all elements{idle})"
            + "".join(f"{OR}{sentence}" for sentence in self.others)
        )


def explain(
    which: Pass, witnesses: Sequence[Witness], end: float, like: str = ""
) -> Explanation | None:
    """The best explanation of what is wrong in one pass, if any fits.

    A kernel may have two faults: where nothing explains every case, what explains this one and its
    neighbours is enough, and the explanation says so.

    Args:
        which: The pass.
        witnesses: The trial that is explained, then others.
        end: When to stop trying, on `time.process_time`.
        like: What explains the other pass: the same cause goes before others.
    """
    found = _explain(which, witnesses, end, like)
    near = [witness for witness in witnesses if not witness.far]
    if found is not None or len(near) == len(witnesses):
        return found
    end = max(end, time.process_time() + _GRACE)
    found = _explain(which, near, end, like)
    if found is None or found.hypothesis.fitted or found.failing < _FOR_CONDITIONAL:
        return None
    return dataclasses.replace(found, apart=True)


def _explain(
    which: Pass, witnesses: Sequence[Witness], end: float, like: str
) -> Explanation | None:
    """What explains all witnesses."""
    usable = [w for w in witnesses if w.evidence.small and which.seen(w)]
    failing = [asked for w in usable if which.fails(w) and (asked := Asked(which, w)).tells]
    if not failing:
        return None
    passing = [Asked(which, w) for w in usable if not which.fails(w)]
    lead = max(failing, key=lambda asked: _tells(asked.witness))
    found = _applicable(which, lead.witness, witnesses[0])
    if like:
        found.sort(key=lambda h: not h.sentence.endswith(like))
    rest = [w for w in failing if w is not lead]
    kept = _kept(found, lead, _sieve(which, lead, rest), end)
    merits: _Items = []
    conditional: _Items = []
    for hypothesis, best in kept:
        if time.process_time() > end + _GRACE:
            break
        logs = [math.log(max(best.merit, 1e-9))]
        for asked in rest:
            known = asked.fit(hypothesis)
            if known is None:
                continue
            if not _agrees(known):
                break
            logs.append(math.log(max(known.merit, 1e-9)))
        else:
            item = (math.exp(sum(logs) / len(logs)), hypothesis, best)
            if all(asked.idle(hypothesis) for asked in passing):
                merits.append(item)
            elif len(failing) >= _FOR_CONDITIONAL and best.gain > NAN_ALONE:
                conditional.append(item)
    picked = _picked(merits, conditional, alone=not passing)
    idle = len(passing) if picked is merits else -len(passing)
    return _chosen(picked, witnesses[0], which, (len(failing), idle)) if picked else None


def _picked(merits: _Items, conditional: _Items, *, alone: bool) -> _Items:
    """Those idle on what passes, or else those that only some cases have, unless NaN fits all."""
    causes = {_bare(h.sentence) for _, h, _ in merits}
    nan = all(fit.gain <= NAN_ALONE for _, _, fit in merits)
    if alone and nan and len(causes) > _MOST_NAMED:  # any read that strays gives it
        return []
    exact = any(not hypothesis.fitted for _, hypothesis, _ in conditional)
    fitted = all(hypothesis.fitted for _, hypothesis, _ in merits)
    return conditional if not merits or (exact and fitted) else merits


def _applicable(which: Pass, lead: Witness, first: Witness) -> list[Hypothesis]:
    """Hypotheses on the case that tells most which may explain the first one.

    What is wrong with a term explains no case that lacks it: two faults have two causes.
    """
    found = which.hypotheses(lead)
    if not (lead.evidence.problem.terms and first.evidence.small):
        return found
    own = {h.key for h in which.hypotheses(first)}
    return [h for h in found if h.key in own]


def _tells(witness: Witness) -> tuple[bool, bool, bool, int]:
    """How much a failing case tells: a whole one with many wrong elements that are numbers.

    Of problems with terms few causes are known.
    """
    evidence = witness.evidence
    return not evidence.problem.terms, evidence.whole, evidence.finite, evidence.wrongs


def _sieve(which: Pass, lead: Asked, rest: list[Asked]) -> list[Asked]:
    """Cheap cases that most hypotheses fail on, cheapest first: small ones, then a part."""
    limit = lead.witness.evidence.logits // _CHEAPER
    cheap = sorted(
        (asked for asked in rest if asked.witness.evidence.logits <= limit),
        key=lambda asked: asked.witness.evidence.logits,
    )[:_SIEVES]
    evidence = lead.witness.evidence.narrowed()
    if evidence is lead.witness.evidence:
        return cheap
    return [*cheap, Asked(which, Witness(lead.witness.trial, evidence))]


def _kept(
    found: list[Hypothesis], lead: Asked, sieve: list[Asked], end: float
) -> list[tuple[Hypothesis, Fit]]:
    """The hypotheses that explain the case that tells most, the best of them, in their order."""
    kept: dict[str, tuple[int, Hypothesis, Fit]] = {}
    for place, hypothesis in enumerate(found):
        if time.process_time() > end:
            break
        fits = (asked.fit(hypothesis) for asked in sieve)
        if not all(known is None or _agrees(known) for known in fits):
            continue
        known = lead.simulated(hypothesis)
        if not _accepted(known):
            continue
        other = kept.get(hypothesis.key)
        if other is None or _better(known, other[2]):
            kept[hypothesis.key] = (place, hypothesis, known)
    late = time.process_time() > end  # a fitted number may imitate what there was no time to try
    left = [item for item in kept.values() if not (late and item[1].fitted)]
    best = sorted(left, key=lambda item: -item[2].merit)[:_MOST_KEPT]
    return [(hypothesis, known) for _, hypothesis, known in sorted(best, key=lambda item: item[0])]


def _accepted(found: Fit) -> bool:
    """Whether one case alone speaks for a hypothesis."""
    return found.gain >= _LEAST_GAIN and found.merit >= _LEAST_MERIT and _agrees(found)


def _agrees(found: Fit) -> bool:
    """Whether a hypothesis reproduces a case, and no right kernel would as well."""
    enough = found.explained >= _LEAST_EXPLAINED and found.reproduced >= _LEAST_REPRODUCED
    return enough and found.gain >= NEARER


def _chosen(
    merits: _Items,
    first: Witness,
    which: Pass,
    counts: tuple[int, int],
) -> Explanation:
    """The best; of those as good the earliest. What is fitted to each case must be far nearer."""
    top = max(merit for merit, _, _ in merits)
    exact = [item for item in merits if not item[1].fitted and item[0] * _FITTED >= top]
    if exact:
        merits, top = exact, max(merit for merit, _, _ in exact)
    near = _whole([item for item in merits if item[0] * _CLEARLY_BETTER >= top])
    if len(_strayed(first) & {"k", "v"}) == 1:  # the other was read at its own heads
        near = [item for item in near if not re.match("GQA|every", item[1].sentence)] or near
    if near[0][2].gain <= NAN_ALONE:
        near = _of_strayed(near, first) or near
    _, hypothesis, best = near[0]
    words = {h.key: h.sentence for h in which.hypotheses(first)}
    named = hypothesis.sentence if hypothesis.fitted else words.get(hypothesis.key, "")
    named = named or hypothesis.sentence
    others = [h.sentence for _, h, _ in near[1:] if _bare(h.sentence) != _bare(named)]
    return Explanation(
        hypothesis=dataclasses.replace(hypothesis, sentence=named),
        fit=best,
        failing=counts[0],
        passing=counts[1],
        others=tuple(dict.fromkeys(others))[:_MOST_NAMED],
        covers=frozenset(hypothesis.predict().values),
    )


def _whole(near: _Items) -> _Items:
    """Without those that leave elements unexplained which others explain; formats always do."""
    left = [1 - fit.explained for _, hypothesis, fit in near if not hypothesis.rounding]
    most = max(_FLIPS, _FAR_FEWER * min(left, default=1.0))
    return [item for item in near if item[1].rounding or 1 - item[2].explained <= most]


def _strayed(first: Witness) -> set[str]:
    """The tensors that were read where they do not lie."""
    found = first.trial.execution.incidents
    return {plain(x.argument) for x in found if not x.kind.endswith("write")}


def _of_strayed(near: _Items, first: Witness) -> _Items:
    """Those about a tensor through which something strayed: NaN does not say through which."""
    strayed = _strayed(first)
    names = [re.escape(name) for name in sorted(strayed)]
    named = "|".join([*names, *(["key head"] if strayed & {"k", "v"} else [])])
    return [item for item in near if named and re.search(rf"\b({named})\b", item[1].sentence)]


def _bare(sentence: str) -> str:
    """Without the gradients that it is about: in one of them a cause may do what it does in all."""
    return re.sub(r"^in (the backward pass|[dqkv, and]+), ", "", sentence)


def _better(found: Fit, best: Fit) -> bool:
    """Clearly nearer, or as near and with far fewer elements left unexplained."""
    if found.merit > _CLEARLY_BETTER * best.merit:
        return True
    left, was = 1 - found.explained, 1 - best.explained
    return found.merit * _CLEARLY_BETTER >= best.merit and left < was / _FAR_FEWER
