"""Block masks: put together again they are the mask, and each list has the blocks of its kind."""

import numpy as np
import pytest

from fa_verify import Mask, Problem

MASKS = [
    Mask(pattern="block-sparse:64:50:1"),
    Mask(causal=True, pattern="prefix:100"),
    Mask(pattern="predicate:1"),
    Mask(pattern="scattered:3:1", documents=((100, 20), (0, 80), (200, 350))),
    Mask(pattern="block-sparse:8:0:0"),
    Mask(pattern="dilated:1"),
]


def _mask(kernels, mask, seqlen_q, seqlen_k):
    problem = Problem(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=8, head_dim_v=8,
        mask=mask.resized(seqlen_q, seqlen_k),
    )  # fmt: skip
    module = kernels("block_mask")
    made = module.block_mask(problem, "cpu")
    return problem, made.size, made


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.pattern)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 450), (128, 64), (5, 70), (70, 2100)])
def test_blocks_put_together_are_the_mask(kernels, mask, seqlen_q, seqlen_k):
    problem, size, blocks = _mask(kernels, mask, seqlen_q, seqlen_k)
    kinds, tiles = blocks.kinds.numpy(), blocks.tiles.numpy().astype(bool)
    assert kinds.shape == (-(-seqlen_q // size), -(-seqlen_k // size))
    found = np.zeros((kinds.shape[0] * size, kinds.shape[1] * size), dtype=bool)
    for (row, column), kind in np.ndenumerate(kinds):
        at = slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size)
        found[at] = kind == -2 if kind < 0 else tiles[kind]
        if kind >= 0:
            assert tiles[kind].any()
    assert np.array_equal(found[:seqlen_q, :seqlen_k], problem.mask.allowed(seqlen_q, seqlen_k))
    assert not found[:, seqlen_k:].any()


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.pattern)
def test_lists_have_whole_blocks_and_then_partial_ones(kernels, mask):
    _, _, blocks = _mask(kernels, mask, 300, 450)
    kinds = blocks.kinds.numpy()
    for lists, table in ((blocks.by_query, kinds), (blocks.by_key, kinds.T)):
        offsets, listed = (x.tolist() for x in lists)
        assert len(offsets) == 2 * len(table) + 1
        for number, row in enumerate(table):
            whole, partial, end = offsets[2 * number : 2 * number + 3]
            assert listed[whole:partial] == (row == -2).nonzero()[0].tolist()
            assert listed[partial:end] == (row >= 0).nonzero()[0].tolist()


def test_a_list_is_made_once(kernels):
    first, again = (_mask(kernels, MASKS[0], 300, 450)[2] for _ in range(2))
    assert first is again
