"""32-bit arithmetic that wraps on its way to an address, and what may wrap."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir

BIG = 1 << 30


@triton.jit
def product(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n  # product
    tl.store(y_ptr + tl.program_id(0), tl.load(x_ptr + at))


@triton.jit
def scalar_sum(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = n + n * (tl.program_id(0) % 2)  # scalar_sum
    tl.store(y_ptr + tl.program_id(0), tl.load(x_ptr + at))


@triton.jit
def tile_sum(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    base = x_ptr + (n + n * (tl.program_id(0) % 2) + tl.arange(0, BLOCK))  # tile_sum
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(base))


@triton.jit
def difference(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = -n - n - tl.program_id(0)  # difference
    tl.store(y_ptr + tl.program_id(0), tl.load(x_ptr + at))


@triton.jit
def shift(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = (tl.program_id(0) + 1) << (n // n * 30)  # shift
    tl.store(y_ptr + tl.program_id(0), tl.load(x_ptr + at))


@triton.jit
def carried(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for _ in range(3):
        tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + at))
        at += n  # carried


@triton.jit
def hashed(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = ((tl.program_id(0) + 1) * n * 7) % BLOCK
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@triton.jit
def random(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.rand(n, at))


@triton.jit
def cancels(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK).to(tl.int64) + (n.to(tl.int64) * 4 - n.to(tl.int64) * 4)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


def line_of(text):
    with open(__file__, encoding="utf-8") as source:  # noqa: PTH123
        return next(i for i, line in enumerate(source, 1) if line.rstrip().endswith(text))


@pytest.mark.parametrize("kernel", [product, scalar_sum, tile_sum, difference, shift, carried])
def test_what_wraps_is_reported_at_its_line(kernel):
    with ttir.execute() as run:
        kernel[(4,)](torch.zeros(64), torch.zeros(64), BIG, 16)
    found = [i for i in run.incidents if i.kind == "integer-overflow"]
    assert {i.line for i in found} == {line_of(f"# {kernel.__name__}")}
    assert "does not fit 32 bits" in found[0].detail
    with ttir.execute() as run:
        kernel[(1,)](torch.zeros(64), torch.zeros(64), 1, 16)
    assert [i for i in run.incidents if i.kind == "integer-overflow"] == []


@triton.jit
def masked(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = i * n + i * (n // 2) - i * (n // 2)
    x = tl.load(x_ptr + at * 1, mask=i < 1, other=0.0)
    for k in range(2):
        tl.store(y_ptr + k * n + i * n, x, mask=(i < 1) & (k < 1))


@triton.jit
def to_the_start(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * 4 * n  # to_the_start
    tl.store(y_ptr + tl.program_id(0), tl.load(x_ptr + at))


def test_what_wraps_onto_a_legal_element_is_reported_all_the_same():
    with ttir.execute() as run:
        to_the_start[(2,)](torch.zeros(64), torch.zeros(64), BIG, 16)
    assert [(i.kind, i.line) for i in run.incidents] == [
        ("integer-overflow", line_of("# to_the_start"))
    ]


@pytest.mark.parametrize("kernel", [hashed, random, cancels, masked])
def test_what_may_wrap_or_does_not_is_left_alone(kernel):
    with ttir.execute() as run:
        kernel[(1,)](torch.zeros(64), torch.zeros(64), BIG, 16)
    assert run.incidents == []


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@triton.jit
def last_rows(x_ptr, y_ptr, first, stride, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = first + tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + i)  # far
    tl.store(y_ptr + tl.program_id(0) * BLOCK + i, x)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
@pytest.mark.parametrize("strided", [False, True])
def test_offsets_past_2_to_31_elements_cost_no_memory(dtype, strided):
    rows, width = 1 << 17, 1 << 15  # 2^32 elements
    before = resident()
    with ttir.execute() as run:
        base = torch.empty(rows, width, dtype=dtype)
        x = base[:, : width - 5] if strided else base
        x[-2:, :16] = torch.arange(32).reshape(2, 16).to(dtype)
        for wide in (True, False):
            y = torch.zeros(2, 16, dtype=dtype)
            last_rows[(2,)](x, y, rows - 2, width, wide, 16)
            if wide:
                assert run.incidents == []
                assert torch.equal(y, torch.arange(32).reshape(2, 16).to(dtype))
        assert {i.line for i in run.incidents} == {line_of("# far")}
        assert "integer-overflow" in {i.kind for i in run.incidents}
        last_rows[(1,)](x, y, 5, width, True, 16)
    (found,) = [i for i in run.incidents if i.kind == "uninitialised-read"]
    assert found.line == line_of("# far")
    assert resident() - before < 1 << 30  # the tensor alone would be 4 or 8 GiB


@triton.jit
def write_rows(x_ptr, first, stride, BLOCK: tl.constexpr):
    row = (first + tl.program_id(0)).to(tl.int64)
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + row * stride + i, i.to(tl.float16))
    x = tl.load(x_ptr + row * stride + i)
    tl.store(x_ptr + row * stride + i + BLOCK, x + x)


def test_a_kernel_writes_past_2_to_31_elements():
    rows, width = 1 << 17, 1 << 15
    before = resident()
    with ttir.execute() as run:
        x = torch.empty(rows, width, dtype=torch.float16)
        write_rows[(2,)](x, rows - 2, width, 16)
        assert torch.equal(x[-1, 16:32], 2 * torch.arange(16).half())
        assert not run.unwritten(x[-2:, :32]).any()
        assert run.unwritten(x[-2:, 32:40]).all()
    assert run.incidents == []
    assert resident() - before < 1 << 30
