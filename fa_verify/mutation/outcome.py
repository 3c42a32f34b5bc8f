"""`Outcome`: what became of one mutant over all its cases; `Score`: of many."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Outcome", "Score", "score"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one mutant.

    Attributes:
        id: Its name, for `--only`.
        kernel: The Triton function; operator: the kind of change; says: what is wrong.
        file: Where, "" for a launch; line: in it; source: the line's text.
        fate: "killed", "equivalent", "survived" or "invalid".
        check: What killed it; message: what that said, why nothing can, or why it does not run.
        cases: Cases whose code it is in, up to its end.
        reached: On how many of them the changed operation computed anything else; changed: on how
            many of them an output had other bits.
        case: The case that ended it; seconds: spent on it.
    """

    id: str
    kernel: str
    operator: str
    says: str
    fate: str
    file: str = ""
    line: int = 0
    source: str = ""
    check: str = ""
    message: str = ""
    cases: int = 0
    reached: int = 0
    changed: int = 0
    case: str = ""
    seconds: float = 0.0

    @property
    def sentence(self) -> str:
        """What is wrong, where, and what the cases made of it."""
        where = f" at {self.file}:{self.line}" if self.file else f" at the launch of {self.kernel}"
        return f"{self.says}{where}: {self.verdict}"

    @property
    def verdict(self) -> str:  # noqa: PLR0911 - one a fate
        """What the cases made of it."""
        of = f"{self.cases} case{'s' * (self.cases != 1)}"
        if self.fate == "killed":
            return f"killed by {self.check}, case {self.cases}"
        if self.fate == "invalid":
            return self.message
        if self.fate == "equivalent":
            return f"can make no difference ({self.message}), and made none in {of}"
        if not self.cases:
            return "no case ran it"
        if not self.reached:
            return f"never made a difference in {of}"
        if not self.changed:
            return f"made a difference in {self.reached} of {of}, and to no output"
        return f"gave other bits in {self.changed} of {of}, which no check minded"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How many mutants there are of each fate."""

    killed: int = 0
    survived: int = 0
    equivalent: int = 0
    invalid: int = 0

    @property
    def share(self) -> float:
        """Killed, of those that are not proven equivalent and run; 1 where there are none."""
        due = self.killed + self.survived
        return self.killed / due if due else 1.0


def score(outcomes: Iterable[Outcome]) -> Score:
    """Count."""
    fates = [outcome.fate for outcome in outcomes]
    return Score(**{f.name: fates.count(f.name) for f in dataclasses.fields(Score)})
