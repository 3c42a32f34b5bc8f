"""Which lines, ways of branches and sides of masks ran."""

# Triton reads the kernels in this file: their constexprs are upper-case, their ifs stay ifs.
# ruff: noqa: N803, SIM108

import inspect

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir


@triton.jit
def ways(x, n, turns, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(x + columns, mask=columns < n, other=0.0)  # the load
    for _ in range(turns):  # the loop
        tile += 1.0  # its body
    if tl.program_id(0) > 0:  # the branch
        tile = tile * 3.0  # taken
    else:
        tile = tile - 5.0  # not taken
    if TWICE:  # the constexpr
        tile = tile + tile  # twice
    tl.store(x + columns, tile, mask=columns < n)


_, FIRST = inspect.getsourcelines(ways.fn)
LINES = inspect.getsource(ways.fn).splitlines()


def line(comment):
    """The number of the line that ends in a comment."""
    (index,) = (i for i, text in enumerate(LINES) if text.endswith(f"# {comment}"))
    return FIRST + index


def ran(n, *, turns=2, programs=1, twice=False):
    x = torch.zeros(64 * programs)
    with ttir.execute() as run:
        ways[(programs,)](x, n, turns, BLOCK=64, TWICE=twice)
    return run.ran


def met(found, comment):
    return {way for (at, way), there in found.ways.items() if at[1] == line(comment) and there}


@pytest.mark.parametrize(
    ("n", "sides"), [(64, {"shown"}), (60, {"shown", "hidden"}), (0, {"hidden"})]
)
def test_sides_of_a_mask(n, sides):
    assert met(ran(n), "the load") == sides


def test_a_mask_of_several_programs():
    assert met(ran(128, programs=2), "the load") == {"shown"}
    assert met(ran(100, programs=2), "the load") == {"shown", "hidden"}


@pytest.mark.parametrize(("turns", "way"), [(3, "loop"), (0, "no loop")])
def test_a_loop(turns, way):
    found = ran(64, turns=turns)
    assert met(found, "the loop") == {way}
    body = {at[1] for at in found.ran} & {line("its body")}
    assert bool(body) == (way == "loop")
    assert line("its body") in {at[1] for at in found.compiled}


@pytest.mark.parametrize(
    ("programs", "sides", "idle"), [(1, {"else"}, "taken"), (2, {"then", "else"}, None)]
)
def test_a_branch(programs, sides, idle):
    found = ran(64, programs=programs)
    assert met(found, "the branch") == sides
    missing = {at[1] for at in found.compiled - found.ran}
    assert (line("taken") in missing) == (idle == "taken")
    assert line("not taken") not in missing


def test_what_a_constexpr_turns_off_is_not_compiled():
    assert line("twice") not in {at[1] for at in ran(64).compiled}
    assert line("twice") in {at[1] for at in ran(64, twice=True).ran}


def test_launches_of_one_execution_are_joined_and_others_are_not():
    x = torch.zeros(64)
    with ttir.execute() as run:
        ways[(1,)](x, 64, 2, BLOCK=64, TWICE=False)
        ways[(1,)](x, 60, 0, BLOCK=64, TWICE=False)
    assert met(run.ran, "the loop") == {"loop", "no loop"}
    assert met(run.ran, "the load") == {"shown", "hidden"}
    assert met(ran(64), "the load") == {"shown"}


@triton.jit
def early(x, n):
    if tl.program_id(0) >= n:  # the test
        return
    tl.store(x + tl.program_id(0), 1.0)  # the store


def test_programs_that_return_early():
    source, first = inspect.getsourcelines(early.fn)
    at = first + next(i for i, text in enumerate(source) if "the store" in text)
    for n, stored in ((0, False), (2, True)):
        with ttir.execute() as run:
            early[(2,)](torch.zeros(2), n)
        assert (at in {place[1] for place in run.ran.ran}) == stored
        assert at in {place[1] for place in run.ran.compiled}


@triton.jit
def countdown(x):
    left = tl.load(x)
    while left > 0:  # the while
        left -= 1
    tl.store(x, left)


@pytest.mark.parametrize("start", [0, 3])
def test_a_while(start):
    x = torch.tensor([start], dtype=torch.int32)
    with ttir.execute() as run:
        countdown[(1,)](x)
    loops = {there for (_, way), there in run.ran.ways.items() if way == "loop"}
    assert loops == {start > 0}


@triton.jit
def _doubled(x):
    return 2.0 * x


@triton.jit
def calls_in_a_branch(x, TWICE: tl.constexpr):
    y = 1.0 + tl.program_id(0)
    if TWICE:
        y = _doubled(y)
    tl.store(x, y)


def test_a_line_whose_every_operation_a_callee_wrote_ran():
    with ttir.execute() as run:
        calls_in_a_branch[(1,)](torch.zeros(1), TWICE=True)
    first = inspect.getsourcelines(calls_in_a_branch.fn)[1]
    assert first + 4 in {at for _, at in run.ran.ran}
