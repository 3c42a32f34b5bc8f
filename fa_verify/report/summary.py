"""`Summary`: what a run says of each kernel, counted from its record. Every format reads this.

No torch, no Triton. The order of the lines, and how many files they came in, never matters.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from fa_verify.case import Case
from fa_verify.errors import InvalidInputError
from fa_verify.record import CaseRecord, End, Line, Sanitized, Shrunk, Start
from fa_verify.report.coverage import Coverage, coverage
from fa_verify.report.facts import Facts, gather
from fa_verify.report.faults import Fault, Note, find_faults, find_notes
from fa_verify.report.group import Group, count_verdicts, group
from fa_verify.report.result import Result, compared
from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Summary", "exit_code", "finished", "summarise"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run, or several merged.

    Attributes:
        facts: What ran, where, and how fast.
        total: Cases by verdict, every verdict present.
        rows: A group for each kernel and precision, sorted.
        groups: A group for each kernel, precision and pass, sorted.
        faults: Failures that are the same fault as one, likely causes before their consequences.
        notes: Reasons for the verdicts unsupported, inconclusive and error, with counts.
        results: Every case, sorted.
        coverage: What each kernel's cases reached, sorted by kernel.
        sanitized: What each sanitizer did for each kernel.
    """

    facts: Facts
    total: Mapping[Verdict, int]
    rows: tuple[Group, ...]
    groups: tuple[Group, ...]
    faults: tuple[Fault, ...]
    notes: tuple[Note, ...]
    results: tuple[Result, ...]
    coverage: tuple[Coverage, ...] = ()
    sanitized: tuple[Sanitized, ...] = ()

    @property
    def cases(self) -> int:
        """How many cases."""
        return len(self.results)

    @property
    def verified(self) -> int:
        """Cases that reached pass or fail."""
        return self.total[Verdict.PASS] + self.total[Verdict.FAIL]

    @property
    def only_watched(self) -> bool:
        """Whether sanitizers ran and found nothing, and nothing else was to be done."""
        return bool(self.sanitized) and not self.cases

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that a table of it has."""
        return compared({name for row in self.rows for name in row.tensors})

    @property
    def repeats(self) -> int:
        """Cases that another case repeats: same kernel and source, same line, same setup."""
        records = [result.record for result in self.results]
        distinct = {(r.target, r.source_hash, r.case, r.setup) for r in records}
        return len(records) - len(distinct)

    @property
    def mixed(self) -> tuple[str, ...]:
        """Kernels with results of several versions of their source, sorted."""
        sources = {(result.kernel, result.record.source_hash) for result in self.results}
        versions = Counter(kernel for kernel, _ in sources)
        return tuple(sorted(kernel for kernel, number in versions.items() if number > 1))

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels, sorted."""
        return tuple(sorted({row.kernel for row in self.rows}))

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the kernels that fail, sorted."""
        return tuple(sorted({row.kernel for row in self.rows if row.counts[Verdict.FAIL]}))


def summarise(lines: Iterable[Line]) -> Summary:
    """Count the lines of one record or of several.

    Raises:
        InvalidInputError: A case line or a verdict is not one of this version's.
    """
    starts: list[Start] = []
    ends: list[End] = []
    records: list[CaseRecord] = []
    shrunk: list[CaseRecord] = []
    sanitized: list[Sanitized] = []
    for line in lines:
        if isinstance(line, Start):
            starts.append(line)
        elif isinstance(line, End):
            ends.append(line)
        elif isinstance(line, Shrunk):
            shrunk.append(line.record)
        elif isinstance(line, Sanitized):
            sanitized.append(line)
        else:
            records.append(line)
    names = _names((*records, *shrunk))
    results = _results(records, names)
    return Summary(
        facts=gather(starts, ends, records),
        total=count_verdicts(results),
        rows=group(results, lambda r: (r.kernel, r.precision, "")),
        groups=group(results, lambda r: (r.kernel, r.precision, r.direction)),
        faults=find_faults(results, _results(shrunk, names)),
        notes=find_notes(results),
        results=tuple(results),
        coverage=coverage(results),
        sanitized=tuple(sanitized),
    )


def finished(summary: Summary, start: Start, end: End) -> Summary:
    """The same of a run that has ended since: how long it took is known."""
    records = [result.record for result in summary.results]
    return dataclasses.replace(summary, facts=gather([start], [end], records))


def exit_code(summary: Summary, *, strict: bool = False) -> int:
    """The exit status of a run.

    1: a kernel fails; under strict also when a case is unsupported or a tensor is more inconclusive
    than `group.INCONCLUSIVE_LIMIT`. 4: the harness broke. 3: no case reached pass or fail, or a
    sanitizer that was asked for is unavailable. 0: the rest. The first that applies, in this
    order, is returned.
    """
    if summary.total[Verdict.FAIL]:
        return 1
    if strict and (
        summary.total[Verdict.UNSUPPORTED] or any(row.too_inconclusive for row in summary.groups)
    ):
        return 1
    if summary.total[Verdict.ERROR]:
        return 4
    unavailable = any(line.unavailable for line in summary.sanitized)
    return 0 if (summary.verified or summary.only_watched) and not unavailable else 3


def _names(records: Iterable[CaseRecord]) -> dict[tuple[str, str], str]:
    """What each kernel is called: its name, or its target where another file has the same name."""
    targets: defaultdict[str, set[str]] = defaultdict(set)
    for record in records:
        targets[record.kernel].add(record.target)
    return {
        (kernel, target): target if len(found) > 1 else kernel
        for kernel, found in targets.items()
        for target in found
    }


def _results(records: Iterable[CaseRecord], names: Mapping[tuple[str, str], str]) -> list[Result]:
    results = []
    for record in records:
        try:
            verdict = Verdict(record.verdict)
        except ValueError as error:
            msg = f"verdict={record.verdict!r}: must be one of {', '.join(Verdict)}"
            raise InvalidInputError(msg) from error
        results.append(
            Result(
                kernel=names[record.kernel, record.target],
                case=Case.parse(record.case),
                verdict=verdict,
                record=record,
            )
        )
    return sorted(results, key=lambda result: result.order)
