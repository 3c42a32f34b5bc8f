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
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["Sharing", "join"]

_DAEMON = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_PATIENCE = 15.0  # seconds for the daemon to start, to serve or to stop
_OPEN = "open"  # a file beside the pipes, as long as processes may join
_PID = "nvidia-cuda-mps-control.pid"  # the daemon's own
_PAUSE = 0.1  # seconds between looks at whether a process has ended
_ATTEMPTS = 2
# A client that may hang: one that came while another daemon was ending has waited for ever.
_PROBE = """
import ctypes
driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
status = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)
raise SystemExit(bool(status or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)))
"""


# Ends the daemon when whoever started it has died: then its input ends without a word.
_GUARDIAN = 'read -r _ || { printf "quit -t 1\\n" | "$0"; rm -rf "$1"; }'


class Sharing:
    """The daemon, from `start` to `stop`, or to the end of this process.

    Attributes:
        folder: Its pipes, for `join`; None: there is no daemon, and processes take turns.
    """

    def __init__(self, folder: Path | None) -> None:
        """Remember where it listens."""
        self.folder = folder
        self._guardian: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, command: str = _DAEMON, probe: str = _PROBE) -> Sharing:
        """Start one; where none can be started that serves, processes take turns on the card.

        A daemon that serves this process already stays in charge.

        Args:
            command: The daemon.
            probe: Python that uses a card, and fails where it cannot.
        """
        if _PIPES in os.environ or shutil.which(command) is None:
            return cls(None)
        for _ in range(_ATTEMPTS):
            sharing = cls(Path(tempfile.mkdtemp(prefix="fa-mps-")))  # a socket's path is short
            if sharing._started(command) and sharing._serves(probe):
                return sharing
            sharing.stop(command)
        return sharing

    def _started(self, command: str) -> bool:
        assert self.folder is not None  # noqa: S101 - of a daemon
        try:
            done = subprocess.run(  # noqa: S603 - a daemon of the driver's
                [command, "-d"],
                env=_environment(self.folder),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_PATIENCE,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        self._guardian = subprocess.Popen(  # noqa: S603
            ["/bin/sh", "-c", _GUARDIAN, command, str(self.folder)],
            env=_environment(self.folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends this process's group does not end it
        )
        (self.folder / _OPEN).touch()
        return done.returncode == 0

    def _serves(self, probe: str) -> bool:
        """Whether a process gets through to a card, in time."""
        client = subprocess.Popen(  # noqa: S603 - this Python
            [sys.executable, "-c", probe],
            env={**os.environ, _PIPES: str(self.folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return client.wait(_PATIENCE) == 0
        except subprocess.TimeoutExpired:
            client.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                client.wait(_PAUSE)  # no longer: it may hang in the driver
            return False

    def stop(self, command: str = _DAEMON) -> None:
        """End the daemon, and wait until it has; processes from now on take turns."""
        if self.folder is None:
            return
        folder, self.folder = self.folder, None
        (folder / _OPEN).unlink(missing_ok=True)
        daemon = _process(folder / _PID)
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
        _wait_for(daemon)
        if self._guardian is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._guardian.communicate(b"ended\n", _PATIENCE)
        shutil.rmtree(folder, ignore_errors=True)


def _process(path: Path) -> int:
    """The number in a file; 0: none."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _wait_for(process: int) -> None:
    """Wait until a daemon of ours has ended; in the end, end it."""
    end = time.monotonic() + _PATIENCE
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while process and time.monotonic() < end:
            os.kill(process, 0)  # raises once it is gone
            time.sleep(_PAUSE)
        if process:
            os.kill(process, signal.SIGTERM)


def join(folder: Path | None) -> None:
    """Have this process, which has not used CUDA yet, share the card if the daemon still runs."""
    if folder is not None and (folder / _OPEN).exists():
        os.environ[_PIPES] = str(folder)


def _environment(folder: Path) -> dict[str, str]:
    """The daemon's: it sees all cards, so that a card's number means the same with it."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**kept, _PIPES: str(folder), _LOGS: str(folder)}
