"""What runs inside a worker process: it looks what a case allows, and tries mutants on it."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from fa_verify import loader, worker
from fa_verify.backends.base import Setup
from fa_verify.case import Case
from fa_verify.mutation.subject import Subject
from fa_verify.ttir.launch.compiler import keep_apart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.kernel import Kernel
    from fa_verify.mutation.subject import Fate
    from fa_verify.ttir.mutation.mutants import Mutant
    from fa_verify.ttir.mutation.recorder import AnyMutant, Found

__all__ = ["Ready", "attempt", "prove", "start", "survey"]

_MEMORY = 4 << 30  # bytes of live intermediates, as `backends.cpu` has them
_SUBJECTS = 24  # cases kept: mutants that live longer come to more of them

Ready = tuple[str, list[tuple[dict["AnyMutant", "Found"], set["AnyMutant"]]]]


def start(memory: int) -> None:
    """Prepare the process."""
    worker.start(0.0, memory, cap=True)
    keep_apart()


@functools.cache
def _kernel(target: str) -> Kernel:
    (kernel,) = loader.load(target)
    return kernel


@functools.lru_cache(maxsize=_SUBJECTS)
def _subject(target: str, case: str, setup: str) -> Subject:
    return Subject(_kernel(target), Case.parse(case), Setup.parse(setup), _MEMORY)


def survey(target: str, case: str, setup: str) -> Ready:
    """Run the kernel itself.

    Returns:
        Why it fails the case ("" if it passes), and of each part the mutants, and those of them
        that compute anything else at their own place.
    """
    subject = _subject(target, case, setup)
    failure = subject.failure()
    if failure:
        return failure, []
    return "", [(x.found, x.differ) for x in subject.looked()]


def attempt(
    target: str, case: str, setup: str, mutants: Sequence[tuple[AnyMutant, int | None]]
) -> list[tuple[Fate, float]]:
    """Try mutants, each on a part of the case or (None) on the whole; fates and seconds."""
    subject = _subject(target, case, setup)
    fates = []
    for mutant, part in mutants:
        begin = time.perf_counter()
        fate = subject.try_whole(mutant) if part is None else subject.try_part(mutant, part)
        fates.append((fate, time.perf_counter() - begin))
    return fates


def prove(target: str, case: str, setup: str, mutants: Sequence[Mutant]) -> dict[Mutant, set[str]]:
    """Ask why mutants change no result; "": nothing says so of one of their places."""
    return _subject(target, case, setup).proofs(mutants)
