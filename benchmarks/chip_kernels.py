"""One operation a kernel: what benchmarks/chip_numbers.py runs on a chip and on the executor."""

import triton
import triton.language as tl


@triton.jit
def dot_kernel(
    a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + tile * M * K + i[:, None] * K + k[None, :])
    right = tl.load(b + tile * K * N + k[:, None] * N + j[None, :])
    at = tile * M * N + i[:, None] * N + j[None, :]
    start = tl.load(c + at)
    tl.store(out + at, tl.dot(left, right, start, input_precision=PRECISION, out_dtype=OUT))


@triton.jit
def unary_kernel(x, out, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n)
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
    elif OP == "sqrt_rn":
        r = tl.sqrt_rn(a)
    elif OP == "rsqrt":
        r = tl.rsqrt(a)
    elif OP == "sin":
        r = tl.sin(a)
    elif OP == "cos":
        r = tl.cos(a)
    elif OP == "erf":
        r = tl.erf(a)
    elif OP == "sigmoid":
        r = tl.sigmoid(a)
    elif OP == "floor":
        r = tl.floor(a)
    elif OP == "ceil":
        r = tl.ceil(a)
    elif OP == "abs":
        r = tl.abs(a)
    elif OP == "reciprocal":
        r = 1.0 / a
    tl.store(out + at, r, mask=at < n)


@triton.jit
def ternary_kernel(x, y, z, out, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n)
    b = tl.load(y + at, mask=at < n)
    c = tl.load(z + at, mask=at < n)
    if OP == "add":
        r = a + b
    elif OP == "sub":
        r = a - b
    elif OP == "mul":
        r = a * b
    elif OP == "div":
        r = a / b
    elif OP == "div_rn":
        r = tl.div_rn(a, b)
    elif OP == "fma":
        r = tl.fma(a, b, c)
    elif OP == "contracted":  # a product added at once
        r = a * b + c
    elif OP == "contracted_sub":
        r = a * b - c
    elif OP == "contracted_from":
        r = c - a * b
    elif OP == "two_products":
        r = a * b + b * c
    elif OP == "used_twice":
        r = (a * b + c) * (a * b)
    elif OP == "max":
        r = tl.maximum(a, b)
    elif OP == "rem":
        r = a % b
    tl.store(out + at, r, mask=at < n)


@triton.jit
def cast_kernel(x, out, n, TO: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n)
    tl.store(out + at, tl.cast(a, TO, fp_downcast_rounding=ROUNDING), mask=at < n)
