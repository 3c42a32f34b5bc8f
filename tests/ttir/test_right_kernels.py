"""Right kernels of other kinds than attention: locks, queues, work handed on, memory used twice.

None may raise an alarm, in whatever order its programs run.
"""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir

orders = pytest.mark.parametrize("schedule", ["forward", "reverse", "shuffled", "serial"])


@triton.jit
def at(start, BLOCK: tl.constexpr):
    return start + tl.arange(0, BLOCK)


@triton.jit
def product(a_ptr, b_ptr, rows, cols, first, last, step, m, n, k, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(first, last, step):
        depth = at(start, BLOCK)
        a_mask, b_mask = (rows < m)[:, None] & (depth < k)[None, :], (depth < k)[:, None]
        a = tl.load(a_ptr + rows[:, None] * k + depth[None, :], mask=a_mask, other=0.0)
        b_mask &= (cols < n)[None, :]
        b = tl.load(b_ptr + depth[:, None] * n + cols[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def grouped(table, sizes, groups, BLOCK: tl.constexpr):
    """Matrices of several sizes, by their addresses."""
    tile, last = tl.program_id(0), 0
    for g in range(groups):
        m, n, k = tl.load(sizes + 3 * g), tl.load(sizes + 3 * g + 1), tl.load(sizes + 3 * g + 2)
        across = tl.cdiv(n, BLOCK)
        tiles = tl.cdiv(m, BLOCK) * across
        while tile >= last and tile < last + tiles:
            a_ptr = tl.load(table + 3 * g).to(tl.pointer_type(tl.float32))
            b_ptr = tl.load(table + 3 * g + 1).to(tl.pointer_type(tl.float32))
            c_ptr = tl.load(table + 3 * g + 2).to(tl.pointer_type(tl.float32))
            rows = at((tile - last) // across * BLOCK, BLOCK)
            cols = at((tile - last) % across * BLOCK, BLOCK)
            acc = product(a_ptr, b_ptr, rows, cols, 0, k, BLOCK, m, n, k, BLOCK)
            mask = (rows < m)[:, None] & (cols < n)[None, :]
            tl.store(c_ptr + rows[:, None] * n + cols[None, :], acc, mask=mask)
            tile += tl.num_programs(0)
        last += tiles


@orders
def test_grouped_products(schedule):
    sizes = [(40, 50, 33), (16, 16, 16), (70, 20, 100)]
    a = [torch.randn(m, k) for m, _, k in sizes]
    b = [torch.randn(k, n) for _, n, k in sizes]
    c = [torch.empty(m, n) for m, n, _ in sizes]
    table = torch.tensor([x.data_ptr() for xs in zip(a, b, c, strict=True) for x in xs])
    quiet(schedule, grouped, 5, table, torch.tensor(sizes).int(), 3, 16)
    for x, y, z in zip(a, b, c, strict=True):
        torch.testing.assert_close(z, x @ y, rtol=1e-4, atol=1e-4)


@triton.jit
def split_k(a_ptr, b_ptr, c_ptr, locks, m, n, k, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The first to hold the lock stores, the others add."""
    tile, across = tl.program_id(0), tl.cdiv(n, BLOCK)
    rows, cols = at(tile // across * BLOCK, BLOCK), at(tile % across * BLOCK, BLOCK)
    first = tl.program_id(1) * BLOCK
    acc = product(a_ptr, b_ptr, rows, cols, first, k, SPLITS * BLOCK, m, n, k, BLOCK)
    c_at, mask = c_ptr + rows[:, None] * n + cols[None, :], (rows < m)[:, None] & (cols < n)[None]
    count = locks + tl.num_programs(0) + tile
    while tl.atomic_cas(locks + tile, 0, 1) == 1:
        pass
    done = tl.load(count)
    if done > 0:
        acc += tl.load(c_at, mask=mask)
    tl.store(c_at, acc, mask=mask)
    tl.atomic_xchg(count, (done + 1) % SPLITS)
    tl.debug_barrier()
    tl.atomic_xchg(locks + tile, 0)


@orders
def test_split_products_under_locks(schedule):
    a, b, c = torch.randn(30, 100), torch.randn(100, 40), torch.empty(30, 40)
    locks = torch.zeros(12, dtype=torch.int32)
    quiet(schedule, split_k, (6, 4), a, b, c, locks, 30, 40, 100, 4, 16)
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)
    assert not locks.any()


@triton.jit
def stream_k(a_ptr, b_ptr, c_ptr, flags, m, n, k, tiles, share, BLOCK: tl.constexpr):
    """Programs take equal shares of all steps; who begins a tile stores, who goes on adds."""
    steps, across = tl.cdiv(k, BLOCK), tl.cdiv(n, BLOCK)
    start = tl.program_id(0) * share
    end = tl.minimum(start + share, tiles * steps)
    while start < end:
        tile = start // steps
        stop = tl.minimum(end, (tile + 1) * steps)
        rows, cols = at(tile // across * BLOCK, BLOCK), at(tile % across * BLOCK, BLOCK)
        first, last = (start - tile * steps) * BLOCK, (stop - tile * steps) * BLOCK
        acc = product(a_ptr, b_ptr, rows, cols, first, last, BLOCK, m, n, k, BLOCK)
        c_at = c_ptr + rows[:, None] * n + cols[None, :]
        if start == tile * steps:
            tl.store(c_at, acc)
            tl.debug_barrier()
            tl.atomic_xchg(flags + tile, 1, sem="release")
        else:
            while tl.atomic_cas(flags + tile, 1, 1, sem="acquire") != 1:
                pass
            tl.atomic_add(c_at, acc)
        start = stop


@orders
def test_shares_of_all_steps(schedule):
    a, b, c = torch.randn(64, 96), torch.randn(96, 64), torch.empty(64, 64)
    flags = torch.zeros(16, dtype=torch.int32)
    quiet(schedule, stream_k, 7, a, b, c, flags, 64, 64, 96, 16, 14, 16)
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)


@triton.jit
def last_one(x_ptr, part_ptr, y_ptr, count_ptr, n, BLOCK: tl.constexpr):
    """Whoever arrives last adds up what all have written."""
    i = at(tl.program_id(0) * BLOCK, BLOCK)
    tl.store(part_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + i, mask=i < n, other=0), 0))
    tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        j = tl.arange(0, BLOCK)
        parts = tl.load(part_ptr + j, mask=j < tl.num_programs(0), other=0)
        tl.store(y_ptr, tl.sum(parts, 0))
        tl.store(count_ptr, 0)


@orders
def test_the_last_one_adds_up(schedule):
    x, y, count = torch.randint(0, 9, (1000,)).int(), torch.empty(1).int(), torch.zeros(1).int()
    quiet(schedule, last_one, 8, x, torch.empty(8, dtype=torch.int32), y, count, 1000, 128)
    assert y.item() == x.sum()
    assert count.item() == 0


@triton.jit
def queue(next_ptr, x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row = tl.atomic_add(next_ptr, 1)
    while row < n:
        i = at(row * BLOCK, BLOCK)
        tl.store(y_ptr + i, tl.load(x_ptr + i) * 2 + row)
        row = tl.atomic_add(next_ptr, 1)


@orders
def test_a_queue_of_work(schedule):
    x, y = torch.randn(20, 16), torch.empty(20, 16)
    quiet(schedule, queue, 6, torch.zeros(1, dtype=torch.int32), x, y, 20, 16)
    assert torch.equal(y, x * 2 + torch.arange(20)[:, None])


@triton.jit
def transpose_in_place(x_ptr, n, BLOCK: tl.constexpr):
    """Each program exchanges a pair of blocks."""
    p, q = tl.program_id(0), tl.program_id(1)
    if p > q:
        return
    a, b = at(p * BLOCK, BLOCK), at(q * BLOCK, BLOCK)
    upper, lower = a[:, None] * n + b[None, :], b[:, None] * n + a[None, :]
    upper_mask, lower_mask = (a[:, None] < n) & (b[None, :] < n), (b[:, None] < n) & (a[None] < n)
    above = tl.load(x_ptr + upper, mask=upper_mask)
    below = tl.load(x_ptr + lower, mask=lower_mask)
    tl.debug_barrier()
    tl.store(x_ptr + lower, tl.trans(above), mask=lower_mask)
    if p != q:
        tl.store(x_ptr + upper, tl.trans(below), mask=upper_mask)


@orders
def test_transposition_in_place(schedule):
    x = torch.randn(40, 40)
    want = x.T.clone()
    quiet(schedule, transpose_in_place, (3, 3), x, 40, 16)
    assert torch.equal(x, want)


@triton.jit
def chain(x_ptr, y_ptr, flags, BLOCK: tl.constexpr):
    """Each program waits for the one before it."""
    p = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    value = tl.load(x_ptr + p * BLOCK + i)
    if p > 0:
        while tl.atomic_add(flags + p - 1, 0, sem="acquire") == 0:
            pass
        value += tl.load(y_ptr + (p - 1) * BLOCK + i)
    tl.store(y_ptr + p * BLOCK + i, value)
    tl.debug_barrier()
    tl.atomic_add(flags + p, 1, sem="release")


@orders
def test_sums_handed_on(schedule):
    x, y = torch.randint(0, 9, (10, 16)).int(), torch.empty(10, 16, dtype=torch.int32)
    quiet(schedule, chain, 10, x, y, torch.zeros(10, dtype=torch.int32), 16)
    assert torch.equal(y, x.cumsum(0).int())


@triton.jit
def insert(keys, slots, ROOM: tl.constexpr):
    key = tl.load(keys + tl.program_id(0))
    slot = key * 37 % ROOM
    old = tl.atomic_cas(slots + slot, -1, key)
    while (old != -1) & (old != key):
        slot = (slot + 1) % ROOM
        old = tl.atomic_cas(slots + slot, -1, key)


@orders
def test_a_table_of_keys(schedule):
    keys = torch.randint(0, 60, (50,)).int()
    slots = torch.full((128,), -1, dtype=torch.int32)
    quiet(schedule, insert, 50, keys, slots, 128)
    assert sorted(set(keys.tolist())) == sorted(x for x in slots.tolist() if x >= 0)


@triton.jit
def cross_entropy(x_ptr, target_ptr, loss_ptr, n, ignored, BLOCK: tl.constexpr):
    """The gradient takes the place of the logits."""
    x_ptr += tl.program_id(0) * n
    target = tl.load(target_ptr + tl.program_id(0))
    if target == ignored:
        for start in range(0, n, BLOCK):
            tl.store(x_ptr + at(start, BLOCK), 0.0, mask=at(start, BLOCK) < n)
        tl.store(loss_ptr + tl.program_id(0), 0.0)
        return
    largest, total = float("-inf"), 0.0
    chosen = tl.load(x_ptr + target)
    for start in range(0, n, BLOCK):
        i = at(start, BLOCK)
        x = tl.load(x_ptr + i, mask=i < n, other=float("-inf"))
        above = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - above) + tl.sum(tl.exp(x - above), 0)
        largest = above
    for start in range(0, n, BLOCK):
        i = at(start, BLOCK)
        x = tl.load(x_ptr + i, mask=i < n, other=float("-inf"))
        p = tl.exp(x - largest) / total
        tl.store(x_ptr + i, tl.where(i == target, p - 1.0, p), mask=i < n)
    tl.store(loss_ptr + tl.program_id(0), largest + tl.log(total) - chosen)


@orders
def test_a_gradient_in_the_place_of_its_input(schedule):
    x, target, loss = torch.randn(9, 100), torch.randint(0, 100, (9,)), torch.empty(9)
    target[4] = -100
    want = x.clone().requires_grad_()
    losses = torch.nn.functional.cross_entropy(want, target, reduction="none")
    losses.sum().backward()
    quiet(schedule, cross_entropy, 9, x, target, loss, 100, -100, 32)
    torch.testing.assert_close(loss, losses.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x, want.grad, rtol=1e-5, atol=1e-5)


def quiet(schedule, kernel, grid, *args):
    """Launch, and expect nothing to be said."""
    with ttir.execute(ttir.Options(schedule=schedule)) as run:
        kernel[grid if isinstance(grid, tuple) else (grid,)](*args)
    assert (run.incidents, run.notes) == ([], [])
