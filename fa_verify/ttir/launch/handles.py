"""What torch.cuda hands out while the executor is active: guards, streams, events, a generator."""

from __future__ import annotations

import time
from typing import Any, Self

import numpy as np
import torch


class Guard:
    """Stands for torch.cuda.device and stream contexts: does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.idx, self.prev_idx = 0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Stream(Guard):
    """A queue that is always empty: launches are synchronous."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device = torch.device("cuda", 0)
    priority = 0

    def synchronize(self) -> None:
        """Nothing runs behind our back."""

    def query(self) -> bool:
        """Everything has run."""
        return True

    def is_capturing(self) -> bool:
        """There are no graphs."""
        return False

    def wait_stream(self, *_: Any) -> None:
        """Nothing runs behind our back."""

    def wait_event(self, *_: Any) -> None:
        """Nothing runs behind our back."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that has happened."""
        event = Event() if event is None else event
        event.record()
        return event


class Event(Guard):
    """A moment on this machine's own clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.moment = time.perf_counter()

    def record(self, *_: Any) -> None:
        """Happen."""
        self.moment = time.perf_counter()

    def wait(self, *_: Any) -> None:
        """Have happened."""

    def synchronize(self) -> None:
        """Have happened."""

    def query(self) -> bool:
        """Have happened."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of wall time here: says nothing about a GPU, but is never 0."""
        return max((end.moment - self.moment) * 1e3, 1e-6)


class Generator(torch.Generator):
    """The device's own: its state is a seed and an offset, as in CUDAGeneratorImpl.cpp.

    Libraries draw seeds of their kernels from it. The seed is that of the CPU's generator.
    """

    offset = 0

    def manual_seed(self, seed: int) -> Self:
        """Begin anew."""
        torch.default_generator.manual_seed(seed)
        self.offset = 0
        return self

    def seed(self) -> int:
        """Begin anew, anywhere."""
        self.offset = 0
        return torch.default_generator.seed()

    def initial_seed(self) -> int:
        """Where it began."""
        return torch.default_generator.initial_seed()

    def get_offset(self) -> int:
        """How many numbers were drawn since."""
        return self.offset

    def set_offset(self, offset: int) -> Self:
        """Go on from there."""
        self.offset = offset
        return self

    def get_state(self) -> torch.Tensor:
        """16 bytes."""
        seed = np.uint64(self.initial_seed()).astype(np.int64)
        return torch.tensor([int(seed), self.offset]).view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> Self:
        """From 16 bytes."""
        seed, self.offset = state.view(torch.int64).tolist()
        if seed % (1 << 64) != self.initial_seed():
            torch.default_generator.manual_seed(seed)
        return self
