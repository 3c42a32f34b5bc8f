"""Repair: the small edit of a kernel after which failing cases pass, and passing ones still do.

It names the line; where none was found in time, `lines` may. Edits of the kernel's IR are tried one
after the other, the likeliest first, on the cheapest case first; what mends it is tried on all
others, then on cases that nobody chose: an edit that avoids what is wrong mends cases that are like
each other. Only the CPU backend can.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import linecache
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fa_verify import checks, distribution
from fa_verify.backends.cpu import CpuBackend
from fa_verify.checks import reruns
from fa_verify.checks.observed import comparisons
from fa_verify.diagnosis import lines
from fa_verify.diagnosis.incidents import plain
from fa_verify.inputs import duplicate
from fa_verify.trial import Trial
from fa_verify.ttir.mutation.repairs import Repairs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from fa_verify.bounds import Bounded
    from fa_verify.inputs import Inputs
    from fa_verify.kernel import Outputs
    from fa_verify.ttir.mutation.repairs import AnyRepair, Place

__all__ = ["mend"]

# Those of which a kernel allows few come first, of those that people get wrong; what is not named
# comes after, the launch last.
_ORDER = (
    "masked-other",
    "shift-comparison",
    "loop-bound",
    "flip-comparison",
    "change-constant",
    "other-operation",
    "add-atomic",
    "other-quotient",
    "wrong-argument",
    "other-index",
    "add-factor",
    "swap-operands",
    "drop-cast",
    "drop-operand",
)
_HINTS = (  # what a cause that is known speaks of, and where its line may be then
    (r"head|sequence|read at|place of", ("other-index", "other-quotient")),
    (r"stride|address|head|sequence", ("wrong-argument", "other-operation")),
    (r"lacks? the factor|missing", ("add-factor",)),
    (r"scale|log2|factor|sign is|times what", ("drop-operand", "other-operation")),
    (r"without an atomic", ("add-atomic",)),
)
_GRADIENTS = frozenset({"dq", "dk", "dv"})
_PATIENCE = 1.5  # seconds of one run: an edit may make a loop that does not end
_MOST = 3  # repairs that are named
_ENOUGH = 2  # failing cases; one alone is mended by chance
_DRAWN = 12  # cases that nobody chose: each kind of corner, after cases drawn at random
_DRAWN_SECONDS = 1.5  # of this process, on running them
_DRAWN_ELEMENTS = 1 << 14  # logits of one: some hundredths of a second


class _Mended(Trial):
    """A trial of the kernel with an edit, which takes the inputs of the trial without it."""

    def __init__(self, base: Trial, backend: CpuBackend) -> None:
        super().__init__(base.kernel, base.case, base.setup, backend, independent=base.independent)
        self._base = base

    @functools.cached_property
    def pristine(self) -> Inputs:
        return self._base.pristine

    @functools.cached_property
    def inputs(self) -> Inputs:
        return duplicate(self._base.pristine)

    @functools.cached_property
    def forward_bounds(self) -> tuple[Bounded, Bounded]:
        return self._base.forward_bounds

    @functools.cached_property
    def backward_bounds(self) -> tuple[Bounded, ...]:
        return self._base.backward_bounds  # conditional on o and lse, which are kept


@dataclasses.dataclass(slots=True)
class _Case:
    """A case, whether it fails, and the edits that it allows."""

    trial: Trial
    fails: bool
    allows: dict[AnyRepair, Place]


def mend(trials: Sequence[Trial], seconds: float, cause: str = "") -> str:
    """The edits that mend the kernel, or else where it computes what the cause speaks of.

    "" where there is neither.

    Args:
        trials: The trial that is explained, then others.
        seconds: Of this process.
        cause: What is known of it: the edits, and the lines, that it speaks of are tried first.
    """
    end = time.process_time() + seconds
    if trials[0].backend.device != "cpu" or not trials[0].execution.config:
        return ""
    parts = [_forward_alone(trial) for trial in trials]
    if not any(map(_fails, parts)):
        parts = [_backward_alone(trial) for trial in trials if trial.case.backward]
    parts.sort(key=_cost)
    fails = [_fails(trial) for trial in parts]
    if sum(fails) < _ENOUGH:
        return ""
    cases = [_Case(*item, _allowed(item[0])) for item in zip(parts, fails, strict=True)]
    text, suspects = lines.suspected(next(x.trial for x in cases if x.fails), cause)
    drawn: list[_Case] | None = None
    found: dict[tuple[str, int], list[str]] = {}
    counts: dict[tuple[str, int], tuple[int, int]] = {}
    at_once = {(line.file, line.line) for line in suspects}
    for repair, place in _ordered([case for case in cases if case.fails], cause, at_once):
        if time.process_time() > end or sum(map(len, found.values())) == _MOST:
            break
        known = sorted((x for x in cases if repair in x.allows), key=lambda x: not x.fails)
        failing = sum(x.fails for x in known)
        if failing >= _ENOUGH and all(_passes(x.trial, repair) for x in known):
            if drawn is None:
                drawn = list(_drawn(trials[0]))
            if not all(_right(x.trial, repair) for x in drawn if repair in x.allows):
                continue
            at = (place.file, place.line)
            found.setdefault(at, []).append(place.says)
            counts[at] = (failing, len(known) - failing)
    mended = "; or ".join(_said(at, says, *counts[at]) for at, says in found.items())
    return mended or lines.said(text, suspects)


def _said(place: tuple[str, int], edits: Sequence[str], failing: int, passing: int) -> str:
    file, line = place
    where = f"{Path(file).name}:{line}" if file else "the launch"
    source = linecache.getline(file, line).strip() if file else ""
    idle = f", and the {passing} that pass still do" if passing else ""
    shown = f" `{source}`" if source else ""
    once = " (or ".join(edits[:2]) + ")" * (len(edits) > 1)
    return f"{where}{shown}: once {once}, all {failing} failing cases pass{idle}"


def _drawn(trial: Trial) -> Iterator[_Case]:
    """Small cases of the default distribution with the dtype of this one, as the kernel has them.

    Every one counts, whether it fails without the edit or not.
    """
    end = time.process_time() + _DRAWN_SECONDS
    dtype = trial.case.problem.dtype
    takes = trial.kernel.takes
    for case in distribution.draw(0, _DRAWN, takes, dtype=dtype, max_elements=_DRAWN_ELEMENTS):
        if time.process_time() > end:
            return
        other = Trial(trial.kernel, case, trial.setup, trial.backend, independent=False)
        allows = _allowed(other)
        if allows:
            yield _Case(other, fails=False, allows=allows)


def _forward_alone(trial: Trial) -> Trial:
    case = dataclasses.replace(trial.case, backward=False)
    return Trial(trial.kernel, case, trial.setup, trial.backend, independent=trial.independent)


def _backward_alone(trial: Trial) -> Trial:
    """The backward pass with the outputs of the forward pass that was run."""
    kept = trial.execution.outputs
    assert kept is not None  # noqa: S101 - for mypy: no pass failed before this one
    kernel = dataclasses.replace(trial.kernel, forward=functools.partial(_kept, kept))
    return Trial(kernel, trial.case, trial.setup, trial.backend, independent=trial.independent)


def _kept(outputs: Outputs, *_: object, **__: object) -> Outputs:
    return copy.deepcopy(outputs)


def _ordered(
    failing: Sequence[_Case], cause: str, suspects: Collection[tuple[str, int]]
) -> Iterator[tuple[AnyRepair, Place]]:
    """The edits that failing cases allow, the likeliest first: those of suspected lines."""
    hinted = [name for words, names in _HINTS if re.search(words, cause) for name in names]
    wrong = {name for case in failing for name in _wrong(case.trial)}
    known: dict[AnyRepair, Place] = {}
    for case in failing:
        for repair, place in case.allows.items():
            writes = {plain(name) for name in place.writes}
            if not wrong or not writes or not writes <= _GRADIENTS - wrong:
                known.setdefault(repair, place)
    rank = {operator: index for index, operator in enumerate(dict.fromkeys((*hinted, *_ORDER)))}
    last = len(rank)

    def late(item: tuple[AnyRepair, Place]) -> tuple[bool, bool, int]:
        place = item[1]
        elsewhere = (place.file, place.line) not in suspects
        return elsewhere, not place.file, rank.get(item[0].operator, last)

    yield from sorted(known.items(), key=late)


def _wrong(trial: Trial) -> Iterator[str]:
    for name, part in comparisons(trial).items():
        if bool(((part.ratio > 1) | part.broken).any()):
            yield name


def _cost(trial: Trial) -> float:
    return trial.execution.seconds


def _allowed(trial: Trial) -> dict[AnyRepair, Place]:
    repairs = Repairs()
    backend = CpuBackend(seconds=10 * _PATIENCE, alteration=repairs)
    _Mended(trial, backend).execution  # noqa: B018 - it is run for what is noted
    return repairs.found


def _passes(trial: Trial, repair: AnyRepair) -> bool:
    return not _fails(_Mended(trial, CpuBackend(seconds=_PATIENCE, alteration=repair)))


def _right(trial: Trial, repair: AnyRepair) -> bool:
    """The same of both passes: the gradients' bounds are then those of the mended o and lse.

    Few edits come here, and one run that a busy machine makes slow must not refute the right one.
    """
    backend = CpuBackend(seconds=10 * _PATIENCE, alteration=repair)
    return not _fails(Trial(trial.kernel, trial.case, trial.setup, backend, independent=False))


def _fails(trial: Trial) -> bool:
    """Whether a check that needs no other run minds anything."""
    if trial.execution.error:
        return True
    once = (check for check in checks.ALL if check is not reruns.check)
    return any(True for check in once for _ in check(trial))
