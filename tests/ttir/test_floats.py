"""Formats: every pattern of the narrow ones, every rounding, against fractions and bisection."""

import bisect
import functools
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir
from fa_verify.ttir.numbers import floats
from fa_verify.ttir.numbers.exact import exact_fma

# name: (exponent bits, fraction bits, bias, what the top exponent holds)
FORMATS = {
    "f16": (5, 10, 15, "ieee"), "bf16": (8, 7, 127, "ieee"), "f8E5M2": (5, 2, 15, "ieee"),
    "f8E4M3FN": (4, 3, 7, "fn"), "f8E5M2FNUZ": (5, 2, 16, "fnuz"), "f8E4M3FNUZ": (4, 3, 8, "fnuz"),
}  # fmt: skip
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f8E5M2": torch.float8_e5m2,
         "f8E4M3FN": torch.float8_e4m3fn}  # fmt: skip
NAN, INF = "nan", "inf"


@pytest.fixture(autouse=True)
def _quiet():
    """As the executor is: overflow and NaN are results, not warnings."""
    with np.errstate(all="ignore"):
        yield


def value(pattern, name):
    """What a non-negative pattern means: a fraction, INF or NAN."""
    _, fraction, bias, kind = FORMATS[name]
    width = sum(FORMATS[name][:2])
    exponent, significand = pattern >> fraction, pattern & ((1 << fraction) - 1)
    if kind == "ieee" and exponent == (1 << FORMATS[name][0]) - 1:
        return NAN if significand else INF
    if kind == "fn" and pattern == (1 << width) - 1:
        return NAN
    if exponent == 0:
        return Fraction(significand, 1 << fraction) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(significand, 1 << fraction)) * Fraction(2) ** (exponent - bias)


@functools.cache
def numbers(name):
    """All finite non-negative numbers of a format, ascending; a number's index is its pattern."""
    found = [value(p, name) for p in range(1 << sum(FORMATS[name][:2]))]
    return [x for x in found if isinstance(x, Fraction)]


def nearest(x, name):
    """Round a fraction to nearest, ties to the even pattern; INF beyond the last half step."""
    table, magnitude = numbers(name), abs(x)
    if magnitude >= table[-1] + (table[-1] - table[-2]) / 2:
        return INF
    at = min(bisect.bisect_right(table, magnitude), len(table) - 1)
    below = at - 1 if table[at] > magnitude else at
    above = min(below + 1, len(table) - 1)
    low, high = magnitude - table[below], table[above] - magnitude
    return table[above if high < low or (high == low and below % 2) else below]


def toward_zero(x, name):
    table = numbers(name)
    return table[bisect.bisect_right(table, abs(x)) - 1]


def patterns(name):
    width = 1 + sum(FORMATS[name][:2])
    return np.arange(1 << width).astype(f"u{width // 8}").view(f"i{width // 8}")


def hard_cases(name, seed=3):
    """float32 at, between and beside the numbers of a format, and beyond its range."""
    rng = np.random.default_rng(seed)
    table = numbers(name)
    chosen = rng.choice(len(table) - 1, min(len(table) - 1, 700), replace=False)
    chosen = np.unique([*chosen, 0, 1, 2, len(table) - 2])
    exact = [x for i in chosen for x in (table[i], (table[i] + table[i + 1]) / 2)]
    exact += [table[-1], table[-1] * 33 / 32, table[-1] * 17 / 16, table[-1] * 2]
    points = np.array([float(x) for x in exact])
    points = points[points < 2.0**127].astype(np.float32)
    points = np.concatenate(
        [points, np.nextafter(points, 0), np.nextafter(points, np.float32(9e37))]
    )
    points = np.concatenate(
        [points, rng.integers(0, 0x7F7FFFFF, 500).astype(np.int32).view(np.float32)]
    )
    return np.concatenate([points, -points]).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_every_pattern_means_what_the_format_says(name):
    got = floats.decode(patterns(name), name)
    half = got.size // 2
    for pattern in range(half):
        want = value(pattern, name)
        positive, negative = got[pattern], got[pattern + half]
        if want == NAN:
            assert np.isnan(positive)
            assert np.isnan(negative)
        elif FORMATS[name][3] == "fnuz" and pattern == 0:
            assert positive == 0
            assert np.isnan(negative)
        else:
            number = float("inf") if want == INF else float(want)
            assert (positive, negative) == (number, -number)


@pytest.mark.parametrize("name", FORMATS)
def test_a_load_and_a_store_keep_every_pattern(name):
    raw = patterns(name)
    assert np.array_equal(floats.encode(floats.decode(raw, name), name), raw)
    few = raw[-100:]  # other routines serve small tiles
    assert np.array_equal(floats.encode(floats.decode(few, name), name), few)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_to_nearest_even(name):
    x = hard_cases(name)
    saturates = name.startswith("f8")
    largest = numbers(name)[-1]
    for got, one in zip(floats.round_to(x, name), x, strict=True):
        want = nearest(Fraction(float(one)), name)
        if want == INF:
            want = largest if saturates else float("inf")
        assert abs(float(got)) == float(want), (float(one), float(got))
        assert got == 0 or np.sign(got) == np.sign(one)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_toward_zero(name):
    x = hard_cases(name)
    for got, one in zip(floats.round_toward_zero(x, name), x, strict=True):
        assert abs(float(got)) == float(toward_zero(Fraction(float(one)), name)), float(one)
        assert got == 0 or np.sign(got) == np.sign(one)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_float64_is_rounded_once(name):
    exact = np.unique(np.abs(hard_cases(name)).astype(np.float64))
    x = np.concatenate([exact, exact * (1 + 2.0**-50), exact * (1 - 2.0**-50)])
    for got, one in zip(floats.narrow_once(x, name), x, strict=True):
        want = nearest(Fraction(float(one)), name)
        assert float(got) == (float("inf") if want == INF else float(want)), float(one)


def test_infinities_and_nan_convert_as_cvt_satfinite_does():
    x = np.array([np.inf, -np.inf, np.nan], np.float32)
    assert floats.round_to(x, "f8E4M3FN")[:2].tolist() == [448, -448]
    assert floats.round_to(x, "f8E5M2")[:2].tolist() == [57344, -57344]
    assert floats.round_toward_zero(x, "f8E5M2")[:2].tolist() == [np.inf, -np.inf]
    assert floats.round_to(x, "f16")[:2].tolist() == [np.inf, -np.inf]
    for name in FORMATS:
        assert np.isnan(floats.round_to(x, name)[2])
        assert np.isnan(floats.round_toward_zero(x, name)[2])


def test_tf32_by_both_roundings():
    one, ulp = Fraction(1), Fraction(1, 1 << 10)
    x = np.array(
        [1 + 2.0**-11, 1 + 2.0**-11 - 2.0**-23, 1 + 3 * 2.0**-11, 2 - 2.0**-23], np.float32
    )
    away = [one + ulp, one, one + 2 * ulp, Fraction(2)]
    cut = [one, one, one + ulp, 2 - ulp]
    assert [Fraction(float(v)) for v in floats.round_tf32(x)] == away
    assert [Fraction(float(v)) for v in floats.round_tf32(-x)] == [-v for v in away]
    assert [Fraction(float(v)) for v in floats.truncate_tf32(x)] == cut
    special = floats.round_tf32(np.array([np.inf, np.nan], np.float32))
    assert np.isinf(special[0])
    assert np.isnan(special[1])


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_fma_rounds_once(name):
    rng = np.random.default_rng(11)
    a, b = (floats.round_to(rng.standard_normal(3000).astype(np.float32), name) for _ in "ab")
    c = floats.round_to((-a * b).astype(np.float32), name)  # cancels: what is left is the rounding
    tiny = floats.round_to(np.float32(2.0) ** rng.integers(-20, -1, 3000).astype(np.float32), name)
    c[::2] = floats.round_to(tiny, name)[::2]
    b[:500] *= 0
    b[:500] += 1  # a halfway case for float32 needs a product of few bits and a tiny addend
    c[:500] = 2.0**-60 if name != "f16" else 2.0**-24
    for got, x, y, z in zip(floats.fma(a, b, c, name), a, b, c, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        if name == "f32":
            want = np.float32(exact.numerator / exact.denominator)
            half = Fraction(float(np.nextafter(want, np.float32(9)))) - Fraction(float(want))
            assert abs(Fraction(float(got)) - exact) <= max(half / 2, Fraction(1, 1 << 149))
        else:
            assert abs(float(got)) == float(nearest(exact, name))


def test_a_float32_fma_that_double_rounding_would_spoil():
    # a b = 2^-24 - 2^-70: the sum lies just below a tie, and float64 rounds it onto the tie.
    a, b = np.float32([(1 + 2.0**-23) * 2.0**-12]), np.float32([(1 - 2.0**-23) * 2.0**-12])
    c = np.float32([1 + 2.0**-23])
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert twice[0] == 1 + 2.0**-22
    assert floats.fma(a, b, c)[0] == 1 + 2.0**-23


def test_a_float64_fma_rounds_once():
    rng = np.random.default_rng(12)
    a, b = rng.standard_normal(4000), rng.standard_normal(4000)
    c = -a * b  # cancels: what is left is the rounding of the product
    c[::3] += rng.standard_normal(c[::3].size) * 2.0 ** rng.integers(-60, 60, c[::3].size)
    a[:40], b[:40], c[:40] = 2.0**-560, 2.0**-500, 2.0**-1060  # subnormal
    a[40:60], b[40:60], c[40:60] = 2.0**600, 2.0**600, -(2.0**1000)
    c[60:80] = 2.0**1023
    a[80:100], b[80:100] = (1 + 2.0**-52) * 2.0**-26, (1 - 2.0**-52) * 2.0**-27
    c[80:100] = 1 + 2.0**-52  # just below a tie
    got = exact_fma(a, b, c)
    for result, x, y, z in zip(got, a, b, c, strict=True):
        want = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert result == (np.inf if want > 2**1024 else float(want))
    assert (got != a * b + c).mean() > 0.3
    ends = exact_fma(*np.array([[0, 1, -0.0], [-0.0, 0, -0.0], [np.inf, 0, 1], [1, 1, -1]]).T)
    assert np.isnan(ends[2])
    assert ends[[0, 1, 3]].tolist() == [0, 0, 0]
    assert np.signbit(ends[[0, 1, 3]]).tolist() == [False, True, False]


@triton.jit
def cast(x, out, TO: tl.constexpr, ROUNDING: tl.constexpr, N: tl.constexpr):  # noqa: N803
    i = tl.arange(0, N)
    tl.store(out + i, tl.cast(tl.load(x + i), TO, fp_downcast_rounding=ROUNDING))


@pytest.mark.parametrize("rounding", ["rtne", "rtz"])
@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("f16", tl.float16),
        ("bf16", tl.bfloat16),
        ("f8E5M2", tl.float8e5),
        ("f8E4M3FN", tl.float8e4nv),
    ],
)
def test_a_kernel_casts_with_the_rounding_it_names(name, to, rounding):
    x = hard_cases(name)[:1024]
    out = torch.empty(1024, dtype=TORCH[name])
    with ttir.execute():
        cast[(1,)](torch.from_numpy(x), out, to, rounding, 1024)
    rule = floats.round_to if rounding == "rtne" else floats.round_toward_zero
    assert np.array_equal(out.to(torch.float32).numpy(), rule(x, name))
    assert (rounding == "rtne") == (np.abs(out.to(torch.float64).numpy()) > np.abs(x)).any()


@triton.jit
def whole(x, out, TO: tl.constexpr, N: tl.constexpr):  # noqa: N803
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(TO))


@pytest.mark.parametrize(
    ("source", "to", "want"),
    [
        # what 2.9, -2.9, 300, -300, 1e6, -1e6, 1e30, -1e30 and NaN become
        ("float32", "int8", [2, -2, 44, -44, -1, 0, -1, 0, 0]),
        ("float32", "uint8", [2, 0, 44, 0, 255, 0, 255, 0, 0]),
        ("float32", "int16", [2, -2, 300, -300, 32767, -32768, 32767, -32768, 0]),
        ("float32", "int32", [2, -2, 300, -300, 10**6, -(10**6), 2**31 - 1, -(2**31), 0]),
        ("float32", "int64", [2, -2, 300, -300, 10**6, -(10**6), 2**63 - 1, -(2**63), -(2**63)]),
        ("float64", "int32", [2, -2, 300, -300, 10**6, -(10**6), 2**31 - 1, -(2**31), -(2**31)]),
        ("float64", "int8", [2, -2, 44, -44, -1, 0, -1, 0, 0]),
        ("float32", "uint32", [2, 0, 300, 0, 10**6, 0, 2**32 - 1, 0, 0]),
        ("float32", "uint64", [2, 0, 300, 0, 10**6, 0, 2**64 - 1, 0, 2**63]),
    ],
)
def test_floats_become_integers_as_cvt_rzi_makes_them(source, to, want):
    x = torch.tensor([2.9, -2.9, 300, -300, 1e6, -1e6, 1e30, -1e30, np.nan] + [0] * 7)
    out = torch.empty(16, dtype=getattr(torch, to))
    with ttir.execute():
        whole[(1,)](x.to(getattr(torch, source)), out, getattr(tl, to), 16)
    assert out[:9].tolist() == want


@triton.jit
def up(x, out, N: tl.constexpr):  # noqa: N803
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.float16))


def test_e4m3b15_is_converted_by_tritons_own_bit_tricks():
    """Bias 15 and no NaN; the downcast saturates at 1.75, to nearest with ties upwards."""
    raw = torch.arange(256).to(torch.uint8).view(torch.int8)
    wide = torch.empty(256, dtype=torch.float16)
    back = torch.empty(256, dtype=torch.int8)
    few = torch.empty(16, dtype=torch.int8)
    x = torch.tensor([1.0625, 1.06, -1.0625, 1.75, 1.8, 9.0, -9.0, 2.0**-17] + [0.0] * 8)
    with ttir.execute():
        up[(1,)](triton.reinterpret(raw, tl.float8e4b15), wide, 256)
        narrow = triton.reinterpret(back, tl.float8e4b15)
        cast[(1,)](wide, narrow, tl.float8e4b15, "rtne", 256)
        cast[(1,)](x, triton.reinterpret(few, tl.float8e4b15), tl.float8e4b15, None, 16)
    for pattern in range(128):
        exponent, fraction = pattern >> 3, pattern & 7
        want = (fraction if exponent == 0 else 8 + fraction) * 2.0 ** (max(exponent, 1) - 18)
        assert (wide[pattern].item(), wide[pattern + 128].item()) == (want, -want)
    representable = (raw & 0x7F) != 0x7F  # the largest becomes 1.75
    assert torch.equal(back[representable], raw[representable])
    code = {1.0: 0x78, 1.125: 0x79, 1.75: 0x7E}
    assert few[:6].tolist() == [code[1.125], code[1.0], code[1.125] - 128, *[code[1.75]] * 3]
    assert few[6:8].tolist() == [code[1.75] - 128, 1]


def test_rounding_works_in_inference_mode_and_after_it():
    x = np.linspace(-3, 3, 2000, dtype=np.float32)
    for mode in (True, False):
        with torch.inference_mode(mode):
            rounded = floats.round_to(x.copy(), "bf16", x.copy())
        assert np.array_equal(rounded, torch.from_numpy(x).bfloat16().float().numpy())
