"""Numbers: each family of operations against torch, NumPy or a formula, exact where possible."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803, C901, PLR0912, PLW0108, SIM108

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from fa_verify import ttir

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
N = 64


def values(dtype, n=N, seed=0, scale=1.0):
    return (torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def launch(kernel, *args, grid=(1,), options=None, **kwargs):
    with ttir.execute(options or ttir.Options()) as run:
        kernel[grid](*args, **kwargs)
    assert run.incidents == []
    return run


@triton.jit
def binary(a_ptr, b_ptr, o_ptr, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(a_ptr + i)
    b = tl.load(b_ptr + i)
    if OP == "add":
        o = a + b
    elif OP == "sub":
        o = a - b
    elif OP == "mul":
        o = a * b
    elif OP == "div":
        o = a / b
    elif OP == "floordiv":
        o = a // b
    elif OP == "mod":
        o = a % b
    elif OP == "max":
        o = tl.maximum(a, b)
    elif OP == "min":
        o = tl.minimum(a, b)
    elif OP == "and":
        o = a & b
    elif OP == "or":
        o = a | b
    elif OP == "xor":
        o = a ^ b
    elif OP == "shl":
        o = a << (b & 7)
    elif OP == "shr":
        o = a >> (b & 7)
    elif OP == "lt":
        o = (a < b).to(a.dtype)
    elif OP == "where":
        o = tl.where(a > b, a, b)
    tl.store(o_ptr + i, o)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("max", torch.maximum),
        ("min", torch.minimum), ("lt", lambda a, b: (a < b).to(a.dtype)),
        ("where", lambda a, b: torch.where(a > b, a, b)),
    ],
)  # fmt: skip
def test_float_arithmetic_rounds_once(dtype, op, function):
    a, b, o = values(dtype), values(dtype, seed=1), torch.empty(N, dtype=dtype)
    launch(binary, a, b, o, op, N)
    assert torch.equal(o, function(a, b))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_division_is_correctly_rounded(dtype):
    a, b = values(dtype), values(dtype, seed=1) + 3
    o = torch.empty(N, dtype=torch.float32 if dtype != torch.float32 else dtype)
    launch(binary, a, b, o, "div", N)
    assert torch.equal(o, (a.float() / b.float()).to(o.dtype))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8], ids=str
)
@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("max", torch.maximum),
        ("min", torch.minimum), ("and", torch.bitwise_and), ("or", torch.bitwise_or),
        ("xor", torch.bitwise_xor), ("shl", lambda a, b: a << (b & 7)),
        ("shr", lambda a, b: a >> (b & 7)),
        ("floordiv", lambda a, b: torch.div(a, b, rounding_mode="trunc")),
        ("mod", lambda a, b: torch.fmod(a, b)), ("lt", lambda a, b: (a < b).to(a.dtype)),
    ],
)  # fmt: skip
def test_integers_wrap_divide_and_compare_as_in_c(dtype, op, function):
    bounds = torch.iinfo(dtype)
    g = torch.Generator().manual_seed(2)
    a = torch.randint(bounds.min, bounds.max, (N,), generator=g, dtype=dtype)
    b = torch.randint(max(bounds.min, -20), 20, (N,), generator=g, dtype=dtype)
    if op in ("floordiv", "mod"):
        b[b == 0] = 7
    o = torch.empty(N, dtype=dtype)
    launch(binary, a, b, o, op, N)
    assert torch.equal(o, function(a, b))


@triton.jit
def unary(x_ptr, o_ptr, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    if OP == "exp":
        o = tl.exp(x)
    elif OP == "exp2":
        o = tl.exp2(x)
    elif OP == "log":
        o = tl.log(tl.abs(x))
    elif OP == "log2":
        o = tl.log2(tl.abs(x))
    elif OP == "sin":
        o = tl.sin(x)
    elif OP == "cos":
        o = tl.cos(x)
    elif OP == "sqrt":
        o = tl.sqrt(tl.abs(x))
    elif OP == "rsqrt":
        o = tl.rsqrt(tl.abs(x))
    elif OP == "erf":
        o = tl.erf(x)
    elif OP == "floor":
        o = tl.floor(x)
    elif OP == "ceil":
        o = tl.ceil(x)
    elif OP == "sqrt_rn":
        o = tl.sqrt_rn(tl.abs(x))
    elif OP == "tanh":
        o = libdevice.tanh(x)
    elif OP == "sigmoid":
        o = tl.sigmoid(x)
    elif OP == "fma":
        o = tl.fma(x, x, x)
    elif OP == "clamp":
        o = tl.clamp(x, -0.5, 0.5)
    elif OP == "softmax":
        o = tl.softmax(x)
    elif OP == "neg":
        o = -x
    tl.store(o_ptr + i, o)


@pytest.mark.parametrize(
    ("op", "function", "ulps"),
    [
        ("exp", np.exp, 2), ("exp2", np.exp2, 2), ("log", lambda x: np.log(np.abs(x)), 2),
        ("log2", lambda x: np.log2(np.abs(x)), 2), ("sin", np.sin, 4), ("cos", np.cos, 4),
        ("sqrt", lambda x: np.sqrt(np.abs(x)), 1), ("sqrt_rn", lambda x: np.sqrt(np.abs(x)), 0.5),
        ("rsqrt", lambda x: 1 / np.sqrt(np.abs(x)), 2), ("floor", np.floor, 0),
        ("ceil", np.ceil, 0),
        ("erf", np.vectorize(math.erf), 4), ("tanh", np.tanh, 4), ("neg", np.negative, 0),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x)), 8), ("fma", lambda x: x * x + x, 0.5),
        ("clamp", lambda x: np.clip(x, -0.5, 0.5), 0),
        ("softmax", lambda x: np.exp(x) / np.exp(x).sum(), 16),
    ],
)  # fmt: skip
def test_functions_are_within_ulps_of_exact(op, function, ulps):
    x, o = values(torch.float32, scale=4.0), torch.empty(N)
    options = ttir.Options(float_model=ttir.FloatModel(functions="correct"))
    launch(unary, x, o, op, N, options=options)
    exact = function(x.double().numpy())
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (np.abs(o.double().numpy() - exact) / unit).max() <= ulps + 1e-6


@triton.jit
def convert(x_ptr, o_ptr, BITCAST: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(o_ptr + i, x.to(o_ptr.dtype.element_ty, bitcast=BITCAST))


CASTS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SMALL = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("source", CASTS, ids=str)
@pytest.mark.parametrize("target", CASTS, ids=str)
def test_float_conversions_round_to_nearest_even(source, target):
    x = torch.cat([values(source, 56, scale=300.0), torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, 65504.0, 65520.0, 1e-7, 6e-8]).to(source)])  # fmt: skip
    o = torch.empty(N, dtype=target)
    launch(convert, x, o, False, N)
    with np.errstate(over="ignore"):  # NumPy rounds float64 to float16 once; torch does so twice
        half = torch.from_numpy(x.double().numpy().astype(np.float16))
    want = half if target == torch.float16 else x.to(target)
    assert torch.equal(o, want)


@pytest.mark.parametrize("source", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("target", SMALL, ids=str)
def test_fp8_saturates_and_widens_exactly(source, target):
    x = values(source, scale=30.0)
    x[:2] = torch.tensor([60000.0, -60000.0])
    o, back = torch.empty(N, dtype=target), torch.empty(N, dtype=source)
    launch(convert, x, o, False, N)
    largest = torch.finfo(target).max
    assert torch.equal(o.float(), x.float().clamp(-largest, largest).to(target).float())
    launch(convert, o, back, False, N)
    assert torch.equal(back, o.to(source))


@pytest.mark.parametrize("target", [torch.int8, torch.int32, torch.int64, torch.uint8], ids=str)
def test_float_to_integer_truncates_toward_zero(target):
    x = (
        values(torch.float32, scale=20.0).abs()
        if target == torch.uint8
        else values(torch.float32, scale=20.0)
    )
    o = torch.empty(N, dtype=target)
    launch(convert, x, o, False, N)
    assert torch.equal(o, x.trunc().to(target))


@pytest.mark.parametrize("source", [torch.int8, torch.int32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_integer_to_float_rounds_once(source, target):
    info = torch.iinfo(source)
    x = torch.randint(
        info.min, info.max, (N,), generator=torch.Generator().manual_seed(1), dtype=source
    )
    if source in (torch.int32, torch.int64):
        x = x % 60000
    o = torch.empty(N, dtype=target)
    launch(convert, x, o, False, N)
    assert torch.equal(o, x.double().to(target))


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, torch.int32), (torch.int32, torch.float32), (torch.float16, torch.int16),
     (torch.int16, torch.bfloat16), (torch.int8, torch.float8_e5m2)],
    ids=str,
)  # fmt: skip
def test_bitcasts_keep_the_bits(source, target):
    x = values(torch.float32, scale=50.0).to(source)
    o = torch.empty(N, dtype=target)
    launch(convert, x, o, True, N)
    assert torch.equal(o.view(x.dtype), x)


@triton.jit
def reduce_rows(
    x_ptr, o_ptr, OP: tl.constexpr, AXIS: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    r = tl.arange(0, R)
    c = tl.arange(0, C)
    x = tl.load(x_ptr + r[:, None] * C + c[None, :])
    if OP == "sum":
        o = tl.sum(x, AXIS)
    elif OP == "max":
        o = tl.max(x, AXIS)
    elif OP == "min":
        o = tl.min(x, AXIS)
    elif OP == "argmax":
        o = tl.argmax(x, AXIS)
    elif OP == "argmin":
        o = tl.argmin(x, AXIS)
    elif OP == "xor":
        o = tl.xor_sum(x, AXIS)
    elif OP == "product":
        o = tl.reduce(x, AXIS, multiply)
    if AXIS == 0:
        tl.store(o_ptr + c, o)
    else:
        tl.store(o_ptr + r, o)


@triton.jit
def multiply(a, b):
    return a * b * 1.0


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("sum", lambda x, d: x.sum(d)), ("max", lambda x, d: x.amax(d)),
        ("min", lambda x, d: x.amin(d)),
        ("argmax", lambda x, d: x.argmax(d).int()), ("argmin", lambda x, d: x.argmin(d).int()),
        ("product", lambda x, d: x.prod(d)),
    ],
)  # fmt: skip
def test_reductions(op, function, axis, rows):
    x = torch.randint(-9, 9, (rows, 32), generator=torch.Generator().manual_seed(0)).float()
    if op == "product":
        x = x.sign() * 2.0 ** (x.abs() % 2)
    want = function(x, axis)
    o = torch.empty(want.shape, dtype=want.dtype)
    launch(reduce_rows, x, o, op, axis, rows, 32)
    if "arg" in op:  # ties go to the first
        first = (
            (x == x.amax(axis, keepdim=True))
            if op == "argmax"
            else (x == x.amin(axis, keepdim=True))
        )
        want = first.int().argmax(axis).int()
    assert torch.equal(o, want)


def test_maxima_ignore_nan_and_minus_infinity_survives():
    x = torch.randn(16, 256)
    x[3, 5] = math.nan
    x[4] = -math.inf
    o = torch.empty(16)
    launch(reduce_rows, x, o, "max", 1, 16, 256)
    want = torch.where(x.isnan(), -math.inf, x).amax(1)
    assert torch.equal(o, want)


def test_a_half_precision_sum_rounds_at_every_addition():
    x = torch.ones(16, 32, dtype=torch.float16)
    x[:, 0] = 2048.0  # 2048 + 1 rounds to 2048 in fp16; the tree pairs 2048 with 1 first
    o = torch.empty(16, dtype=torch.float16)
    launch(reduce_rows, x, o, "sum", 1, 16, 32)
    assert 2048 <= o[0].item() <= 2080
    assert (o == o[0]).all()


def test_integer_xor():
    x = torch.randint(0, 1 << 30, (16, 32), dtype=torch.int32)
    o = torch.empty(16, dtype=torch.int32)
    launch(reduce_rows, x, o, "xor", 1, 16, 32)
    assert o.tolist() == [int(np.bitwise_xor.reduce(row)) for row in x.numpy()]


@triton.jit
def scan_rows(
    x_ptr, o_ptr, OP: tl.constexpr, REVERSE: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    x = tl.load(x_ptr + at)
    if OP == "sum":
        o = tl.cumsum(x, 1, reverse=REVERSE)
    elif OP == "prod":
        o = tl.cumprod(x, 1, reverse=REVERSE)
    elif OP == "sort":
        o = tl.sort(x, descending=REVERSE)
    elif OP == "flip":
        o = tl.flip(x, 1)
    tl.store(o_ptr + at, o)


@pytest.mark.parametrize("reverse", [False, True])
def test_scans_and_sorts(reverse):
    x = torch.randint(-5, 5, (4, 32), generator=torch.Generator().manual_seed(0)).float()
    o = torch.empty(4, 32)
    turn = (lambda t: t.flip(1)) if reverse else (lambda t: t)
    launch(scan_rows, x, o, "sum", reverse, 4, 32)
    assert torch.equal(o, turn(turn(x).cumsum(1)))
    y = x.sign() * 2.0 ** (x.abs() % 2)
    launch(scan_rows, y, o, "prod", reverse, 4, 32)
    assert torch.equal(o, turn(turn(y).cumprod(1)))
    launch(scan_rows, x, o, "sort", reverse, 4, 32)
    assert torch.equal(o, x.sort(1, descending=reverse).values)
    launch(scan_rows, x, o, "flip", reverse, 4, 32)
    assert torch.equal(o, x.flip(1))


@triton.jit
def matmul_tile(
    a_ptr, b_ptr, c_ptr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    c = tl.dot(a, b, input_precision=PRECISION, out_dtype=ACC)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_narrow_dots_have_exact_products(dtype):
    a, b = values(dtype, 32 * 32).view(32, 32), values(dtype, 32 * 32, seed=1).view(32, 32)
    c = torch.empty(32, 32)
    launch(matmul_tile, a, b, c, "tf32", 32, 32, 32, tl.float32)
    torch.testing.assert_close(c, a.float() @ b.float(), atol=1e-5, rtol=1e-6)


def test_int8_dots_are_exact():
    a = torch.randint(-128, 127, (32, 64), dtype=torch.int8)
    b = torch.randint(-128, 127, (64, 32), dtype=torch.int8)
    c = torch.empty(32, 32, dtype=torch.int32)
    launch(matmul_tile, a, b, c, "tf32", 32, 32, 64, tl.int32)
    assert torch.equal(c, a.int() @ b.int())


def test_a_half_accumulator_is_rounded():
    a, b = values(torch.float16, 256).view(16, 16), values(torch.float16, 256, seed=1).view(16, 16)
    c = torch.empty(16, 16, dtype=torch.float16)
    launch(matmul_tile, a, b, c, "tf32", 16, 16, 16, tl.float16)
    torch.testing.assert_close(c, (a.float() @ b.float()).half(), atol=1e-2, rtol=2e-3)


@pytest.mark.parametrize(
    ("precision", "model", "low_bits_of_one"),
    [
        ("ieee", "truncate", 1 + 2.0**-11 + 2.0**-12), ("tf32", "truncate", 1.0),
        ("tf32", "nearest_away", 1 + 2.0**-10), ("tf32x3", "truncate", 1 + 2.0**-11 + 2.0**-12),
    ],
)  # fmt: skip
def test_tf32_treats_the_low_bits_as_asked(precision, model, low_bits_of_one):
    a = torch.zeros(16, 16)
    a[0, 0] = 1 + 2.0**-11 + 2.0**-12  # just above half of tf32's last place
    b = torch.eye(16)
    c = torch.empty(16, 16)
    options = ttir.Options(float_model=ttir.FloatModel(tf32=model))
    launch(matmul_tile, a, b, c, precision, 16, 16, 16, tl.float32, options=options)
    assert c[0, 0].item() == low_bits_of_one


def test_tf32_probes_of_a_tie():
    a, c = torch.zeros(16, 16), torch.empty(16, 16)
    a[0, 0], a[1, 0] = 1 + 2.0**-11, -(1 + 2.0**-11)
    options = ttir.Options(float_model=ttir.FloatModel(tf32="nearest_away"))
    launch(matmul_tile, a, torch.eye(16), c, "tf32", 16, 16, 16, tl.float32, options=options)
    assert c[:2, 0].tolist() == [1 + 2.0**-10, -(1 + 2.0**-10)]


@pytest.mark.parametrize("precision", ["tf32x3", "bf16x3", "bf16x6"])
def test_split_dots_are_nearly_float32(precision):
    a, b = (
        values(torch.float32, 1024).view(32, 32),
        values(torch.float32, 1024, seed=1).view(32, 32),
    )
    c = torch.empty(32, 32)
    launch(matmul_tile, a, b, c, precision, 32, 32, 32, tl.float32)
    error = (c.double() - a.double() @ b.double()).abs().max().item()
    assert error < {"tf32x3": 1e-5, "bf16x3": 1e-3, "bf16x6": 1e-5}[precision]
    assert error > 0


@triton.jit
def shapes(x_ptr, o_ptr, OP: tl.constexpr):
    i = tl.arange(0, 32)
    x = tl.load(x_ptr + i)
    if OP == "reshape_trans":
        o = tl.reshape(tl.trans(tl.reshape(x, (4, 8))), (32,))
    elif OP == "permute":
        o = tl.reshape(tl.permute(tl.reshape(x, (2, 4, 4)), (2, 0, 1)), (32,))
    elif OP == "join_split":
        a, b = tl.split(tl.reshape(x, (16, 2)))
        o = tl.reshape(tl.join(b, a), (32,))
    elif OP == "interleave":
        y = tl.load(x_ptr + tl.arange(0, 16))
        o = tl.interleave(y, y * 2)
    elif OP == "gather":
        o = tl.gather(x, (i * 7) & 31, 0)
    elif OP == "broadcast":
        o = tl.reshape(tl.broadcast_to(tl.load(x_ptr + tl.arange(0, 4))[None, :], (8, 4)), (32,))
    elif OP == "histogram":
        o = tl.histogram(x.to(tl.int32) & 31, 32)
    elif OP == "ranges":
        o = tl.where((i & 1) == 0, i, -i)
    tl.store(o_ptr + i, o.to(tl.float32))


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("reshape_trans", lambda x: x.view(4, 8).mT.reshape(-1)),
        ("permute", lambda x: x.view(2, 4, 4).permute(2, 0, 1).reshape(-1)),
        ("join_split", lambda x: x.view(16, 2).flip(1).reshape(-1)),
        ("interleave", lambda x: torch.stack([x[:16], 2 * x[:16]], 1).reshape(-1)),
        ("gather", lambda x: x[torch.arange(32) * 7 % 32]),
        ("broadcast", lambda x: x[:4].repeat(8)),
        ("histogram", lambda x: torch.bincount(x.int() & 31, minlength=32).float()),
        ("ranges", lambda x: torch.where(torch.arange(32) % 2 == 0, 1, -1) * torch.arange(32.0)),
    ],
)  # fmt: skip
def test_tiles_are_rearranged(op, function):
    x = torch.randint(0, 32, (32,), generator=torch.Generator().manual_seed(0)).float()
    o = torch.empty(32)
    launch(shapes, x, o, op)
    assert torch.equal(o, function(x))


@triton.jit
def atomics(x_ptr, old_ptr, OP: tl.constexpr, N: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, N)
    if OP == "add":
        old = tl.atomic_add(x_ptr + i, pid + 1, mask=i < N - 2)
    elif OP == "max":
        old = tl.atomic_max(x_ptr + i, pid * 3 - 2)
    elif OP == "min":
        old = tl.atomic_min(x_ptr + i, -pid)
    elif OP == "and":
        old = tl.atomic_and(x_ptr + i, pid + 6)
    elif OP == "or":
        old = tl.atomic_or(x_ptr + i, 1 << pid)
    elif OP == "xor":
        old = tl.atomic_xor(x_ptr + i, 1 << pid)
    elif OP == "xchg":
        old = tl.atomic_xchg(x_ptr + i, pid)
    elif OP == "cas":
        old = tl.atomic_cas(
            x_ptr + i, tl.full([N], 0, tl.int32) + pid, tl.full([N], 1, tl.int32) + pid
        )
    elif OP == "same":
        old = tl.atomic_add(x_ptr + i * 0, 1)
    tl.store(old_ptr + pid * N + i, old, mask=i < N - 2)


@pytest.mark.parametrize("memory_limit", [1, 1 << 30], ids=["program by program", "in lockstep"])
@pytest.mark.parametrize("op", ["add", "max", "min", "and", "or", "xor", "xchg", "cas", "same"])
def test_atomics_take_effect_in_program_order(op, memory_limit):
    n, programs = 8, 5
    x, old = torch.zeros(n, dtype=torch.int32), torch.zeros(programs, n, dtype=torch.int32)
    launch(
        atomics, x, old, op, n, grid=(programs,), options=ttir.Options(memory_limit=memory_limit)
    )
    step = {
        "add": lambda v, p: v + p + 1, "max": lambda v, p: max(v, 3 * p - 2),
        "min": lambda v, p: min(v, -p),
        "and": lambda v, p: v & (p + 6), "or": lambda v, p: v | 1 << p,
        "xor": lambda v, p: v ^ 1 << p,
        "xchg": lambda _, p: p, "cas": lambda v, p: p + 1 if v == p else v,
    }  # fmt: skip
    if op == "same":
        assert x[0] == n * programs
        assert old[:, : n - 2].flatten().tolist() == [
            p * n + i for p in range(programs) for i in range(n - 2)
        ]
        return
    value = 0
    for program in range(programs):
        assert (old[program, : n - 2] == value).all()
        value = step[op](value, program)
    assert (x[: n - 2] == value).all()
    assert (x[n - 2 :] == (0 if op == "add" else value)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_float_atomics_on_overlapping_tiles(dtype):
    x = torch.zeros(40, 16, dtype=dtype)
    launch(overlapping, x, grid=(4,))
    want = torch.zeros(40, 16)
    for p in range(4):
        want[8 * p : 8 * p + 16] += 1.5
    assert torch.equal(x.float(), want)


@triton.jit
def overlapping(x_ptr):
    r = tl.program_id(0) * 8 + tl.arange(0, 16)
    c = tl.arange(0, 16)
    value = tl.full([16, 16], 1.5, x_ptr.dtype.element_ty)
    tl.atomic_add(x_ptr + r[:, None] * 16 + c[None, :], value, sem="relaxed")


@triton.jit
def divergent(x_ptr, o_ptr, n):
    pid = tl.program_id(0)
    if pid >= n:
        return
    total = 0.0
    count = 0
    for i in range(pid % 3, pid):
        x = tl.load(x_ptr + i)
        if x > 0.0:
            total += x
        elif x < -1.0:
            total -= 1.0
            for j in range(i):
                count += j
        else:
            count += 1
    while total > 4.0:
        total = total / 2
        count += 100
    p = o_ptr
    if pid % 2 == 1:
        p = x_ptr + 64
    tl.store(p + pid, total + count)


def test_programs_that_go_different_ways():
    x = torch.randn(128, generator=torch.Generator().manual_seed(4)) * 2
    before, o = x.clone(), torch.full((32,), -1.0)
    launch(divergent, x, o, 30, grid=(32,))
    for pid in range(32):
        total, count = np.float32(0), 0
        for i in range(pid % 3, pid):
            v = np.float32(before[i].item())
            if v > 0:
                total += v
            elif v < -1:
                total -= np.float32(1)
                count += sum(range(i))
            else:
                count += 1
        while total > 4:
            total, count = total / np.float32(2), count + 100
        want = (
            total + np.float32(count)
            if pid < 30
            else (-1.0 if pid % 2 == 0 else before[64 + pid].item())
        )
        assert (x[64 + pid] if pid % 2 else o[pid]).item() == want, pid


@triton.jit
def choose_per_lane(a_ptr, b_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    p = tl.where(i % 3 == 0, a_ptr + i, b_ptr + 2 * i)
    x = tl.load(p, mask=i < N - 1, other=-1.0)
    tl.store(o_ptr + i, x)
    tl.store(tl.where(i % 3 == 0, a_ptr + i, b_ptr + 2 * i), x * 10, mask=i < N - 1)


def test_a_pointer_may_be_chosen_lane_by_lane():
    a, b, o = torch.arange(16.0), torch.arange(100.0, 132.0), torch.empty(16)
    launch(choose_per_lane, a, b, o, 16)
    i = torch.arange(16)
    want = torch.where(i % 3 == 0, i.float(), 100.0 + 2 * i)
    want[15] = -1
    assert torch.equal(o, want)
    assert a[3] == 30
    assert b[2] == 1020
    assert a[15] == 15


@triton.jit
def moving_pointers(x_ptr, o_ptr, stride, steps, R: tl.constexpr, C: tl.constexpr):
    pid = tl.program_id(0)
    p = x_ptr + pid * R * stride + tl.arange(0, R)[:, None] * stride + tl.arange(0, C)[None, :]
    acc = tl.zeros([R, C], tl.float32)
    for _ in range(steps):
        acc += tl.load(p)
        p += C
    tl.store(o_ptr + pid * R * C + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :], acc)


def test_pointers_may_move_in_a_loop():
    x, o = torch.randn(24, 64), torch.empty(24, 16)
    launch(moving_pointers, x, o, 64, 4, 8, 16, grid=(3,))
    torch.testing.assert_close(o, x.view(24, 4, 16).sum(1))


@triton.jit
def random_numbers(o_ptr, i_ptr, seed, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o_ptr + i, tl.rand(seed, i))
    tl.store(i_ptr + i, tl.randint(seed, i).to(tl.int32, bitcast=True))


def test_philox_is_the_published_one():
    o, integers = torch.empty(N), torch.empty(N, dtype=torch.int32)
    launch(random_numbers, o, integers, 42, N)

    def philox(counter, key):
        c, k = [counter, 0, 0, 0], [key & 0xFFFFFFFF, key >> 32]
        for _ in range(10):
            p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [
                (p1 >> 32) ^ c[1] ^ k[0],
                p1 & 0xFFFFFFFF,
                (p0 >> 32) ^ c[3] ^ k[1],
                p0 & 0xFFFFFFFF,
            ]
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
        return c[0]

    ints = [philox(i, 42) for i in range(N)]
    signed = [v - (1 << 32) if v >> 31 else v for v in ints]
    assert integers.tolist() == signed
    assert ((o >= 0) & (o < 1)).all()


@triton.jit
def descriptors(in_desc, o_ptr, rows, cols, R: tl.constexpr, C: tl.constexpr):
    pid = tl.program_id(0)
    out = tl.make_tensor_descriptor(o_ptr, [rows, cols], [cols, 1], [R, C])
    for j in range(tl.cdiv(cols, C)):
        tile = in_desc.load([pid * R, j * C])
        out.store([pid * R, j * C], tile * 2)


def test_descriptors_pad_reads_and_clip_writes():
    x, o = torch.randn(20, 24), torch.zeros(20 * 24 + 16)
    described = TensorDescriptor(x, [20, 24], [24, 1], [8, 16])
    launch(descriptors, described, o, 20, 24, 8, 16, grid=(3,))
    assert torch.equal(o[: 20 * 24].view(20, 24), 2 * x)
    assert not o[20 * 24 :].any()


def test_a_descriptor_larger_than_its_tensor_is_out_of_bounds():
    x, o = torch.randn(20, 32), torch.zeros(24 * 32)
    described = TensorDescriptor(x, [24, 32], [32, 1], [8, 16])
    with ttir.execute() as run:
        descriptors[(3,)](described, o, 24, 32, 8, 16)
    assert [(i.kind, i.argument, i.coordinates) for i in run.incidents] == [
        ("out-of-bounds-read", "in_desc", (20, 0))
    ]


@triton.jit
def block_pointers(x_ptr, o_ptr, rows, cols, R: tl.constexpr, C: tl.constexpr):
    p = tl.make_block_ptr(x_ptr, (rows, cols), (cols, 1), (tl.program_id(0) * R, 0), (R, C), (1, 0))
    o = tl.make_block_ptr(o_ptr, (rows, cols), (cols, 1), (tl.program_id(0) * R, 0), (R, C), (1, 0))
    for _ in range(tl.cdiv(cols, C)):
        x = tl.load(p, boundary_check=(0, 1), padding_option="zero")
        tl.store(o, x * 2, boundary_check=(0, 1))
        p = tl.advance(p, (0, C))
        o = tl.advance(o, (0, C))


@pytest.mark.filterwarnings("ignore:.*make_block_ptr is deprecated")
@pytest.mark.skipif(triton.__version__ >= "3.9", reason="Triton 3.9 has no block pointers")
def test_block_pointers_move_and_check_their_bounds():
    x, o = torch.randn(20, 24), torch.zeros(20, 24)
    launch(block_pointers, x, o, 20, 24, 8, 16, grid=(3,))
    assert torch.equal(o, 2 * x)


@triton.jit
def called(x, n):
    if n > 2:
        y = x + n
    else:
        y = x - n
    return y, n * 2


called_noinline = triton.jit(called.fn, noinline=True)


@triton.jit
def calls(x_ptr, o_ptr):
    pid = tl.program_id(0)
    y, n = called_noinline(tl.load(x_ptr + pid), pid)
    tl.store(o_ptr + pid, y + n)


def test_functions_that_are_not_inlined_are_called():
    x, o = torch.randn(5), torch.empty(5)
    launch(calls, x, o, grid=(5,))
    for pid in range(5):
        assert o[pid] == (x[pid] + pid if pid > 2 else x[pid] - pid) + 2 * pid


@triton.jit
def grid_shape(o_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    nx, ny = tl.num_programs(0), tl.num_programs(1)
    tl.store(o_ptr + (z * ny + y) * nx + x, x + 10 * y + 100 * z + 1000 * tl.num_programs(2))


@pytest.mark.parametrize("schedule", ["forward", "reverse", "shuffled"])
def test_programs_know_their_place_in_the_grid(schedule):
    o = torch.zeros(4, 3, 5, dtype=torch.int32)
    launch(grid_shape, o, grid=(5, 3, 4), options=ttir.Options(schedule=schedule))
    z, y, x = torch.meshgrid(torch.arange(4), torch.arange(3), torch.arange(5), indexing="ij")
    assert torch.equal(o, (x + 10 * y + 100 * z + 4000).int())


@triton.jit
def scalar_arguments(o_ptr, i32, i64, u64, f, flag, one, pair):
    tl.store(o_ptr, i32.to(tl.float64))
    tl.store(o_ptr + 1, i64.to(tl.float64))
    tl.store(o_ptr + 2, u64.to(tl.float64))
    tl.store(o_ptr + 3, f.to(tl.float64))
    tl.store(o_ptr + 4, flag.to(tl.float64))
    tl.store(o_ptr + 5, one + pair[0] + pair[1])


def test_scalars_and_tuples_are_passed():
    o = torch.empty(6, dtype=torch.float64)
    launch(scalar_arguments, o, -5, -(1 << 40), (1 << 63) + 2048, 0.1, True, 1, (3, 16))
    want = [-5, -(2.0**40), 2.0**63 + 2048, float(np.float32(0.1)), 1, 20]
    assert o.tolist() == want


@triton.jit
def assertion(x_ptr):
    pid = tl.program_id(0)
    tl.device_assert(tl.load(x_ptr + pid) > 0, "must be positive")
    tl.device_print("x", pid)


def test_asserts_become_incidents_and_prints_are_printed(capsys):
    with ttir.execute() as run:
        assertion[(3,)](torch.tensor([1.0, -1.0, 2.0]), debug=True)
    assert [(i.kind, i.program_id, i.detail) for i in run.incidents] == [
        ("assertion-failed", (1, 0, 0), "must be positive")
    ]
    assert len(capsys.readouterr().out.splitlines()) == 3
