"""Loads, stores, atomics and tensor descriptors, one test an operation and element type."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fa_verify import ttir

N = 32
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def launch(kernel, *args, grid=(1,)):
    with ttir.execute() as run:
        kernel[grid](*args)
    assert run.incidents == []


def elements(dtype, shape=(N,), seed=1):
    """Integers over the whole range, floats around zero."""
    if dtype == torch.bool:
        return torch.arange(N).reshape(shape) % 3 == 0
    rng = np.random.default_rng(seed)
    if dtype.is_floating_point:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype)
    info = torch.iinfo(dtype)
    kind = str(dtype).removeprefix("torch.")
    return torch.from_numpy(rng.integers(info.min, info.max, shape, kind, endpoint=True))


@triton.jit
def copy(x, o, n, other, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i))
    tl.store(o + N + i, tl.load(x + i, mask=i < n), mask=i < n)
    tl.store(o + 2 * N + i, tl.load(x + i, mask=i < n, other=other))
    tl.store(o + 3 * N, tl.load(x + 1))


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, *UNSIGNED, *FLOATS], ids=str)
def test_load_and_store(dtype):
    x, o = elements(dtype), torch.zeros(4, N, dtype=dtype)
    launch(copy, x, o, 20, 1, N)
    x = x.view(getattr(torch, str(dtype)[6:].removeprefix("u"))) if dtype in UNSIGNED else x
    o = o.view(x.dtype)
    assert torch.equal(o[0], x)
    assert torch.equal(o[1], torch.where(torch.arange(N) < 20, x, 0).to(x.dtype))
    assert torch.equal(o[2], torch.where(torch.arange(N) < 20, x, 1).to(x.dtype))
    assert o[3, 0] == x[1]


@triton.jit
def copy_bits(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i))


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_fp8_number_is_loaded_and_stored(dtype):
    x = torch.arange(256).to(torch.uint8).view(dtype)
    o = torch.zeros(256, dtype=dtype)
    launch(copy_bits, x, o, 256)
    number = ~x.float().isnan()
    assert torch.equal(o.view(torch.uint8)[number], x.view(torch.uint8)[number])
    assert o.float()[~number].isnan().all()


@triton.jit
def update(x, o, v, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(v + i)
    if OP == "add":
        old = tl.atomic_add(x + i, value)
    elif OP == "max":
        old = tl.atomic_max(x + i, value)
    elif OP == "min":
        old = tl.atomic_min(x + i, value)
    elif OP == "and":
        old = tl.atomic_and(x + i, value)
    elif OP == "or":
        old = tl.atomic_or(x + i, value)
    elif OP == "xor":
        old = tl.atomic_xor(x + i, value)
    elif OP == "xchg":
        old = tl.atomic_xchg(x + i, value)
    elif OP == "cas":
        old = tl.atomic_cas(x + i, value, value + value)
    tl.store(o + i, old)


WORDS = [torch.int32, torch.int64, torch.uint32, torch.uint64]
UPDATES = {
    "add": (np.add, [*WORDS, *FLOATS]),
    "max": (np.maximum, [*WORDS, torch.float32, torch.float64]),
    "min": (np.minimum, [*WORDS, torch.float32, torch.float64]),
    "and": (np.bitwise_and, WORDS),
    "or": (np.bitwise_or, WORDS),
    "xor": (np.bitwise_xor, WORDS),
    "xchg": (lambda _, new: new, [*WORDS, torch.float32, torch.float64]),
    "cas": (lambda old, new: np.where(old == new, new + new, old), WORDS),
}


@pytest.mark.parametrize(
    ("op", "dtype"), [(op, t) for op, (_, types) in UPDATES.items() for t in types], ids=str
)
def test_atomic_update(op, dtype):
    x, v, o = elements(dtype), elements(dtype, seed=2), torch.zeros(N, dtype=dtype)
    v[::4] = x[::4]
    before = x.clone()
    launch(update, x, o, v, op, N)
    old, new = (t.float() if dtype == torch.bfloat16 else t for t in (before, v))
    with np.errstate(over="ignore"):
        want = torch.from_numpy(np.asarray(UPDATES[op][0](old.numpy(), new.numpy()))).to(dtype)
    assert x.tolist() == want.tolist()
    assert o.tolist() == before.tolist()


@triton.jit
def spinless(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.atomic_load(x + i, mask=i < N - 1, sem="relaxed", scope="cta")
    tl.atomic_store(o + i, v + tl.atomic_load(x + 2), mask=i < N - 1)
    tl.store(o + N + i, tl.atomic_poll(x + i, 3, timeout_ns=0).to(tl.int32))


@pytest.mark.skipif("atomic_load" not in tl.__all__, reason="new in Triton 3.9")
def test_atomic_load_store_and_poll():
    x, o = torch.arange(N, dtype=torch.int32), torch.zeros(2 * N, dtype=torch.int32)
    launch(spinless, x, o, N)
    assert o[:N].tolist() == [*range(2, N + 1), 0]
    assert o[N:].tolist() == [int(i == 3) for i in range(N)]


@triton.jit
def blocks(x, o, rows, cols, KIND: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, cols], [cols, 1], [8, 16])
    target = tl.make_tensor_descriptor(o, [rows, cols], [cols, 1], [8, 16])
    for i in range(0, rows, 8):
        for j in range(0, cols, 16):
            if KIND == "copy":
                tl.store_tensor_descriptor(
                    target, [i, j], tl.load_tensor_descriptor(source, [i, j])
                )
            elif KIND == "add":
                target.atomic_add([i, j], source.load([i, j]))
            elif KIND == "max":
                target.atomic_max([i, j], source.load([i, j]))
            elif KIND == "min":
                target.atomic_min([i, j], source.load([i, j]))
            elif KIND == "and":
                target.atomic_and([i, j], source.load([i, j]))
            elif KIND == "or":
                target.atomic_or([i, j], source.load([i, j]))
            elif KIND == "xor":
                target.atomic_xor([i, j], source.load([i, j]))


BLOCKS = {
    "copy": (lambda _, new: new, [torch.int8, torch.uint16, torch.int32, *FLOATS[:3]]),
    "add": (np.add, [torch.int32, torch.uint32, torch.uint64, torch.float16, torch.float32]),
    "max": (np.maximum, WORDS),
    "min": (np.minimum, WORDS),
    "and": (np.bitwise_and, [torch.uint32, torch.uint64]),
    "or": (np.bitwise_or, [torch.uint32, torch.uint64]),
    "xor": (np.bitwise_xor, [torch.uint32, torch.uint64]),
}


@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, t) for kind, (_, types) in BLOCKS.items() for t in types], ids=str
)
def test_descriptor_blocks(kind, dtype):
    x, o = elements(dtype, (20, 48)), elements(dtype, (20, 48), seed=2)
    before = o.clone()
    launch(blocks, x, o, 20, 48, kind)
    if dtype == torch.bfloat16:
        assert torch.equal(o, x)
        return
    with np.errstate(over="ignore"):
        want = BLOCKS[kind][0](before.numpy(), x.numpy())
    assert np.array_equal(o.numpy(), want)


@triton.jit
def rows_of(source, target, index, o, column, R: tl.constexpr, C: tl.constexpr):
    chosen = tl.load(index + tl.arange(0, R))
    tile = source.gather(chosen, column)
    tl.store(o + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :], tile)
    target.scatter(tile, chosen, column)


@pytest.mark.parametrize("index", [torch.int32, torch.int16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_descriptor_gather_and_scatter(dtype, index):
    if index == torch.int16 and triton.__version__ < "3.8":
        pytest.skip("Triton 3.6 and 3.7 cannot read the TTIR that they write of it")
    x, y, o = (
        elements(dtype, (20, 64)),
        torch.zeros(20, 64, dtype=dtype),
        torch.ones(8, 32).to(dtype),
    )
    rows = torch.tensor([3, 19, 0, 20, 7, -1, 5, 11], dtype=index)
    described = [TensorDescriptor(t, [20, 64], [64, 1], [1, 32]) for t in (x, y)]
    launch(rows_of, *described, rows, o, 48, 8, 32)
    want, moved = torch.zeros(8, 32, dtype=dtype), torch.zeros_like(y)
    for i, row in enumerate(rows.tolist()):
        if 0 <= row < 20:  # what lies outside reads as zero and is not written
            want[i, :16] = x[row, 48:]
            moved[row, 48:] = x[row, 48:]
    assert torch.equal(o, want)
    assert torch.equal(y, moved)


@triton.jit
def padded(source, o):
    tile = source.load([-2, 12])
    tl.store(o + tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :], tile)


@pytest.mark.parametrize("padding", ["zero", "nan"])
def test_descriptor_padding(padding):
    x, o = elements(torch.float32, (20, 24)), torch.ones(8, 16)
    launch(padded, TensorDescriptor(x, [20, 24], [24, 1], [8, 16], padding=padding), o)
    want = torch.full((8, 16), 0.0 if padding == "zero" else torch.nan)
    want[2:, :12] = x[:6, 12:]
    assert torch.equal(o.isnan(), want.isnan())
    assert torch.equal(o.nan_to_num(), want.nan_to_num())


@triton.jit
def block_pointers(x, o, rows, cols):
    p = tl.make_block_ptr(x, (rows, cols), (cols, 1), (tl.program_id(0) * 8, 0), (8, 16), (1, 0))
    q = tl.make_block_ptr(o, (rows, cols), (cols, 1), (tl.program_id(0) * 8, 0), (8, 16), (1, 0))
    for _ in range(tl.cdiv(cols, 16)):
        tile = tl.load(p, boundary_check=(0, 1), padding_option="zero")
        tl.store(q, tile * 2, boundary_check=(0, 1))
        p = tl.advance(p, (0, 16))
        q = tl.advance(q, (0, 16))


@pytest.mark.filterwarnings("ignore:.*make_block_ptr is deprecated")
@pytest.mark.skipif("advance" not in tl.__all__, reason="Triton 3.9 has no block pointers")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_block_pointers_move_and_check_their_bounds(dtype):
    x, o = elements(dtype, (20, 24)), torch.zeros(20, 24, dtype=dtype)
    launch(block_pointers, x, o, 20, 24, grid=(3,))
    assert torch.equal(o, 2 * x)
