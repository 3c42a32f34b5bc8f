"""What is proven of integers: which steps of loops matter, what is stored, what is the same."""

# Triton reads the kernels in this file: their constexprs are upper-case.
# ruff: noqa: N803

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir
from fa_verify.ttir.mutation.inequalities import ONE, at_least, infeasible
from fa_verify.ttir.mutation.prover import Prover
from fa_verify.ttir.mutation.recorder import Recorder

HIDDEN = "a step more or less is one whose mask hides every lane, which adds nothing"
MOVED = "a step is taken in a loop that does the same, where every mask is true"
STORED = " of those that are stored"


@triton.jit
def band_kernel(x, y, columns, reach, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Row i of y is the sum of x[j], j <= i + reach; whole blocks first, then those with a mask."""
    first_row = tl.program_id(0) * BLOCK
    rows = first_row + tl.arange(0, BLOCK)
    end = tl.minimum(columns, first_row + BLOCK + reach)
    inner = tl.maximum(tl.minimum(columns, first_row + reach + 1), 0) // BLOCK * BLOCK
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, inner, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        numbers = tl.load(x + keys, mask=keys < columns, other=0.0)
        total += tl.sum(tl.broadcast_to(numbers[None, :], (BLOCK, BLOCK)), 1)
    for first in range(inner, end, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        numbers = tl.load(x + keys, mask=keys < columns, other=0.0)
        wide = tl.broadcast_to(numbers[None, :], (BLOCK, BLOCK))
        if MASKED:
            wide = tl.where(keys[None, :] - rows[:, None] <= reach, wide, 0.0)
        total += tl.sum(wide, 1)
    tl.store(y + rows, total, mask=rows < columns)


@triton.jit
def largest_kernel(x, y, columns, reach, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Row i of y is the log-sum-exp of x[j], j <= i + reach, with a running maximum."""
    first_row = tl.program_id(0) * BLOCK
    rows = first_row + tl.arange(0, BLOCK)
    end = tl.minimum(columns, first_row + BLOCK + reach)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, end, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        numbers = tl.load(x + keys, mask=keys < columns, other=0.0)
        tile = tl.dot(
            tl.broadcast_to(numbers[:, None], (BLOCK, BLOCK)),
            tl.full((BLOCK, BLOCK), 1.0, tl.float32),
        )
        seen = (keys[None, :] < columns) & (keys[None, :] - rows[:, None] <= reach)
        if MASKED:
            tile = tl.where(seen, tl.trans(tile) / BLOCK, float("-inf"))
        m_new = tl.maximum(m, tl.max(tile, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        total = total * tl.exp(m - shift) + tl.sum(tl.exp(tile - shift[:, None]), 1)
        m = m_new
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(y + rows, m + tl.log(total), mask=rows < columns)


@triton.jit
def tail_kernel(x, y, columns, reach, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """As `band_kernel`; rows past the end see more, but for MASKED = 2, and for 0 come to all."""
    first_row = tl.program_id(0) * BLOCK
    rows = first_row + tl.arange(0, BLOCK)
    last_row = tl.minimum(first_row + BLOCK, columns) - 1
    end = tl.minimum(columns, last_row + reach + 1)
    inner = tl.maximum(tl.minimum(columns, first_row + reach + 1), 0) // BLOCK * BLOCK
    inner = tl.minimum(inner, end)
    if first_row + BLOCK > columns:
        inner = 0
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, inner, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        numbers = tl.load(x + keys, mask=keys < columns, other=0.0)
        total += tl.sum(tl.broadcast_to(numbers[None, :], (BLOCK, BLOCK)), 1)
    for first in range(inner, end, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        numbers = tl.load(x + keys, mask=keys < columns, other=0.0)
        wide = tl.broadcast_to(numbers[None, :], (BLOCK, BLOCK))
        seen = keys[None, :] - rows[:, None] <= reach
        if MASKED == 2:
            seen = seen & (rows[:, None] < columns)
        total += tl.sum(tl.where(seen, wide, 0.0), 1)
    if not MASKED:
        total += tl.sum(total, 0)
    tl.store(y + rows, total, mask=rows < columns)


@triton.jit
def nested_kernel(x, y, columns, reach, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Column j of y is the sum of x[i] of the rows i that see it, j <= i + reach."""
    own = tl.program_id(0) * BLOCK
    lanes = own + tl.arange(0, BLOCK)
    begin = tl.maximum(own - reach, 0) // BLOCK * BLOCK
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for first_row in range(begin, columns, BLOCK):
        rows = first_row + tl.arange(0, BLOCK)
        numbers = tl.load(x + rows, mask=rows < columns, other=0.0)
        for first in range(own, tl.minimum(own + BLOCK, columns), BLOCK):
            keys = first + tl.arange(0, BLOCK)
            wide = tl.broadcast_to(numbers[:, None], (BLOCK, BLOCK))
            if MASKED:
                wide = tl.where(keys[None, :] - rows[:, None] <= reach, wide, 0.0)
            total += wide
    tl.store(y + lanes, tl.sum(total, 0), mask=lanes < columns)


@triton.jit
def early_kernel(x, y, columns, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    length = columns
    if first >= columns:
        length = 0
    lanes = first + tl.arange(0, BLOCK)
    numbers = tl.load(x + lanes, mask=lanes < columns, other=0.0) + length
    other = tl.load(x + lanes, mask=(lanes < columns) & (lanes < columns + 1), other=0.0)
    if MASKED:
        tl.store(y + lanes, numbers + other, mask=lanes < columns)
    else:
        tl.store(y + lanes, numbers + other)


def run(kernel, alteration, columns=37, masked=True, **numbers):
    # Whole numbers: their sums are the same in any order.
    x = torch.randint(-9, 9, (64,), generator=torch.Generator().manual_seed(0)).float()
    y = torch.zeros(64)
    with ttir.execute(ttir.Options(alteration=alteration)) as execution:
        execution.declare(x, "x", written=True)
        kernel[(4,)](x, y, columns, *numbers.values(), BLOCK=16, MASKED=masked)
    return x, y, execution.incidents


def proven(kernel, **options):
    """Mutants of a kernel, by what they say, and the proofs of each."""
    recorder = Recorder()
    run(kernel, recorder, **options)
    mutants = [m for m in recorder.found if hasattr(m, "place")]
    prover = Prover(mutants)
    run(kernel, prover, **options)
    return {
        mutant: (recorder.found[mutant].says, "; ".join(sorted(said)))
        for mutant, said in prover.proofs.items()
        if said and "" not in said
    }


def test_the_kernel_is_right():
    x, y, incidents = run(band_kernel, None, reach=5)
    due = [x[: min(37, i + 6)].sum() for i in range(37)]
    torch.testing.assert_close(y[:37], torch.stack(due))
    assert not incidents


def test_steps_that_add_nothing_and_steps_that_move_are_told():
    found = proven(band_kernel, reach=5)
    reasons = {reason for _, reason in found.values()}
    assert {HIDDEN, MOVED} <= reasons
    hidden = {says for says, reason in found.values() if reason == HIDDEN}
    assert "the constant 16 is 17" in hidden  # end: a row more, and a block beyond the mask
    moved = {says for says, reason in found.values() if reason == MOVED}
    assert "max(a, b) is only b" in moved  # inner = 0: all blocks have a mask


def test_a_step_that_no_lane_sees_leaves_a_running_maximum_as_it_is():
    found = proven(largest_kernel, reach=5).values()
    assert ("the constant 16 is 17", HIDDEN) in found
    assert HIDDEN not in {r for _, r in proven(largest_kernel, reach=5, masked=False).values()}


def test_rows_that_nothing_stores_may_see_what_they_like():
    found = proven(tail_kernel, reach=5).values()
    assert ("min(a, b) is only a", HIDDEN + STORED) in found  # last_row: beyond the end
    moved = dict(proven(tail_kernel, reach=5, masked=2).values())
    assert MOVED + STORED in moved["a > b is a <= b"]  # a last block without masks
    mixed = proven(tail_kernel, reach=5, masked=False).values()
    assert not any(STORED in reason for _, reason in mixed)


def test_a_step_that_holds_a_loop_adds_nothing_where_that_loop_adds_nothing():
    assert ("max(a, b) is only b", HIDDEN) in proven(nested_kernel, reach=5).values()
    assert HIDDEN not in {r for _, r in proven(nested_kernel, reach=5, masked=False).values()}


@pytest.mark.parametrize(
    "kernel",
    [band_kernel, largest_kernel, tail_kernel, nested_kernel, early_kernel],
    ids=["band", "largest", "tail", "nested", "early"],
)
def test_what_is_proven_makes_no_difference_on_any_numbers(kernel):
    options = [{"columns": columns} for columns in (1, 15, 16, 17, 31, 32, 37, 48, 64)]
    if kernel is not early_kernel:
        reaches = (-40, -17, -16, -1, 0, 1, 15, 16, 17, 40)
        options = [{**o, "reach": r} for o, r in itertools.product(options, reaches)]
    options = random.Random(0).sample(options, min(len(options), 30))  # noqa: S311
    found = proven(kernel, **options[0])
    assert found
    for option in options:
        _, right, _ = run(kernel, None, **option)
        for mutant, why in found.items():
            _, y, incidents = run(kernel, mutant, **option)
            assert torch.equal(y, right), (why, option)
            assert not incidents, (why, option)


def test_without_a_mask_a_step_more_is_a_step_too_many():
    reasons = {reason for _, reason in proven(band_kernel, reach=5, masked=False).values()}
    assert HIDDEN not in reasons
    assert MOVED in reasons  # both loops do the same, to whatever block


def test_what_differs_only_where_nothing_is_stored():
    found = proven(early_kernel).values()
    assert ("a >= b is a > b", "where it is another, nothing is stored") in found
    assert ("a & b is only a", "it is the same, whatever the kernel is given") in found
    assert not any("nothing is stored" in r for _, r in proven(early_kernel, masked=False).values())


def test_whole_numbers_are_told_from_fractions():
    x, y = {"x": 1}, {"y": 2}
    assert infeasible(
        [at_least(x, y), at_least(y, x), at_least(x, {"z": 2}, 1), at_least({"z": 2}, x, -1)]
    )
    assert not infeasible([at_least(x, y), at_least(y, x), at_least(x, {"z": 2})])
    assert infeasible([at_least({ONE: 3}, y), at_least(y, {ONE: 3})])  # 2 y = 3
    assert not infeasible([])


def test_no_solution_is_only_said_of_what_has_none():
    rng = random.Random(1)  # noqa: S311
    said = 0
    for _ in range(400):
        rows = [
            {**{name: rng.randint(-3, 3) for name in "abc"}, ONE: rng.randint(-4, 4)}
            for _ in range(rng.randint(2, 6))
        ]
        solved = any(
            all(row["a"] * a + row["b"] * b + row["c"] * c + row[ONE] >= 0 for row in rows)
            for a, b, c in itertools.product(range(-6, 7), repeat=3)
        )
        if infeasible(rows):
            said += 1
            assert not solved, rows
    assert said > 20
