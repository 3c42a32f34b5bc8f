"""Results that depend on which program an atomic served first."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir


@triton.jit
def first_wins(count_ptr, y_ptr, n, N: tl.constexpr):
    ticket = tl.atomic_add(count_ptr, 1)  # first_wins
    if ticket == 0:
        tl.store(y_ptr, tl.program_id(0) * 1.0)


@triton.jit
def append(count_ptr, y_ptr, n, N: tl.constexpr):
    ticket = tl.atomic_add(count_ptr, 1, sem="relaxed")  # append
    tl.store(y_ptr + ticket, tl.program_id(0) + 0.5)


@triton.jit
def work_queue(count_ptr, y_ptr, n, N: tl.constexpr):
    for _ in range(n):
        item = tl.atomic_add(count_ptr, 1)
        if item < N:
            tl.store(y_ptr + item, item * 2.0)


@triton.jit
def last_sums(count_ptr, y_ptr, n, N: tl.constexpr):
    pid, i = tl.program_id(0), tl.arange(0, N)
    tl.store(y_ptr + 1 + pid, 1.0 / (pid + 1))
    if tl.atomic_add(count_ptr, 1) == n - 1:
        tl.store(y_ptr, tl.sum(tl.load(y_ptr + 1 + i, mask=i < n, other=0.0)))


@triton.jit
def accumulate(count_ptr, y_ptr, n, N: tl.constexpr):
    pid = tl.program_id(0)
    old = tl.atomic_add(y_ptr, 1.0 / (pid + 3.0))
    tl.store(y_ptr + 1 + pid, tl.where(old < 1e9, 1.0, 0.0))


def line_of(text):
    with open(__file__, encoding="utf-8") as source:  # noqa: PTH123
        return next(i for i, line in enumerate(source, 1) if line.rstrip().endswith(text))


def launch(kernel, schedule="forward", **options):
    count, y = torch.zeros(1, dtype=torch.int32), torch.zeros(40)[8:]
    with ttir.execute(ttir.Options(schedule=schedule, **options)) as run:
        kernel[(6,)](count, y, 6, 8)
    assert run.incidents == []
    return run.notes, y


@pytest.mark.parametrize("kernel", [first_wins, append])
@pytest.mark.parametrize("schedule", ["forward", "reverse", "shuffled", "serial"])
def test_what_depends_on_the_order_of_tickets_is_noted(kernel, schedule):
    (found,), y = launch(kernel, schedule)
    assert (found.kind, found.line) == ("order-dependence", line_of(f"# {kernel.__name__}"))
    assert found.argument == "y_ptr"
    assert "in the opposite order" in found.detail
    alone, same = launch(kernel, schedule, sanitize=False)
    assert alone == []
    assert torch.equal(y, same)  # the first run's results stand


@pytest.mark.parametrize("kernel", [work_queue, last_sums, accumulate])
@pytest.mark.parametrize("schedule", ["forward", "reverse"])
def test_tickets_that_change_nothing_but_rounding_are_left_alone(kernel, schedule):
    assert launch(kernel, schedule)[0] == []


def test_a_counter_of_which_only_the_sum_is_wanted_is_not_run_twice():
    @triton.jit
    def counts(count_ptr, y_ptr, n, N: tl.constexpr):
        tl.atomic_add(count_ptr, 1)

    with ttir.execute() as run:
        count = torch.zeros(1, dtype=torch.int32)
        counts[(6,)](count, count, 6, 8)
    assert run.incidents == run.notes == []
    assert count.item() == 6
