"""Loops over blocks of keys (or of rows) that begin or end wrongly: who then still sees whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.problem import Problem

__all__ = ["forward_loops", "row_loops", "visited"]


def forward_loops(problem: Problem) -> Iterator[tuple[str, str]]:
    """Sentences and names of loops over keys that can go wrong under this mask.

    Loops over one document of several, or over a list of blocks, are not modelled.
    """
    mask = problem.mask
    if mask.pattern and not mask.documents:
        yield "the loop over keys ends at a causal diagonal though none is asked", "end causal"
        yield "the loop over keys is rounded down: its last, partial block is left out", "end floor"
    if mask.documents or mask.pattern:
        return
    if mask.window_left is not None:
        yield "the loop over the keys of a window begins a block too late", "begin late"
        yield "the window skips blocks, but keys inside a block are not masked", "left unmasked"
    if mask.hides_anything:
        yield "partly hidden blocks are treated as wholly visible", "unmasked"
    if mask.causal or mask.window_right is not None:
        yield "the loop over keys ends one key too early", "end short"
    else:
        yield "the loop over keys ends at a causal diagonal though none is asked", "end causal"
    yield "the loop over keys is rounded down: its last, partial block is left out", "end floor"
    yield "the loop over keys begins at the block's first query", "begin at the query"


def row_loops(problem: Problem) -> Iterator[tuple[str, str]]:
    """The same of loops over rows, which dk and dv have."""
    if problem.mask.documents or problem.mask.pattern:
        return
    if problem.mask.causal or problem.mask.window_right is not None:
        yield "the loop over rows begins a block after the diagonal", "rows late"
    if problem.mask.window_left is not None:
        yield "the loop over rows ends one row too early under the window", "rows short"
    if problem.mask.hides_anything:
        yield "partly hidden blocks are treated as wholly visible", "rows unmasked"
    yield "the loop over rows is rounded down: its last, partial block is left out", "rows floor"


def visited(
    problem: Problem, visible: torch.Tensor, loop: str, block_m: int, block_n: int
) -> torch.Tensor:
    """Who sees whom, (seqlen_q, keys), when the loop goes wrong in the way that `loop` names."""
    mask = problem.mask
    shift = mask.shift(problem.seqlen_q, problem.seqlen_k)
    right = 0 if mask.causal else mask.window_right
    rows = torch.arange(visible.shape[0])[:, None]
    keys = torch.arange(visible.shape[1])[None, :]
    first = rows // block_m * block_m
    last = (first + block_m).clamp(max=problem.seqlen_q) - 1
    begin = torch.zeros_like(first)
    if mask.window_left is not None:
        begin = (first + shift - mask.window_left).clamp(min=0)
    end = torch.full_like(first, problem.seqlen_k)
    if right is not None:
        end = (last + shift + right + 1).clamp(max=problem.seqlen_k)
    tiles = (keys >= begin // block_n * block_n) & (keys < problem.seqlen_k)
    if loop == "left unmasked":
        return tiles & (keys - rows - shift <= (problem.seqlen_k if right is None else right))
    if loop == "unmasked":
        return tiles & (keys < -(-end // block_n) * block_n)
    starts = {
        "begin late": -(-begin // block_n) * block_n,
        "begin at the query": first // block_n * block_n,
    }
    diagonal = last + problem.seqlen_k - problem.seqlen_q + 1
    ends = {  # a loop that ends inside a block visits all of the block
        "end short": -(-(end - 1) // block_n) * block_n,
        "end causal": -(-diagonal // block_n) * block_n,
        "end floor": end // block_n * block_n,
    }
    if loop == "rows unmasked":
        return _rows(problem, loop, (rows, keys), block_m, block_n)
    if loop in starts:
        return visible & (keys >= starts[loop])
    if loop in ends:
        return visible & (keys < ends[loop])
    return visible & _rows(problem, loop, (rows, keys), block_m, block_n)


def _rows(
    problem: Problem, loop: str, at: tuple[torch.Tensor, torch.Tensor], block_m: int, block_n: int
) -> torch.Tensor:
    rows, keys = at
    mask = problem.mask
    shift = mask.shift(problem.seqlen_q, problem.seqlen_k)
    first = keys // block_n * block_n
    if loop == "rows late":
        right = 0 if mask.causal else mask.window_right or 0
        begin = (first - shift - right).clamp(min=0)
        return rows >= -(-begin // block_m) * block_m
    end = torch.full_like(first, problem.seqlen_q)  # "rows floor"
    if mask.window_left is not None:
        last = (first + block_n).clamp(max=problem.seqlen_k) - 1
        end = (last - shift + mask.window_left + 1).clamp(max=problem.seqlen_q)
    if loop == "rows unmasked":
        edge = 0 if mask.causal else mask.window_right
        if edge is not None:
            begin = (first - shift - edge).clamp(min=0) // block_m * block_m
        else:
            begin = torch.zeros_like(first)
        return (rows >= begin) & (rows < -(-end // block_m) * block_m)
    if loop == "rows short":  # the last block is whole: what it visits is masked row by row
        return rows < -(-(end - 1) // block_m) * block_m
    return rows < end // block_m * block_m
