"""`Spool`: what a worker process is doing, on disk before it does it, so that its death tells.

One small file a process, written over. The parent reads it when the process is gone; what is still
there after a run was killed says which cases it was at. No torch, no Triton.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Argument", "Launch", "Running", "Spool", "launched", "read"]


class Argument(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that a Triton function was given.

    Attributes:
        name: The parameter's.
        label: The slot that it lies in ("q", "k", ..., or an allocation's number); "" if in none.
        shape, strides: Of the tensor, in elements.
        offset: Elements from the slot's first one to the tensor's.
        itemsize: Bytes of an element.
    """

    name: str
    label: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    itemsize: int


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A launch: the Triton function, where it begins, its tensors."""

    kernel: str
    file: str
    line: int
    arguments: tuple[Argument, ...]


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is at.

    Attributes:
        target: The kernel's; case, setup: their text.
        launch: The launch that was begun last, if the backend says.
        alone: Those before it had ended.
        fence: How tensors lay then.
        error: What the device said when it faulted; "" if it did not say.
    """

    target: str = ""
    case: str = ""
    setup: str = ""
    fence: str = ""
    launch: Launch | None = None
    alone: bool = False
    error: str = ""


class Spool:
    """The file of this process."""

    def __init__(self, folder: Path | None) -> None:
        """Write into a folder, if one is given; only when there is something to say."""
        self._path = None if folder is None else folder / f"{os.getpid()}.json"
        self._file = -1
        self._running = Running()
        self._encoder = msgspec.json.Encoder()

    def begin(self, *, target: str, case: str, setup: str) -> None:
        """A case begins."""
        self._write(Running(target=target, case=case, setup=setup))

    def launch(self, launch: Launch, fence: str, *, alone: bool) -> None:
        """A kernel is about to be launched."""
        running = msgspec.structs.replace(self._running, launch=launch, fence=fence, alone=alone)
        self._write(running)

    def fault(self, error: str) -> None:
        """The device faulted."""
        self._write(msgspec.structs.replace(self._running, error=error))

    def _write(self, running: Running) -> None:
        self._running = running
        if self._path is None:
            return
        data = self._encoder.encode(running) + b"\n"
        with contextlib.suppress(OSError):  # a full disk: then nothing is known of its last moment
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._file, os.pwrite(self._file, data, 0))


def read(folder: Path, process: int | None) -> Running:
    """What a process was at when it wrote last; nothing if it never wrote."""
    try:
        return msgspec.json.decode((folder / f"{process}.json").read_bytes(), type=Running)
    except (OSError, msgspec.DecodeError):
        return Running()


def launched(folder: Path, at: tuple[str, ...]) -> bool:
    """Whether a process that is, or was last, at this target, case and setup had a launch."""
    found = [read(folder, int(file.stem)) for file in folder.glob("*.json")]
    return any(x.launch is not None for x in found if (x.target, x.case, x.setup) == at)
