"""Accesses that are described by windows, in whole or in part, do what element by element would."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803, PTH123

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir


@triton.jit
def segments(x_ptr, y_ptr, counts_ptr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = program * BLOCK + at < tl.load(counts_ptr + program)
    x = tl.load(x_ptr + program * BLOCK + at, mask=inside, other=-1.0)  # the load
    tl.store(y_ptr + program * BLOCK + at, x + 1, mask=inside)  # the store


@triton.jit
def wrapped_rows(x_ptr, y_ptr, rows, BLOCK: tl.constexpr):
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) % rows
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + c[:, None] * rows + r[None, :])
    tl.store(y_ptr + tl.program_id(0) * BLOCK * BLOCK + c[:, None] * BLOCK + c[None, :], x)


@triton.jit
def shifted_writes(y_ptr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = program * STEP + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, at * 0.0 + program)  # steps on its neighbour


def line_of(text):
    with open(__file__) as source:
        return next(i for i, line in enumerate(source, 1) if f"# {text}" in line)


def run(kernel, grid, *arguments, **constants):
    with ttir.execute() as execution:
        kernel[grid](*arguments, **constants)
    return execution.incidents


@pytest.mark.parametrize("cut", [(), (5,), (0,), (2, 3), (0, 2, 5), (0, 1, 2, 3, 4, 5)])
def test_programs_cut_short_anywhere(cut):
    block, programs = 32, 6
    keep = torch.tensor([7 * i % block if i in cut else block for i in range(programs)])
    counts = (torch.arange(programs) * block + keep).to(torch.int32)
    x = torch.randn(programs, block)
    y = torch.zeros(programs, block)
    assert not run(segments, (programs,), x, y, counts, BLOCK=block)
    inside = torch.arange(block) < keep[:, None]
    torch.testing.assert_close(y, torch.where(inside, x + 1, 0.0), rtol=0, atol=0)


@pytest.mark.parametrize(("beyond", "count"), [(1, 1), (32, 32), (40, 40)])
def test_what_is_cut_and_what_is_whole_may_both_lie_outside(beyond, count):
    # 4 blocks of 32; the last `beyond` elements that the mask lets through are not there.
    counts = torch.tensor([32, 64, 96, 127], dtype=torch.int32)
    x, y = torch.randn(127 - beyond), torch.zeros(128)
    (incident,) = run(segments, (4,), x, y, counts, BLOCK=32)
    assert incident.kind == "out-of-bounds-read"
    assert incident.line == line_of("the load")
    assert (incident.count, incident.offset) == (count, 127 - beyond)


@pytest.mark.parametrize("rows", [32, 64, 48, 50])
def test_a_range_that_wraps_around_in_some_programs(rows):
    x = torch.randn(16, rows)
    grid = triton.cdiv(rows, 16)
    y = torch.zeros(grid, 16, 16)
    assert not run(wrapped_rows, (grid,), x, y, rows, BLOCK=16)
    columns = torch.arange(grid * 16).reshape(grid, 16) % rows
    torch.testing.assert_close(y, x[:, columns].transpose(0, 1), rtol=0, atol=0)


@pytest.mark.parametrize("step", [16, 15, 1])
def test_windows_that_overlap_in_part_race(step):
    incidents = run(shifted_writes, (8,), torch.zeros(200), STEP=step, BLOCK=16)
    assert [i.kind for i in incidents] == ["race"] * (step < 16)
    if incidents:
        assert incidents[0].line == line_of("steps on its neighbour")


@triton.jit
def blocks_anywhere(x_ptr, starts_ptr, o_ptr, rows, R: tl.constexpr, C: tl.constexpr):
    program = tl.program_id(0)
    slab, row = tl.load(starts_ptr + 3 * program), tl.load(starts_ptr + 3 * program + 1)
    column = tl.load(starts_ptr + 3 * program + 2)
    one = tl.make_tensor_descriptor(x_ptr + slab * rows * 32, [rows, 32], [32, 1], [R, C])
    all_ = tl.make_tensor_descriptor(x_ptr, [2, rows, 32], [rows * 32, 32, 1], [1, R, C])
    at = program * R * C + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(o_ptr + at, one.load([row, column]) + all_.load([slab, row, column]).reshape(R, C))


@pytest.mark.parametrize("programs", [1, 5, 100])
@pytest.mark.parametrize("same", [(), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_blocks_of_descriptors_wherever_they_begin(programs, same):
    """Starts that are the same for all programs, or not; before, across and past the ends."""
    rows = 20
    x, o = torch.randn(2, rows, 32), torch.empty(programs, 8, 16)
    generator = torch.Generator().manual_seed(programs)
    starts = torch.stack(
        [torch.randint(lo, hi, (programs,), generator=generator, dtype=torch.int32)
         for lo, hi in ((0, 2), (-10, rows + 3), (-18, 35))], dim=1,
    )  # fmt: skip
    starts[:, same] = starts[0, same]
    with ttir.execute() as run:
        blocks_anywhere[(programs,)](x, starts, o, rows, 8, 16)
    padded = torch.zeros(2, rows + 40, 32 + 80)
    padded[:, 20 : 20 + rows, 40:72] = x
    for program, (slab, row, column) in enumerate(starts.tolist()):
        want = padded[slab, row + 20 :, column + 40 :][:8, :16]
        assert torch.equal(o[program], 2 * want)
    assert run.incidents == []
