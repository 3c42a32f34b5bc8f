"""What the mask lets be seen, as tensors: the same as the mask's own matrix says."""

from __future__ import annotations

import pytest
import torch

from fa_verify import sight
from fa_verify.masks import Mask
from fa_verify.problem import Problem

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "mask",
    [
        Mask(),
        Mask(causal=True),
        Mask(causal=True, alignment="top-left"),
        Mask(window_left=2, window_right=0),
        Mask(window_left=1, window_right=1, alignment="top-left"),
        Mask(causal=True, documents=((0, 2), (3, 1), (2, 0), (4, 6))),
        Mask(pattern="block-sparse:2:30:1"),
        Mask(causal=True, pattern="dilated:3", documents=((0, 2), (3, 1), (2, 0), (4, 6))),
    ],
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(9, 4), (4, 9), (5, 5), (0, 3), (3, 0)])
def test_intervals_blind_rows_and_seen_keys_are_those_of_the_matrix(mask, seqlen_q, seqlen_k):
    mask = mask.resized(seqlen_q, seqlen_k)
    problem = Problem(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=8, head_dim_v=8, dtype="float32", mask=mask
    )
    allowed = torch.from_numpy(mask.allowed(seqlen_q, seqlen_k))
    lo, hi = sight.intervals(problem, CPU)
    keys = torch.arange(seqlen_k)
    between = (keys >= lo[:, None]) & (keys < hi[:, None])
    assert torch.equal(between & allowed, allowed)
    assert mask.pattern or torch.equal(between, allowed)
    for row, first, end in zip(allowed, lo.tolist(), hi.tolist(), strict=True):
        assert first == end or (row[first] and row[end - 1])
    assert mask.seen(seqlen_q, seqlen_k).tolist() == allowed.sum(1).tolist()
    every = slice(None)
    assert torch.equal(sight.hidden(problem, every, every, CPU), ~allowed)
    some, few = torch.arange(seqlen_q)[1::2], torch.arange(seqlen_k)[::3]
    assert torch.equal(sight.hidden(problem, some, few, CPU), ~allowed[some][:, few])
    assert torch.equal(sight.blind(problem, CPU), ~allowed.any(1))
    assert sight.any_blind(problem) == bool((~allowed.any(1)).any())
    assert torch.equal(sight.keys_seen(problem, CPU), allowed.any(0).double())


def test_a_mask_too_large_to_keep_says_the_same(monkeypatch):
    mask = Mask(causal=True, pattern="scattered:3:5")
    problem = Problem(seqlen_q=9, seqlen_k=7, head_dim=8, head_dim_v=8, mask=mask)
    rows, keys = torch.tensor([0, 5, 8]), slice(2, 6)
    whole = sight.hidden(problem, rows, keys, CPU)
    monkeypatch.setattr(sight, "_KEPT", 0)
    assert torch.equal(sight.hidden(problem, rows, keys, CPU), whole)
    assert torch.equal(sight.hidden(problem, slice(3, 9), keys, CPU)[2], whole[1])


def test_each_is_made_once():
    problem = Problem(seqlen_q=6, seqlen_k=7, head_dim=8, head_dim_v=8, mask=Mask(causal=True))
    assert sight.blind(problem, CPU) is sight.blind(problem, CPU)
    assert sight.intervals(problem, CPU)[0] is sight.intervals(problem, CPU)[0]
