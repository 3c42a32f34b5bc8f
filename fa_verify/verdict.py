"""`Verdict` and `Failure`: what the harness says of a kernel on a case. No torch."""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["Failure", "Verdict"]


class Verdict(enum.StrEnum):
    """The five answers. Inconclusive is never a pass: the bound says nothing there."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    UNSUPPORTED = "unsupported"
    ERROR = "error"  # the harness itself broke


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One thing that is wrong with a kernel.

    Attributes:
        check: The check that saw it: numerics, nonfinite, memory, unwritten, masking, inputs,
            determinism, metamorphic, dropout, contract, timeout, crash.
        title: A few words, the same for every case with this fault: "dq outside its bound".
        message: What was measured: index, got, expected plus or minus bound, how many of how many.
        tensor: o, lse, dq, dk, dv, an argument's name, or "".
        diagnosis: The likely cause in a sentence; "" if none is known.
        location: "file:line" in the kernel, or "".
        source: The text of that line, or "".
    """

    check: str
    title: str
    message: str
    tensor: str = ""
    diagnosis: str = ""
    location: str = ""
    source: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes two failures the same fault: check, title and line."""
        return self.check, self.title, self.location
