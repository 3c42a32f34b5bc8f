"""Programs that part for good: early returns and branches, after loops and reductions."""

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir

PROGRAMS = 48


@triton.jit
def clipped(x, low, high):
    if x < low:
        return low
    if x > high:
        return high
    return x


@triton.jit
def largest(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def after_a_loop(x_ptr, y_ptr, n):
    i = tl.program_id(0)
    if i >= n:
        return
    x = tl.load(x_ptr + i)
    if x < 0:
        tl.store(y_ptr + i, -7)
        return
    total = x
    for j in range(clipped(x, 3, 9)):  # programs leave it at different times
        if j % 2 == 1:
            total += j
    tl.store(y_ptr + i, total + clipped(total, 0, 4))


@triton.jit
def after_a_while(x_ptr, y_ptr, n):
    i = tl.program_id(0)
    x = tl.load(x_ptr + i % n)
    turns = 0
    while x > 1:
        x = x // 2
        turns += 1
    if turns == 2:
        return
    tl.store(y_ptr + i, clipped(turns, 1, 3))


@triton.jit
def after_a_reduction(x_ptr, y_ptr, n):
    i = tl.program_id(0)
    if i >= n:
        return
    at = tl.arange(0, 8)
    x = tl.load(x_ptr + (i + at) % n)
    most = tl.reduce(x * 2, 0, largest)  # the region's own values have other shapes
    if most > 20:
        tl.store(y_ptr + i, most)
        return
    tl.store(y_ptr + i, clipped(tl.sum(x, 0), -5, 5))


def clip(x, low, high):
    return min(max(x, low), high)


def looped(x, n, i):
    if i >= n:
        return None
    if x[i] < 0:
        return -7
    total = x[i] + sum(range(1, clip(x[i], 3, 9), 2))
    return total + clip(total, 0, 4)


def halved(x, n, i):
    turns = max(x[i % n], 1).bit_length() - 1
    return None if turns == 2 else clip(turns, 1, 3)


def reduced(x, n, i):
    if i >= n:
        return None
    near = [x[(i + j) % n] for j in range(8)]
    return 2 * max(near) if max(near) > 10 else clip(sum(near), -5, 5)


@pytest.mark.parametrize("schedule", ["forward", "serial"])
@pytest.mark.parametrize(
    ("kernel", "want"),
    [(after_a_loop, looped), (after_a_while, halved), (after_a_reduction, reduced)],
)
def test_programs_part_after_what_left_values_behind(kernel, want, schedule):
    n = PROGRAMS - 8
    x = torch.randint(-5, 15, (n,), generator=torch.Generator().manual_seed(1)).int()
    y = torch.full((PROGRAMS,), 99, dtype=torch.int32)
    with ttir.execute(ttir.Options(schedule=schedule)) as run:
        kernel[PROGRAMS,](x, y, n)
    assert not run.incidents
    values = [want(x.tolist(), n, i) for i in range(PROGRAMS)]
    assert y.tolist() == [99 if v is None else v for v in values]
