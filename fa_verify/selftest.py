"""`selftest`: shows what the oracle catches, by running it on kernels with known defects.

Without a target the defects are those of `fa_verify.zoo.defects`, planted in small right kernels,
which run beside them; with one, those of `fa_verify.zoo.operators`, put on the target's kernel.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from rich.console import Console
from rich.text import Text

from fa_verify import campaign, distribution, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.errors import InvalidInputError
from fa_verify.trial import Trial
from fa_verify.verdict import Verdict
from fa_verify.zoo import defects, operators, table
from fa_verify.zoo.oracles import flags
from fa_verify.zoo.outcomes import Outcome, named, place, totals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fa_verify.kernel import Kernel
    from fa_verify.record import CaseRecord, Shrunk

__all__ = ["Subject", "judged", "of_rows", "selftest"]

_RIGHT = (
    *(f"launch.py:{name}" for name in ("flash", "atomic", "decode_forward", "paged_forward")),
    *(f"launch.py:{name}" for name in ("varlen_forward", "masked_forward")),
    "launch_terms.py:terms",
    "launch_fp8.py:fp8",
)
_SHRINK_SECONDS = 2.0
_CASES_OF_RIGHT = 12  # of each right kernel, that the other oracles judge
_TIMEOUT = 300.0  # a slow machine is no defect
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@dataclasses.dataclass(slots=True)
class Subject:
    """A kernel under selftest, and what has been seen of it so far.

    Attributes:
        kernel: With a defect, or right.
        expected: What is known beforehand.
        causes: Parts of a sentence of diagnosis that names the cause rightly.
        lines: Of a kernel, that the defect changed.
        cases: Judged until it was caught.
        seconds: Of worker processes for these.
        failed: The first case that failed; small: the smallest of the first fault shown.
        harness: Cases on which the harness broke.
    """

    kernel: Kernel
    expected: Outcome
    causes: tuple[str, ...] = ()
    lines: frozenset[str] = frozenset()
    cases: int = 0
    seconds: float = 0.0
    failed: CaseRecord | None = None
    small: CaseRecord | None = None
    harness: int = 0

    def outcome(self) -> Outcome:
        """What came of it."""
        if self.failed is None:
            return msgspec.structs.replace(
                self.expected, cases=self.cases, seconds=self.seconds, harness=self.harness
            )
        text = cause = line = where = ""
        if self.small is not None:
            said = [f.diagnosis for f in self.small.failures]
            text, cause = named(said, self.causes, self.lines)
            line, where = place(said, [f.location for f in self.small.failures], self.lines)
        return msgspec.structs.replace(
            self.expected,
            caught=True,
            checks=tuple(dict.fromkeys(f.check for f in self.failed.failures)),
            cases=self.cases,
            seconds=self.seconds,
            case=self.failed.case,
            small=self.small.case if self.small else "",
            diagnosis=text,
            cause=cause,
            line=line,
            place=where,
            harness=self.harness,
        )


class _Seen:
    """A campaign's listener: counts until the first failure of each subject, and says it."""

    def __init__(self, subjects: Mapping[str, Subject], console: Console) -> None:
        self._subjects = subjects
        self._console = console

    def record(self, record: CaseRecord) -> None:
        subject = self._subjects[record.target]
        if subject.failed is not None:
            return
        subject.cases += 1
        subject.seconds += sum(record.seconds.values())
        subject.harness += record.verdict == Verdict.ERROR
        if record.verdict == Verdict.FAIL:
            subject.failed = record
            checks = ", ".join(dict.fromkeys(f.check for f in record.failures))
            self._say(f"{subject.expected.name}: case {subject.cases}, {checks}  [{record.case}]")

    def shrinking(self, record: CaseRecord) -> None:
        pass

    def shrunk(self, shrunk: Shrunk) -> None:
        subject = self._subjects[shrunk.record.target]
        if subject.small is not None:
            return
        subject.small = shrunk.record
        outcome = subject.outcome()
        self._say(f"{outcome.name}: cause {outcome.cause}: {outcome.diagnosis}  [{outcome.small}]")

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def selftest(
    target: str | None,
    folder: Path,
    *,
    only: Sequence[str] = (),
    cases: int = 300,
    budget: float | None = None,
    seed: int = 0,
    workers: int | None = None,
    others: bool = False,
) -> int:
    """Run the defects, print and write what was caught, return the exit code.

    Args:
        target: A kernel on which the operators are put; None: the zoo.
        folder: Where selftest.json and selftest.md are written.
        only: Names (or beginnings of names) of defects; empty: all.
        cases: Most cases for each defect.
        budget: Seconds for all; what is then not caught counts as escaped, and faults that there
            was no time to make small are not explained.
        seed: Of the distribution.
        workers: Processes; None: one a core.
        others: Ask the rules of other projects about the same cases.

    Returns:
        0, or 1 where a defect that must be caught escaped, a right kernel alarmed, or the harness
        broke; 130 after an interrupt, when only what was decided by then is written.
    """
    console = Console(highlight=False)
    workers = workers or len(os.sched_getaffinity(0))
    plan = campaign.Plan(
        cases=cases,
        seconds=budget,
        seed=seed,
        workers=workers,
        max_failures=1,
        shrinks=1,
        shrink_seconds=_SHRINK_SECONDS,
        timeout=_TIMEOUT,
        turn=1,  # what one defect's first case finds spares its second
    )
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fa-verify-selftest-") as place:
        subjects = {
            subject.kernel.target: subject for subject in _subjects(target, Path(place), only)
        }
        if not subjects:
            msg = f"only={', '.join(only)}: names no defect; see fa_verify/zoo"
            raise InvalidInputError(msg)
        interrupted = False
        try:
            outcomes = judged(subjects, plan, console)
        except KeyboardInterrupt:  # what is known by then is written
            interrupted = True
            known = [s for s in subjects.values() if s.failed is not None or s.cases >= cases]
            outcomes = [subject.outcome() for subject in known]
            console.print(f"interrupted: {len(known)} of {len(subjects)} are decided")
        if others and not interrupted:
            _write(folder, outcomes, _headline(outcomes, time.monotonic() - begin, workers))
            asked = [(where, _asked(x, seed)) for where, x in subjects.items()]
            context = multiprocessing.get_context("forkserver")
            with ProcessPoolExecutor(workers, mp_context=context) as pool:
                found = pool.map(_others, *zip(*asked, strict=True))
                outcomes = [
                    msgspec.structs.replace(outcome, others=flagged)
                    for outcome, flagged in zip(outcomes, found, strict=True)
                ]
    if target is None and not only and not interrupted:
        outcomes += _gaps()
    bad = [outcome for outcome in outcomes if outcome.bad]
    headline = _headline(outcomes, time.monotonic() - begin, workers)
    _write(folder, outcomes, headline)
    for outcome in bad:
        what = "alarmed" if outcome.caught else "escaped" if not outcome.harness else "broke"
        console.print(Text(f"{outcome.name} {what}: {outcome.defect}", style="red"))
    console.print(Text(headline))
    console.print(Text(str(folder / "selftest.md"), style="dim"), soft_wrap=True)
    return _INTERRUPTED if interrupted else int(bool(bad))


def judged(subjects: Mapping[str, Subject], plan: campaign.Plan, console: Console) -> list[Outcome]:
    """What a campaign makes of each subject; they are given by their targets."""
    kernels = tuple(subject.kernel for subject in subjects.values())
    campaign.run(kernels, plan, _Seen(subjects, console))
    return [subject.outcome() for subject in subjects.values()]


def _asked(subject: Subject, seed: int) -> list[str]:
    """What other oracles are asked about: what failed here, or a right kernel's first cases."""
    if subject.failed is not None:
        return [subject.failed.case]
    if subject.expected.tag != "right":
        return []
    cases = distribution.draw(seed, _CASES_OF_RIGHT, subject.kernel.takes)
    return [str(case) for case in cases]


def _others(target: str, cases: Sequence[str]) -> dict[str, bool]:
    """Which other oracles flag any of these cases; runs in a process of its own."""
    torch.set_num_threads(1)
    (kernel,) = loader.load(target)
    found: dict[str, bool] = {}
    for case in cases:
        trial = Trial(kernel, Case.parse(case), Setup(), CpuBackend(seconds=_TIMEOUT))
        found = {name: found.get(name, False) or flag for name, flag in flags(trial).items()}
    return found


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or name.startswith(tuple(only))


def _subjects(target: str | None, place: Path, only: Sequence[str]) -> Iterator[Subject]:
    if target is not None:
        for operator, where in operators.planted(target, place).items():
            if not _wanted(operator.name, only):
                continue
            (mutant,) = loader.load(where)
            yield Subject(
                mutant,
                Outcome(
                    name=operator.name,
                    defect=operator.defect,
                    tag="operator",
                    kernel=target,
                ),
                operator.causes,
            )
    right = [target] if target else [f"{defects.KERNELS / name}" for name in _RIGHT]
    for where in right:
        (kernel,) = loader.load(where)
        if _wanted(kernel.name, only):
            yield Subject(kernel, _right(kernel))
    if target is not None:
        return
    yield from of_rows(
        [row for row in defects.rows() if row.patch and _wanted(row.name, only)], place
    )


def of_rows(
    rows: Sequence[defects.Defect], place: Path, kernels: Path = defects.KERNELS
) -> Iterator[Subject]:
    """Each row's defect, planted in a copy of the folder of kernels."""
    for row, where in defects.planted(rows, place, kernels).items():
        (mutant,) = loader.load(where)
        yield Subject(mutant, _outcome(row), row.causes, defects.lines(row, where, kernels))


def _right(kernel: Kernel) -> Outcome:
    return Outcome(name=kernel.name, defect="none: it is right", tag="right", kernel=kernel.name)


def _outcome(row: defects.Defect) -> Outcome:
    return Outcome(
        name=row.name,
        defect=row.defect,
        tag=row.tag,
        source=row.source,
        why=row.why or row.test,
        kernel=row.kernel if row.patch else "",
    )


def _gaps() -> list[Outcome]:
    """The rows that nothing is planted for."""
    return [_outcome(row) for row in defects.rows() if not row.patch]


def _headline(outcomes: Sequence[Outcome], seconds: float, workers: int) -> str:
    planted = [o for o in outcomes if o.kernel and o.tag != "right"]
    due = [o for o in planted if o.tag != "gpu-only"]
    t = totals(due)
    alarms = collections.Counter(o.caught for o in outcomes if o.tag == "right")[True]
    return (
        f"{t.caught} of {t.defects} defects caught, in a median of {t.cases:g} cases and "
        f"{t.seconds:.1f} s; cause right {t.right}, wrong {t.wrong}, unknown {t.unknown}; "
        f"line right {t.placed}, wrong {t.misplaced}, where it shows {t.shown}; "
        f"{alarms} right kernels flagged ({seconds:.0f} s on {workers} workers)"
    )


def _write(folder: Path, outcomes: Sequence[Outcome], headline: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "selftest.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(outcomes), indent=1)
        )
        (folder / "selftest.md").write_text(table.render(outcomes, headline), encoding="utf-8")
    except OSError as error:
        msg = f"report={str(folder)!r}: cannot be written ({error.strerror}); choose another folder"
        raise InvalidInputError(msg) from error
