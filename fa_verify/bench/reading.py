"""How fast a device reads memory: a kernel that does nothing else."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from fa_verify.bench.timing import Stopwatch

__all__ = ["bandwidth"]

_BYTES = 1 << 32  # eighty times an H200's L2
_ROUNDS = 5
# Programs a multiprocessor, elements a block, warps: which is fastest depends on the chip.
_LAUNCHES = ((2, 16384, 8), (4, 4096, 4), (4, 8192, 4), (4, 8192, 8), (8, 4096, 8), (16, 2048, 4))


@triton.jit  # type: ignore[untyped-decorator]
def _read(x, sums, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    """Sum every element, a number a program."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for first in tl.range(start, n, tl.num_programs(0) * BLOCK):
        places = first + tl.arange(0, BLOCK)
        total += tl.load(x + places, mask=places < n, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def bandwidth(milliseconds: float) -> float:
    """10^12 bytes that the current device reads a second, by the fastest of a few launches."""
    x = torch.zeros(_BYTES // 4, device="cuda")
    count = torch.cuda.get_device_properties().multi_processor_count
    best = 0.0
    for programs, block, warps in _LAUNCHES:
        sums = torch.empty(count * programs, device="cuda")
        launch = functools.partial(
            _read[len(sums),], x, sums, x.numel(), BLOCK=block, num_warps=warps
        )
        watch = Stopwatch.of([launch], milliseconds)
        for _ in range(_ROUNDS):
            watch.turn()
        best = max(best, _BYTES / watch.median / 1e9)
    return best
