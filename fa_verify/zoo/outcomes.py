"""`Outcome`: what the oracle made of one defect, and the totals over many. No torch, no Triton."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["Outcome", "Totals", "named", "place", "totals"]

RIGHT, WRONG, UNKNOWN, SHOWN = "right", "wrong", "unknown", "shown"
_UNEXPLAINED = "no known defect explains"
_OR = "; or "  # before alternatives
_MENDED = re.compile(
    r"(?:^|; )([\w.-]+\.py:\d+)(?: `.*?`)?: once "
)  # the line of an edit that mends
_COMPUTED = re.compile(r"; [^;`]* at ([\w.-]+\.py:\d+) `")  # where a cause is at work


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One defect, or a right kernel (tag "right").

    Attributes:
        name: Of the defect; defect: what is wrong; tag, source, why: as its row says.
        kernel: What it was planted in.
        caught: Whether a check failed; checks: which ones, on the first case that failed.
        cases: Until it was caught, that one included, or in all.
        seconds: Of the worker processes for these cases.
        case: The first case that failed; small: the smallest found.
        diagnosis: What was said of it; cause: whether that names the cause: "right", "wrong",
            "unknown", or "" where nothing was caught or there was no time to ask.
        line: What line was named, "file.py:7"; place: whether that is the defect's: "right",
            "wrong"; "shown" where the defect shows there and is elsewhere; or "" where none was
            named or the defect is in no kernel.
        harness: Cases on which the harness itself broke.
        others: Which other oracles flag the defect on the same cases.
    """

    name: str
    defect: str
    tag: str
    source: str = ""
    why: str = ""
    kernel: str = ""
    caught: bool = False
    checks: tuple[str, ...] = ()
    cases: int = 0
    seconds: float = 0.0
    case: str = ""
    small: str = ""
    diagnosis: str = ""
    cause: str = ""
    line: str = ""
    place: str = ""
    harness: int = 0
    others: dict[str, bool] = {}

    @property
    def bad(self) -> bool:
        """Whether the oracle did not do what it must."""
        must = self.tag in ("ttir", "launcher", "operator")
        return self.harness > 0 or (
            self.caught if self.tag == "right" else must and not self.caught
        )


def named(
    diagnoses: Sequence[str], causes: Sequence[str], lines: Collection[str] = ()
) -> tuple[str, str]:
    """The most likely cause that the failures' diagnoses name, and whether it is one of `causes`.

    The first diagnosis that names any cause counts: it stands first in a report. What it names as
    explaining the failure as well does not count. Where all that is named is an edit that mends the
    kernel, its line must be one of the defect's.

    >>> named(["", "softmax_scale is missing"], ["softmax_scale is missing"])
    ('softmax_scale is missing', 'right')
    >>> named(["no known defect explains it; only heads 1 of 2"], ["GQA"])[1]
    'unknown'
    >>> named(["k.py:7: once a < b is a <= b, all pass"], [], ["k.py:7"])[1]
    'right'
    """
    said = [text for text in diagnoses if text and not text.startswith(_UNEXPLAINED)]
    if not said:
        return next((text for text in diagnoses if text), ""), UNKNOWN
    first = said[0].partition(_OR)[0]
    mended = _MENDED.match(first)
    fits = mended[1] in lines if mended else any(cause in first for cause in causes)
    return said[0], RIGHT if fits else WRONG


def place(
    diagnoses: Sequence[str], locations: Sequence[str], lines: Collection[str]
) -> tuple[str, str]:
    """The line that failures name, and whether it is one of the defect's.

    An edit that mends the kernel goes first, then where it computes what the cause speaks of. The
    line of a failure itself, where memory was touched or a NaN was born, is right if the defect is
    there; elsewhere it is where the defect shows, and nothing was said of where it is.

    Args:
        diagnoses: Of the failures.
        locations: Of the same.
        lines: Of the defect: "file.py:7".

    >>> place(["the mask; k.py:7 `x`: once a < b is a <= b, all pass"], ["/a/k.py:9"], ["k.py:7"])
    ('k.py:7', 'right')
    >>> place(["an index is wrong"], ["/a/k.py:9"], ["k.py:7"])
    ('k.py:9', 'shown')
    """
    mended, computed = (
        [found[1] for text in diagnoses if (found := pattern.search(text))]
        for pattern in (_MENDED, _COMPUTED)
    )
    named = [*mended, *computed]
    shown = [location.rpartition("/")[2] for location in locations if location]
    line = "".join((named or shown)[:1])
    if not line or not lines:
        return line, ""
    return line, RIGHT if line in lines else WRONG if named else SHOWN


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Of the defects of one tag, or of several.

    Attributes:
        defects: How many; caught: how many of them.
        cases, seconds: Medians until caught.
        right, wrong, unknown: Diagnoses of those caught.
        placed: Whose line was named rightly; misplaced: whose line was named wrongly; shown: for
            which only the line was known where the defect shows.
    """

    defects: int
    caught: int
    cases: float
    seconds: float
    right: int
    wrong: int
    unknown: int
    placed: int = 0
    misplaced: int = 0
    shown: int = 0


def totals(outcomes: Sequence[Outcome]) -> Totals:
    """The totals of some outcomes."""
    caught = [outcome for outcome in outcomes if outcome.caught]
    causes = [outcome.cause for outcome in caught]
    return Totals(
        defects=len(outcomes),
        caught=len(caught),
        cases=statistics.median([o.cases for o in caught]) if caught else 0.0,
        seconds=statistics.median([o.seconds for o in caught]) if caught else 0.0,
        right=causes.count(RIGHT),
        wrong=causes.count(WRONG),
        unknown=causes.count(UNKNOWN),
        placed=sum(outcome.place == RIGHT for outcome in caught),
        misplaced=sum(outcome.place == WRONG for outcome in caught),
        shown=sum(outcome.place == SHOWN for outcome in caught),
    )
