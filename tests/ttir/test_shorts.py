"""16-bit tiles in 16 bits: the numbers, to the bit, that they are in float32."""

# Triton reads the kernels in this file: their constexprs are upper-case.
# ruff: noqa: N803

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from fa_verify import ttir
from fa_verify.ttir.engine import program
from fa_verify.ttir.engine.program import program_for
from fa_verify.ttir.lowering import lower, narrowing
from fa_verify.ttir.lowering.narrowing import narrow
from fa_verify.ttir.lowering.shorts import short_tiles
from fa_verify.ttir.numbers import shorts
from fa_verify.ttir.numbers.floats import SHORT, decode, encode, round_to
from fa_verify.ttir.syntax.parser import parse

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
OPERATIONS = {
    "add": (torch.add, np.add),
    "subtract": (torch.sub, np.subtract),
    "multiply": (torch.mul, np.multiply),
    "divide": (torch.div, np.divide),
}
ALL = np.arange(-(1 << 15), 1 << 15).astype(np.int16)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN and overflow
scalars = pytest.mark.parametrize("scalar", list(SHORT))


@scalars
def test_every_pattern_survives_widening(scalar):
    short = ALL.view(SHORT[scalar])
    wide = shorts.widen(short)
    assert wide.dtype == np.float32
    assert (wide.view(np.int32) == decode(ALL, scalar).view(np.int32)).all()
    assert (encode(wide, scalar) == ALL).all()
    assert (encode(short, scalar) == ALL).all()


@scalars
@pytest.mark.parametrize("size", [7, 100_000])
def test_shortening_rounds_as_ever(scalar, size):
    x = np.random.default_rng(size).integers(0, 1 << 32, size).astype(np.uint32).view(np.float32)
    got, want = shorts.shorten(x, scalar), round_to(x, scalar)
    assert np.array_equal(shorts.widen(got), want, equal_nan=True)
    assert (np.signbit(shorts.widen(got)) == np.signbit(want)).all()


@scalars
@pytest.mark.parametrize("name", OPERATIONS)
@given(
    seed=st.integers(0, 1 << 32),
    size=st.sampled_from([1, 31, 513, 5000]),
    left=st.booleans(),
    right=st.booleans(),
    into=st.sampled_from([None, 0, 1]),
)
def test_operations_round_once(scalar, name, seed, size, left, right, into):
    """Whichever operand is short, and wherever the result goes: a float32 operation, rounded."""
    function, plain = OPERATIONS[name]
    raw = np.random.default_rng(seed).integers(-(1 << 15), 1 << 15, (2, size)).astype(np.int16)
    wide = [decode(x, scalar) for x in raw]
    tiles = [
        x.copy().view(SHORT[scalar]) if short else y.copy()
        for x, y, short in zip(raw, wide, (left, right), strict=True)
    ]
    with np.errstate(all="ignore"):
        want = encode(round_to(plain(*wide), scalar), scalar)
        got = shorts.compute(function, *tiles, scalar, None if into is None else tiles[into])
    assert got.dtype == SHORT[scalar]
    nan = np.isnan(decode(want, scalar))  # which of two NaNs goes on is nobody's promise
    assert (np.isnan(shorts.widen(got)) == nan).all()
    assert (got.view(np.int16) == want)[~nan].all()


@scalars
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("into", [False, True])
def test_a_single_number_meets_every_element(scalar, name, first, rank, wide, into):
    function, plain = OPERATIONS[name]
    for number in (1.0, -0.0, 3e-5, np.inf):
        single = round_to(np.full((1,) * rank, number, np.float32), scalar)
        tile = ALL.reshape(2, -1).copy().view(SHORT[scalar])
        pair = (single, shorts.widen(tile)) if first else (shorts.widen(tile), single)
        with np.errstate(all="ignore"):
            want = encode(round_to(plain(*pair), scalar), scalar)
        given_ = single if wide else encode(single, scalar).view(SHORT[scalar])
        pair = (given_, tile) if first else (tile, given_)
        out = tile if into and rank < 3 else None  # it has the result's shape
        got = shorts.compute(function, *pair, scalar, out)
        assert out is None or got is out
        assert got.shape == want.shape
        nan = np.isnan(decode(want, scalar))
        assert (np.isnan(shorts.widen(got)) == nan).all()
        assert (got.view(np.int16) == want)[~nan].all()


@pytest.mark.parametrize("name", OPERATIONS)
@given(seed=st.integers(0, 1 << 32), size=st.sampled_from([1, 64, 511]))
def test_numpy_rounds_a_few_alike(name, seed, size):
    raw = np.random.default_rng(seed).integers(-(1 << 15), 1 << 15, (2, size)).astype(np.int16)
    tiles = [x.view(np.float16) for x in raw]
    assert shorts.is_few(*tiles)
    function, plain = OPERATIONS[name]
    got, want = plain(*tiles), shorts.compute(function, *tiles, "f16", None)
    assert got.dtype == np.float16
    nan = np.isnan(want)
    assert (np.isnan(got) == nan).all()
    assert (got.view(np.int16) == want.view(np.int16))[~nan].all()


def test_few_are_fp16_of_one_shape():
    few, many, row = (np.zeros(n, np.float16) for n in ((2, 4), (2, 256), (1, 4)))
    assert not shorts.is_few(many, many)
    assert not shorts.is_few(few, row)
    assert not shorts.is_few(few, few.astype(np.float32))
    assert not shorts.is_few(*[few.view(np.int16)] * 2)  # bf16


@scalars
def test_signs_and_nan_of_every_pattern(scalar):
    short, wide = ALL.view(SHORT[scalar]), decode(ALL, scalar)
    assert (shorts.negative(short).view(np.int16) == encode(-wide, scalar)).all()
    assert (shorts.absolute(short).view(np.int16) == encode(np.abs(wide), scalar)).all()
    for pattern in ALL[np.isnan(wide)][::41]:
        tile = np.array([0, pattern, 1], np.int16).view(SHORT[scalar])
        assert shorts.any_nan(tile)
    assert not shorts.any_nan(short[~np.isnan(wide)])


@scalars
def test_two_of_one_form(scalar):
    short, wide = ALL.view(SHORT[scalar]), decode(ALL, scalar)
    one = np.array([1.5], np.float32)
    for pair in ((short, one), (one, short)):
        assert all(map(shorts.is_short, shorts.alike(*pair)))
    for pair in ((short, wide), (wide, short)):
        first, second = shorts.alike(*pair)
        assert (first.view(np.int32) == second.view(np.int32)).all()
    assert shorts.alike(wide, one)[1] is one


@triton.jit
def at(BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def moved(x_ptr, w_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Not one bit changes but signs."""
    places = at(BLOCK)
    x = tl.load(x_ptr + places, mask=places % 5 > 0, other=2.0)
    w = tl.load(w_ptr + (places * 7) % n, mask=places % 3 > 0)
    for i in range(tl.program_id(0)):
        x = tl.where((places + i) % 2 > 0, x, w)
    if tl.program_id(0) % 2 == 0:
        x, w = -w, tl.abs(x)
    w = tl.where(places % 7 > 0, w, 1.0)
    low, high = tl.split(tl.join(x, tl.trans(w)))
    x = tl.reshape(tl.join(high, low), (BLOCK, 2 * BLOCK))
    x = x.to(tl.int16, bitcast=True).to(x.dtype, bitcast=True)
    twice = tl.program_id(0) * BLOCK * BLOCK * 2
    flat = tl.arange(0, BLOCK)[:, None] * 2 * BLOCK + tl.arange(0, 2 * BLOCK)[None, :]
    tl.store(y_ptr + twice + flat, x, mask=flat % 11 > 0)


@triton.jit
def computed(x_ptr, w_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Tiles of both forms meet in operations, in branches and in loops that end at odd times."""
    places = at(BLOCK)
    x = tl.load(x_ptr + places)
    w = tl.load(w_ptr + places)
    total = tl.zeros((BLOCK, BLOCK), x.dtype)
    for i in range(1 + tl.program_id(0)):
        total += x * w
        if i % 2 == 1:
            total = tl.maximum(total, w).to(x.dtype) - x
    if tl.program_id(0) % 3 == 0:
        total = total + w
    elif tl.program_id(0) % 3 == 1:
        total = tl.minimum(x, w).to(x.dtype)
    s = (total.to(tl.float32) / w.to(tl.float32)).to(x.dtype) + 0.5
    s = ((s.to(tl.float32) * 3.0).to(x.dtype).to(tl.float32) - 0.1).to(x.dtype)
    s += tl.sum(x, 1)[:, None] + tl.sum(w, 0)[None, :] + tl.max(x, 1).to(x.dtype)[:, None]
    tl.store(y_ptr + 2 * places, s)
    tl.store(y_ptr + 2 * places + 1, (s - tl.trans(total)).to(tl.float32) * 2)


@triton.jit
def described(x_ptr, w_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Descriptors that reach beyond the tensor, and an atomic on a short tile."""
    x_desc = tl.make_tensor_descriptor(x_ptr, [n // BLOCK - 3, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
    y_desc = tl.make_tensor_descriptor(y_ptr, [n // BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
    row = tl.program_id(0) * BLOCK
    x = x_desc.load([row, 0])
    w = tl.load(w_ptr + at(BLOCK))
    y_desc.store([row, 0], x + w)
    tl.atomic_add(y_ptr + n + at(BLOCK), x * w)


@pytest.fixture
def wide(monkeypatch):
    """Have no tile short; called before what it is about."""

    def forbid():
        monkeypatch.setattr(lower, "short_tiles", lambda _: frozenset())
        monkeypatch.setattr(program, "narrow", lambda _: None)
        program_for.cache_clear()

    yield forbid
    program_for.cache_clear()


def launched(kernel, scalar, seed, block, finite):
    """What a kernel makes of random patterns, as bits."""
    programs = 4
    n = programs * block * block
    raw = np.random.default_rng(seed).integers(-(1 << 15), 1 << 15, (2, n)).astype(np.int16)
    if finite:  # values about 1, so that sums are neither all NaN nor exact
        raw = encode(round_to(np.random.default_rng(seed).normal(size=(2, n)), scalar), scalar)
    x, w = (torch.from_numpy(r.copy()).view(TYPES[scalar]) for r in raw)
    y = torch.zeros(2 * n, dtype=TYPES[scalar])
    with ttir.execute() as run:
        kernel[programs,](x, w, y, n, block)
    assert not run.incidents
    return y.view(torch.int16).numpy()


@scalars
@pytest.mark.parametrize("block", [8, 16, 64])
@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("kernel", [moved, computed, described])
def test_kernels_compute_the_same_in_either_form(kernel, finite, block, scalar, wide):
    seed = block + finite
    short = launched(kernel, scalar, seed, block, finite)
    wide()
    want = launched(kernel, scalar, seed, block, finite)
    assert len(set(want.tolist())) > block
    different = short != want
    if kernel is not moved:
        nan = [np.isnan(decode(bits, scalar)) for bits in (short, want)]
        assert (nan[0] == nan[1]).all()
        different &= ~nan[0]
    assert not different.any()


@triton.jit
def wishes(x_ptr, w_ptr, y_ptr, n, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + at(BLOCK))  # added and stored
    w = tl.load(w_ptr + at(BLOCK))  # added once, compared twice
    v = tl.load(w_ptr + n + at(BLOCK))  # through a view and a loop, only a product's factor
    total = tl.trans(v)
    for _ in range(n):
        total *= 2.0
    highest = tl.maximum(tl.maximum(x + w, w) + total, w)
    tl.store(y_ptr + at(BLOCK), x)
    tl.store(y_ptr + n + at(BLOCK), highest)


@triton.jit
def between(x_ptr, w_ptr, y_ptr, n, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + at(BLOCK)).to(tl.float32)
    w = tl.load(w_ptr + at(BLOCK)).to(tl.float32)
    kind: tl.constexpr = y_ptr.dtype.element_ty
    tl.store(y_ptr + at(BLOCK), (x / w).to(kind))
    tl.store(y_ptr + n + at(BLOCK), (x + 0.5).to(kind))
    tl.store(y_ptr + 2 * n + at(BLOCK), (x + 0.1).to(kind))  # no number of 16 bits
    tl.store(y_ptr + 3 * n + at(BLOCK), (x * 3.0 - w).to(kind))  # two operations
    difference = w - x  # two readers
    tl.store(y_ptr + 4 * n + at(BLOCK), difference.to(kind))
    tl.store(y_ptr + 5 * n + at(BLOCK), tl.abs(difference).to(kind))
    tl.store(y_ptr + 6 * n + at(BLOCK), (w * w).to(kind, fp_downcast_rounding="rtz"))


def parsed(kernel):
    x = torch.zeros(8192, dtype=torch.float16)
    with ttir.execute():
        return parse(kernel[1,](x, x.clone(), x.clone(), 1024, 32).asm["ttir"], program.LIBRARY)


def test_tiles_are_as_most_of_their_readers_want_them():
    function = parsed(wishes).entry
    short = short_tiles(function)
    loads = [op.results[0] for op in function.walk() if op.name == "tt.load"]
    sums = [op.results[0] for op in function.walk() if op.name == "arith.addf"]
    assert [x in short for x in loads] == [True, False, True]
    assert not short & set(sums)  # a maximum reads them


def test_an_operation_between_widening_and_rounding_is_done_in_16_bits():
    function = parsed(between).entry
    narrow(function)
    ops = [op for op in function.walk() if op.name in narrowing._OPERATIONS]
    found = [(op.name.removeprefix("arith."), op.results[0].type.scalar) for op in ops]
    assert sorted(found) == [
        ("addf", "f16"), ("addf", "f32"), ("divf", "f16"), ("mulf", "f32"), ("mulf", "f32"),
        ("subf", "f32"), ("subf", "f32"),
    ]  # fmt: skip
    quotient = next(op for op in ops if op.name == "arith.divf")
    assert [x.producer.name for x in quotient.operands] == ["tt.load", "tt.load"]
    assert all(user in list(function.walk()) for x in quotient.operands for user in x.users)
