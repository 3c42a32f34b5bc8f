"""What runs inside a worker process: it loads a kernel once and verifies cases on it.

A worker may be killed at any moment (a hang, an explosion of memory, a fault on the card), so it
owns nothing but caches.
"""

from __future__ import annotations

import functools
import gc
import resource
from typing import TYPE_CHECKING

import torch

from fa_verify import loader
from fa_verify.backends import make
from fa_verify.backends.base import Setup
from fa_verify.case import Case
from fa_verify.spool import Spool
from fa_verify.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

    from fa_verify.backends.base import Backend
    from fa_verify.kernel import Kernel
    from fa_verify.record import CaseRecord

__all__ = ["run", "start"]

_LIMITS: dict[str, float] = {}
_SPOOL = [Spool(None)]


def start(seconds: float, memory: int, *, cap: bool, spool: Path | None = None) -> None:
    """Prepare the process: one BLAS thread, limits on time and memory, and a spool.

    Args:
        seconds: Wall-clock limit of one execution of a kernel.
        memory: Bytes that the process may allocate.
        cap: Enforce the memory limit by the operating system (not on CUDA, whose driver reserves
            far more address space than it uses).
        spool: Folder of files that say what each process is at.
    """
    torch.set_num_threads(1)
    _LIMITS.update(seconds=seconds, memory=memory)
    _SPOOL[:] = [Spool(spool)]
    gc.freeze()  # what the imports left: a full collection would go through it for nothing
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
    return verify(
        Case.parse(case),
        _kernel(target),
        parsed,
        _backend(parsed.backend),
        independent=independent,
        explain=explain,
        others=tuple(map(Case.parse, others)),
    )
