"""Diagnosis: the likely cause of a failure, in a sentence, from its place and by simulation.

`diagnose` reads a failing trial, and runs the kernel on a few cases beside it: a cause must explain
all that fail and be idle on all that pass.
"""

from __future__ import annotations

import dataclasses
import re
import time
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis import explain, incidents, patterns, repair, witnesses
from fa_verify.diagnosis.dropout import other_draw
from fa_verify.diagnosis.evidence import SUMMED, gather
from fa_verify.diagnosis.explain import OR, SIMULATED
from fa_verify.diagnosis.finite_mask import finite_mask
from fa_verify.diagnosis.hypotheses import SYMPTOMS
from fa_verify.diagnosis.incidents import plain
from fa_verify.diagnosis.looser import looser
from fa_verify.diagnosis.summed import summed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fa_verify.backends.base import Execution, Incident
    from fa_verify.case import Case
    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.problem import Problem
    from fa_verify.trial import Trial
    from fa_verify.verdict import Failure

__all__ = ["OR", "SIMULATED", "diagnose"]

_FORWARD = ("o", "lse")
_GRADIENTS = ("dq", "dk", "dv")
_BY_VALUE = ("numerics", "nonfinite", "metamorphic")
_ELSEWHERE = ("out-of-bounds-write", "race")
_FATAL = ("timeout", "crash", "contract")  # other cases would take as long, or end as badly
_UNKNOWN = "no known defect explains it"
_FEW = 3  # failing cases without a forbidden access, which need a cause of their own
_SECONDS = 10.0
_ON_CASES, _ON_CAUSES, _ON_LINES = 0.25, 0.4, 0.35  # shares of it


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
        seconds: Of this process, for all of it: what is not tried by then is not said. A quarter
            goes to other cases, two to causes, the rest to edits of the kernel, fewer where the
            cause is known; 0: no other case runs.
    """
    if not failures:
        return []
    begin = time.process_time()
    evidence = gather(trial)
    seen = [explain.Witness(trial, evidence)]
    if seconds and not any(f.check in _FATAL for f in failures):
        called = witnesses.call(trial, others, seconds * _ON_CASES)
        far = set(others[1:])  # the first is what was made small
        seen += [explain.Witness(x, gather(x), far=x.case in far) for x in called]
    causes = _causes(seen, begin + (seconds or _SECONDS) * (_ON_CASES + _ON_CAUSES))
    trials = [witness.trial for witness in seen]
    found = [f.diagnosis or _sentence(trials, f, evidence, causes) for f in failures]
    if seconds and len(trials) > 1:
        known = bool(found[0]) and not found[0].startswith(_UNKNOWN)
        left = begin + seconds - time.process_time()
        left = min(left, seconds * _ON_LINES) if known else left
        mended = repair.mend(trials, left, found[0])
        found = [
            _joined(text, mended) if n == 0 or text.startswith(_UNKNOWN) else text
            for n, text in enumerate(found)
        ]
    return [
        dataclasses.replace(failure, diagnosis=text)
        for failure, text in zip(failures, found, strict=True)
    ]


def _joined(cause: str, mended: str) -> str:
    """A cause, and the line that mends the kernel: which is the cause where none is known.

    Edits of several lines leave open which of them it is.
    """
    if not mended:
        return cause
    if not cause or cause.startswith(_UNKNOWN):
        return f"{_UNKNOWN}; {mended}" if OR in mended else mended
    return f"{cause}; {mended}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Causes:
    """What the values say of each pass."""

    forward: explain.Explanation | None = None
    backward: explain.Explanation | None = None
    elsewhere: bool = False  # found on cases without a forbidden access

    def address(self, name: str) -> str:
        """A wrong address of a tensor explains forbidden accesses to it too."""
        for found in (self.forward, self.backward):
            if found is not None and found.hypothesis.addressing:
                sentence = found.hypothesis.sentence
                if re.search(rf"head|documents|packed|\b{re.escape(name)}\b", sentence):
                    return found.text
        return ""


def _causes(seen: list[explain.Witness], end: float) -> _Causes:
    which, elsewhere = explain.Pass(names=_FORWARD, backward=False), False
    forward = explain.explain(which, seen, end)
    clean = [x for x in seen if not (x.trial.execution.incidents or x.trial.execution.unwritten)]
    if forward is None and sum(map(which.fails, clean)) >= _FEW and len(clean) < len(seen):
        forward = explain.explain(which, clean, end)
        elsewhere = forward is not None
    like = "" if forward is None else forward.hypothesis.sentence
    gradients = explain.Pass(names=_GRADIENTS, backward=True)
    return _Causes(forward, explain.explain(gradients, seen, end, like), elsewhere)


def _sentence(
    trials: Sequence[Trial], failure: Failure, evidence: Evidence, causes: _Causes
) -> str:
    """The cause of one failure of the first of the trials."""
    name = failure.tensor
    if failure.check == "memory":
        return _stray(trials, failure, causes)
    if failure.check == "unwritten":
        return causes.address(name) or _unwritten(trials, name)
    if failure.check == "metamorphic" and not evidence.wrong(name):
        return next((text for part, text in _RELATIONS.items() if part in failure.title), "")
    if failure.check == "contract" and "grid=" in failure.message:
        return "an axis of the launch's grid is longer than CUDA allows: only axis 0 passes 65535"
    if failure.check not in _BY_VALUE or name not in evidence.seen:
        return _of_no_head(trials, failure)
    return _value(trials, failure, evidence, causes)


def _stray(trials: Sequence[Trial], failure: Failure, causes: _Causes) -> str:
    """The cause of a forbidden access."""
    seen = _incident(trials, failure)
    # A page that does not exist comes of its table: strides explain NaN as well as anything.
    if incidents.NO_PAGE in seen:
        return seen
    if causes.elsewhere and causes.forward is not None:  # what strays is not all that is wrong
        return causes.forward.text
    return causes.address(plain(failure.tensor)) or seen


def _of_no_head(trials: Sequence[Trial], failure: Failure) -> str:
    """The cause of a failure that no head's values say anything of."""
    if failure.check == "numerics" and failure.tensor in SUMMED:
        return summed(trials, failure.tensor) or _UNKNOWN
    finite = finite_mask(trials[0]) if failure.check == "masking" else ""
    return finite or _FIXED.get(failure.check, "")


_RELATIONS = {
    "its batch mates": "how a sequence is computed hangs on the rest of the batch: the number of "
    "splits, the size of a block or an order of sums is chosen by the batch",
}
_FIXED = {
    "masking": "a key that the mask hides enters the result: it is loaded, weighted or skipped "
    "before the mask is applied, or the mask ends a block too late",
    "determinism": "programs write or add to the same elements in an order that is not fixed, or "
    "read memory that another program writes",
    "inputs": "a store goes to an input, by a wrong pointer or a wrong stride",
    "timeout": "a loop does not end, or programs wait for each other",
}


def _value(trials: Sequence[Trial], failure: Failure, evidence: Evidence, causes: _Causes) -> str:
    name, trial = failure.tensor, trials[0]
    found = causes.forward if name in _FORWARD else causes.backward
    if found is not None and name not in found.covers:
        found = None
    if found is not None and found.hypothesis.follows and causes.forward is not None:
        text = f"follows from the forward pass: {causes.forward.text}"
    elif found is not None and found.hypothesis.follows:
        text = f"no known defect explains the forward pass; {found.text}"
    elif found is not None and not (_fits_anything(found, name) and causes.forward is not None):
        symptom = found.hypothesis.key in SYMPTOMS  # of a cause that is not known
        text = f"{_UNKNOWN}: {found.text}" if symptom else found.text
    elif name in _GRADIENTS and causes.forward is not None:
        text = f"follows from the forward pass: {causes.forward.text}"
    else:
        drawn = other_draw(trial)
        if drawn:
            return drawn
        text = _unexplained(trials, name, evidence)
    if trial.execution.incidents or trial.execution.unwritten:
        return text
    excuse = looser(trial, "" if found is None else found.hypothesis.sentence)
    return f"{text}; {excuse}" if excuse else text


def _fits_anything(found: explain.Explanation, name: str) -> bool:
    """Whether numbers were fitted to gradients, which a cause of the forward pass does without."""
    return name in _GRADIENTS and found.hypothesis.fitted


def _unexplained(trials: Sequence[Trial], name: str, evidence: Evidence) -> str:
    trial = trials[0]
    if trial.execution.incidents:
        first = trial.execution.incidents[0]
        where = f"the {first.kind} through {first.argument} at {first.file}:{first.line}"
        cause = incidents.likeliest(first, _seen(trials))
        if plain(first.argument) in trial.execution.unwritten:
            cause = _unwritten(trials, plain(first.argument))
        if cause.startswith(_UNKNOWN):
            return f"{_UNKNOWN}: it follows from {where}"
        return f"follows from {where}: {cause}"
    if not trial.execution.unwritten:
        sound = not evidence.wrong(*_FORWARD)
        read = _nan_was_read(trial, name, evidence)
        cause = read or patterns.empty(name, evidence.seen[name], evidence.problem, sound=sound)
        if cause and (read or all(_empty_too(other, name) for other in trials[1:])):
            return cause
    known = patterns.pattern(name, evidence.seen[name].wrong, evidence.problem)
    return f"{_UNKNOWN}; {known}" if known else _UNKNOWN


def _empty_too(trial: Trial, name: str) -> bool:
    """Whether what rows without keys do explains another case as well, if it fails."""
    evidence = gather(trial)
    if name not in evidence.seen or not evidence.wrong(name):
        return True
    sound = not evidence.wrong(*_FORWARD)
    return bool(patterns.empty(name, evidence.seen[name], evidence.problem, sound=sound))


def _nan_was_read(trial: Trial, name: str, evidence: Evidence) -> str:
    """Whether NaN of o was born in no kernel, where the scores were right and nothing strayed."""
    watched = trial.backend.device == "cpu" and bool(trial.execution.config)
    born = any(note.kind == "nan-born" for note in trial.execution.notes)
    nan = name == "o" and bool(torch.isnan(evidence.seen["o"].got).any())
    if not watched or born or not nan or evidence.wrong("lse"):
        return ""
    return (
        "v of hidden keys comes through: where no query sees a key its tile holds NaN, and 0 times "
        "NaN is NaN: mask the load of v, with other=0"
    )


def _incident(trials: Sequence[Trial], failure: Failure) -> str:
    unwritten = trials[0].execution.unwritten
    if failure.title.startswith("uninitialised") and plain(failure.tensor) in unwritten:
        name = plain(failure.tensor)
        return (
            f"{name} is read where the launch before left it unwritten: {_unwritten(trials, name)}"
        )
    for trial in trials:  # a check may have run the kernel again, and seen what no trial did
        for incident in trial.execution.incidents:
            same = failure.location == f"{incident.file}:{incident.line}"
            same = same and failure.title.startswith(incident.kind)
            if same and incident.argument == failure.tensor:
                return incidents.likeliest(incident, _seen(trials))
    return ""


def _seen(trials: Sequence[Trial]) -> list[tuple[tuple[Incident, ...], Problem]]:
    return [(trial.execution.incidents, trial.case.problem) for trial in trials]


def _unwritten(trials: Sequence[Trial], name: str) -> str:
    """What all cases say of where nobody writes a tensor."""
    elsewhere = (x for trial in trials for x in trial.execution.incidents)
    if any(x.kind in _ELSEWHERE and plain(x.argument) == name for x in elsewhere):
        return (
            f"{_UNKNOWN}: {name} is not written everywhere, and something is written elsewhere: a "
            "stride, an offset or a mask of its store is wrong"
        )
    holes = []
    for trial in trials:
        tensor = next(
            (x for n, x in _tensors(trial.execution) if n == name and x is not None), None
        )
        if tensor is not None:
            none = torch.zeros(tensor.shape, dtype=torch.bool)
            left = trial.execution.unwritten.get(name, none).cpu()
            holes.append((left, trial.case.problem))
    return patterns.unwritten(name, trials[0].execution.unwritten[name].cpu(), holes)


def _tensors(execution: Execution) -> Iterator[tuple[str, torch.Tensor | None]]:
    for part in (execution.outputs, execution.grads):
        for name in (*_FORWARD, *_GRADIENTS):
            yield name, getattr(part, name, None)
