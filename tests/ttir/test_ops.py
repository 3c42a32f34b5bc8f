"""Numbers: each family of operations against torch, NumPy or a formula, exact where possible."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803, SIM108

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("columns", [1, 2, 16, 32, 64, 128])
@pytest.mark.parametrize("axis", [0, 1])
def test_half_precision_sums_add_halves_of_the_axis(dtype, rows, columns, axis):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = x.movedim(axis, 0)
    while (half := len(want) // 2) > 0:
        want = want[:half] + want[half:]
    o = torch.empty(want[0].shape, dtype=dtype)
    launch(reduce_rows, x, o, "sum", axis, rows, columns)
    assert torch.equal(o, want[0])


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
def descriptors(in_desc, o_ptr, rows, cols, R: tl.constexpr, C: tl.constexpr):
    pid = tl.program_id(0)
    out = tl.make_tensor_descriptor(o_ptr, [rows, cols], [cols, 1], [R, C])
    for j in range(tl.cdiv(cols, C)):
        tile = in_desc.load([pid * R, j * C])
        out.store([pid * R, j * C], tile * 2)


def test_a_descriptor_larger_than_its_tensor_is_out_of_bounds():
    x, o = torch.randn(20, 32), torch.zeros(24 * 32)
    described = TensorDescriptor(x, [24, 32], [32, 1], [8, 16])
    with ttir.execute() as run:
        descriptors[(3,)](described, o, 24, 32, 8, 16)
    assert [(i.kind, i.argument, i.coordinates) for i in run.incidents] == [
        ("out-of-bounds-read", "in_desc", (20, 0))
    ]


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
    assert capsys.readouterr().out == "".join(f"pid ({i}, 0, 0) x: {i}\n" for i in range(3))


@triton.jit
def printer(x_ptr, h_ptr, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.device_print("x", tl.load(x_ptr + i))
    tl.device_print("half", tl.load(h_ptr + i) + 1.0)
    tl.device_print("where", tl.program_id(0) * B + i, n)
    tl.device_print("unsigned", n.to(tl.uint8))
    tl.device_print("splat", tl.full((2, B), 3, tl.int32))
    tl.device_print("bits", n, tl.load(h_ptr + i), hex=True)
    tl.device_print("address", x_ptr + i, hex=True)
    tl.device_print("nothing")


def test_prints_show_values_as_memory_holds_them(capsys):
    x, h = torch.tensor([0.5, -1.0]), torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    with ttir.execute() as run:
        printer[(2,)](x, h, -3, 2)
    assert run.incidents == []
    addresses = " ".join(f"0x{x.data_ptr() + 4 * i:016x}" for i in range(2))
    assert capsys.readouterr().out.splitlines() == [
        f"pid ({pid}, 0, 0) {line}"
        for line in (
            "x: [ 0.5 -1. ]", "half: [ 2.5 -1. ]", "where: [{0} {1}] -3", "unsigned: 253",
            "splat: [[3 3] [3 3]]", "bits: 0xfffffffd [0x3fc0 0xc000]", f"address: [{addresses}]",
            "nothing",
        )
        for pid, line in enumerate([line.format(0, 1), line.format(2, 3)])
    ]  # fmt: skip


@triton.jit
def looked_at_again(x_ptr, o_ptr, B: tl.constexpr):
    i = tl.max_contiguous(tl.arange(0, B) ^ 1, B)
    ticket = tl.atomic_add(o_ptr + B, 1.0)
    tl.device_print("root of", tl.load(x_ptr + i))
    tl.store(o_ptr + i, tl.sqrt(tl.load(x_ptr + i)) + ticket)


def test_what_is_run_again_to_explain_a_finding_prints_once(capsys):
    with ttir.execute() as run:
        looked_at_again[(1,)](torch.tensor([-1.0, 4.0]), torch.zeros(3), 2)
    assert {i.kind for i in (*run.incidents, *run.notes)} == {"false-hint", "nan-born"}
    assert capsys.readouterr().out == "pid (0, 0, 0) root of: [ 4. -1.]\n"
