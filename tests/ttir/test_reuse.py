"""Results may take the place of operands only where nobody can tell."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803, SIM108

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir
from fa_verify.ttir.lowering import reuse

BLOCK = 128  # 128 x 128 elements of one program are worth reusing


def test_an_array_that_only_its_slot_holds_is_spare():
    env = [np.zeros((1, 64)), np.zeros((1, 64))]
    assert reuse.spare(env, [1], (1, 64)) is env[1]


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ([np.zeros((4, 64))[:1]], "it is a view"),
        ([np.zeros((1, 32))], "another shape"),
    ],
)
def test_other_arrays_are_not(env, why):
    assert reuse.spare(env, [0], (1, 64)) is None, why


@pytest.mark.parametrize("hold", [lambda x: x, lambda x: x[:, :1], torch.from_numpy])
def test_nor_what_somebody_else_still_sees(hold):
    env = [np.zeros((1, 64))]
    other = hold(env[0])
    assert reuse.spare(env, [0], (1, 64)) is None
    del other
    assert reuse.spare(env, [0], (1, 64)) is env[0]


SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.5, 1e-45, -3e38], np.float32)


BIG = (8, 1024)


@pytest.mark.parametrize(
    "shapes",
    [
        (BIG, BIG, BIG),
        (BIG, BIG, (1, 1)),
        (BIG, (8, 1), (1, 1)),
        (BIG, (1, 1), BIG),
        ((8, 1), BIG, (1, 1024)),
    ],
)
def test_blending_gives_the_bits_of_where(shapes):
    rng = np.random.default_rng(0)
    c, yes, no = shapes
    condition = rng.random(c) < 0.5
    left, right = rng.choice(SPECIAL, yes), rng.choice(SPECIAL, no)
    left.view(np.int32)[np.isnan(left)] ^= 0x15  # a NaN's payload
    want = np.where(condition, left, right)
    assert (reuse.blend(condition, left, right).view(np.int32) == want.view(np.int32)).all()


@triton.jit
def at(BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    return i[:, None] * BLOCK + i[None, :]


@triton.jit
def both_results(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + at(BLOCK))
    double = x + x
    half = x * 0.5
    tl.store(y_ptr + at(BLOCK), double - half + x)


@triton.jit
def rotation(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    a = tl.load(x_ptr + at(BLOCK))
    b = a + 1.0
    c = a * 2.0
    for _ in range(n):
        a, b, c = b, c, a + c  # every value changes its name
    tl.store(y_ptr + at(BLOCK), a * 100.0 + b * 10.0 + c)


@triton.jit
def kept_outside(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + at(BLOCK))
    total = x * 0.0
    for i in range(n):
        if i % 2 == 0:
            total = total + tl.exp2(x)
        else:
            total = total * x
    tl.store(y_ptr + at(BLOCK), total + x)


@triton.jit
def uneven(x_ptr, y_ptr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = tl.load(x_ptr + at(BLOCK)) + program
    total = x
    for _ in range(program):
        total = total * 0.5 + x
    tl.store(y_ptr + program * BLOCK * BLOCK + at(BLOCK), total - x)


@triton.jit
def early_return(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + at(BLOCK))
    y = x + 1.0
    if tl.program_id(0) < n:
        tl.store(y_ptr + tl.program_id(0) * BLOCK * BLOCK + at(BLOCK), y * 3.0 + x)
        return
    tl.store(y_ptr + tl.program_id(0) * BLOCK * BLOCK + at(BLOCK), y - x)


def run(kernel, y, *arguments, grid=1):
    x = torch.randn(BLOCK, BLOCK)
    kept = x.clone()
    with ttir.execute() as execution:
        kernel[grid,](x, y, *arguments, BLOCK=BLOCK)
    assert not execution.incidents
    assert torch.equal(x, kept)
    return x


def test_an_operand_that_is_read_again_is_left_alone():
    y = torch.zeros(BLOCK, BLOCK)
    x = run(both_results, y)
    assert torch.equal(y, (x + x) - x * 0.5 + x)


@pytest.mark.parametrize("turns", range(6))
def test_loop_carried_values_that_change_places(turns):
    y = torch.zeros(BLOCK, BLOCK)
    a = run(rotation, y, turns)
    b, c = a + 1.0, a * 2.0
    for _ in range(turns):
        a, b, c = b, c, a + c
    assert torch.equal(y, a * 100.0 + b * 10.0 + c)


def test_a_value_from_outside_a_loop():
    y = torch.zeros(BLOCK, BLOCK)
    x = run(kept_outside, y, 5)
    total = x * 0.0
    for i in range(5):
        total = total + torch.from_numpy(np.exp2(x.numpy())) if i % 2 == 0 else total * x
    assert torch.equal(y, total + x)


def test_programs_that_leave_a_loop_one_by_one():
    y = torch.zeros(4, BLOCK, BLOCK)
    start = run(uneven, y, grid=4)
    for program in range(4):
        x = start + program
        total = x
        for _ in range(program):
            total = total * 0.5 + x
        assert torch.equal(y[program], total - x)


@pytest.mark.parametrize("n", [0, 2, 4])
def test_values_that_cross_blocks(n):
    y = torch.zeros(4, BLOCK, BLOCK)
    x = run(early_return, y, n, grid=4)
    want = [(x + 1.0) * 3.0 + x if i < n else (x + 1.0) - x for i in range(4)]
    assert torch.equal(y, torch.stack(want))
