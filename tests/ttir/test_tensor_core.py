"""The tensor-core model against one written with fractions, element by element."""

# ruff: noqa: N803 - Triton's constexprs are upper-case

from fractions import Fraction
from math import floor, trunc

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir
from fa_verify.ttir.numbers import floats, tensor_core

FORMATS = {"f16": (10, -14), "bf16": (7, -126), "f32": (10, -126), "f8E4M3FN": (3, -6),
           "f8E5M2": (2, -14)}  # fmt: skip
UNITS = {"f16": tensor_core.HALF, "bf16": tensor_core.HALF, "f32": tensor_core.TF32,
         "f8E4M3FN": tensor_core.FP8, "f8E5M2": tensor_core.FP8}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def exponent(x, smallest):
    """Floor of log2|x|, not below the format's; None for zero."""
    if x == 0:
        return None
    x, e = abs(x), 0
    while x >= 2:
        x, e = x / 2, e + 1
    while x < 1:
        x, e = x * 2, e - 1
    return max(e, smallest)


def cut(x, lowest):
    """Drop what lies below 2**lowest."""
    return trunc(x / Fraction(2) ** lowest) * Fraction(2) ** lowest


def to_even(x, lowest):
    steps = x / Fraction(2) ** lowest
    below = floor(steps)
    rest = steps - below
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2)
    return (below + bool(up)) * Fraction(2) ** lowest


def step(a, b, c, unit, smallest, *, half):
    """One tensor-core step on lists of fractions."""
    top = [exponent(c, -14 if half else -126)]
    for x, y in zip(a, b, strict=True):
        ex, ey = exponent(x, smallest), exponent(y, smallest)
        top.append(None if ex is None or ey is None else ex + ey)
    present = [e for e in top if e is not None]
    if not present:
        return Fraction(0)
    lowest = max(present) - unit.fraction
    total = cut(c, lowest) + sum(cut(x * y, lowest) for x, y in zip(a, b, strict=True))
    if total == 0:
        return total
    if half:
        return to_even(total, exponent(total, -14) - 10)
    return cut(total, exponent(total, -126) - unit.result)


def slow_dot(a, b, c, name, *, half=False):
    unit, smallest = UNITS[name], FORMATS[name][1]
    out = np.empty(c.shape)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            left = [Fraction(float(x)) for x in a[i]]
            right = [Fraction(float(x)) for x in b[:, j]]
            total = Fraction(float(c[i, j]))
            for k in range(0, len(left), unit.width):
                group = slice(k, k + unit.width)
                total = step(left[group], right[group], total, unit, smallest, half=half)
            out[i, j] = float(total)
    return out


def operand(rng, shape, name, spread):
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)).astype(
        np.float32
    )
    x[rng.random(shape) < 0.05] = 0
    return floats.truncate_tf32(x) if name == "f32" else floats.round_to(x, name)


@pytest.mark.parametrize(
    ("name", "spread", "half"),
    [(name, spread, False) for name in FORMATS for spread in (0, 5, 14)]
    + [("f16", 0, True), ("f16", 4, True)],
)
def test_the_model_is_the_slow_one(name, spread, half):
    rng = np.random.default_rng(spread)
    a, b = operand(rng, (2, 5, 70), name, spread), operand(rng, (2, 70, 4), name, spread)
    c = rng.standard_normal((2, 5, 4)).astype(np.float32) * 2.0 ** rng.integers(-9, 9, (2, 5, 4))
    c = floats.round_to(c.astype(np.float32), "f16" if half else "f32")
    c[0, 0] = 0
    smallest = (tensor_core.SMALLEST[name],) * 2
    got = tensor_core.fused_dot(a, b, c, UNITS[name], smallest, half=half)
    for program in range(2):
        want = slow_dot(a[program], b[program], c[program], name, half=half)
        np.testing.assert_array_equal(got[program], want)


@pytest.mark.parametrize("half", [False, True])
def test_rows_and_columns_of_zeros_are_left_out(half):
    rng = np.random.default_rng(7)
    a, b = operand(rng, (2, 6, 70), "f16", 3), operand(rng, (2, 70, 5), "f16", 3)
    a[:, [1, 4]], a[..., 30:], b[..., 2], b[:, :9] = 0, 0, 0, 0
    c = floats.round_to(operand(rng, (2, 6, 5), "f16", 6), "f16")
    for start in (c, np.zeros((1, 1, 1), np.float32)):
        got = tensor_core.fused_dot(a, b, start, UNITS["f16"], (-14, -14), half=half)
        for program in range(2):
            whole = np.broadcast_to(start, c.shape)[program]
            want = slow_dot(a[program], b[program], whole, "f16", half=half)
            np.testing.assert_array_equal(got[program], want)
    b[0, 0, 0], a[0, 1, 0] = np.inf, 0
    assert np.isnan(tensor_core.fused_dot(a, b, c, UNITS["f16"], (-14, -14), half=half)[0, 1, 0])


def test_subnormal_operands_and_results():
    rng = np.random.default_rng(2)
    for name, scale in (("f16", 2.0**-24), ("bf16", 2.0**-66)):
        a = floats.round_to((rng.integers(-9, 9, (1, 4, 16)) * scale).astype(np.float32), name)
        b = floats.round_to((rng.integers(-9, 9, (1, 16, 3)) * scale).astype(np.float32), name)
        c = np.float32([[[2.0**-140] * 3] * 4])
        got = tensor_core.fused_dot(a, b, c, UNITS[name], (tensor_core.SMALLEST[name],) * 2)
        np.testing.assert_array_equal(got[0], slow_dot(a[0], b[0], c[0], name))
        assert 0 < np.abs(got).max() < 2.0**-36


def test_infinities_and_nan_pass_through():
    a, b = np.ones((1, 4, 16), np.float32), np.ones((1, 16, 1), np.float32)
    a[0, 0, 3], a[0, 1, 3], a[0, 2, 3] = np.inf, -np.inf, np.nan
    c = np.zeros((1, 4, 1), np.float32)
    c[0, 3] = np.inf
    got = tensor_core.fused_dot(a, b, c, tensor_core.HALF, (-14, -14))[0, :, 0]
    assert got[[0, 1, 3]].tolist() == [np.inf, -np.inf, np.inf]
    assert np.isnan(got[2])
    big = np.full((1, 1, 16), 3e38, np.float32)
    assert tensor_core.fused_dot(
        floats.round_to(big, "bf16"), b, c[:, :1], tensor_core.HALF, (-126, -126)
    )[0, 0, 0] == np.inf  # fmt: skip


@triton.jit
def dot(
    a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    LIMIT: tl.constexpr = None,
):  # fmt: skip
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + i[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + j[None, :])
    at = i[:, None] * N + j[None, :]
    tl.store(out + at, tl.dot(left, right, tl.load(c + at), input_precision=P,
                             max_num_imprecise_acc=LIMIT))  # fmt: skip


def launch(a, b, c, precision=None, **model):
    out = torch.empty_like(c)
    options = ttir.Options(float_model=ttir.FloatModel(**model))
    with ttir.execute(options):
        dot[(1,)](a, b, c, out, a.shape[0], b.shape[1], a.shape[1], precision)
    return out


def probe(tail, dtype, m=16, k=16):
    """One 1 and k - 1 products `tail` in each row."""
    a = torch.full((m, k), tail, dtype=torch.float32)
    a[:, 0] = 1
    return a.to(dtype), torch.ones(k, 16).to(dtype), torch.zeros(m, 16)


@pytest.mark.parametrize("m", [16, 64])
def test_what_was_measured_on_an_h200(m):
    """15 x 2^-25 adds 3 x 2^-23 to 1, and 15 x 2^-26 nothing, in fp16 and bf16."""
    for dtype in (torch.float16, torch.bfloat16):
        x = probe(2.0**-12, dtype, m)
        a, b, c = x[0], x[1] * 2.0**-13, x[2]
        b[0] = 1
        assert (launch(a, b, c, accumulation="tensor_core") == 1 + 3 * 2.0**-23).all()
        b[1:] = 2.0**-14
        assert (launch(a, b, c, accumulation="tensor_core") == 1).all()
        assert (launch(a, b, c, accumulation="exact") == 1 + 2.0**-22).all()


@pytest.mark.parametrize("accumulation", ["float32", "exact"])
def test_the_other_models_round_to_nearest(accumulation):
    a, b, c = probe(2.0**-11, torch.float16)
    assert (launch(a, b, c, accumulation=accumulation) == 1 + 15 * 2.0**-11).all()


def test_exact_rounds_once_where_float32_loses_all():
    a, b, c = probe(2.0**-12, torch.float16)
    b[1:] = 2.0**-13
    c += 2.0**-30
    exact = np.float32(1 + 15 * 2.0**-25 + 2.0**-30)
    assert (launch(a, b, c, accumulation="exact") == exact.item()).all()
    assert exact == 1 + 4 * 2.0**-23


def test_fp8_accumulates_in_thirteen_bits_from_64_rows_on():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for m, want in ((16, 1 + 31 * 2.0**-14), (64, 1.0)):
            a, b, c = probe(2.0**-6, dtype, m, 32)
            b = torch.full((32, 16), 2.0**-8)
            b[0] = 1
            assert (launch(a, b.to(dtype), c, accumulation="tensor_core") == want).all()
            assert (launch(a, b.to(dtype), c) == want).all()
            exact = launch(a, b.to(dtype), c, accumulation="exact")
            assert (exact == 1 + 31 * 2.0**-14).all()


def test_fp8_sums_go_to_float32_as_often_as_asked():
    a, b, c = probe(2.0**-6, torch.float8_e5m2, 64, 128)
    b = torch.full((128, 16), 2.0**-8)
    b[0] = 1
    sums = {0: 1 + 127 * 2.0**-14, 32: 1 + 96 * 2.0**-14, 64: 1 + 64 * 2.0**-14, 128: 1.0}
    for limit, want in sums.items():
        out = torch.empty_like(c)
        with ttir.execute():
            dot[(1,)](a, b.to(a.dtype), c, out, 64, 16, 128, None, limit)
        assert (out == want).all(), limit


def test_ieee_dots_are_chains_of_fused_multiply_adds():
    rng = np.random.default_rng(4)
    a, b, c = (torch.from_numpy(rng.standard_normal((16, 16)).astype(np.float32)) for _ in "abc")
    got = launch(a, b, c, "ieee", accumulation="tensor_core").numpy()
    for i, j in np.ndindex(16, 16):
        total = float(c[i, j])
        for k in range(16):
            total = Fraction(float(a[i, k])) * Fraction(float(b[k, j])) + Fraction(total)
            total = float(np.float32(total.numerator / total.denominator))
        assert got[i, j] == total


@pytest.mark.parametrize("precision", ["tf32x3", "bf16x3", "bf16x6"])
@pytest.mark.parametrize("accumulation", ["float32", "exact", "tensor_core"])
def test_split_dots_survive_infinities(precision, accumulation):
    a, b, c = torch.ones(16, 16), torch.ones(16, 16), torch.ones(16, 16)
    a[0, 0] = np.inf
    got = launch(a, b, c, precision, accumulation=accumulation)
    assert (got[0] == np.inf).all()
    assert (got[1:] == 17).all()
