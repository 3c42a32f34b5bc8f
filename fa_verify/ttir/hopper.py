"""torch.cuda's answers while the executor is active on a machine without CUDA.

Kernel launchers ask for capabilities, multiprocessor counts, streams and device guards; they get an
H100's. Where CUDA is available nothing is replaced.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# H100 SXM: 132 SMs, 227 KiB of shared memory a block (CUDA C Programming Guide, compute capability
# 9.0).
PROPERTIES = {
    "max_shared_mem": 232448,
    "max_num_regs": 65536,
    "multiprocessor_count": 132,
    "warpSize": 32,
    "sm_clock_rate": 1980000,
    "mem_clock_rate": 2619000,
    "mem_bus_width": 5120,
}
_TORCH_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 << 30,
    multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20, is_integrated=0,
    is_multi_gpu_board=0, gcnArchName="",
)  # fmt: skip


class _Guard:
    """Stands for torch.cuda.device and stream contexts: does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.idx, self.prev_idx = 0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Stream(_Guard):
    cuda_stream = 0
    stream_id = 0

    def synchronize(self) -> None:
        """Nothing runs behind our back."""

    def wait_stream(self, *_: Any) -> None:
        """Nothing runs behind our back."""

    def wait_event(self, *_: Any) -> None:
        """Nothing runs behind our back."""

    def record_event(self, *_: Any) -> _Event:
        """Return an event that has happened."""
        return _Event()


class _Event(_Guard):
    def record(self, *_: Any) -> None:
        """Happen."""

    def wait(self, *_: Any) -> None:
        """Have happened."""

    def synchronize(self) -> None:
        """Have happened."""

    def query(self) -> bool:
        """Have happened."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Nothing is timed."""
        return 0.0


def _answers() -> dict[str, Any]:
    return {
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: _TORCH_PROPERTIES,
        "get_device_name": lambda *_: _TORCH_PROPERTIES.name,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "stream": lambda *_: _Guard(),
        "device": _Guard,
        "device_of": _Guard,
        "Stream": _Stream,
        "Event": _Event,
    }


@contextmanager
def answering() -> Iterator[None]:
    """Answer for torch.cuda where there is no CUDA."""
    if torch.cuda.is_available():
        yield
        return
    with patch.multiple(torch.cuda, **_answers()):
        yield
