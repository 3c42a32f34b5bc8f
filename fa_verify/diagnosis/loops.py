"""Loops over blocks of keys (or of rows) that begin or end wrongly: who then still sees whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.problem import Problem

__all__ = ["forward_loops", "row_loops", "visited"]

_MISSING = "seqlen_k - seqlen_q is missing"


def forward_loops(problem: Problem) -> Iterator[tuple[str, str]]:
    """Sentences and names of loops over keys that can go wrong under this mask.

    Loops over a list of blocks are not modelled.
    """
    mask = problem.mask
    ends = mask.causal or mask.window_right is not None
    if not (mask.documents or mask.pattern):
        if mask.window_left is not None:
            yield "the window skips blocks, but keys inside a block are not masked", "left unmasked"
        if mask.hides_anything:
            yield "partly hidden blocks are treated as wholly visible", "unmasked"
        yield "the loop over keys begins at the block's first query", "begin at the query"
    if not mask.pattern:
        if mask.window_left is not None:
            yield "the loop over the keys of a window begins a block too late", "begin late"
            yield "the loop over the keys of a window skips its first block", "begin after"
        if ends:
            yield "the loop over keys ends one key too early", "end short"
        shifted = mask.alignment == "bottom-right"
        if shifted and ends:
            yield f"the loop over keys ends at the block's last query: {_MISSING}", "end unshifted"
        if shifted and mask.window_left is not None:
            text = f"the loop over keys begins at a window about the block's queries: {_MISSING}"
            yield text, "begin unshifted"
        if not shifted and ends:
            yield "the loop over keys ends at a diagonal aligned bottom-right", "end causal"
    if not mask.causal:
        text = "the loop over keys ends at a causal diagonal though none is asked"
        yield text, "end at the diagonal"
    yield "the loop over keys is rounded down: its last, partial block is left out", "end floor"
    yield "the loop over keys leaves out its last block", "end before"


def row_loops(problem: Problem) -> Iterator[tuple[str, str]]:
    """The same of loops over rows, which dk and dv have."""
    mask = problem.mask
    if mask.pattern:
        return
    if mask.hides_anything and not mask.documents:
        yield "partly hidden blocks are treated as wholly visible", "rows unmasked"
    shifted = mask.alignment == "bottom-right"
    if mask.causal or mask.window_right is not None:
        yield "the loop over rows begins a block after the diagonal", "rows late"
        yield "the loop over rows skips the diagonal's block", "rows after"
        if shifted:
            text = f"the loop over rows begins at the block's first key: {_MISSING}"
            yield text, "rows begin unshifted"
    if mask.window_left is not None:
        yield "the loop over rows ends one row too early under the window", "rows short"
        if shifted:
            text = f"the loop over rows ends at a window about the block's keys: {_MISSING}"
            yield text, "rows end unshifted"
    yield "the loop over rows is rounded down: its last, partial block is left out", "rows floor"
    yield "the loop over rows leaves out its last block", "rows before"


class _Places(NamedTuple):
    """Rows and keys by their places in a document, and that document's lengths.

    A kernel for packed documents tiles each for itself. Of a pair from two documents it says
    nothing that matters.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    queries: torch.Tensor
    length: torch.Tensor


def _places(problem: Problem, shape: torch.Size, *, apart: bool) -> _Places:
    """Of (rows, keys) in one sequence or, if apart, in its documents."""
    documents = problem.mask.documents if apart else ()
    lengths = torch.tensor(documents or ((problem.seqlen_q, problem.seqlen_k),))
    starts = lengths.cumsum(0) - lengths
    of_row = torch.cat([starts, lengths], dim=1).repeat_interleave(lengths[:, 0], dim=0)
    first_row, first_key, queries, length = of_row[:, None].unbind(-1)
    rows, keys = torch.arange(shape[0])[:, None], torch.arange(shape[1])[None, :]
    return _Places(rows - first_row, keys - first_key, queries, length)


def visited(
    problem: Problem, visible: torch.Tensor, loop: str, block_m: int, block_n: int
) -> torch.Tensor:
    """Who sees whom, (seqlen_q, keys), when the loop goes wrong in the way that `loop` names."""
    at = _places(problem, visible.shape, apart="unmasked" not in loop)
    if loop == "rows unmasked":
        return _rows(problem, loop, at, block_m, block_n)
    if loop.startswith("rows"):
        return visible & _rows(problem, loop, at, block_m, block_n)
    mask, (rows, keys, queries, length) = problem.mask, at
    shift = length - queries if mask.alignment == "bottom-right" else torch.zeros_like(length)
    right = 0 if mask.causal else mask.window_right
    first = rows // block_m * block_m
    last = torch.minimum(first + block_m, queries) - 1
    begin = torch.zeros_like(first)
    if mask.window_left is not None:
        begin = (first + shift - mask.window_left).clamp(min=0)
    end = length
    if right is not None:
        end = torch.minimum(last + shift + right + 1, length)
    tiles = (keys >= begin // block_n * block_n) & (keys < length)
    if loop == "left unmasked":
        edge = length if right is None else torch.full_like(length, right)
        return tiles & (keys - rows - shift <= edge)
    if loop == "unmasked":
        return tiles & (keys < -(-end // block_n) * block_n)
    starts = {
        "begin late": -(-begin // block_n) * block_n,
        "begin after": (begin // block_n + 1) * block_n,
        "begin at the query": first // block_n * block_n,
        "begin unshifted": (first - (mask.window_left or 0)).clamp(min=0) // block_n * block_n,
    }
    diagonal = last + length - queries + 1
    ends = {  # a loop that ends inside a block visits all of the block
        "as due": -(-end // block_n) * block_n,
        "end short": -(-(end - 1) // block_n) * block_n,
        "end causal": -(-(diagonal + (right or 0)) // block_n) * block_n,
        "end at the diagonal": -(-diagonal // block_n) * block_n,
        "end unshifted": -(-(first + block_m + (right or 0)) // block_n) * block_n,
        "end floor": end // block_n * block_n,
        "end before": (end - 1) // block_n * block_n,
    }
    if loop in starts:
        return visible & (keys >= starts[loop])
    return visible & (keys < ends[loop]) & (tiles if loop == "as due" else True)


def _rows(problem: Problem, loop: str, at: _Places, block_m: int, block_n: int) -> torch.Tensor:
    mask, (rows, keys, queries, length) = problem.mask, at
    shift = length - queries if mask.alignment == "bottom-right" else torch.zeros_like(length)
    if "unshifted" in loop:
        shift = torch.zeros_like(length)
    right = 0 if mask.causal else mask.window_right
    first = keys // block_n * block_n
    begin = torch.zeros_like(first) if right is None else (first - shift - right).clamp(min=0)
    end = queries
    if mask.window_left is not None:
        last = torch.minimum(first + block_n, length) - 1
        end = torch.minimum(last - shift + mask.window_left + 1, queries)
    starts = {
        "rows late": -(-begin // block_m) * block_m,
        "rows after": (begin // block_m + 1) * block_m,
        "rows begin unshifted": begin // block_m * block_m,
    }
    ends = {  # the last block is whole: what it visits is masked row by row
        "rows short": -(-(end - 1) // block_m) * block_m,
        "rows end unshifted": -(-end // block_m) * block_m,
        "rows floor": end // block_m * block_m,
        "rows before": (end - 1) // block_m * block_m,
    }
    if loop == "rows unmasked":
        return (rows >= begin // block_m * block_m) & (rows < -(-end // block_m) * block_m)
    return rows >= starts[loop] if loop in starts else rows < ends[loop]
