"""What else runs on the card beside a launch: a load, or the same launches on a second stream."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fa_verify.inputs import Inputs, duplicate

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["launched", "negated"]

T = TypeVar("T")

# A product of 4096^3 in float16 and a copy of 32 MB take an H200 0.2 ms (measured), other chips
# longer. There are enough of them to outlast what is queued meanwhile, but at most for a second.
_SIZE = 4096
_ROUND = 2e-4
_LEAST, _MOST = 16, 5000


def launched(beside: str, launch: Callable[[Inputs], T], inputs: Inputs) -> T:
    """What a launch on the inputs returns, in the company that `Setup.beside` names.

    The twin runs on other numbers, both before and behind the launch that counts, on a second
    stream. Both streams are held back until all is queued, so that the launches do overlap. The
    caller synchronises before it allocates anything.
    """
    if beside == "nothing":
        return launch(inputs)
    twin = negated(inputs)
    seconds = _seconds_to_queue(launch, twin)
    if beside == "load":
        _load().start(2 * seconds)
        return launch(inputs)
    gate = _load().start(2 * 3 * seconds)
    own, other = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for stream in (own, other):
        stream.wait_stream(torch.cuda.current_stream())
        stream.wait_event(gate)
    with torch.cuda.stream(other):
        launch(twin)
    with torch.cuda.stream(own):
        result = launch(inputs)
    with torch.cuda.stream(other):
        launch(twin)
    return result


def _seconds_to_queue(launch: Callable[[Inputs], object], inputs: Inputs) -> float:
    """How long the host takes over a launch that is compiled."""
    launch(inputs)
    begin = time.perf_counter()
    launch(inputs)
    return time.perf_counter() - begin


class _Load:
    """Products and copies on a stream of their own; they fill the multiprocessors and the bus."""

    def __init__(self) -> None:
        """Allocate the operands."""
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        shape = (_SIZE, _SIZE)
        self._a, self._b = (torch.zeros(shape, dtype=torch.float16, device="cuda") for _ in "ab")
        torch.cuda.synchronize()

    def start(self, seconds: float) -> Any:
        """Queue work for so long at least; the event is behind it."""
        with torch.cuda.stream(self._stream):
            for _ in range(min(_MOST, max(_LEAST, round(seconds / _ROUND)))):
                torch.mm(self._a, self._a, out=self._b)
                self._a.copy_(self._b)
            return self._stream.record_event()


@functools.cache
def _load() -> _Load:
    """The process's own: its operands must outlive what is queued."""
    return _Load()


def negated(inputs: Inputs) -> Inputs:
    """A copy with q and v negated: other weights, another o, lse and delta, as finite as before.

    A workspace that two launches share unawares would hold the same numbers in both, were they
    given the same inputs.
    """
    copy = duplicate(inputs)
    for tensor in (copy.q, copy.v):
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        whole.set_(tensor.untyped_storage()).neg_()
    return copy
