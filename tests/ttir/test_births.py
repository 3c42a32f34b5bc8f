"""Where a NaN that a kernel stores was born."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import torch
import triton
import triton.language as tl

from fa_verify import ttir


@triton.jit
def quotient(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=1.0)
    z = x - x
    ratio = x / z  # quotient, in part
    ratio = tl.where(x == 3.0, ratio * z, x)  # quotient
    tl.store(y_ptr + i, ratio + 1.0, mask=i < n)


@triton.jit
def softmax(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * BLOCK + i)
    m = tl.full([], float("-inf"), tl.float32)
    total = 0.0
    p = tl.zeros([BLOCK], tl.float32)
    for _ in range(2):
        s = tl.where(x < n, x, float("-inf"))
        new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp(s - new)  # softmax
        total = total * tl.exp(m - new) + tl.sum(p, 0)
        m = new
    tl.store(y_ptr + row * BLOCK + i, p / total)


@triton.jit
def root(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + i, tl.sqrt(tl.load(x_ptr + i) - n))  # root


@triton.jit
def row_root(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.sqrt(tl.load(x_ptr + i)))  # row root


@triton.jit
def rescaled(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    m = tl.full([], float("-inf"), tl.float32)
    new = tl.maximum(m, tl.max(x, 0))
    tl.store(y_ptr + i, x * tl.exp(m - new) + n)  # rescaled


@triton.jit
def selected(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    ratio = tl.where(i < n, x / x, 1.0)  # 0 / 0 behind the end is left out
    tl.store(y_ptr + i, tl.sqrt(ratio - 2.0), mask=i < n)  # after a select


@triton.jit
def total(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i) * tl.where(i < n, float("inf"), float("-inf"))
    tl.store(y_ptr, tl.sum(x, 0))  # total


@triton.jit
def overflow(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + i * BLOCK + j)
    big = x * 3.0e38  # overflow, in part
    tl.store(y_ptr + i * BLOCK + j, tl.dot(big, big - big))  # overflow


@triton.jit
def halve(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 0.5, mask=i < n)


@triton.jit
def in_place(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(x_ptr + i, (x - x) / (x - x))


def line_of(text):
    with open(__file__, encoding="utf-8") as source:  # noqa: PTH123
        return next(i for i, line in enumerate(source, 1) if line.rstrip().endswith(text))


def launch(kernel, x, programs, n, block=16):
    y = torch.zeros(64 * 16)[16:]
    with ttir.execute() as run:
        kernel[(programs,)](x, y, n, block)
    assert run.incidents == []
    return y, run.notes


def test_the_operation_and_the_program_are_named():
    y, notes = launch(quotient, torch.arange(1.0, 64.0), 4, 40)
    assert y.isnan().nonzero().flatten().tolist() == [2]
    (note,) = notes
    assert (note.kind, note.line) == ("nan-born", line_of("# quotient"))
    assert note.argument == "y_ptr"
    assert note.coordinates == (2,)
    assert note.program_id == (0, 0, 0)
    assert "arith.mulf of inf, 0 gave NaN" in note.detail
    assert f"inf first came from arith.divf of 1, 0 at line {line_of('in part')}" in note.detail


def test_a_fully_masked_row_of_an_online_softmax_is_traced_to_the_subtraction():
    x = torch.zeros(4, 16)
    x[2] = 9.0
    y, notes = launch(softmax, x, 4, 5)
    assert y[32:48].isnan().all()
    (note,) = notes
    assert note.line == line_of("# softmax")
    assert note.program_id == (2, 0, 0)
    assert "arith.subf of -inf, -inf gave NaN" in note.detail
    _, notes = launch(softmax, torch.zeros(4, 16), 4, 5)
    assert notes == []


def test_an_atomic_that_adds_nan_counts_as_storing_it():
    _, (note,) = launch(root, torch.ones(16), 1, 2)
    assert note.line == line_of("# root")
    assert "of -1 gave NaN" in note.detail


def test_an_overflow_that_a_product_turns_into_nan_is_named_with_the_product():
    _, (note,) = launch(overflow, torch.full((16, 16), 4.0), 1, 2)
    assert note.line in {line_of("# overflow"), line_of("# overflow, in part")}
    assert "arith.mulf of 4, 3e+38" in note.detail


def test_a_nan_that_was_loaded_was_not_born_in_the_kernel():
    x = torch.ones(64)
    x[33] = torch.nan
    y, notes = launch(halve, x, 4, 64)
    assert y[33].isnan()
    assert notes == []


def test_a_birth_is_found_behind_programs_that_loaded_nan():
    x = torch.ones(128, 16)
    x[:64], x[90:, 3] = torch.nan, -1.0  # so many programs cannot all be run again
    y = torch.empty(128, 16)
    with ttir.execute() as run:
        row_root[(128,)](x, y, 16)
    (note,) = run.notes
    assert note.line == line_of("# row root")
    assert "of -1 gave NaN" in note.detail
    assert note.program_id[0] >= 90
    assert note.coordinates == (note.program_id[0], 3)


def test_what_follows_from_a_loaded_nan_that_a_maximum_dropped_is_not_called_born():
    x = torch.zeros(4, 16)
    x[2] = torch.nan
    y, notes = launch(rescaled, x, 4, 5)
    assert y[2 * 16 :][:16].isnan().all()
    assert notes == []
    x[3] = torch.inf
    _, (note,) = launch(rescaled, x, 4, 5)
    assert note.program_id == (3, 0, 0)


def test_a_nan_that_a_select_left_out_is_not_the_one_that_was_stored():
    _, (note,) = launch(selected, torch.ones(16), 1, 9)
    assert note.line == line_of("# after a select")
    assert "of -1 gave NaN" in note.detail


def test_a_sum_of_opposite_infinities_is_named():
    _, (note,) = launch(total, torch.ones(16), 1, 8)
    assert note.line == line_of("# total")
    assert "tt.reduce of operands with inf gave NaN" in note.detail


def test_a_program_whose_input_is_gone_is_not_run_again():
    x = torch.ones(16)
    _, notes = launch(in_place, x, 1, 16)
    assert x.isnan().all()
    assert notes == []


def test_running_again_leaves_memory_as_it_was():
    x = torch.arange(1.0, 64.0)
    y, _ = launch(quotient, x, 4, 40)
    assert torch.equal(x, torch.arange(1.0, 64.0))
    assert y[:2].tolist() == [2.0, 3.0]
    assert not y[40:].any()
