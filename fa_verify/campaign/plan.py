"""`Plan`: what a campaign does, and `Listener`: who is told of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from fa_verify.backends.fences.fence import Mode
    from fa_verify.record import CaseRecord, Shrunk

__all__ = ["Listener", "Plan"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a campaign does.

    Attributes:
        backend: "cpu" or "cuda".
        cases: Cases for each kernel; None: as many as the budget allows.
        seconds: Budget of the whole run, shrinking included; None: no limit.
        seed: The run's seed; every shard's follows from it.
        workers: How many cases are in work at a time, on a card `lanes` times as many.
        lanes: Processes of a worker (CUDA): what a case takes is mostly a processor's time.
        timeout: Seconds that one case may take.
        memory: Bytes that one worker may allocate.
        max_failures: Failing cases after which a kernel gets no more cases.
        shrinks: Distinct faults of one kernel that are made small.
        shrink_seconds: Seconds spent on making one fault small.
        turn: Cases of one kernel before the next kernel's turn.
        dtype: Only this dtype, if given.
        stress: Some cases also run many times under stress, under every configuration, and with
            other numbers of warps and stages (`cases.further`).
        long: The long cases, once, in the place of drawn ones (CUDA only); under stress all of
            them run many times, each in one configuration.
        fence: Mode of the fences around tensors (CUDA).
        spool: Folder where processes say what they are at; None: a temporary one.
    """

    backend: str = "cpu"
    cases: int | None = 200
    seconds: float | None = None
    seed: int = 0
    workers: int = 1
    lanes: int = 1
    timeout: float = 60.0
    memory: int = 8 << 30
    max_failures: int = 10
    shrinks: int = 4
    shrink_seconds: float = 20.0
    turn: int = 16
    dtype: str | None = None
    stress: bool = False
    long: bool = False
    fence: Mode = "poison"
    spool: Path | None = None

    @property
    def processes(self) -> int:
        """Of all workers."""
        return self.workers * self.lanes


class Listener(Protocol):
    """Whoever shows or stores what happens."""

    def record(self, record: CaseRecord) -> None:
        """A case was verified."""
        ...

    def shrinking(self, record: CaseRecord) -> None:
        """A fault is about to be made small; called from several threads."""
        ...

    def shrunk(self, shrunk: Shrunk) -> None:
        """A fault was made small."""
        ...
