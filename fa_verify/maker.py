"""`Maker`: a process beside a worker that makes the inputs of its next case, and hands them over.

A thread of the worker's would hold up its Python, which launches some hundred operations a case
(docs/cuda.md has the measurement). The tensors come through memory that both processes map.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import mmap
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING

import msgspec
import torch

from fa_verify.case import Case
from fa_verify.inputs import Inputs, materialise

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

__all__ = ["AHEAD", "Maker"]

AHEAD = 3
"""Cases that may be begun while the inputs of one are in use: some take longer than judging."""

_ROOM = 32 << 20  # bytes of one case's inputs; larger ones are the worker's own to make
_ALIGNED = 512


class _Made(msgspec.Struct, frozen=True):
    """Where a tensor lies in the memory.

    Attributes:
        offset: Bytes before its storage.
        elements: Of its storage.
        place: Its shape, strides and storage offset.
    """

    dtype: str
    offset: int
    elements: int
    place: tuple[tuple[int, ...], tuple[int, ...], int]


class Maker:
    """The process, from the worker's side; whatever becomes of it, the worker goes on without."""

    def __init__(self) -> None:
        """Fork it: before CUDA is used, and before there are threads."""
        self._memory = mmap.mmap(-1, (AHEAD + 1) * _ROOM)  # it takes what is written to
        self._pipe, theirs = multiprocessing.Pipe()
        self._begun: collections.deque[str] = collections.deque()
        if os.fork() == 0:
            try:
                self._pipe.close()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                _serve(theirs, self._memory)
            finally:
                os._exit(0)
        theirs.close()

    def begin(self, case: str) -> None:
        """Have a case's inputs made; those of the one begun `AHEAD` + 1 before are overwritten."""
        with contextlib.suppress(OSError):
            self._pipe.send(case)
            self._begun.append(case)

    def result(self, case: str) -> Inputs | None:
        """The inputs of a case that was begun; None: the worker has to make them."""
        while self._begun:
            begun = self._begun.popleft()  # one before it may never have been asked for
            try:
                made, seed = self._pipe.recv()
            except (EOFError, OSError):
                return None
            if begun == case and made is not None:
                tensors = {name: _found(self._memory, one) for name, one in made.items()}
                return Inputs(**tensors, dropout_seed=seed)
            if begun == case:
                return None
        return None

    def stop(self) -> None:
        """Let it end."""
        self._pipe.close()


def _serve(pipe: Connection, memory: mmap.mmap) -> None:
    """Make what is asked for, in the parts of the memory by turns, until nobody asks."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        for turn in itertools.cycle(range(AHEAD + 1)):
            case = pipe.recv()
            try:
                inputs = materialise(Case.parse(case))
                made = _lay(inputs, memory, turn * _ROOM)
            except Exception:  # noqa: BLE001 - whatever it is, it happens again where it is reported
                made = None
            pipe.send((made, None if made is None else inputs.dropout_seed))


def _lay(inputs: Inputs, memory: mmap.mmap, start: int) -> dict[str, _Made] | None:
    """Copy each storage into the memory, slack and all; None if they do not fit."""
    made, offset = {}, start
    for name, tensor in inputs.named():
        size = tensor.untyped_storage().nbytes()
        if offset + size > start + _ROOM:
            return None
        elements = size // tensor.element_size()
        place = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        made[name] = _Made(str(tensor.dtype).removeprefix("torch."), offset, elements, place)
        _storage(memory, made[name]).copy_(torch.as_strided(tensor, (elements,), (1,), 0))
        offset += -(-size // _ALIGNED) * _ALIGNED
    return made


def _storage(memory: mmap.mmap, made: _Made) -> Tensor:
    dtype = getattr(torch, made.dtype)
    return torch.frombuffer(memory, dtype=dtype, count=made.elements, offset=made.offset)


def _found(memory: mmap.mmap, made: _Made) -> Tensor:
    return _storage(memory, made).as_strided(*made.place)
