"""`Pool`: worker processes, one case at a time, killed and replaced when a case hangs or dies."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import pebble

from fa_verify import processes, worker
from fa_verify.backends.base import FAULT
from fa_verify.backends.sharing import Sharing
from fa_verify.record import CaseRecord, FailureRecord
from fa_verify.spool import Running, launched, read
from fa_verify.verdict import Verdict
from fa_verify.verify import replay_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fa_verify.backends.base import Setup
    from fa_verify.case import Case
    from fa_verify.kernel import Kernel

__all__ = ["Pool"]

_DEATHS = (TimeoutError, pebble.ProcessExpired)
# Processes for each core from which on a case is given more time: what fewer keep waiting past its
# limit takes two thirds of that by itself.
_CROWDED = 1.5
_GRACE = 10.0  # seconds between the soft limit of an execution and the kill of its process
# How many times as long a case may take whose worker was still at work before its first launch on a
# card: torch.compile of flex_attention took over 70 s beside 16 others on 16 cores of an H200.
_COMPILING = 4.0


class Pool:
    """Worker processes, and the translation of their deaths into records."""

    def __init__(
        self,
        workers: int,
        *,
        timeout: float,
        memory: int,
        cap: bool,
        card: bool = False,
        spool: Path | None = None,
        lanes: int = 1,
    ) -> None:
        """Start none yet.

        Args:
            workers: How many.
            timeout: Seconds that one case may take.
            memory: Bytes that one worker may allocate.
            cap: Have the operating system enforce that.
            card: Each works on a card, of which it takes a lease.
            spool: Folder where each process says what it is at; it goes with the pool.
            lanes: Processes of a worker; cases go to whichever is free.
        """
        count = workers * lanes
        self._sharing = Sharing.start() if card and count > 1 else Sharing(None)
        self._spool = spool or Path(tempfile.mkdtemp(prefix="fa-verify-"))
        self._spool.mkdir(parents=True, exist_ok=True)
        # By target; None: nothing more is compiled ahead of the kernel's cases.
        self._ahead: dict[str, list[Future[None]] | None] = {}
        self._deaths: dict[tuple[str, str, str], Running] = {}
        self._timeout, self._card = timeout, card
        start = functools.partial(
            worker.start,
            timeout,
            memory,
            cap=cap,
            on_card=count * card,
            pipes=self._sharing.folder,
            spool=self._spool,
        )
        self._pool = _processes(count, start)

    def submit(
        self,
        kernel: Kernel,
        case: Case,
        setup: Setup,
        *,
        search: bool = False,
        explain: bool = False,
        others: tuple[str, ...] = (),
    ) -> Future[CaseRecord]:
        """Start one case; a case of a search is judged by det alone.

        A death on a card that it shared with others is not yet a failure of the kernel: sharing
        ends, and the case runs again, behind what is in work. Nor is a limit of the wall's clock on
        a machine with more to do than it has cores, or before anything was launched on a card: a
        compiler may have been at work, whose caches keep what it had done.
        """
        future: Future[CaseRecord] = Future()
        kwargs = {"independent": not search, "explain": explain, "others": others}
        args = (kernel.target, str(case), str(setup))
        self._try(future, functools.partial(self._scheduled, args, kwargs), args)
        return future

    def _scheduled(
        self, args: tuple[str, ...], kwargs: dict[str, object], patience: float
    ) -> Future[CaseRecord]:
        """One run, which may take `patience` times as long as others."""
        future: Future[CaseRecord] = self._pool.schedule(
            worker.run, args=args, kwargs=kwargs, timeout=self._timeout * patience + _GRACE
        )
        return future

    def _try(
        self,
        future: Future[CaseRecord],
        schedule: Callable[[float], Future[CaseRecord]],
        args: tuple[str, ...],
        patience: float = 1.0,
    ) -> None:
        shared = self._sharing.folder is not None

        def ended(done: Future[CaseRecord]) -> None:
            error = None if done.cancelled() else done.exception()
            if isinstance(error, _DEATHS):
                self._sharing.stop()
                late = isinstance(error, TimeoutError) and patience == 1.0
                again = 1.0 if shared else self._patience(args) if late else 0.0
                if again:
                    with contextlib.suppress(RuntimeError):  # the pool has been stopped
                        self._try(future, schedule, args, again)
                        return
            _copy(future, done)

        schedule(patience).add_done_callback(ended)

    def _patience(self, args: tuple[str, ...]) -> float:
        """How much more time a case gets once that has run out: none, or what others took of it."""
        crowd = _crowd() if _crowd() > _CROWDED else 0.0
        return max(crowd, _COMPILING) if self._card and not launched(self._spool, args) else crowd

    def compile_ahead(self, items: Iterable[tuple[Kernel, Case, Setup]]) -> None:
        """Compile what cases will need, before those that are submitted later.

        What goes wrong is found again by the case itself, and said then. A kernel at which a
        process died or hung is left to its cases.
        """
        for kernel, case, setup in items:
            ahead = self._ahead.setdefault(kernel.target, [])
            if ahead is None:
                continue
            future = self._pool.schedule(
                worker.compile_ahead,
                args=(kernel.target, str(case), str(setup)),
                timeout=self._timeout + _GRACE,
            )
            ahead.append(future)
            future.add_done_callback(functools.partial(self._compiled, kernel.target))

    def _compiled(self, target: str, done: Future[None]) -> None:
        if not done.cancelled() and isinstance(done.exception(), _DEATHS):
            self._sharing.stop()
            ahead, self._ahead[target] = self._ahead[target] or [], None
            for future in ahead:
                if not future.running():
                    future.cancel()

    def submit_together(
        self, kernel: Kernel, items: Sequence[tuple[Case, Setup]]
    ) -> list[Future[CaseRecord]]:
        """Start some cases, one after the other in one worker; each has a future of its own.

        If the worker dies, each is started again by itself, so that only the guilty one fails.
        """
        if len(items) == 1:
            return [self.submit(kernel, *items[0])]
        futures: list[Future[CaseRecord]] = [Future() for _ in items]
        texts = tuple((str(case), str(setup)) for case, setup in items)

        def hand_out(done: Future[list[CaseRecord]]) -> None:
            if done.cancelled():
                for future in futures:
                    future.cancel()
            elif done.exception() is None:
                for future, record in zip(futures, done.result(), strict=True):
                    future.set_result(record)
            else:
                self._sharing.stop()
                for future, item in zip(futures, items, strict=True):
                    self.submit(kernel, *item).add_done_callback(functools.partial(_copy, future))

        # Several may have to be compiled; if one hangs, it is killed again by itself.
        self._pool.schedule(
            worker.run_together, args=(kernel.target, texts), timeout=2 * self._timeout + _GRACE
        ).add_done_callback(hand_out)
        return futures

    def result(
        self, future: Future[CaseRecord], kernel: Kernel, case: Case, setup: Setup
    ) -> CaseRecord:
        """The record of a finished case; a dead or killed worker is a failure of the kernel."""
        faulted = False
        try:
            return future.result()
        except TimeoutError:
            message = f"no result in {self._timeout + _GRACE:g} s; the worker was killed"
            if self._card and not launched(self._spool, (kernel.target, str(case), str(setup))):
                message += (
                    f", and again after {_COMPILING:g} times as long; it had launched nothing: "
                    "if it was still being compiled, a longer --timeout lets it end"
                )
            failure = FailureRecord(check="timeout", title="the kernel hangs", message=message)
        except pebble.ProcessExpired as error:
            faulted = error.exitcode == FAULT
            last = read(self._spool, error.pid)
            self._deaths[kernel.target, str(case), str(setup)] = last
            failure = _death(error.exitcode, last, watched=setup.fence.mode != "off")
        except Exception as error:  # noqa: BLE001 - the worker itself broke (kernel import, protocol)
            return _record(
                kernel, case, setup, Verdict.ERROR, reason=f"{type(error).__name__}: {error}"
            )
        if (setup.warps or setup.stages) and not faulted:
            # A compiler may take minutes over options that nobody asked for, or give up.
            return _record(kernel, case, setup, Verdict.UNSUPPORTED, reason=failure.message)
        return _record(kernel, case, setup, Verdict.FAIL, failures=(failure,))

    def last(self, record: CaseRecord) -> Running:
        """What a process was at when it died of a record's case."""
        return self._deaths.get((record.target, record.case, record.setup), Running())

    def stop(self) -> None:
        """Kill the workers."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()
        self._sharing.stop()
        shutil.rmtree(self._spool, ignore_errors=True)


def _crowd() -> float:
    """How many processes want to run for each core (the last minute's load)."""
    return os.getloadavg()[0] / len(os.sched_getaffinity(0))


def _death(code: int, last: Running, *, watched: bool = False) -> FailureRecord:
    """A failure that says what a process was at when it died.

    Args:
        code: Its exit code.
        last: What it was at.
        watched: Launches of Triton's were.
    """
    launch = last.launch
    what = "the worker died"
    if code == FAULT:
        what = last.error.removeprefix("CUDA error: ") or "the card faulted"
    message = f"the process running this case ended with exit code {code}"
    if launch is not None:
        what += f" in {launch.kernel}" if last.alone else ""
        given = ", ".join(argument.name for argument in launch.arguments)
        message += f"; its last launch was {launch.kernel}({given}), fence={last.fence}"
    elif code == FAULT and watched:
        message += "; it had launched no Triton function: an operation of torch's faulted"
    return FailureRecord(
        check="crash",
        title=what,
        message=message,
        location=f"{launch.file}:{launch.line}" if launch and last.alone else "",
    )


def _processes(count: int, start: Callable[[], None]) -> pebble.ProcessPool:
    return pebble.ProcessPool(max_workers=count, context=processes.context(), initializer=start)


def _copy(future: Future[CaseRecord], done: Future[CaseRecord]) -> None:
    """End a future as another has ended."""
    if done.cancelled():
        future.cancel()
    elif (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


def _record(
    kernel: Kernel,
    case: Case,
    setup: Setup,
    verdict: Verdict,
    *,
    reason: str = "",
    failures: tuple[FailureRecord, ...] = (),
) -> CaseRecord:
    return CaseRecord(
        kernel=kernel.name,
        target=kernel.target,
        source_hash=kernel.source_hash,
        case=str(case),
        setup=str(setup),
        verdict=verdict.value,
        reason=reason,
        failures=failures,
        replay=replay_line(kernel, case, setup, drawn=True),
    )
