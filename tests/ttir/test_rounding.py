"""Rounding to 16 bits: whatever the layout in memory, in place or not, once and not twice."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir
from fa_verify.ttir.numbers.floats import narrow_once, round_to

RNG = np.random.default_rng(0)
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2, 1),
    "reversed": lambda x: x.transpose(2, 1, 0),
    "rows with gaps": lambda x: x[:, ::2],
    "backwards": lambda x: x[:, :, ::-1],
    "broadcast": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
    "one row": lambda x: x[:1, :1],
}


@pytest.mark.parametrize("scalar", ["f16", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, scalar):
    x = LAYOUTS[layout](RNG.standard_normal((4, 32, 48)).astype(np.float32))
    kept = x.copy()
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[scalar]
    want = torch.from_numpy(kept).to(dtype).float().numpy()
    assert (round_to(x, scalar) == want).all()
    assert (x == kept).all()
    if x.flags.writeable:
        assert (round_to(x, scalar, x) == want).all()


def test_more_than_the_scratch_memory_holds():
    x = RNG.standard_normal(1 << 19).astype(np.float32)
    assert (round_to(x, "f16") == x.astype(np.float16)).all()


def test_float64_is_rounded_once():
    halves = np.arange(0, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middle = (halves[1:] + halves[:-1]) / 2  # between each two neighbours, subnormal ones too
    step = halves[1:] - halves[:-1]
    near = [middle + step * d for d in (0, 2.0**-30, -(2.0**-30), 2.0**-12, -(2.0**-12))]
    x = np.concatenate([*near, [65519.999999, 65520.0, 1e300, np.inf, np.nan, 1e-300, 0.0]])
    for signed in (x, -x):
        with np.errstate(over="ignore"):
            want = signed.astype(np.float16).astype(np.float32)
            got = narrow_once(signed, "f16")
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@triton.jit
def sums(x_ptr, y_ptr, AXIS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + rows[:, None] * COLUMNS + columns[None, :])
    at = columns if AXIS == 0 else rows
    tl.store(y_ptr + at, tl.sum(x, AXIS))


@pytest.mark.parametrize("shape", [(16, 64), (2, 4), (64, 16), (4, 1)])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_round_after_each_addition(shape, axis, dtype):
    x = (torch.randn(shape) * 100).to(dtype)
    y = torch.zeros(shape[1 - axis], dtype=dtype)
    with ttir.execute():
        sums[1,](x, y, AXIS=axis, ROWS=shape[0], COLUMNS=shape[1])
    halves = x.float().movedim(axis, 0)
    while len(halves) > 1:
        half = len(halves) // 2
        halves = (halves[:half] + halves[half:]).to(dtype).float()
    assert torch.equal(y.float(), halves[0])
