"""Processes that share a card at the same time: a private daemon of CUDA's Multi-Process Service.

Without it a card serves one process at a time, for a millisecond or two each, so that every read of
a result waits for the turns of all others. With it the processes' small kernels run side by side;
docs/cuda.md has the measurement. But what faults in one process, or is killed, may end the others:
then sharing is over, and what was running is run again (`fa_verify.pool`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["Sharing", "join"]

_DAEMON = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_PATIENCE = 20.0  # seconds for the daemon to start or to stop
_OPEN = "open"  # a file beside the pipes, as long as processes may join


class Sharing:
    """The daemon, from `start` to `stop`.

    Attributes:
        folder: Its pipes, for `join`; None: there is no daemon, and processes take turns.
    """

    def __init__(self, folder: Path | None) -> None:
        """Remember where it listens."""
        self.folder = folder

    @classmethod
    def start(cls, command: str = _DAEMON) -> Sharing:
        """Start one; where it cannot be started, processes take turns on the card.

        A daemon that serves this process already stays in charge.
        """
        if _PIPES in os.environ or shutil.which(command) is None:
            return cls(None)
        folder = Path(tempfile.mkdtemp(prefix="fa-mps-"))  # a socket's path is short
        try:
            done = subprocess.run(  # noqa: S603 - a daemon of the driver's
                [command, "-d"],
                env=_environment(folder),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_PATIENCE,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            started = False
        else:
            started = done.returncode == 0
        if not started:
            shutil.rmtree(folder, ignore_errors=True)
            return cls(None)
        (folder / _OPEN).touch()
        return cls(folder)

    def stop(self, command: str = _DAEMON) -> None:
        """End the daemon; processes that start from now on take turns."""
        if self.folder is None:
            return
        folder, self.folder = self.folder, None
        (folder / _OPEN).unlink(missing_ok=True)
        # Whoever has not left in a second is ended: what runs is lost already.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(  # noqa: S603
                [command],
                input=b"quit -t 1\n",
                env=_environment(folder),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_PATIENCE,
                check=False,
            )
        shutil.rmtree(folder, ignore_errors=True)


def join(folder: Path | None) -> None:
    """Have this process, which has not used CUDA yet, share the card if the daemon still runs."""
    if folder is not None and (folder / _OPEN).exists():
        os.environ[_PIPES] = str(folder)


def _environment(folder: Path) -> dict[str, str]:
    """The daemon's: it sees all cards, so that a card's number means the same with it."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**kept, _PIPES: str(folder), _LOGS: str(folder)}
