"""What each operation costs the executor in fp16 and bf16, as a multiple of its cost in fp32.

    python benchmarks/op_costs.py [--limit 3] [--programs 32] [--rounds 31]

A kernel does the operation some times over; the same kernel without it is subtracted. In each of
several rounds every type has its turn, and so has an fp32 addition: what costs fp32 less than that
(negation, a bitcast) is compared with it. The lower quartile of all rounds counts, since whoever
else uses the machine only adds to what a launch takes. Marks, and exits with 1 for, fp16 ratios
above the limit. With --programs 1 --rounds 301 what a call costs decides, not what elements do.
"""

# ruff: noqa: ARG001 - every operation is called alike

import argparse
import statistics
import sys
import time

import torch
import triton
import triton.language as tl

from fa_verify import ttir

ROWS, COLUMNS = tl.constexpr(64), tl.constexpr(128)
TIMES = 16
MOST = tl.constexpr(TIMES)


@triton.jit
def add(x, w):
    return x + w


@triton.jit
def subtract(x, w):
    return x - w


@triton.jit
def multiply(x, w):
    return x * w


@triton.jit
def divide(x, w):
    return (x / w).to(x.dtype)


@triton.jit
def negate(x, w):
    return -x


@triton.jit
def absolute(x, w):
    return tl.abs(x)


@triton.jit
def maximum(x, w):
    return tl.maximum(x, w)


@triton.jit
def minimum_nan(x, w):
    return tl.minimum(x, w, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamp(x, w):
    return tl.clamp(x, -1.0, 1.0)


@triton.jit
def compare_select(x, w):
    return tl.where(x > w, x, 0.0)


@triton.jit
def select_rows(x, w):
    return tl.where((tl.arange(0, ROWS) % 2 == 0)[:, None], x, w)


@triton.jit
def fused_multiply_add(x, w):
    return tl.fma(x, w, x)


@triton.jit
def exponential(x, w):
    return tl.exp(x.to(tl.float32)).to(x.dtype)


@triton.jit
def exponential_base_2(x, w):
    return tl.exp2(x.to(tl.float32)).to(x.dtype)


@triton.jit
def square_root(x, w):
    return tl.sqrt(tl.abs(x).to(tl.float32)).to(x.dtype)


@triton.jit
def sine(x, w):
    return tl.sin(x.to(tl.float32)).to(x.dtype)


@triton.jit
def floor(x, w):
    return tl.floor(x.to(tl.float32)).to(x.dtype)


@triton.jit
def row_sum(x, w):
    return x + tl.sum(x, 1)[:, None]


@triton.jit
def column_sum(x, w):
    return x + tl.sum(x, 0)[None, :]


@triton.jit
def row_max(x, w):
    return x - tl.max(x, 1)[:, None]


@triton.jit
def argmax(x, w):
    return x + tl.argmax(x, 1).to(x.dtype)[:, None]


@triton.jit
def cumulative_sum(x, w):
    return tl.cumsum(x, 1)


@triton.jit
def transpose(x, w):
    return tl.trans(tl.trans(x) + 1.0)


@triton.jit
def reshape(x, w):
    return tl.reshape(tl.reshape(x, (COLUMNS, ROWS)) + 1.0, (ROWS, COLUMNS))


@triton.jit
def join_split(x, w):
    a, b = tl.split(tl.join(x, x + 1.0))
    return a - b


@triton.jit
def to_float32(x, w):
    return (x.to(tl.float32) + 1.0).to(x.dtype)


@triton.jit
def to_float64(x, w):
    return (x.to(tl.float64) + 1.0).to(x.dtype)


@triton.jit
def to_int32(x, w):
    return x.to(tl.int32).to(x.dtype) + x


@triton.jit
def to_fp8(x, w):
    return x.to(tl.float8e5).to(x.dtype) + x


@triton.jit
def bits(x, w):  # three operations
    return (
        x.to(tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32, bitcast=True).to(
            x.dtype, bitcast=True
        )
        + x
    )


ELEMENTWISE = (
    add, subtract, multiply, divide, negate, absolute, maximum, minimum_nan, clamp, compare_select,
    select_rows, fused_multiply_add, exponential, exponential_base_2, square_root, sine, floor,
    row_sum, column_sum, row_max, argmax, cumulative_sum, transpose, reshape, join_split,
    to_float32, to_float64, to_int32, to_fp8, bits,
)  # fmt: skip


@triton.jit
def places():
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def repeat(x_ptr, w_ptr, y_ptr, operation: tl.constexpr, TIMES: tl.constexpr):
    x = tl.load(x_ptr + places())
    w = tl.load(w_ptr + places())
    x = tl.maximum(x, w)
    for _ in tl.static_range(TIMES):
        x = operation(x, w)
    tl.store(y_ptr + places(), x)


@triton.jit
def load(x_ptr, w_ptr, y_ptr, operation: tl.constexpr, TIMES: tl.constexpr):
    x = tl.load(x_ptr + places())
    for _ in tl.static_range(TIMES):
        x = tl.maximum(x, tl.load(x_ptr + places(), volatile=True))  # each is made
    tl.store(y_ptr + places(), x)


@triton.jit
def load_masked(x_ptr, w_ptr, y_ptr, operation: tl.constexpr, TIMES: tl.constexpr):
    x = tl.load(x_ptr + places())
    for i in tl.static_range(TIMES):
        x = tl.maximum(x, tl.load(x_ptr + places(), mask=places() % 3 > i % 3, other=0.0))
    tl.store(y_ptr + places(), x)


@triton.jit
def store(x_ptr, w_ptr, y_ptr, operation: tl.constexpr, TIMES: tl.constexpr):
    x = tl.load(x_ptr + places())
    for _ in tl.static_range(TIMES + 1):
        tl.store(y_ptr + places(), x)


@triton.jit
def atomic_add(x_ptr, w_ptr, y_ptr, operation: tl.constexpr, TIMES: tl.constexpr):
    x = tl.load(x_ptr + places())
    for _ in tl.static_range(TIMES + 1):
        tl.atomic_add(y_ptr + places(), x)


@triton.jit
def row_sum_alone(x_ptr, w_ptr, y_ptr, operation: tl.constexpr, TIMES: tl.constexpr):
    sums_alone(x_ptr, w_ptr, y_ptr, 1, TIMES)


@triton.jit
def column_sum_alone(x_ptr, w_ptr, y_ptr, operation: tl.constexpr, TIMES: tl.constexpr):
    sums_alone(x_ptr, w_ptr, y_ptr, 0, TIMES)


@triton.jit
def sums_alone(x_ptr, w_ptr, y_ptr, AXIS: tl.constexpr, TIMES: tl.constexpr):
    x = tl.load(x_ptr + places())
    w = tl.load(w_ptr + places())
    first = tl.sum(w, AXIS)
    total = first
    for i in tl.static_range(MOST):
        x += w  # whether or not they are summed
        total += tl.sum(x, AXIS) if i < TIMES else first
    tl.store(y_ptr + places(), x + tl.expand_dims(total, AXIS))


@triton.jit
def dot(x_ptr, w_ptr, y_ptr, operation: tl.constexpr, TIMES: tl.constexpr):
    x = tl.load(x_ptr + places())
    total = tl.zeros((ROWS, ROWS), tl.float32)
    for _ in tl.static_range(TIMES):
        total = tl.dot(x, tl.trans(x), total, input_precision="ieee")
    tl.store(y_ptr + places(), x + tl.sum(total, 1)[:, None].to(x.dtype))


CASES = {f.__name__: (repeat, f) for f in ELEMENTWISE} | {
    f.__name__: (f, add)
    for f in (load, load_masked, store, atomic_add, row_sum_alone, column_sum_alone, dot)
}


TYPES = (torch.float32, torch.float16, torch.bfloat16)


def seconds(kernel, operation, programs, rounds):
    """What TIMES operations take, beyond what everything around them takes.

    In each of TYPES; the last is an addition in fp32.
    """
    torch.manual_seed(0)
    values = torch.randn(programs * 64, 128)
    tensors = [
        (values.to(t), torch.full_like(values, 1.25, dtype=t), torch.zeros_like(values, dtype=t))
        for t in TYPES
    ]
    runs = [(kernel, operation, x) for x in tensors] + [(repeat, add, tensors[0])]
    clocks = [([], []) for _ in runs]
    with ttir.execute():
        for _ in range(rounds):
            for (function, done, (x, w, y)), clock in zip(runs, clocks, strict=True):
                for times, taken in zip((0, TIMES), clock, strict=True):
                    y.zero_()
                    began = time.process_time()
                    function[programs,](x, w, y, done, times)
                    taken.append(time.process_time() - began)
    without, whole = ([statistics.quantiles(c[i], n=4)[0] for c in clocks] for i in (0, 1))
    return [y - x for x, y in zip(without, whole, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=3.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--programs", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=31)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'operation':20}{'fp32, ns an element':>20}{'fp16':>8}{'bf16':>8}")
    slow = []
    for name, (kernel, operation) in CASES.items():
        if arguments.only not in name:
            continue
        base, *narrow, addition = seconds(kernel, operation, arguments.programs, arguments.rounds)
        ratios = [round(x / max(base, addition * (3 if name == "bits" else 1)), 1) for x in narrow]
        mark = "  <- above the limit" if ratios[0] > arguments.limit else ""
        slow += [name] * bool(mark)
        elements = arguments.programs * 64 * 128 * TIMES
        print(
            f"{name:20}{base / elements * 1e9:>20.2f}"
            + "".join(f"{r:>8.1f}" for r in ratios)
            + mark
        )
    sys.exit(bool(slow))


if __name__ == "__main__":
    main()
