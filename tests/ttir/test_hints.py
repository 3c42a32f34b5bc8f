"""What a kernel tells the compiler about its values, true and false."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir


@triton.jit
def multiple(x_ptr, y_ptr, n, start, BLOCK: tl.constexpr):
    i = tl.multiple_of(start + tl.arange(0, BLOCK), 16)  # multiple
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def contiguous(x_ptr, y_ptr, n, start, BLOCK: tl.constexpr):
    i = tl.max_contiguous((start + tl.arange(0, BLOCK)) % (n - 2), BLOCK)  # contiguous
    tl.store(y_ptr + i, tl.load(x_ptr + i))


@triton.jit
def constant(x_ptr, y_ptr, n, start, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.max_constancy((start + i) // 8, 8)  # constant
    tl.store(y_ptr + i, tl.load(x_ptr + row))


@triton.jit
def pointer(x_ptr, y_ptr, n, start, BLOCK: tl.constexpr):
    at = tl.multiple_of(x_ptr + start, 16)  # pointer
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(at + i))


@triton.jit
def assumed(x_ptr, y_ptr, n, start, BLOCK: tl.constexpr):
    tl.assume(start + tl.program_id(0) < 17)  # assumed
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i))


@triton.jit
def rows(x_ptr, y_ptr, n, start, BLOCK: tl.constexpr):
    i = start + tl.arange(0, BLOCK)[:, None] * 16 + tl.arange(0, 16)[None, :]  # rows
    i = tl.max_contiguous(tl.multiple_of(i, (1, 16)), (1, 16))
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def both_axes(x_ptr, y_ptr, n, start, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)[:, None] * start + tl.arange(0, 16)[None, :]
    at = x_ptr + i  # both_axes
    tl.store(y_ptr + i, tl.load(tl.multiple_of(at, (16, 16)), mask=i < n), mask=i < n)


@triton.jit
def slanting(x_ptr, y_ptr, n, start, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)[:, None] * start + tl.arange(0, 16)[None, :]  # slanting
    i = tl.multiple_of(i, (1, 16))
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


def line_of(text):
    with open(__file__, encoding="utf-8") as source:  # noqa: PTH123
        return next(i for i, line in enumerate(source, 1) if line.rstrip().endswith(text))


def launch(kernel, start, programs=1, **options):
    storage = torch.arange(1024.0)
    with ttir.execute(ttir.Options(**options)) as run:
        kernel[(programs,)](storage[256:], torch.zeros(1024), 64, start, 32)
    return run.incidents


@pytest.mark.parametrize(
    ("kernel", "true", "false", "words"),
    [
        (
            multiple,
            32,
            8,
            "multiple_of(..., 16) is claimed, but the value at (0,) of the tile is 8",
        ),
        (contiguous, 28, 32, "max_contiguous(..., 32) is claimed, but the value at (30,) of"),
        (constant, 16, 4, "max_constancy(..., 8) is claimed, but the value at (4,) of"),
        (pointer, 12, 2, "multiple_of(..., 16) is claimed, but the value is"),
        (assumed, 16, 17, "what is assumed is false"),
        (rows, 32, 8, "multiple_of(..., 1, 16) is claimed, but the value at (0, 0) of"),
        (both_axes, 20, 18, "multiple_of(..., 16, 16) is claimed, but the value at (1, 0) of"),
        (slanting, 32, 1, "multiple_of(..., 1, 16) is claimed, but the value at (1, 0) of"),
    ],
)
def test_a_false_claim_is_reported_at_its_line_and_a_true_one_is_not(kernel, true, false, words):
    assert launch(kernel, true) == []
    found = launch(kernel, false)
    assert [(i.kind, i.line) for i in found] == [("false-hint", line_of(f"# {kernel.__name__}"))]
    assert words in found[0].detail
    assert launch(kernel, false, sanitize=False) == []


@pytest.mark.parametrize(("n", "false"), [(32, 0), (40, 0), (100, 0), (62, 1), (126, 1), (125, 1)])
def test_indices_that_wrap_between_wide_accesses_mislead_nobody(n, false):
    with ttir.execute() as run:
        contiguous[(1,)](torch.arange(128.0), torch.zeros(128), n + 2, 0, 128)
    assert [i.kind for i in run.incidents if i.kind != "race"] == ["false-hint"] * false


@triton.jit
def product(x_ptr, y_ptr, z_ptr, m, n, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    rows, columns, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    i = tl.max_contiguous(tl.where(rows < m, rows, 0), M)
    j = tl.max_contiguous(tl.where(columns < n, columns, 0), N)  # columns
    x = tl.load(x_ptr + i[:, None] * K + k[None, :])
    y = tl.load(y_ptr + k[:, None] * 64 + j[None, :])
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(z_ptr + rows[:, None] * n + columns[None, :], tl.dot(x, y), mask=inside)


@triton.jit
def read_twice(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.max_contiguous(tl.where(i < n, i, 0), BLOCK)  # twice
    tl.store(y_ptr + i, tl.load(x_ptr + at))


@triton.jit
def strided(x_ptr, y_ptr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    i = tl.max_contiguous(tl.arange(0, BLOCK) * 2, BLOCK)  # strided
    rows = tl.arange(0, ROWS)[:, None] * BLOCK
    tl.store(y_ptr + rows + tl.arange(0, BLOCK)[None, :], tl.load(x_ptr + rows * 2 + i[None, :]))


@pytest.mark.parametrize("rows", [1, 8])
def test_what_counts_up_by_two_is_not_contiguous(rows):
    with ttir.execute() as run:
        strided[(1,)](torch.randn(rows, 64), torch.empty(rows, 32), 32, rows)
    assert [(i.kind, i.line) for i in run.incidents] == [("false-hint", line_of("# strided"))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("n", [61, 40, 33])
def test_a_false_claim_of_what_is_never_used_misleads_nobody(dtype, n):
    x, y = torch.randn(20, 16, dtype=dtype), torch.randn(16, 64, dtype=dtype)
    z = torch.empty(20, n)
    with ttir.execute() as run:
        product[(1,)](x, y, z, 20, n, 16, 32, 64)
        assert not run.incidents
        read_twice[(1,)](y, torch.empty(64, dtype=dtype), n, 64)  # here it is
    torch.testing.assert_close(z, x.float() @ y[:, :n].float(), rtol=1e-2, atol=1e-2)
    assert [(i.kind, i.line) for i in run.incidents] == [("false-hint", line_of("# twice"))]


def test_the_program_whose_claim_is_false_is_named():
    (found,) = launch(assumed, 15, programs=4)
    assert found.program_id == (2, 0, 0)
    assert found.count == 2


@triton.jit
def begins(x_ptr, y_ptr, BLOCK: tl.constexpr, BYTES: tl.constexpr):
    at = tl.multiple_of(x_ptr + tl.program_id(0) * BLOCK, BYTES)  # begins
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(at + tl.arange(0, BLOCK)))


def test_memory_begins_as_far_on_as_a_gpu_would_have_it():
    kept = [torch.zeros(n) for n in (64, 70, 1000, 3000, 50_000) for _ in range(4)]
    assert any(x.data_ptr() % 256 for x in kept)  # malloc cares for 64 at most
    y = torch.zeros(64)
    with ttir.execute() as run:
        for x in kept:
            begins[(1,)](x, y, 64, 256)
        begins[(1,)](kept[-1][64:], y, 64, 256)
    assert run.incidents == []
    with ttir.execute() as run:
        begins[(1,)](kept[-1][16:], y, 64, 256)
    (found,) = run.incidents
    assert (found.kind, found.line) == ("false-hint", line_of("# begins"))
    assert "but the value is 64 bytes into its memory" in found.detail


@triton.jit
def copy(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i * stride, mask=i < n), mask=i < n)


def test_a_compiled_kernel_is_told_when_its_arguments_are_not_what_it_was_compiled_for():
    x, y = torch.arange(1024.0), torch.zeros(64)
    with ttir.execute() as run:
        compiled = copy[(1,)](x, y, 32, 16, 32)
        compiled[(1, 1, 1)](x, y, 16, 32, 32)
        assert run.incidents == []
        compiled[(1, 1, 1)](x[1:], y, 32, 16, 32)
        compiled[(1, 1, 1)](x, y, 32, 3, 32)
        copy[(1,)](x[1:], y, 31, 3, 32)  # compiled anew, for these
        compiled = copy[(1,)](x, y, 32, 1, 32)
        compiled[(1, 1, 1)](x, y, 32, 5, 32)
    assert {i.kind for i in run.incidents} == {"false-hint"}
    assert [i.argument for i in run.incidents] == ["x_ptr", "stride"]
    assert "compiled for x_ptr divisible by 16; it is " in run.incidents[0].detail
    assert run.incidents[1].detail == "compiled for stride divisible by 16; it is 3"
    assert run.incidents[1].count == 2  # the second time it was compiled for stride=1
