"""`Outcome`: what the oracle made of one defect, and the totals over many. No torch, no Triton."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Outcome", "Totals", "named", "totals"]

RIGHT, WRONG, UNKNOWN = "right", "wrong", "unknown"
_UNEXPLAINED = "no known defect explains"
_OR = "; or "  # before alternatives


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
    harness: int = 0
    others: dict[str, bool] = {}

    @property
    def bad(self) -> bool:
        """Whether the oracle did not do what it must."""
        must = self.tag in ("ttir", "launcher", "operator")
        return self.harness > 0 or (
            self.caught if self.tag == "right" else must and not self.caught
        )


def named(diagnoses: Sequence[str], causes: Sequence[str]) -> tuple[str, str]:
    """The most likely cause that the failures' diagnoses name, and whether it is one of `causes`.

    The first diagnosis that names any cause counts: it stands first in a report. What it names as
    explaining the failure as well does not count.

    >>> named(["", "softmax_scale is missing"], ["softmax_scale is missing"])
    ('softmax_scale is missing', 'right')
    >>> named(["no known defect explains it; only heads 1 of 2"], ["GQA"])[1]
    'unknown'
    """
    said = [text for text in diagnoses if text and not text.startswith(_UNEXPLAINED)]
    if said:
        first = said[0].partition(_OR)[0]
        return said[0], RIGHT if any(cause in first for cause in causes) else WRONG
    return next((text for text in diagnoses if text), ""), UNKNOWN


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Of the defects of one tag, or of several.

    Attributes:
        defects: How many; caught: how many of them.
        cases, seconds: Medians until caught.
        right, wrong, unknown: Diagnoses of those caught.
    """

    defects: int
    caught: int
    cases: float
    seconds: float
    right: int
    wrong: int
    unknown: int


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
    )
