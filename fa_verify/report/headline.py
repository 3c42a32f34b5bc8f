"""The verdict of a run in a sentence, and the remark of a row: one wording for every format."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from fa_verify.report.sanitized import missing, sentences
from fa_verify.report.text import count, plural, share
from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.report.faults import Family, Fault
    from fa_verify.report.group import Group
    from fa_verify.report.summary import Summary

__all__ = ["beside", "caveats", "headline", "remark", "where", "word"]

_POSSIBLE: Final = 10  # lines of possible faults before "more": a reader's patience


def word(summary: Summary) -> str:
    """The verdict of the run: FAIL, ERROR, NOTHING VERIFIED, INCOMPLETE or PASS."""
    if summary.total[Verdict.FAIL]:
        return "FAIL"
    if summary.total[Verdict.ERROR]:
        return "ERROR"
    if any(line.unavailable for line in summary.sanitized):
        return "INCOMPLETE"
    if summary.verified and _unfinished(summary):
        return "INCOMPLETE"
    return "PASS" if summary.verified or summary.only_watched else "NOTHING VERIFIED"


def _unfinished(summary: Summary) -> bool:
    """Whether a run was killed, interrupted, or is still going: no whole run has passed."""
    return bool(summary.facts.files) and not summary.facts.complete


def headline(summary: Summary) -> str:
    """What the verdict rests on, without the verdict itself."""
    cases = plural(summary.cases, "case")
    kernels = plural(len(summary.kernels), "kernel")
    if summary.failed:
        names = ", ".join(summary.failed)
        faults = plural(len(summary.faults), "fault")
        some = kernels if len(summary.kernels) == 1 else f"{len(summary.failed)} of {kernels}"
        return f"{some} ({names}): {faults} in {count(summary.total[Verdict.FAIL])} of {cases}"
    if summary.total[Verdict.ERROR]:
        return f"the harness broke on {count(summary.total[Verdict.ERROR])} of {cases}"
    if not summary.cases:
        return "; ".join(sentences(summary.sanitized)) or "no case ran"
    if not summary.verified:
        counts = [
            f"{count(summary.total[verdict])} {verdict}"
            for verdict in (Verdict.UNSUPPORTED, Verdict.INCONCLUSIVE)
            if summary.total[verdict]
        ]
        return f"{kernels}, {cases}: {', '.join(counts)}"
    return f"{kernels}, {count(summary.total[Verdict.PASS])} of {cases} passed and none failed"


def caveats(summary: Summary) -> list[str]:
    """What a reader must know before trusting the verdict."""
    found = list(missing(summary.sanitized))
    if _unfinished(summary):
        found.append("The record has no last line: the run was killed or is still going.")
    found.extend(
        f"{kernel}: results of several versions of its source are mixed."
        for kernel in summary.mixed
    )
    if 0 < summary.cases <= 2 * summary.repeats:  # fewer: shards share their first case
        found.append(f"{plural(summary.repeats, 'case')} ran twice: the same run twice?")
    if summary.total[Verdict.ERROR] and summary.failed:
        found.append(f"The harness broke on {plural(summary.total[Verdict.ERROR], 'case')}.")
    if summary.verified:
        found.extend(
            f"{plural(summary.total[verdict], 'case')} {verdict}: not verified."
            for verdict in (Verdict.UNSUPPORTED, Verdict.INCONCLUSIVE)
            if summary.total[verdict]
        )
    for group in summary.groups:
        for name in group.too_inconclusive:
            tensor = group.tensors[name]
            found.append(
                f"{group.kernel} {group.precision} {group.direction}: the bound says nothing about "
                f"{share(tensor.inconclusive, tensor.elements)} of {name}."
            )
    possible = Counter(
        (result.kernel, line) for result in summary.results for line in result.record.possible
    )
    found.extend(
        f"{kernel}: possibly {line} ({plural(cases, 'case')})."
        for (kernel, line), cases in sorted(possible.items())[:_POSSIBLE]
    )
    if len(possible) > _POSSIBLE:
        found.append(f"{plural(len(possible) - _POSSIBLE, 'more possible fault')}: see the record.")
    return found


def remark(row: Group) -> str:
    """The verdict of a row, with whatever keeps it from being plain."""
    if row.counts[Verdict.FAIL]:
        return f"FAIL in {count(row.counts[Verdict.FAIL])}"
    if row.counts[Verdict.ERROR]:
        return f"ERROR in {count(row.counts[Verdict.ERROR])}"
    parts = [
        f"{count(row.counts[verdict])} {verdict}"
        for verdict in (Verdict.INCONCLUSIVE, Verdict.UNSUPPORTED)
        if row.counts[verdict]
    ]
    if not row.verified:
        return "not verified: " + ", ".join(parts)
    return ", ".join(["pass", *parts])


def beside(family: Family, most: int = 6) -> Iterator[tuple[str, str]]:
    """Labels and lines of the faults of a family beside its first one."""
    for label, faults in (
        ("also", family.others),
        ("hence", family.hence),
        ("with it", family.beside),  # whether it is another fault shows once the first is mended
    ):
        for fault in faults[:most]:
            place = f" at {fault.location}" if fault.location else ""
            yield label, f"{fault.title}{place}, in {plural(fault.cases, 'case')}"
        if len(faults) > most:
            yield label, f"{count(len(faults) - most)} more: see the report"


def where(fault: Fault) -> str:
    """How many cases a fault was seen in, in which precisions and passes."""
    cases = f"in {count(fault.cases)} of {plural(fault.of, 'case')}"
    if not fault.cases:
        cases = "while shrinking another failure"
    precisions = "every precision" if fault.everywhere else ", ".join(fault.precisions)
    return f"{cases} ({precisions}; {' and '.join(fault.directions)})"
