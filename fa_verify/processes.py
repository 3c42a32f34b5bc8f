"""The process that workers are forked from, with what all of them import.

It is started as early as can be: its imports take as long as those of the command, and run beside
them.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

__all__ = ["context", "start"]

_PRELOADED = ["fa_verify.worker", "fa_verify.backends.cpu"]


def context() -> ForkServerContext:
    """Whose processes are forked from it."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_PRELOADED)
    return found


def start() -> None:
    """Start it, if it is not there yet, without waiting for its imports."""
    context()
    forkserver.ensure_running()
