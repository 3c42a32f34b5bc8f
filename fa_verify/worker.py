"""What runs inside a worker process: it loads a kernel once and verifies cases on it.

A worker may be killed at any moment (a hang, an explosion of memory, a fault on the card), so it
owns nothing but caches.
"""

from __future__ import annotations

import functools
import gc
import os
import resource
from typing import TYPE_CHECKING

import torch

from fa_verify import loader
from fa_verify.backends import cards, make, sharing
from fa_verify.backends.base import FAULT, Setup
from fa_verify.case import Case
from fa_verify.inputs import duplicate, materialise
from fa_verify.spool import Spool
from fa_verify.ttir.launch.once import Busy, compile_once, impatient
from fa_verify.verdict import Verdict
from fa_verify.verify import verify

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fa_verify.backends.base import Backend
    from fa_verify.kernel import Kernel
    from fa_verify.record import CaseRecord

__all__ = ["compile_ahead", "run", "run_together", "start"]

_LIMITS: dict[str, float] = {}
_SPOOL = [Spool(None)]


def start(
    seconds: float,
    memory: int,
    *,
    cap: bool,
    on_card: int = 0,
    pipes: Path | None = None,
    spool: Path | None = None,
) -> None:
    """Prepare the process: one BLAS thread, limits on time and memory, a card and a spool.

    Args:
        seconds: Wall-clock limit of one execution of a kernel.
        memory: Bytes that the process may allocate.
        cap: Enforce the memory limit by the operating system (not on CUDA, whose driver reserves
            far more address space than it uses).
        on_card: How many such processes lease a card and a share of its memory; 0: none does.
        pipes: Of the daemon through which processes share it (`fa_verify.backends.sharing`).
        spool: Folder of files that say what each process is at, and of locks of what is compiled.
    """
    torch.set_num_threads(1)
    _LIMITS.update(seconds=seconds, memory=memory)
    _SPOOL[:] = [Spool(spool)]
    gc.freeze()  # what the imports left: a full collection would go through it for nothing
    if on_card:
        if spool is not None:
            compile_once(spool / "compiling")
        sharing.join(pipes)
        cards.take(on_card)
    if cap:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


@functools.cache
def _backend(name: str) -> Backend:
    return make(
        name,
        seconds=_LIMITS.get("seconds"),
        memory=int(_LIMITS.get("memory", 8 << 30)),
        spool=_SPOOL[0],
    )


@functools.cache
def _kernel(target: str) -> Kernel:
    (kernel,) = loader.load(target)
    return kernel


def run(
    target: str,
    case: str,
    setup: str,
    *,
    independent: bool = True,
    explain: bool = False,
    others: tuple[str, ...] = (),
) -> CaseRecord:
    """Verify the kernel at ``target`` on one case; all arguments are text."""
    _SPOOL[0].begin(target=target, case=case, setup=setup)
    parsed = Setup.parse(setup)
    record = verify(
        Case.parse(case),
        _kernel(target),
        parsed,
        _backend(parsed.backend),
        independent=independent,
        explain=explain,
        others=tuple(map(Case.parse, others)),
    )
    if record.verdict == Verdict.ERROR and parsed.backend == "cuda":
        _leave_if_dead()
    return record


def compile_ahead(target: str, case: str, setup: str) -> None:
    """Run the kernel on one case, whatever comes of it: what was compiled is in Triton's cache.

    Where another process compiles one of its kernels already, there is better to do than wait.
    """
    parsed, how = Case.parse(case), Setup.parse(setup)
    _SPOOL[0].begin(target=target, case=case, setup=setup)
    kernel, backend = _kernel(target), _backend(how.backend)
    inputs = duplicate(materialise(parsed), backend.device)
    try:
        with impatient():
            backend.run(kernel, parsed.problem, inputs, how, backward=parsed.backward)
    except Busy:
        _leave_if_dead()  # the card must be idle before the next case's memory is laid out


def run_together(target: str, items: Sequence[tuple[str, str]]) -> list[CaseRecord]:
    """Verify the kernel on some cases, each with its setup, drawn independently of any search."""
    return [run(target, case, setup) for case, setup in items]


def _leave_if_dead() -> None:
    """End the process if it can do no more on the card: another that shares it has faulted."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(FAULT)
