"""Faults planted in kernels of other kinds than attention: found, at their line and element.

A fault sits on the line that ends in its name.
"""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir

LINES = Path(__file__).read_text(encoding="utf-8").splitlines()
PLANTED = {}


def planted(kind, argument="", coordinates=None, count=None):
    """A test case: a function that launches the kernel whose fault has its name."""

    def keep(function):
        PLANTED[function.__name__] = (function, kind, argument, coordinates, count)
        return function

    return keep


def inside(*shape, dtype=torch.float32):
    """A view of the middle of something larger, all of it written."""
    whole = torch.ones(3, *(n + 5 for n in shape), dtype=dtype)
    return whole[1][tuple(slice(2, n + 2) for n in shape)]


@triton.jit
def convolve(x, w, y, n, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(WIDTH):
        at = x + c * row + i - (WIDTH - 1) + k
        acc += tl.load(w + c * WIDTH + k) * tl.load(at, mask=i < n, other=0.0)  # halo
    tl.store(y + c * n + i, acc, mask=i < n)


@planted("out-of-bounds-read", "x", count=24)
def halo():
    x = inside(4, 40)
    convolve[4, 2](x, torch.ones(4, 4), torch.empty(4, 40), 40, x.stride(0), 4, 32)


@triton.jit
def embed(ids, table, y, n, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    r, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    i = tl.load(ids + r, mask=r < n, other=0)
    x = tl.load(table + i[:, None] * row + d[None, :], mask=(r < n)[:, None])  # vocabulary
    tl.store(y + r[:, None] * WIDTH + d[None, :], x, mask=(r < n)[:, None])


@planted("out-of-bounds-read", "table", (50, 0), 16)
def vocabulary():
    table, ids = inside(50, 16), torch.arange(37)
    ids[21] = 50
    embed[3,](ids, table, torch.empty(37, 16), 37, table.stride(0), 16, 16)


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)  # gap


@planted("out-of-bounds-read", "x", count=16)
def gap():
    copy[2,](torch.ones(64)[::2], torch.empty(32), 32, 16)


@triton.jit
def add(a, b, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(a + i, mask=i < n + 2, other=0.0)  # neighbour
    tl.store(y + i, x + tl.load(b + i, mask=i < n, other=0.0))


@planted("out-of-bounds-read", "a", (20,), 2)
def neighbour():
    both = torch.ones(40)
    add[1,](both[:20], both[20:], torch.empty(32), 20, 32)


@triton.jit
def scatter(x, ids, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    to = tl.load(ids + i, mask=i < n, other=0)
    tl.store(y + to, tl.load(x + i, mask=i < n), mask=i < n)  # padding


@planted("out-of-bounds-write", "y", count=1)
def padding():
    ids = torch.arange(60)
    ids[5] = -1
    scatter[4,](torch.randn(60), ids, inside(60), 60, 16)


@triton.jit
def count(x, counts, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = (tl.load(x + i, mask=i < n) * BINS).to(tl.int32)
    tl.atomic_add(counts + slot, 1, mask=i < n)  # last_bin


@planted("out-of-bounds-write", "counts", (10,), 1)
def last_bin():
    x = torch.rand(100) * 0.9
    x[77] = 1.0
    count[4,](x, inside(10, dtype=torch.int32), 100, 10, 32)


@triton.jit
def parts(x, work, n, BLOCK: tl.constexpr):
    if tl.program_id(0) * BLOCK < n:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(work + tl.program_id(0), tl.sum(tl.load(x + i, mask=i < n, other=0.0), 0))


@triton.jit
def whole(work, y, PARTS: tl.constexpr):
    tl.store(y, tl.sum(tl.load(work + tl.arange(0, PARTS)), 0))  # idle_part


@planted("uninitialised-read", "work", (3,), 1)
def idle_part():
    work = torch.empty(4)
    parts[4,](torch.ones(48), work, 48, 16)
    whole[1,](work, torch.empty(1), 4)


@triton.jit
def accumulate(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(y + i, tl.load(x + tl.program_id(0) * BLOCK + i))  # no_zeros


@planted("uninitialised-read", "y", (0,))
def no_zeros():
    accumulate[4,](torch.ones(64), torch.empty(16), 16)


@triton.jit
def stepped(y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * (BLOCK - 1) + tl.arange(0, BLOCK)
    tl.store(y + i, tl.program_id(0), mask=i < n)  # step


@planted("race", "y", (15,), 3)
def step():
    stepped[4,](torch.empty(61, dtype=torch.int32), 61, 16)


@planted("race", "y", (7,), 1)
def twice():
    ids = torch.arange(16)
    ids[3] = 7
    place[1,](torch.randn(16), ids, torch.empty(16), 16)


@triton.jit
def place(x, ids, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + tl.load(ids + i), tl.load(x + i))  # twice


@triton.jit
def move_up(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i + 1, mask=i + 1 < n, other=0.0)
    tl.store(x + i, value, mask=i < n)  # in_place


@planted("race", "x", (16,))
def in_place():
    move_up[4,](torch.randn(64), 64, 16)


@triton.jit
def held(lock, total, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    while tl.atomic_cas(lock, 0, 1, sem="relaxed") == 1:
        pass
    tl.store(total + i, tl.load(total + i) + 1.0)  # relaxed_lock
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="relaxed")


@planted("race", "total", (0,))
def relaxed_lock():
    held[6,](torch.zeros(1, dtype=torch.int32), torch.zeros(16), 16)


@triton.jit
def compact(x, y, found):
    value = tl.load(x + tl.program_id(0))
    if value > 0:
        tl.store(y + tl.atomic_add(found, 1), value)  # ticket


@planted("order-dependence", "y")
def ticket():
    x = torch.arange(-8.0, 8.0)
    compact[16,](x, torch.zeros(16), torch.zeros(1, dtype=torch.int32))


@triton.jit
def page(cache, table, y, row, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    number = tl.load(table + tl.program_id(0))
    tl.store(y + tl.program_id(0) * BLOCK + i, tl.load(cache + number * row + i))  # far_page


@planted("integer-overflow")
def far_page():
    cache = torch.empty(40_000, 65_536, dtype=torch.float16)  # of which two pages are touched
    cache[3, :64] = cache[39_000, :64] = 1
    table = torch.tensor([3, 39_000], dtype=torch.int32)
    page[2,](cache, table, torch.empty(2, 64, dtype=torch.float16), cache.stride(0), 64)


@triton.jit
def gathered(x, ids, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    near = tl.max_contiguous(tl.load(ids + i), 4)  # contiguous
    tl.store(y + i, tl.load(x + near))


@planted("false-hint", count=24)
def contiguous():
    gathered[1,](torch.randn(64), torch.arange(64).flip(0)[:32].clone(), torch.empty(32), 32)


@triton.jit
def described(x, y, m, n, ROWS: tl.constexpr, COLS: tl.constexpr):
    tile = tl.make_tensor_descriptor(x, [m, n], [n, 1], [ROWS, COLS])  # stride
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(y + at, tile.load([0, 0]))


@planted("descriptor-rule", "x")
def stride():
    x = torch.zeros(16, 20, dtype=torch.float16)
    described[1,](x, torch.empty(8, 16, dtype=torch.float16), 16, 20, 8, 16)


@triton.jit
def centre(x, m, y, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.load(m + i)
    value = tl.load(x + i) * keep
    mean = tl.sum(value, 0) / tl.sum(keep, 0)  # nothing_kept
    tl.store(y + i, value - mean)


@planted("nan-born", "y", (1, 0))
def nothing_kept():
    keep = torch.ones(3, 16)
    keep[1] = 0
    centre[3,](torch.randn(3, 16), keep, torch.empty(3, 16), 16)


@triton.jit
def through_memory(x, work, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(work + i, tl.load(x + i))
    tl.store(y + i, tl.load(work + BLOCK - 1 - i))  # reversal


@planted("read-back", "work")
def reversal():
    through_memory[1,](torch.randn(64), torch.empty(64), torch.empty(64), 64)


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_is_found_at_its_line(name):
    function, kind, argument, coordinates, lanes = PLANTED[name]
    (line,) = (i for i, text in enumerate(LINES, 1) if text.endswith(f"# {name}"))
    with ttir.execute() as run:
        function()
    found = [i for i in (*run.incidents, *run.notes) if i.kind == kind]
    assert [(i.line, i.argument) for i in found] == [(line, argument)]
    assert coordinates is None or found[0].coordinates == coordinates
    assert lanes is None or found[0].count == lanes
