"""Diagnosis: the likely cause of a failure, in a sentence, from its place and by simulation.

`diagnose` reads a failing trial, and runs the kernel on a few cases beside it: a cause must explain
all that fail and be idle on all that pass.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from fa_verify.diagnosis import explain, incidents, patterns, witnesses
from fa_verify.diagnosis.evidence import gather
from fa_verify.diagnosis.explain import OR, SIMULATED
from fa_verify.diagnosis.looser import looser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.case import Case
    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.trial import Trial
    from fa_verify.verdict import Failure

__all__ = ["OR", "SIMULATED", "diagnose"]

_FORWARD = ("o", "lse")
_GRADIENTS = ("dq", "dk", "dv")
_BY_VALUE = ("numerics", "nonfinite", "metamorphic")
_FATAL = ("timeout", "crash", "contract")  # other cases would take as long, or end as badly
_SECONDS = 4.0  # for other cases, and as many for hypotheses


def diagnose(
    trial: Trial,
    failures: Sequence[Failure],
    others: Sequence[Case] = (),
    *,
    seconds: float = _SECONDS,
) -> list[Failure]:
    """The failures, each with its likely cause where one is known; what fits nothing says where.

    Args:
        trial: The trial that they come from.
        failures: What the checks found.
        others: Other cases on which the kernel fails likewise.
        seconds: Spent on running other cases, and as many on trying causes; 0: no other case runs.
    """
    evidence = gather(trial)
    seen = [explain.Witness(trial, evidence)]
    if seconds and not any(f.check in _FATAL for f in failures):
        called = witnesses.call(trial, others, seconds)
        seen += [explain.Witness(other, gather(other)) for other in called]
    causes = _causes(seen, time.process_time() + (seconds or _SECONDS))
    return [
        failure
        if failure.diagnosis
        else dataclasses.replace(failure, diagnosis=_sentence(trial, failure, evidence, causes))
        for failure in failures
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class _Causes:
    """What the values say of each pass."""

    forward: explain.Explanation | None = None
    backward: explain.Explanation | None = None

    @property
    def address(self) -> str:
        """A wrong address explains forbidden accesses too."""
        for found in (self.forward, self.backward):
            if found is not None and found.hypothesis.addressing:
                return found.text
        return ""


def _causes(seen: list[explain.Witness], end: float) -> _Causes:
    forward = explain.explain(explain.Pass(names=_FORWARD, backward=False), seen, end)
    like = "" if forward is None else forward.hypothesis.sentence
    gradients = explain.Pass(names=_GRADIENTS, backward=True)
    return _Causes(forward, explain.explain(gradients, seen, end, like))


def _sentence(trial: Trial, failure: Failure, evidence: Evidence, causes: _Causes) -> str:
    if failure.check == "memory":
        return causes.address or _incident(trial, failure)
    if failure.check == "unwritten":
        if causes.address:
            return causes.address
        return patterns.unwritten(failure.tensor, trial.execution.unwritten[failure.tensor].cpu())
    if failure.check not in _BY_VALUE or failure.tensor not in evidence.seen:
        return _FIXED.get(failure.check, "")
    return _value(trial, failure, evidence, causes)


_FIXED = {
    "masking": "a key that the mask hides enters the result: it is loaded, weighted or skipped "
    "before the mask is applied, or the mask ends a block too late",
    "determinism": "programs write or add to the same elements in an order that is not fixed, or "
    "read memory that another program writes",
    "inputs": "a store goes to an input, by a wrong pointer or a wrong stride",
    "timeout": "a loop does not end, or programs wait for each other",
}


def _value(trial: Trial, failure: Failure, evidence: Evidence, causes: _Causes) -> str:
    name = failure.tensor
    found = causes.forward if name in _FORWARD else causes.backward
    if found is not None and found.hypothesis.follows and causes.forward is not None:
        text = f"follows from the forward pass: {causes.forward.text}"
    elif found is not None and found.hypothesis.follows:
        text = f"no known defect explains the forward pass; {found.text}"
    elif found is not None:
        text = found.text
    elif name in _GRADIENTS and causes.forward is not None:
        text = f"follows from the forward pass: {causes.forward.text}"
    else:
        text = _unexplained(trial, name, evidence)
    if trial.execution.incidents or trial.execution.unwritten:
        return text
    excuse = looser(trial, "" if found is None else found.hypothesis.sentence)
    return f"{text}; {excuse}" if excuse else text


def _unexplained(trial: Trial, name: str, evidence: Evidence) -> str:
    if trial.execution.incidents:
        first = trial.execution.incidents[0]
        return (
            f"follows from the {first.kind} through {first.argument} at {first.file}:{first.line}: "
            + incidents.explain(first, trial.execution.incidents, trial.case.problem)
        )
    if not trial.execution.unwritten:
        sound = not evidence.wrong(*_FORWARD)
        cause = patterns.empty(name, evidence.seen[name], evidence.problem, sound=sound)
        if cause:
            return cause
    known = patterns.pattern(name, evidence.seen[name].wrong, evidence.problem)
    return f"no known defect explains it; {known}" if known else "no known defect explains it"


def _incident(trial: Trial, failure: Failure) -> str:
    if failure.title.startswith("uninitialised") and failure.tensor in trial.execution.unwritten:
        return f"{failure.tensor} is read where the launch before left it unwritten"
    for incident in trial.execution.incidents:
        same = failure.location == f"{incident.file}:{incident.line}"
        if same and incident.argument == failure.tensor and failure.title.startswith(incident.kind):
            return incidents.explain(incident, trial.execution.incidents, trial.case.problem)
    return ""
