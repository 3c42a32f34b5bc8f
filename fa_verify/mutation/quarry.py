"""`Quarry`: a mutant and what has become of it; `Prey`: a case that it is tried on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fa_verify.backends.base import Setup
    from fa_verify.case import Case
    from fa_verify.mutation.subject import Fate
    from fa_verify.ttir.mutation.recorder import AnyMutant, Found

__all__ = ["Prey", "Quarry"]


@dataclasses.dataclass(slots=True)
class Quarry:
    """A mutant, and what has become of it.

    Attributes:
        mutant: The mutant; found: what is known beforehand.
        cases: Numbers of the cases whose code it is in, until its fate came.
        parts: Case number to the parts of it in which the mutated operation computes anything
            else: on the others it gives the same bits.
        fate: Its end, if it has come; changed: numbers of the cases that gave other bits.
        killer: Number of the case that ended it.
        due: Numbers of the cases that it is to run on, up to its end; tried: that it ran on.
        seconds: Spent.
    """

    mutant: AnyMutant
    found: Found
    cases: set[int] = dataclasses.field(default_factory=set)
    parts: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    fate: Fate | None = None
    killer: int | None = None
    changed: set[int] = dataclasses.field(default_factory=set)
    due: set[int] = dataclasses.field(default_factory=set)
    tried: set[int] = dataclasses.field(default_factory=set)
    seconds: float = 0.0

    def meets(self, number: int, part: int, *, differs: bool) -> None:
        """Note that a part of a case has its code, and whether that computes anything else."""
        self.cases.add(number)
        if differs:
            self.parts.setdefault(number, []).append(part)

    def note(self, fates: Iterable[tuple[Fate, float]], number: int) -> None:
        """Note what became of it, part by part, on a case."""
        self.tried.add(number)
        for fate, seconds in fates:
            self.seconds += seconds
            if fate.kind in ("killed", "invalid"):
                self.fate, self.killer = self.fate or fate, number
            elif fate.kind == "within":
                self.changed.add(number)

    @property
    def proof(self) -> str:
        """Why it makes no difference, wherever it was met; "" if it may."""
        return "" if "" in self.found.proofs else "; ".join(sorted(self.found.proofs))


@dataclasses.dataclass(slots=True)
class Prey:
    """A case that the kernel itself passes.

    Attributes:
        number: Its place among those chosen.
        target: The kernel; case: what it is run on; setup: how.
        late: Where it comes among those that a mutant is tried on.
    """

    number: int
    target: str
    case: Case
    setup: Setup
    late: tuple[bool, int]
