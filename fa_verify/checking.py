"""What `check`, `replay` and `list` do, and how they show it: progress, records, tables."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import platform
import shlex
import sys
import time
from typing import TYPE_CHECKING

import torch
import triton
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fa_verify import backends, campaign, loader
from fa_verify.backends import cards
from fa_verify.backends.base import Setup
from fa_verify.backends.fences.fence import Fence
from fa_verify.case import Case
from fa_verify.errors import InvalidInputError, KernelLoadError, UnwritableError
from fa_verify.examples import Examples
from fa_verify.record import CaseRecord, End, Shrunk, Start, Writer
from fa_verify.report import files, table
from fa_verify.report.summary import exit_code, finished, summarise
from fa_verify.sanitizers import sample
from fa_verify.trial import RUN_CASES, RUN_RISK
from fa_verify.verdict import Verdict
from fa_verify.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fa_verify.backends.fences.fence import Mode
    from fa_verify.kernel import Kernel
    from fa_verify.record import Line

__all__ = ["check", "list_kernels", "replay", "start_line"]

_DEFAULT_CASES = 200
_LONG_TIMEOUT = 600.0  # seconds for one long case, which has as many elements as 10,000 others
_WATCHED = 8  # processes under sanitizers at a time: each has a context of its own on the card
_WATCHED_TIMEOUT = 120.0  # seconds for one case under a sanitizer, which begins with 10 of imports
_SAY_EVERY = 10.0  # seconds between lines of progress where there is no terminal
_NOTHING = 3
_UNWRITTEN = 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def check(
    targets: Sequence[str],
    folder: Path,
    *,
    strict: bool,
    backend: str,
    cases: int | None,
    budget: float | None,
    seed: int,
    workers: int | None,
    dtype: str | None,
    timeout: float,
    stress: bool,
    long: bool,
    fence: Mode,
    sanitizer: Sequence[str],
    sanitizer_cases: int,
    examples: Path | None,
) -> int:
    """Run a campaign, write its record and report into ``folder``, return the exit code.

    What failed in earlier runs is kept in the folder `examples` and comes first.
    """
    console = Console(highlight=False)
    kernels = _load(targets)
    if not kernels:
        console.print(
            f"no Kernel found in {', '.join(targets)}: nothing was verified", markup=False
        )
        functions = [name for target in targets for name in loader.candidates(target)]
        for name in functions:
            console.print(
                f"  a function is checked by its name: fa-verify check {name}", markup=False
            )
        if not functions:
            console.print(
                "  a Kernel is a name at a file's top level, as in README.md, 'Your kernel'",
                markup=False,
            )
        return _NOTHING
    backend = backends.resolve(backend)
    if long and backend != "cuda":
        msg = f"--long with backend={backend!r}: cases of 131,072 keys need a CUDA device"
        raise InvalidInputError(msg)
    workers, lanes = _workers(1 if long and not workers else workers, backend)
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S")
    plan = campaign.Plan(
        backend=backend,
        cases=_DEFAULT_CASES if cases is None and budget is None and not long else cases,
        seconds=budget,
        seed=seed,
        workers=workers,
        lanes=1 if long else lanes,
        timeout=max(timeout, _LONG_TIMEOUT) if long else timeout,
        memory=_memory(workers * lanes),
        dtype=dtype,
        stress=stress,
        long=long,
        fence=fence,
        spool=folder / f"{stamp}-{os.getpid()}.running",
    )
    begin = time.monotonic()
    writer = Writer(folder / f"{stamp}-{os.getpid()}.jsonl")
    kept = None if examples is None else Examples(examples)
    known = sum(len(kept.of(kernel, backend=backend)) for kernel in kernels) if kept else 0
    show = _Show(console, writer, plan, len(kernels), known)
    start = start_line(targets, seed, backend)
    show.write(start)
    try:
        with show.progress:
            campaign.run(kernels, plan, show, kept)
            if sanitizer:
                sample.run(kernels, _sample(plan, sanitizer, sanitizer_cases), show)
        summary = summarise(show.lines)
        code = exit_code(summary, strict=strict)
        seconds = time.monotonic() - begin
        end = End(seconds=seconds, cases=summary.cases, exit_code=code)
        show.write(end)
        summary = finished(summary, start, end)
    except (KeyboardInterrupt, UnwritableError) as error:
        what, code = (str(error), _UNWRITTEN) if str(error) else ("interrupted", _INTERRUPTED)
        console.print(f"{what}; what follows is of the cases until then", style="red", markup=False)
        summary = summarise(show.lines)
    finally:
        writer.close()
    table.show(console, summary)
    for path in (writer.path, *files.write(summary, folder)):
        console.print(Text(f"  {path}", style="dim"), soft_wrap=True)
    return code


def _sample(plan: campaign.Plan, tools: Sequence[str], cases: int) -> sample.Plan:
    return sample.Plan(
        tools=tuple(dict.fromkeys(tools)),
        cases=cases,
        seed=plan.seed,
        workers=min(plan.workers, _WATCHED),
        timeout=max(plan.timeout, _WATCHED_TIMEOUT),
        dtype=plan.dtype,
    )


class _Show:
    """A campaign's listener: writes the record, moves the bar, prints a fault at first sight."""

    def __init__(
        self, console: Console, writer: Writer, plan: campaign.Plan, kernels: int, known: int
    ) -> None:
        self.lines: list[Line] = []
        self._writer = writer
        self._console = console
        self._seen: set[tuple[str, str, str]] = set()
        self._begin = self._said = time.monotonic()
        self._cases = self._failed = 0
        self._total = None if plan.cases is None else plan.cases * kernels + known
        self._seconds = plan.seconds
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn(
                "{task.completed:.0f}" + (f"/{self._total} cases" if self._total else " cases")
            ),
            TextColumn("{task.fields[failed]} failed"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self.progress.add_task(plan.backend, total=self._total, failed=0)

    def write(self, line: Line) -> None:
        self.lines.append(line)
        self._writer.write(line)

    def record(self, record: CaseRecord) -> None:
        self.write(record)
        self._cases += 1
        self._failed += record.verdict == Verdict.FAIL
        self.progress.update(self._task, advance=1, failed=self._failed)
        for failure in record.failures:
            key = (record.target, failure.check, failure.title)
            if key not in self._seen:
                self._seen.add(key)
                place = f" at {failure.location}" if failure.location else ""
                self._say(f"FAIL {record.kernel}: {failure.title}{place}  [{record.case}]", "red")
        now = time.monotonic()
        if not self._console.is_terminal and (self._cases == 1 or now - self._said > _SAY_EVERY):
            self._said = now
            of = f" of {self._total}" if self._total else ""
            self._say(f"{now - self._begin:5.0f} s  {self._cases}{of} cases, {self._failed} failed")

    def shrinking(self, record: CaseRecord) -> None:
        self._say(f"shrinking {record.kernel}: {record.failures[0].title}")

    def shrunk(self, shrunk: Shrunk) -> None:
        self.write(shrunk)

    def _say(self, text: str, style: str = "") -> None:
        self.progress.console.print(Text(text, style=style), soft_wrap=True)


def replay(
    target: str,
    case: str,
    setup: str,
    *,
    source: str,
    drawn: bool,
    timeout: float,
    fence: Mode | None,
) -> int:
    """Run one case, explain what is wrong with it, return the exit code."""
    console = Console(highlight=False)
    parsed, how = Case.parse(case), Setup.parse(setup)
    if fence is not None:
        how = dataclasses.replace(how, fence=Fence(mode=fence))
    if not how.sanitizer:
        backends.resolve(how.backend)
    kernels = loader.load(target)
    if len(kernels) != 1:
        msg = f"target={target!r}: names {len(kernels)} kernels; replay needs file.py:NAME"
        raise KernelLoadError(msg)
    if source and kernels[0].source_hash != source:
        console.print(
            f"note: the source has changed since this line was written "
            f"({source} then, {kernels[0].source_hash} now)", markup=False,
        )  # fmt: skip
    lines: list[Line] = [start_line([target], parsed.seed, how.backend)]
    if how.sanitizer:
        lines += sample.one(kernels[0], parsed, how, max(timeout, _WATCHED_TIMEOUT))
    else:
        plan = campaign.Plan(backend=how.backend, timeout=timeout, memory=_memory(1))
        lines.append(campaign.replay(kernels[0], parsed, how, plan, drawn=drawn))
    seconds = sum(sum(x.seconds.values()) for x in lines if isinstance(x, CaseRecord))
    lines.append(End(seconds=seconds, cases=1, exit_code=0))
    summary = summarise(lines)
    table.show(console, summary)
    return exit_code(summary)


def list_kernels(targets: Sequence[str]) -> int:
    """Print each kernel with its target and what it declares."""
    console = Console(highlight=False)
    kernels = _load(targets)
    if not kernels:
        console.print(f"no Kernel found in {', '.join(targets)}", markup=False)
    for kernel in kernels:
        console.print(
            Text(kernel.name, style="bold"), Text(f"{kernel.target} @{kernel.source_hash}")
        )
        declared = kernel.capabilities
        text = "no Capabilities: a clear raise is `unsupported`"
        if declared is not None:
            flags = (
                "window",
                "softcap",
                "gqa",
                "layouts",
                "int64_offsets",
                "empty",
                "deterministic",
                "batch_invariant",
            )
            text = ", ".join(
                [
                    *declared.dtypes,
                    *(f"fp8 scales of {fp8}" for fp8 in declared.fp8 if fp8),
                    *(flag for flag in flags if getattr(declared, flag)),
                ]
            )
        passes = "forward and backward" if kernel.backward else "forward"
        console.print(f"    {passes}; {text}", markup=False)
    return 0 if kernels else _NOTHING


def start_line(targets: Sequence[str], seed: int, backend: str) -> Start:
    """The first line of a record: versions, device, seed."""
    on_card = backend == "cuda" and torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_card else platform.processor() or "cpu"
    return Start(
        version=__version__,
        command=shlex.join(["fa-verify", *sys.argv[1:]]),
        seed=seed,
        backend=backend,
        device=device,
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=triton.__version__,
        platform=platform.platform(),
        started=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        targets=tuple(targets),
        false_alarm=RUN_RISK / RUN_CASES,
    )


def _load(targets: Sequence[str]) -> tuple[Kernel, ...]:
    kernels = [kernel for target in targets for kernel in loader.load(target)]
    return tuple({kernel.target: kernel for kernel in kernels}.values())


def _workers(asked: int | None, backend: str) -> tuple[int, int]:
    """As many workers as asked for, or cores, and processes of each; on cards as many as fit."""
    cores = len(os.sched_getaffinity(0))
    if backend != "cuda":
        return asked or cores, 1
    return cards.workers(asked, cores, cards.room(cards.visible()))


def _memory(workers: int) -> int:
    """Bytes for each worker: an equal share of three quarters of the machine's memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(0.75 * total / workers)
