"""Reductions of 16-bit tiles: halves with halves, each result rounded, to the bit."""

import numpy as np
import pytest
import torch

from fa_verify.ttir.numbers import shorts, trees
from fa_verify.ttir.numbers.floats import SHORT, round_to
from fa_verify.ttir.numbers.trees import tree

OPERATIONS = {"sum": (torch.add, np.add), "product": (torch.mul, np.multiply)}


def halves(x, axis, operation, scalar):
    """What `ops.reductions` does with any combine region."""
    x = np.moveaxis(x, axis, 0)
    while len(x) > 1:
        x = round_to(operation(x[: len(x) // 2], x[len(x) // 2 :]), scalar)
    return x[0]


def tile(shape, scalar, seed):
    values = np.random.default_rng(seed).normal(1, 0.5, shape).astype(np.float32)
    return shorts.shorten(values, scalar)


@pytest.mark.parametrize("scalar", list(SHORT))
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("extent", [2, 4, 8, 16, 32, 64, 256])
@pytest.mark.parametrize(
    ("before", "after"), [((3,), ()), ((1, 5), ()), ((2,), (4,)), ((3, 2), (8,))]
)
def test_a_tree_rounds_each_level(scalar, name, extent, before, after):
    function, operation = OPERATIONS[name]
    axis, made = len(before), []
    for seed in (1, 2):  # the second takes the memory of the first, whose result must stay
        x = tile((*before, extent, *after), scalar, seed)
        got = tree(function, x.shape, axis, x.dtype)(x)
        made.append((got, halves(shorts.widen(x), axis, operation, scalar)))
    for got, want in made:
        assert got.shape == want.shape
        assert np.array_equal(shorts.widen(got), want)


@pytest.mark.parametrize("scalar", list(SHORT))
def test_a_tree_takes_views_and_other_shapes(scalar):
    for lanes in (4, 1, 4):
        x = tile((lanes, 32, 6), scalar, lanes).transpose(0, 2, 1)
        assert not x.flags.c_contiguous
        want = halves(shorts.widen(x), 2, np.add, scalar)
        assert np.array_equal(shorts.widen(tree(torch.add, x.shape, 2, x.dtype)(x)), want)


@pytest.mark.parametrize("scalar", list(SHORT))
@pytest.mark.parametrize("rows", [1024, 96, 72, 7])  # several groups, one, one that is cut short
def test_rows_are_turned_in_groups(scalar, rows):
    for length in (16, 32, 128):
        x = tile((rows, length), scalar, rows)
        want = halves(shorts.widen(x), 1, np.add, scalar)
        assert np.array_equal(shorts.widen(tree(torch.add, x.shape, 1, x.dtype)(x)), want)


def test_tiles_beyond_the_shared_memory_have_their_own(monkeypatch):
    monkeypatch.setattr(trees, "_SCRATCH", np.empty(96, np.int16))
    for rows, own in ((4, False), (5, True)):
        x = tile((rows, 16), "f16", rows)
        made = trees.Tree(torch.add, x.shape, 1, x.dtype)
        assert np.shares_memory(made._result, trees._SCRATCH) is not own
        assert np.array_equal(made(x), halves(shorts.widen(x), 1, np.add, "f16").astype("f2"))
