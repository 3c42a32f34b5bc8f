"""What a run was: versions, device, seed, whether it ended, how fast it went.

One run may have written several files (a worker each), and several runs may be reported together;
the order in which their lines arrive never matters.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fa_verify.record import CaseRecord, End, Start

__all__ = ["Facts", "gather"]

_TOTAL = "total"  # of a case, all stages
# docs/executor.md, "What TTIR cannot show", in a line.
_UNSEEN = (
    "the CPU runs Triton's IR: not seen are pipelining, barriers inside a program, num_warps, "
    "num_stages, FMA contraction and layouts"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The run behind a summary. Texts of several files are joined by ", " when they differ.

    Attributes:
        versions: Name and version of fa_verify, python, torch and triton.
        platform: Operating system and machine.
        backend: cpu or cuda.
        device: What the kernels ran on.
        command: The command line.
        targets: What was asked for, sorted.
        seed: The seed.
        started: When, ISO 8601.
        false_alarm: Probability that right kernels fail anywhere in the whole run, at most.
        files: How many files (workers or runs) there were.
        complete: Every file has its last line; False means killed, or still running.
        seconds: Wall time, None when no file has its last line.
        rate: Cases a second of wall time.
        stages: Seconds spent in each stage, summed over the cases; "other" is what the records'
            "total" has beyond the stages that they name.
    """

    versions: tuple[tuple[str, str], ...]
    platform: str
    backend: str
    device: str
    command: str
    targets: tuple[str, ...]
    seed: str
    started: str
    false_alarm: float
    files: int
    complete: bool
    seconds: float | None
    rate: float | None
    stages: tuple[tuple[str, float], ...]

    @property
    def unseen(self) -> str:
        """What the backend cannot show; "" for a GPU."""
        return _UNSEEN if "cpu" in self.backend.split(", ") else ""


def gather(starts: Sequence[Start], ends: Sequence[End], cases: Sequence[CaseRecord]) -> Facts:
    """Merge the first and last lines of any number of files."""
    stages: defaultdict[str, list[float]] = defaultdict(list)
    for case in cases:
        named = {stage: seconds for stage, seconds in case.seconds.items() if stage != _TOTAL}
        for stage, seconds in named.items():
            stages[stage].append(seconds)
        if _TOTAL in case.seconds:
            stages["other"].append(max(0.0, case.seconds[_TOTAL] - sum(named.values())))
    wall = _wall(starts, ends)
    return Facts(
        versions=(
            ("fa_verify", _joined(start.version for start in starts)),
            ("python", _joined(start.python for start in starts)),
            ("torch", _joined(start.torch for start in starts)),
            ("triton", _joined(start.triton for start in starts)),
        ),
        platform=_joined(start.platform for start in starts),
        backend=_joined(start.backend for start in starts),
        device=_joined(start.device for start in starts),
        command=_joined(start.command for start in starts),
        targets=tuple(sorted({target for start in starts for target in start.targets})),
        seed=_joined(str(start.seed) for start in starts),
        started=min((start.started for start in starts), default=""),
        false_alarm=min(
            1.0, max((start.false_alarm for start in starts), default=0.0) * len(cases)
        ),
        files=max(len(starts), len(ends)),
        complete=bool(starts) and len(ends) >= len(starts),
        seconds=wall,
        rate=len(cases) / wall if wall else None,
        stages=tuple(sorted((stage, math.fsum(spent)) for stage, spent in stages.items())),
    )


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(sorted(set(texts)))


def _wall(starts: Sequence[Start], ends: Sequence[End]) -> float | None:
    """Workers overlap, so the longest counts; runs one after another add up."""
    if not ends:
        return None
    longest = max(end.seconds for end in ends)
    try:
        moments = [dt.datetime.fromisoformat(start.started) for start in starts]
        spread = (max(moments) - min(moments)).total_seconds() if moments else 0.0
    except (TypeError, ValueError):  # unreadable, or naive beside aware: no way to tell
        spread = 0.0
    return spread + longest if spread <= longest else sum(end.seconds for end in ends)
