"""What sanitizers did for each kernel, in a sentence: one wording for every format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.report.text import count, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fa_verify.record import Sanitized

__all__ = ["missing", "sentences"]


def sentences(lines: Iterable[Sanitized]) -> Iterator[str]:
    """What each tool did, without those that are no judges.

    >>> from fa_verify.record import Sanitized
    >>> list(sentences([Sanitized(kernel="k", target="", tool="memcheck", cases=4, asked=4)]))
    ['k: memcheck found nothing in 4 cases']
    """
    for one in sorted(lines, key=lambda line: (line.kernel, line.tool)):
        if one.unavailable:
            continue
        cases = plural(one.cases, "case")
        found = f"faults in {count(one.failed)} of {cases}" if one.failed else f"nothing in {cases}"
        yield f"{one.kernel}: {one.tool} found {found}{_rest(one)}"


def missing(lines: Iterable[Sanitized]) -> Iterator[str]:
    """Tools that were asked for and are no judges: no verdict covers what they see."""
    for one in sorted(lines, key=lambda line: (line.kernel, line.tool)):
        if one.unavailable:
            yield f"{one.kernel}: {one.tool} unavailable: {one.unavailable}"


def _rest(one: Sanitized) -> str:
    """Cases without an answer, or what else limits it."""
    if one.cases < one.asked:
        return f" ({count(one.asked - one.cases)} more did not run: {one.reason})"
    return f" ({one.reason})" if one.reason else ""
