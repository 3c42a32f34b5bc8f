"""Waits that never end are given up within two seconds, with their line."""

import time

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir


def flags(*values):
    return torch.tensor(values, dtype=torch.int32)


def executed(**options):
    return ttir.execute(ttir.Options(deadline=time.thread_time() + 60, **options))


@triton.jit
def wait_for_nobody(flag_ptr):
    while tl.atomic_cas(flag_ptr, 1, 1) == 0:  # a wait
        pass


@triton.jit
def wait_and_count(flag_ptr):
    turns = 0
    while tl.atomic_add(flag_ptr, 0) == 0:  # a wait
        turns += 1
    tl.store(flag_ptr + 1, turns)


@triton.jit
def poll_for_nobody(flag_ptr):
    ready = 0
    while ready == 0:  # a wait
        ready = tl.load(flag_ptr, volatile=True)
    tl.store(flag_ptr + 1, ready)


@triton.jit
def locks_crosswise(lock_ptr):
    me = tl.program_id(0)
    while tl.atomic_cas(lock_ptr + me, 0, 1) == 1:
        pass
    while tl.atomic_cas(lock_ptr + 1 - me, 0, 1) == 1:  # a wait
        pass
    tl.atomic_xchg(lock_ptr, 0)
    tl.atomic_xchg(lock_ptr + 1, 0)


@triton.jit
def never_released(lock_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:  # a wait
        pass


HOPELESS = [
    (wait_for_nobody, 1), (wait_for_nobody, 3000), (wait_and_count, 1), (wait_and_count, 500),
    (poll_for_nobody, 1), (locks_crosswise, 2), (never_released, 50),
]  # fmt: skip


def lines_of(kernel, mark):
    start = kernel.starting_line_number
    return [start + i for i, line in enumerate(kernel.raw_src) if mark in line]


@pytest.mark.parametrize("schedule", ["forward", "reverse"])
@pytest.mark.parametrize(
    ("kernel", "programs"), HOPELESS, ids=[f"{k.__name__}-{n}" for k, n in HOPELESS]
)
def test_a_hopeless_wait_is_given_up_within_two_seconds(kernel, programs, schedule):
    """The least of three counts: compiling, and a long process's garbage, are in its time."""
    taken = []
    while len(taken) < 3 and min(taken, default=2.0) >= 2:
        flag, began = flags(0, 0), time.process_time()
        with (
            pytest.raises(ttir.Unsupported, match="waits for another program") as caught,
            executed(schedule=schedule),
        ):
            kernel[(programs,)](flag)
        taken.append(time.process_time() - began)
        assert caught.value.op == "scf.while"
        assert caught.value.line in lines_of(kernel, "# a wait")
    assert min(taken) < 2


def test_locks_taken_in_turn_are_no_deadlock_one_program_at_a_time():
    lock = flags(0, 0)
    with executed(schedule="serial"):
        locks_crosswise[(2,)](lock)
    assert lock.tolist() == [0, 0]


@triton.jit
def wait_forever_busily(flag_ptr):
    while tl.atomic_xchg(flag_ptr, tl.atomic_add(flag_ptr + 1, 1)) >= 0:
        pass


def test_the_deadline_holds_for_programs_that_take_turns():
    options = ttir.Options(deadline=time.thread_time() + 0.3)
    with pytest.raises(ttir.TimeLimit), ttir.execute(options):
        wait_forever_busily[(5,)](flags(0, 0))


def test_after_a_hopeless_wait_the_kernel_runs_again():
    for _ in range(2):
        with pytest.raises(ttir.Unsupported), executed():
            never_released[(4,)](flags(0))
        lock = flags(0)
        with executed():
            never_released[(1,)](lock)
        assert lock.item() == 1


@triton.jit
def poll_for_nothing(flag_ptr):
    tl.atomic_poll(flag_ptr, 3)  # a wait


@pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="this Triton cannot poll")
def test_a_hopeless_poll_is_given_up():
    with pytest.raises(ttir.Unsupported, match="waits for another program") as caught, executed():
        poll_for_nothing[(2,)](flags(0))
    assert caught.value.op == "tt.atomic_poll"
    assert caught.value.line in lines_of(poll_for_nothing, "# a wait")
