"""A sample of cases under each tool: failures and `Sanitized` lines for the record."""

from __future__ import annotations

import collections
import dataclasses
import linecache
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from fa_verify import distribution
from fa_verify.backends.base import Setup
from fa_verify.errors import InvalidInputError
from fa_verify.record import CaseRecord, FailureRecord, Sanitized
from fa_verify.sanitizers import session
from fa_verify.sanitizers.tools import TOOLS
from fa_verify.verdict import Verdict
from fa_verify.verify import replay_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fa_verify.case import Case
    from fa_verify.kernel import Kernel
    from fa_verify.sanitizers.findings import Finding
    from fa_verify.sanitizers.session import Session

__all__ = ["Listener", "Plan", "one", "run"]

# A launch takes up to some hundred times as long under a tool; what it finds it finds in a few
# blocks of queries and keys.
_WORK: Final = 1 << 18
_UNTRIED: Final = "untried: there is no fault to plant that would show that it works here"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a sample is.

    Attributes:
        tools: Names of tools.
        cases: Of each kernel, under each tool.
        seed: Of the distribution that they are chosen from.
        workers: Processes at a time.
        timeout: Seconds that one case may take.
        dtype: Only this one, if given.
    """

    tools: Sequence[str]
    cases: int
    seed: int
    workers: int
    timeout: float
    dtype: str | None = None


class Listener(Protocol):
    """Whoever keeps what is found."""

    def record(self, record: CaseRecord) -> None:
        """A case in which a tool found something."""
        ...

    def write(self, line: Sanitized) -> None:
        """What a tool did for a kernel."""
        ...


def run(kernels: Sequence[Kernel], plan: Plan, listener: Listener) -> None:
    """Try the tools on planted faults, then run the sample under those that see them."""
    threads = ThreadPoolExecutor(plan.workers)
    try:
        probed = threads.map(lambda name: session.probe(TOOLS[name], plan.timeout), plan.tools)
        refused = dict(zip(plan.tools, probed, strict=True))
        usable = [name for name in plan.tools if not refused[name]]
        started = {
            threads.submit(_session, kernel, case, setup, plan.timeout): (kernel, case, setup)
            for kernel in kernels
            for case, setup in _chosen(kernel, plan, usable)
        }
        ended: collections.defaultdict[tuple[str, str], list[Session]]
        ended = collections.defaultdict(list)
        for future in as_completed(started):
            (kernel, case, setup), found = started[future], future.result()
            ended[kernel.target, setup.sanitizer].append(found)
            if found.findings:
                listener.record(_record(kernel, case, setup, found))
    finally:
        threads.shutdown(cancel_futures=True)  # an interrupt begins nothing more
    for kernel in kernels:
        for name in plan.tools:
            sessions = ended[kernel.target, name]
            listener.write(_summary(kernel, name, sessions, refused[name]))


def _chosen(kernel: Kernel, plan: Plan, tools: Sequence[str]) -> Iterator[tuple[Case, Setup]]:
    """Each case under each tool; configurations take turns."""
    backward = None if kernel.backward is not None else False
    cases = distribution.few(
        kernel.takes, plan.cases, plan.seed, dtype=plan.dtype, backward=backward, most=_WORK
    )
    for index, case in enumerate(cases):
        for name in tools:
            yield case, Setup(backend="cuda", config=index, float_model="hardware", sanitizer=name)


def one(kernel: Kernel, case: Case, setup: Setup, timeout: float) -> list[CaseRecord | Sanitized]:
    """One case again, as a replay line says.

    Raises:
        InvalidInputError: There is no such tool.
    """
    if setup.sanitizer not in TOOLS:
        msg = f"sanitizer={setup.sanitizer!r}: must be one of {', '.join(TOOLS)}"
        raise InvalidInputError(msg)
    refused = session.probe(TOOLS[setup.sanitizer], timeout)
    sessions = [] if refused else [_session(kernel, case, setup, timeout)]
    failed = [_record(kernel, case, setup, ended) for ended in sessions if ended.findings]
    return [*failed, _summary(kernel, setup.sanitizer, sessions, refused)]


def _session(kernel: Kernel, case: Case, setup: Setup, timeout: float) -> Session:
    arguments = ["case", kernel.target, str(case), str(setup.config)]
    return session.run(TOOLS[setup.sanitizer], arguments, timeout)


def _summary(kernel: Kernel, name: str, sessions: Sequence[Session], refused: str) -> Sanitized:
    """A tool without a verdict on any case is unavailable too."""
    judged = [s for s in sessions if s.findings or not s.reason]
    reason = next((s.reason for s in sessions if s not in judged), "")
    unavailable = refused or ("" if judged else reason or "no case to run")
    if not reason and not TOOLS[name].probe:
        reason = _UNTRIED
    return Sanitized(
        kernel=kernel.name,
        target=kernel.target,
        tool=name,
        cases=len(judged),
        asked=len(sessions),
        failed=sum(bool(s.findings) for s in judged),
        unavailable=unavailable,
        reason=reason,
    )


def _record(kernel: Kernel, case: Case, setup: Setup, ended: Session) -> CaseRecord:
    return CaseRecord(
        kernel=kernel.name,
        target=kernel.target,
        source_hash=kernel.source_hash,
        case=str(case),
        setup=str(setup),
        verdict=Verdict.FAIL.value,
        failures=tuple(_failure(setup.sanitizer, one, ended) for one in ended.findings),
        replay=replay_line(kernel, case, setup, drawn=False),
        configs=ended.report.configs,
    )


def _failure(name: str, finding: Finding, ended: Session) -> FailureRecord:
    file = finding.file or ended.report.kernels.get(finding.kernel, "")
    path, here = Path(file), Path.cwd()
    shown = path.relative_to(here) if file and path.is_relative_to(here) else path
    times = "once" if finding.count == 1 else f"{finding.count} times"
    near = [
        name
        for name, (address, size) in ended.report.tensors.items()
        if address <= finding.address < address + size
    ]
    return FailureRecord(
        check=f"sanitizer:{name}",
        title=finding.title,
        message=f"in {finding.kernel}, {times}; the first: {finding.detail}",
        tensor=near[0] if near else "",
        location=f"{shown}:{finding.line}" if finding.line else str(shown),
        source=linecache.getline(file, finding.line).rstrip("\n") if finding.line else "",
    )
