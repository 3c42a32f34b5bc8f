"""Updates by load and compare-and-swap: the load is no race, unless more depends on it."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803, SIM102

import re

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir


@triton.jit
def multiply(x_ptr, y_ptr, KEEP: tl.constexpr):
    pid = tl.program_id(0)
    old = tl.load(x_ptr)  # before the loop
    done = False
    while not done:
        assumed = old
        old = tl.atomic_cas(x_ptr, assumed, assumed * 2, sem="relaxed")
        done = old == assumed
    if KEEP:
        tl.store(y_ptr + pid, old)  # what the compare-and-swap returned


@triton.jit
def multiply_floats(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    bits_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    stop = i >= n
    while tl.sum(stop.to(tl.int32)) < BLOCK:
        old = tl.load(x_ptr + i % n)  # in the loop
        expected = old.to(tl.int32, bitcast=True)
        new = tl.where(stop, old, old * 2).to(tl.int32, bitcast=True)
        seen = tl.atomic_cas(bits_ptr + i % n, expected, new, sem="relaxed")
        stop |= seen == expected


@triton.jit
def watched(x_ptr, y_ptr, z_ptr, HOW: tl.constexpr):
    pid = tl.program_id(0)
    old = tl.load(x_ptr)  # more depends on it
    if HOW == "stored":
        tl.store(y_ptr + pid, old + 1)
    if HOW == "chosen by":
        if old > 5:
            tl.store(y_ptr + pid, 1)
    if HOW == "an address":
        tl.store(z_ptr + pid, tl.load(y_ptr + tl.minimum(old, 1)))
    if HOW == "added":
        tl.atomic_add(z_ptr, old)
    expected = old
    if HOW == "changed":
        expected = old + 1
    place = x_ptr
    if HOW == "of another place":
        place = z_ptr
    seen = tl.atomic_cas(place, expected, expected * 2, sem="relaxed")
    if HOW != "unheard":
        while seen != expected:
            expected = seen
            seen = tl.atomic_cas(place, expected, expected * 2, sem="relaxed")
    if HOW == "of another place":
        tl.atomic_add(x_ptr, 1, sem="relaxed")


@triton.jit
def maybe_no_turn(x_ptr, y_ptr, n):
    pid = tl.program_id(0)
    old = tl.load(x_ptr)  # reaches the store if n is 0
    left = n
    while left > 0:
        seen = tl.atomic_cas(x_ptr, old, old + 1, sem="relaxed")
        left = tl.where(seen == old, left - 1, left)
        old = seen
    tl.store(y_ptr + pid, old)


@triton.jit
def reset(x_ptr, on):
    if tl.program_id(0) == 0:
        tl.store(x_ptr, 7)
    else:
        old = tl.load(x_ptr)  # beside a plain store
        if on == 1:
            tl.store(x_ptr + 1, tl.atomic_cas(x_ptr, old, old + 1))


def races(run):
    return [x.detail for x in run.incidents if x.kind == "race"]


@pytest.mark.parametrize("schedule", ["forward", "shuffled", "serial"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_load_that_a_compare_and_swap_checks_is_no_race(schedule, keep):
    x, y = torch.ones(1, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    with ttir.execute(ttir.Options(schedule=schedule)) as run:
        multiply[(5,)](x, y, keep)
    assert run.incidents == []
    assert x.item() == 32
    assert sorted(y.tolist()) == ([1, 2, 4, 8, 16] if keep else [0] * 5)


def test_nor_is_one_of_a_tile_of_floats_compared_as_integers():
    x = torch.tensor([1.0, 3.0, 0.5])
    with ttir.execute() as run:
        multiply_floats[(4,)](x, 3, 4)
    assert run.incidents == []
    assert x.tolist() == [16.0, 48.0, 8.0]


@pytest.mark.parametrize(
    "how",
    ["stored", "chosen by", "an address", "added", "changed", "of another place", "unheard"],
)
def test_a_load_on_which_more_depends_is_a_race(how):
    x, y = torch.ones(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    with ttir.execute() as run:
        watched[(4,)](x, y, torch.ones(4, dtype=torch.int32), how)
    assert any(re.search("reads? plainly", detail) for detail in races(run))


def test_without_more_the_same_kernel_is_silent():
    x, y = torch.ones(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    with ttir.execute() as run:
        watched[(4,)](x, y, y.clone(), "")
    assert run.incidents == []
    assert x.item() == 16


def test_a_loop_that_may_not_run_checks_nothing():
    x, y = torch.ones(1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    with ttir.execute() as run:
        maybe_no_turn[(3,)](x, y, 2)
    assert any(re.search("reads? plainly", detail) for detail in races(run))


@pytest.mark.parametrize(
    ("schedule", "how"), [("forward", "reads what"), ("reverse", "writes what")]
)
def test_plain_stores_still_race_with_such_a_load(schedule, how):
    x = torch.ones(2, dtype=torch.int32)
    with ttir.execute(ttir.Options(schedule=schedule, memory_limit=1)) as run:
        reset[(2,)](x, 0)
    (detail,) = races(run)
    assert how in detail
