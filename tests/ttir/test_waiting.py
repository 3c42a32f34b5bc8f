"""Programs that wait for each other: each kind of wait ends, or is given up with its line."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import time

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir

SCHEDULES = [
    {"schedule": "forward"},
    {"schedule": "reverse"},
    {"schedule": "serial"},
    *({"schedule": "shuffled", "schedule_seed": seed} for seed in range(2)),
]
every_schedule = pytest.mark.parametrize(
    "options", SCHEDULES, ids=lambda o: "-".join(map(str, o.values()))
)


def flags(*values):
    return torch.tensor(values, dtype=torch.int32)


def executed(**options):
    return ttir.execute(ttir.Options(deadline=time.thread_time() + 60, **options))


@triton.jit
def add_under_lock(lock_ptr, sum_ptr, x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + i)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(sum_ptr + i, tl.load(sum_ptr + i) + x)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@every_schedule
def test_a_lock_lets_one_program_in_at_a_time(options):
    x = torch.arange(64.0).reshape(16, 4)
    total, lock = torch.zeros(4), flags(0)
    with executed(**options) as run:
        add_under_lock[(16,)](lock, total, x, BLOCK=4)
    assert torch.equal(total, x.sum(0))
    assert lock.item() == 0
    assert run.incidents == []


@triton.jit
def pass_on(flag_ptr, x_ptr, y_ptr, BLOCK: tl.constexpr):
    # Program 0 consumes what the last program produces; all between hand it on.
    me, last = tl.program_id(0), tl.num_programs(0) - 1
    i = tl.arange(0, BLOCK)
    if me == last:
        value = tl.load(x_ptr + i)
    else:
        while tl.atomic_add(flag_ptr + me + 1, 0) == 0:
            pass
        value = tl.load(y_ptr + (me + 1) * BLOCK + i) + 1
    tl.store(y_ptr + me * BLOCK + i, value)
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr + me, 1)


@every_schedule
def test_a_consumer_may_begin_before_its_producer(options):
    x, y, flag = torch.arange(8.0), torch.empty(40, 8), torch.zeros(40, dtype=torch.int32)
    with executed(**options) as run:
        pass_on[(40,)](flag, x, y, BLOCK=8)
    assert torch.equal(y, x + torch.arange(39, -1, -1)[:, None])
    assert run.incidents == []


@triton.jit
def poll(flag_ptr, y_ptr):
    if tl.program_id(0) == 0:
        ready = 0
        while ready == 0:
            ready = tl.load(flag_ptr, volatile=True)
        tl.store(y_ptr, ready)
    else:
        tl.atomic_xchg(flag_ptr, 7)


@every_schedule
def test_a_volatile_load_waits_as_well(options):
    y, flag = flags(0), flags(0)
    with executed(sanitize=False, **options):
        poll[(2,)](flag, y)
    assert y.item() == 7


@triton.jit
def phases(count_ptr, x_ptr, y_ptr, ROUNDS: tl.constexpr):
    # A barrier across the grid after each round: everybody reads what a neighbour wrote before.
    me, programs = tl.program_id(0), tl.num_programs(0)
    for r in range(ROUNDS):
        tl.store(x_ptr + r * programs + me, r * 100 + me)
        tl.debug_barrier()
        tl.atomic_add(count_ptr, 1)
        while tl.atomic_add(count_ptr, 0) < (r + 1) * programs:
            pass
        neighbour = tl.load(x_ptr + r * programs + (me + 1) % programs)
        tl.store(y_ptr + r * programs + me, neighbour)


@every_schedule
def test_a_barrier_across_the_grid_opens_when_all_have_come(options):
    x, y = (torch.zeros(3, 9, dtype=torch.int32) for _ in range(2))
    with executed(**options) as run:
        phases[(9,)](flags(0), x, y, ROUNDS=3)
    assert torch.equal(y, x.roll(-1, 1))
    assert run.incidents == []


@triton.jit
def look_back(state_ptr, sum_ptr, x_ptr, y_ptr, BLOCK: tl.constexpr):
    # Merrill and Garland's single-pass scan, one predecessor at a time. state: 0, or 1 ready.
    me = tl.program_id(0)
    i = me * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    before = 0
    if me > 0:
        while tl.atomic_or(state_ptr + me - 1, 0) == 0:
            pass
        before = tl.load(sum_ptr + me - 1)
    tl.store(sum_ptr + me, before + tl.sum(x))
    tl.debug_barrier()
    tl.atomic_xchg(state_ptr + me, 1)
    tl.store(y_ptr + i, before + tl.cumsum(x))


@every_schedule
def test_a_scan_may_look_back_at_its_neighbour(options):
    x = torch.arange(60 * 16, dtype=torch.int32)
    y, sums = torch.zeros_like(x), torch.zeros(60, dtype=torch.int32)
    with executed(**options) as run:
        look_back[(60,)](torch.zeros_like(sums), sums, x, y, BLOCK=16)
    assert torch.equal(y, x.cumsum(0).int())
    assert run.incidents == []


@triton.jit
def queue(next_ptr, order_ptr, y_ptr, tiles, BLOCK: tl.constexpr):
    tile = tl.atomic_add(next_ptr, 1)
    while tile < tiles:
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + i, i)
        tl.store(order_ptr + tile, tl.program_id(0))
        tile = tl.atomic_add(next_ptr, 1)


@every_schedule
def test_a_queue_of_tiles_is_shared_out(options):
    y, order = torch.zeros(13 * 8, dtype=torch.int32), torch.full((13,), -1, dtype=torch.int32)
    number = flags(0)
    with executed(**options) as run:
        queue[(4,)](number, order, y, 13, BLOCK=8)
    assert torch.equal(y, torch.arange(13 * 8, dtype=torch.int32))
    assert number.item() == 13 + 4
    assert (set(order.tolist()) == {0}) == (options["schedule"] == "serial")
    assert run.incidents == []


@triton.jit
def stream_k(lock_ptr, part_ptr, x_ptr, y_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    # Two programs share a tile's sum: the second leaves its part, the first waits and adds it.
    tile, half = tl.program_id(0) // 2, tl.program_id(0) % 2
    i = tl.arange(0, BLOCK)
    part = tl.zeros([BLOCK], tl.float32)
    for k in range(half * K, half * K + K):
        part += tl.load(x_ptr + (tile * 2 * K + k) * BLOCK + i)
    if half == 1:
        tl.store(part_ptr + tile * BLOCK + i, part)
        tl.debug_barrier()
        tl.atomic_xchg(lock_ptr + tile, 1, sem="release")
    else:
        while tl.atomic_cas(lock_ptr + tile, 1, 1, sem="acquire") != 1:
            pass
        part += tl.load(part_ptr + tile * BLOCK + i)
        tl.store(y_ptr + tile * BLOCK + i, part)


@every_schedule
def test_a_tile_split_in_two_is_put_together(options):
    x = torch.arange(6 * 8 * 16.0).reshape(6, 8, 16)
    y, parts = torch.zeros(6, 16), torch.empty(6, 16)
    with executed(**options) as run:
        stream_k[(12,)](torch.zeros(6, dtype=torch.int32), parts, x, y, K=4, BLOCK=16)
    assert torch.equal(y, x.sum(1))
    assert run.incidents == []


@triton.jit
def hand_over(flag_ptr, x_ptr, y_ptr, SEM: tl.constexpr, EARLY: tl.constexpr):
    if tl.program_id(0) == 1:
        tl.store(x_ptr, 5)
        tl.atomic_xchg(flag_ptr, 1, sem=SEM)
    else:
        x = 0
        if EARLY:
            x = tl.load(x_ptr)  # read too soon
        while tl.atomic_add(flag_ptr, 0, sem=SEM) == 0:
            pass
        if not EARLY:
            x = tl.load(x_ptr)  # read in time
        tl.store(y_ptr, x)


@every_schedule
@pytest.mark.parametrize(
    ("sem", "early", "kinds"),
    [("acq_rel", False, set()), ("relaxed", False, {"race"}), ("acq_rel", True, {"race"})],
)
def test_only_what_an_acquire_follows_is_handed_over(sem, early, kinds, options):
    with executed(**options) as run:
        hand_over[(2,)](flags(0), flags(0), flags(0), sem, early)
    assert {incident.kind for incident in run.incidents} == kinds


@triton.jit
def last_one_reduces(count_ptr, part_ptr, y_ptr, PROGRAMS: tl.constexpr):
    me = tl.program_id(0)
    tl.store(part_ptr + me, me + 1)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1) == PROGRAMS - 1:
        tl.store(y_ptr, tl.sum(tl.load(part_ptr + tl.arange(0, PROGRAMS))))


@every_schedule
def test_the_last_program_reduces_without_waiting(options):
    y = flags(0)
    with executed(**options) as run:
        last_one_reduces[(32,)](flags(0), torch.empty(32, dtype=torch.int32), y, PROGRAMS=32)
    assert y.item() == 32 * 33 // 2
    assert run.incidents == []


@triton.jit
def poll_in_one(flag_ptr, seen_ptr, y_ptr, TIMEOUT: tl.constexpr):
    if tl.program_id(0) == 0:
        seen = tl.atomic_poll(flag_ptr, 3, timeout_ns=TIMEOUT)
        tl.store(seen_ptr, seen.to(tl.int32))
        if seen:
            tl.store(y_ptr + 1, tl.load(y_ptr) + 1)
    else:
        tl.store(y_ptr, tl.program_id(0))
        tl.atomic_xchg(flag_ptr, tl.num_programs(0) + 1)


polls = pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="this Triton cannot poll")


@polls
@every_schedule
@pytest.mark.parametrize("timeout", [None, 0])
def test_a_poll_waits_as_long_as_others_go_on(timeout, options):
    seen, y = flags(9), flags(0, 0)
    with executed(**options) as run:
        poll_in_one[(2,)](flags(0), seen, y, timeout)
    assert (seen.item(), y.tolist()) == (1, [1, 2])
    assert run.incidents == []


@polls
def test_time_is_up_for_a_poll_once_nobody_can_go_on():
    seen, y = flags(9), flags(0, 0)
    with executed():
        poll_in_one[(1,)](flags(0), seen, y, 1000)
    assert (seen.item(), y.tolist()) == (0, [0, 0])


@triton.jit(noinline=True)
def lock_up(lock_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass


@triton.jit
def add_once(lock_ptr, sum_ptr, how_much, BLOCK: tl.constexpr):
    # Two waits inlined from one function that returns early, or one that is called.
    i = tl.arange(0, BLOCK)
    if how_much > 3:
        lock_up(lock_ptr)
        tl.store(sum_ptr + i, tl.load(sum_ptr + i) + how_much)
        tl.debug_barrier()
        tl.atomic_xchg(lock_ptr, 0)
        return
    lock_up(lock_ptr)
    tl.store(sum_ptr + i, tl.load(sum_ptr + i) + how_much)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def add_in_turn(lock_ptr, sum_ptr, BLOCK: tl.constexpr):
    add_once(lock_ptr, sum_ptr, tl.program_id(0), BLOCK)


@every_schedule
def test_waits_in_functions_and_branches(options):
    total = torch.zeros(8, dtype=torch.int32)
    with executed(**options) as run:
        add_in_turn[(10,)](flags(0), total, BLOCK=8)
    assert (total == 45).all()
    assert run.incidents == []


@triton.jit
def commit_in_order(next_ptr, turn_ptr, x_ptr, y_ptr, tiles, BLOCK: tl.constexpr):
    # A queue of tiles, each of which waits until those before it have been committed.
    i = tl.arange(0, BLOCK)
    tile = tl.atomic_add(next_ptr, 1)
    while tile < tiles:
        x = tl.load(x_ptr + tile * BLOCK + i)
        while tl.atomic_add(turn_ptr, 0) != tile:
            pass
        tl.store(y_ptr + i, tl.load(y_ptr + i) * 2 + x)
        tl.debug_barrier()
        tl.atomic_add(turn_ptr, 1)
        tile = tl.atomic_add(next_ptr, 1)


@every_schedule
def test_a_wait_inside_a_loop_over_a_queue(options):
    x, y = torch.arange(9 * 16).reshape(9, 16), torch.zeros(16, dtype=torch.int64)
    with executed(**options) as run:
        commit_in_order[(4,)](flags(0), flags(0), x, y, 9, BLOCK=16)
    assert torch.equal(y, (x * 2 ** torch.arange(8, -1, -1)[:, None]).sum(0))
    assert run.incidents == []


def test_what_needs_more_programs_at_a_time_than_there_are_hangs():
    x = torch.zeros(8, dtype=torch.int32)
    with executed(residents=8):
        phases[(8,)](flags(0), x, x.clone(), ROUNDS=1)
    with pytest.raises(ttir.Unsupported, match="1 more cannot begin"), executed(residents=7):
        phases[(8,)](flags(0), x, x.clone(), ROUNDS=1)


def test_a_memory_limit_does_not_keep_programs_from_meeting():
    x = torch.zeros(8, dtype=torch.int32)
    with executed(memory_limit=1):
        phases[(8,)](flags(0), x, x.clone(), ROUNDS=1)
    assert x.tolist() == list(range(8))


def test_thousands_of_programs_may_wait():
    programs = 3000
    x = torch.ones(programs * 4, dtype=torch.int32)
    y, sums = torch.zeros_like(x), torch.zeros(programs, dtype=torch.int32)
    with executed(schedule="reverse", sanitize=False):
        look_back[(programs,)](torch.zeros_like(sums), sums, x, y, BLOCK=4)
    assert torch.equal(y, x.cumsum(0).int())
