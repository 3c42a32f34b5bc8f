"""`FloatModel`'s choices as kernels see them: contraction, functions, subnormal numbers."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir

N = 1024
TINY = 2.0**-140


@triton.jit
def sums(x, y, z, out, OP: tl.constexpr, N: tl.constexpr):  # noqa: N803
    i = tl.arange(0, N)
    a, b, c = tl.load(x + i), tl.load(y + i), tl.load(z + i)
    if OP == "add":
        r = a * b + c
    elif OP == "add_left":
        r = c + a * b
    elif OP == "sub":
        r = a * b - c
    elif OP == "from":
        r = c - a * b
    elif OP == "two":
        r = a * b + c * c
    elif OP == "outside":
        r = a * b
        for _ in range(2):
            r = c - r
    elif OP == "plain":
        r = a + b - c
    elif OP == "rem":
        r = a % b
    tl.store(out + i, r)


@triton.jit
def function(x, out, OP: tl.constexpr, N: tl.constexpr):  # noqa: N803, C901, PLR0912
    i = tl.arange(0, N)
    a = tl.load(x + i)
    if OP == "exp":
        r = tl.exp(a)
    elif OP == "exp2":
        r = tl.exp2(a)
    elif OP == "log":
        r = tl.log(a)
    elif OP == "log2":
        r = tl.log2(a)
    elif OP == "sqrt":
        r = tl.sqrt(a)
    elif OP == "rsqrt":
        r = tl.rsqrt(a)
    elif OP == "erf":
        r = tl.erf(a)
    elif OP == "floor":
        r = tl.floor(a)
    elif OP == "sqrt_rn":
        r = tl.sqrt_rn(a)
    elif OP == "sum":
        r = a + a
    elif OP == "half":
        r = a * 0.5
    elif OP == "div":
        r = 1.0 / a
    elif OP == "sin":
        r = tl.sin(a)
    elif OP == "cos":
        r = tl.cos(a)
    tl.store(out + i, r)


def draw(dtype, seed):
    return torch.randn(N, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(kernel, *args, **model):
    out = torch.empty_like(args[0])
    with ttir.execute(ttir.Options(float_model=ttir.FloatModel(**model))):
        kernel[(1,)](*args[:-1], out, args[-1], N)
    return out


def once(exact, dtype):
    """A fraction rounded once: float64 division is right, and one more rounding is rarely not."""
    return torch.tensor([float(x) for x in exact], dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("op", ["add", "add_left", "sub", "from", "two"])
def test_contraction_rounds_a_product_and_a_sum_once(op, dtype):
    x = [draw(dtype, seed) for seed in (1, 2, 3)]
    fused, plain = (run(sums, *x, op, contraction=how) for how in ("fused", "none"))
    a, b, c = ([Fraction(v) for v in t.double().tolist()] for t in x)
    squares = [Fraction(v) for v in (x[2] * x[2]).double().tolist()]
    signs = {"add": (1, 1), "add_left": (1, 1), "sub": (1, -1), "from": (-1, 1), "two": (1, 1)}[op]
    addend = squares if op == "two" else c
    exact = [signs[0] * p * q + signs[1] * r for p, q, r in zip(a, b, addend, strict=True)]
    assert torch.equal(fused, once(exact, dtype))
    product = x[0] * x[1]
    second = x[2] * x[2] if op == "two" else x[2]
    assert torch.equal(plain, signs[0] * product + signs[1] * second)
    assert not torch.equal(fused, plain)


@pytest.mark.parametrize("op", ["plain", "outside"])
def test_contraction_leaves_the_rest_alone(op):
    x = [draw(torch.float32, seed) for seed in (1, 2, 3)]
    assert torch.equal(run(sums, *x, op, contraction="fused"), run(sums, *x, op))


def error_in_ulps(got, exact):
    want = exact.astype(np.float32)
    ulp = np.spacing(np.maximum(np.abs(want), np.float32(2.0**-126)).astype(np.float32))
    return np.abs(got.double().numpy() - exact) / ulp


# Units in the last place of the relative errors that PTX ISA states for ex2, sqrt and rsqrt
# (2^-22.5, 2^-23, 2^-22.9), and of CUDA's for logf, log2f and erff (1, 1 and 2).
STEPS = {"exp2": 2.83, "log": 1.0, "log2": 1.2, "sqrt": 2.0, "rsqrt": 2.15, "erf": 2.0}


@pytest.mark.parametrize("op", STEPS)
def test_approximate_functions_are_close_where_the_hardwares_are(op):
    x = draw(torch.float32, 5) * 4
    x = x if op in ("exp2", "erf") else x.abs() + 1e-3
    wide = x.double()
    exact = {"exp2": torch.exp2, "log": torch.log, "log2": torch.log2, "sqrt": torch.sqrt,
             "rsqrt": torch.rsqrt, "erf": torch.erf}[op](wide).numpy()  # fmt: skip
    assert error_in_ulps(run(function, x, op, functions="stepwise"), exact).max() <= STEPS[op]
    for model in ("correct", "approximate"):
        error = error_in_ulps(run(function, x, op, functions=model), exact).max()
        assert error <= 4  # NumPy promises 3.83 for log


def test_exp_rounds_its_argument_times_log2e():
    x = torch.linspace(-87, -60, N)
    exact = np.exp(x.double().numpy())
    stepwise = run(function, x, "exp", functions="stepwise")
    scaled = x * np.float32(1.4426950408889634)
    assert torch.equal(stepwise, run(function, scaled, "exp2", functions="stepwise"))
    assert 30 < error_in_ulps(stepwise, exact).max() < 64
    assert 30 < error_in_ulps(run(function, x, "exp"), exact).max() < 64
    assert error_in_ulps(run(function, x, "exp", functions="correct"), exact).max() < 3


@pytest.mark.parametrize(
    ("op", "argument", "correct", "approximate"),
    [
        ("exp2", -130.0, 2.0**-130, 0.0), ("exp2", TINY, 1.0, 1.0), ("exp2", 200.0, np.inf, np.inf),
        ("exp", -89.0, np.float32(np.exp(-89.0)), np.float32(np.exp(-89.0))),
        ("sqrt", TINY, 2.0**-70, 0.0), ("sqrt_rn", TINY, 2.0**-70, 2.0**-70),
        ("rsqrt", TINY, 2.0**70, np.inf), ("floor", -TINY, -1.0, -0.0),
        ("log", 0.0, -np.inf, -np.inf), ("log2", TINY, -140.0, -140.0),
        ("log", -1.0, np.nan, np.nan),
        ("log2", np.inf, np.inf, np.inf), ("log", np.nan, np.nan, np.nan), ("erf", 9.0, 1.0, 1.0),
        ("sum", TINY, 2 * TINY, 2 * TINY), ("div", 3.0, 1 / 3, 1 / 3),
    ],
)  # fmt: skip
def test_the_ends_of_the_range(op, argument, correct, approximate):
    x = torch.full((N,), argument)
    wants = {"correct": correct, "approximate": approximate, "stepwise": approximate}
    for model, want in wants.items():
        got = run(function, x, op, functions=model)
        rtol = 1e-5 if op == "exp" else 2e-7  # x log2 e is rounded
        wanted = torch.full((N,), float(want))
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=0, equal_nan=True)
        assert (torch.signbit(got) == np.signbit(want)).all() or np.isnan(want)


@pytest.mark.parametrize("model", ["correct", "approximate", "stepwise"])
def test_exponentials_of_hidden_scores(model):
    """Minus infinity and other numbers far below among ordinary ones."""
    x = torch.linspace(-151, 127, N)
    x[::3], x[1::50], x[2::50], x[5] = -torch.inf, torch.inf, torch.nan, -1e30
    got = run(function, x, "exp2", functions=model).double()
    exact = torch.exp2(x.double())
    if model != "correct":
        exact[exact < 2.0**-126] = 0
    exact[exact >= 2.0**128] = torch.inf
    torch.testing.assert_close(got, exact, rtol=2.0**-22, atol=2.0**-149, equal_nan=True)
    if model == "correct":
        assert ((got > 0) & (got < 2.0**-126)).any()
    got = run(function, x, "exp", functions=model).double()
    exact = torch.exp(x.double()).float().double()
    torch.testing.assert_close(got, exact, rtol=2.0**-16, atol=2.0**-149, equal_nan=True)
    assert ((got > 0) & (got < 2.0**-126)).any()  # ex2.approx.f32 has no .ftz there


@pytest.mark.parametrize("sign", [1, -1])
def test_flushed_subnormals_keep_their_sign(sign):
    x = torch.full((N,), sign * 2.0**-126)
    assert torch.equal(run(function, x, "half"), x / 2)
    flushed = run(function, x, "half", subnormals="flush")
    assert (flushed == 0).all()
    assert (torch.signbit(flushed) == (sign < 0)).all()
    assert torch.equal(run(function, x, "sum", subnormals="flush"), x * 2)
    assert (run(function, x / 2, "sum", subnormals="flush") == 0).all()


@pytest.mark.parametrize(
    "field", ["tf32", "accumulation", "subnormals", "functions", "contraction"]
)
def test_an_unknown_choice_is_refused_by_name(field):
    with pytest.raises(ValueError, match=rf"{field}='maybe': use '\w+' or '\w+'"):
        ttir.FloatModel(**{field: "maybe"})


def test_one_kernel_under_two_models_in_one_process():
    x = torch.full((N,), TINY)
    results = [run(function, x, "sqrt", functions=how)[0].item() for how in
               ("correct", "approximate", "correct")]  # fmt: skip
    assert results == [2.0**-70, 0.0, 2.0**-70]


@pytest.mark.parametrize("op", ["sin", "cos"])
def test_sines_of_large_arguments_are_reduced_by_the_bits_that_matter(op):
    x = torch.tensor([0.5, 3, -40, 1e5, 105615, 105616, -1e6, 3e9, 1e20, -3e38, 2.0**127] * 94)
    x = torch.cat([x[: N - 3], torch.tensor([torch.inf, -torch.inf, torch.nan])])
    exact = getattr(torch, op)(x.double())
    got = run(function, x, op, functions="stepwise").double()
    torch.testing.assert_close(got, exact, rtol=2.0**-22, atol=2.0**-24, equal_nan=True)


def test_a_remainder_is_what_llvm_expands_it_to():
    a = torch.tensor([7.5, -7.5, 5.0, 3.0, 2.0**24 + 2, 1e20] + [1.0] * (N - 6))
    b = torch.tensor([2.0, 2.0, -3.0, torch.inf, 3.0, 3.0] + [1.0] * (N - 6))
    got = run(sums, a, b, b, "rem")
    assert got[:4].tolist() == [1.5, -1.5, 2.0, 3.0]
    quotient = np.float32(1e20) / np.float32(3)
    left = Fraction(float(np.float32(1e20))) - Fraction(float(quotient)) * 3
    assert got[5].item() == float(left) != np.fmod(np.float32(1e20), np.float32(3))
