"""What is remembered from one launch to the next changes no result and hides no finding."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803, PTH123

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir


@triton.jit
def scaled(x_ptr, y_ptr, n, stride, factor, BLOCK: tl.constexpr):
    row = tl.program_id(0) // 2
    at = tl.arange(0, BLOCK)
    inside = at < n - tl.program_id(0)
    x = tl.load(x_ptr + row * stride + at, mask=inside, other=0.0)
    tl.store(y_ptr + tl.program_id(0) * BLOCK + at, x * (factor * 2.0), mask=inside)


@triton.jit(do_not_specialize=["stride"])
def far(x_ptr, y_ptr, stride):
    offset = (tl.program_id(0) + 1) * stride  # the product
    tl.store(y_ptr + tl.program_id(0), tl.load(x_ptr + offset))


def line_of(text):
    with open(__file__) as source:
        return next(i for i, line in enumerate(source, 1) if f"# {text}" in line)


def expected(x, n, stride, factor, programs, block):
    y = torch.zeros(programs, block)
    for program in range(programs):
        count = max(n - program, 0)
        start = program // 2 * stride
        y[program, :count] = x.reshape(-1)[start : start + count] * torch.tensor(factor * 2.0)
    return y


def test_equal_numbers_other_numbers_other_grids_and_schedules():
    x = torch.randn(8, 16)
    launches = [(16, 16, 1.5, 4), (16, 16, 1.5, 4), (9, 16, 1.5, 4), (16, 8, 1.5, 4),
                (16, 16, 2.5, 4), (16, 16, 1.5, 7), (16, 16, 1.5, 4)]  # fmt: skip
    for schedule in ("forward", "reverse", "shuffled"):
        with ttir.execute(ttir.Options(schedule=schedule, schedule_seed=3)) as run:
            for n, stride, factor, programs in launches * 2:
                x += 1.0
                y = torch.zeros(programs, 16)
                scaled[programs,](x, y, n, stride, factor, BLOCK=16)
                assert torch.equal(y, expected(x, n, stride, factor, programs, 16))
        assert not run.incidents


@pytest.mark.parametrize("launches", [1, 2, 5])
def test_an_overflow_is_reported_each_time(launches):
    x, y = torch.zeros(4), torch.zeros(2)
    with ttir.execute() as run:
        for _ in range(launches):
            far[2,](x, y, 2**30 + 2**29)
    (incident,) = [i for i in run.incidents if i.kind == "integer-overflow"]
    assert incident.line == line_of("the product")
    assert incident.count == launches
