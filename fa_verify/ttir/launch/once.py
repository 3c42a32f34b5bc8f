"""Kernels that several processes ask for, each compiled by one of them.

The others wait, and find it in Triton's cache on disk; or do something else meanwhile.
"""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import hashlib
import os
from typing import TYPE_CHECKING, Any

from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Busy", "compile_once", "impatient"]

_compile = JITFunction._do_compile  # noqa: SLF001 - the one place that all compiling goes through
_patient = contextvars.ContextVar("patient", default=True)


class Busy(BaseException):
    """Another process is compiling the kernel.

    No `Exception`: it is to pass through launchers that catch those of Triton.
    """


def compile_once(folder: Path) -> None:
    """Have this process, from now on, compile each kernel under a lock of the kernel's own.

    Whoever dies gives the lock back. `folder` holds the locks, for all processes the same.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def compiled(self: Any, key: Any, *rest: Any) -> Any:
        name = hashlib.sha256(f"{self.cache_key} {key}".encode()).hexdigest()
        with _locked(folder / name):
            return _compile(self, key, *rest)

    JITFunction._do_compile = compiled  # noqa: SLF001


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Raise `Busy` rather than wait for another process."""
    token = _patient.set(False)
    try:
        yield
    finally:
        _patient.reset(token)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if _patient.get() else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise Busy from error
        yield
    finally:
        os.close(file)
