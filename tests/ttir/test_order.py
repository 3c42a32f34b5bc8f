"""Which accesses atomics order, and which they do not."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir


@triton.jit
def last_one(part_ptr, count_ptr, y_ptr, n, SEM: tl.constexpr, LATE: tl.constexpr, N: tl.constexpr):
    pid = tl.program_id(0)
    if not LATE:
        tl.store(part_ptr + pid, pid.to(tl.float32))
    done = tl.atomic_add(count_ptr, 1, sem=SEM)
    if LATE:
        tl.store(part_ptr + pid, pid.to(tl.float32))
    if done == n - 1:
        tl.store(y_ptr, tl.sum(tl.load(part_ptr + tl.arange(0, N))))  # gathers


@triton.jit
def locked(lock_ptr, count_ptr, x_ptr, OUTSIDE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    x = tl.load(x_ptr + i)
    if tl.load(count_ptr) == 0:
        tl.atomic_xchg(count_ptr, 1)
    if not OUTSIDE:
        tl.store(x_ptr + i, x + 1.0)
    tl.atomic_xchg(lock_ptr, 0)
    if OUTSIDE:
        tl.store(x_ptr + i, x + 1.0)  # after the lock


@triton.jit
def chain(flag_ptr, x_ptr, y_ptr, SKIP: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(x_ptr, 5.0)
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    elif pid == 1:
        while tl.atomic_add(flag_ptr, 0, sem="acquire") == 0:
            pass
        tl.atomic_xchg(flag_ptr + 1, 1, sem="relaxed" if SKIP else "release")
    else:
        while tl.atomic_add(flag_ptr + 1, 0, sem="acquire") == 0:
            pass
        tl.store(y_ptr, tl.load(x_ptr))  # end of the chain


@triton.jit
def counted(count_ptr, y_ptr, SEM: tl.constexpr):
    done = tl.atomic_add(count_ptr, 1, sem=SEM)
    if done == tl.num_programs(0) - 1:
        tl.store(y_ptr, tl.load(count_ptr))  # reads the counter


def line_of(text):
    with open(__file__, encoding="utf-8") as source:  # noqa: PTH123
        return next(i for i, line in enumerate(source, 1) if line.rstrip().endswith(text))


def incidents(kernel, grid, *args, schedule="forward"):
    with ttir.execute(ttir.Options(schedule=schedule)) as run:
        kernel[grid](*args)
    return run.incidents


@pytest.mark.parametrize("schedule", ["forward", "reverse", "serial"])
def test_the_last_to_arrive_may_read_what_all_wrote_before(schedule):
    def launch(sem, *, late):
        count = torch.zeros(1, dtype=torch.int32)
        args = (torch.zeros(8), count, torch.zeros(1), 8, sem, late, 8)
        return incidents(last_one, (8,), *args, schedule=schedule)

    assert launch("acq_rel", late=False) == []
    for sem, late in (("acq_rel", True), ("relaxed", False), ("acquire", False)):
        found = launch(sem, late=late)
        assert {i.kind for i in found} == {"race"}, (sem, late)
        assert line_of("# gathers") in {i.line for i in found}


def test_a_lock_orders_what_is_done_under_it_and_nothing_after_it():
    def launch(*, outside):
        lock, count = torch.zeros(2, 1, dtype=torch.int32).unbind()
        return incidents(locked, (5,), lock, count, torch.zeros(16), outside, 16)

    assert launch(outside=False) == []
    found = launch(outside=True)
    assert {i.kind for i in found} == {"race"}
    assert {i.argument for i in found} == {"x_ptr"}


def test_order_is_handed_on_by_releases_only():
    def launch(*, skip):
        flags = torch.zeros(2, dtype=torch.int32)
        return incidents(chain, (3,), flags, torch.zeros(1), torch.zeros(1), skip)

    assert launch(skip=False) == []
    (found,) = launch(skip=True)
    assert (found.kind, found.line) == ("race", line_of("# end of the chain"))


@triton.jit
def all_set(flag_ptr, y_ptr, SAME: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(flag_ptr, 7 if SAME else 7 + pid)
    tl.store(y_ptr + pid, tl.load(flag_ptr))


@pytest.mark.parametrize("schedule", ["forward", "serial"])
def test_whoever_stored_the_same_value_as_the_others_may_read_it(schedule):
    def launch(*, same):
        flag = torch.zeros(1, dtype=torch.int32)
        return incidents(all_set, (5,), flag, torch.zeros(5), same, schedule=schedule)

    assert launch(same=True) == []
    assert {i.kind for i in launch(same=False)} == {"race"}


def test_a_counter_may_be_read_by_whoever_knows_that_all_have_counted():
    def launch(sem):
        return incidents(counted, (6,), torch.zeros(1, dtype=torch.int32), torch.zeros(1), sem)

    assert launch("acq_rel") == []
    (found,) = launch("relaxed")
    assert (found.kind, found.line) == ("race", line_of("# reads the counter"))
