"""The exact answer in float64: o, lse and the gradients, as the formulas are, tile by tile.

This module knows masks and problems, and nothing about any kernel's arithmetic. A tile holds all
the keys that its rows may see, so memory is O(tile + N) and no online softmax is needed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify import sight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from fa_verify.problem import Problem

__all__ = [
    "ForwardReference",
    "GradReference",
    "Tile",
    "backward",
    "by_kv_head",
    "forward",
    "grouped",
    "tiles",
]

# Logits per tile: on a CPU what its caches hold, on CUDA enough to fill the device.
_TILE = {"cpu": 1 << 18, "cuda": 1 << 24}
_LEAST_ROWS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardReference:
    """The exact forward pass.

    Attributes:
        o: float64, (batch, heads_q, seqlen_q, head_dim_v); 0 in fully masked rows.
        lse: float64 natural logarithm, (batch, heads_q, seqlen_q); -inf in fully masked rows.
    """

    o: Tensor
    lse: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class GradReference:
    """The exact gradients, float64, shaped as q, k and v."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A block of the logits: some key/value heads, queries of their group, and the keys in sight.

    Attributes:
        heads: Which of the batch x heads_kv key/value heads.
        rows: Which queries (of every query head in the group).
        keys: From the first to the last key that any of the rows sees.
        hidden: bool, (rows, keys): True where the query must not see the key; None: sees them all.
    """

    heads: slice
    rows: slice
    keys: slice
    hidden: Tensor | None


def by_kv_head(problem: Problem, x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Reorder a (batch, heads, seqlen, dim) or (batch, heads, seqlen) tensor by key/value head.

    Returns:
        (batch * heads_kv, group, seqlen, dim) for tensors with query heads, where ``group`` is 1
        for k and v; without ``dim`` for a 3-d tensor.
    """
    heads = problem.batch * problem.heads_kv
    return x.to(dtype).reshape(heads, x.shape[1] // problem.heads_kv, *x.shape[2:])


def grouped(problem: Problem, x: Tensor) -> Tensor:
    """(heads, group * rows, ...) as (heads, group, rows, ...)."""
    return x.reshape(x.shape[0], problem.group, -1, *x.shape[2:])


def tiles(problem: Problem, device: torch.device) -> Iterator[Tile]:
    """Cut the logits into tiles; those that the mask hides wholly are left out."""
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    heads = problem.batch * problem.heads_kv
    if 0 in (seqlen_q, seqlen_k):
        return
    size = _TILE.get(device.type, _TILE["cuda"])
    row = problem.group * seqlen_k
    step_rows = min(seqlen_q, max(-(-_LEAST_ROWS // problem.group), size // row))
    step_heads = max(1, size // (row * step_rows))
    lo, hi = problem.mask.intervals(seqlen_q, seqlen_k)
    lows, highs = sight.intervals(problem, device)
    for start in range(0, seqlen_q, step_rows):
        rows = slice(start, min(seqlen_q, start + step_rows))
        seeing = lo[rows] < hi[rows]
        if not seeing.any():
            continue
        first, last = int(lo[rows][seeing].min()), int(hi[rows][seeing].max())
        hidden = None
        if (lo[rows] > first).any() or (hi[rows] < last).any():
            index = torch.arange(first, last, device=device)
            hidden = (index < lows[rows, None]) | (index >= highs[rows, None])
        for head in range(0, heads, step_heads):
            yield Tile(slice(head, min(heads, head + step_heads)), rows, slice(first, last), hidden)


def _logits(problem: Problem, q: Tensor, k: Tensor, tile: Tile) -> tuple[Tensor, Tensor | None]:
    """Masked logits of a tile, (heads, group * rows, keys), and d logits / d (scaled q k^T)."""
    s = torch.bmm(q, k.mT).mul_(problem.scale)
    slope = None
    if problem.softcap:
        t = s.div_(problem.softcap).tanh_()
        slope = 1.0 - t * t
        s = t.mul_(problem.softcap)
    if tile.hidden is not None:
        s.masked_fill_(tile.hidden.repeat(problem.group, 1), -torch.inf)
    return s, slope


def _softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """P = softmax(s) in place of s, and the log-sum-exp; rows of -inf give 0 and -inf."""
    m = s.amax(-1, keepdim=True)
    m.masked_fill_(m == -torch.inf, 0.0)
    p = s.sub_(m).exp_()
    total = p.sum(-1, keepdim=True)
    lse = m.add_(total.log()).squeeze(-1)
    return p.div_(total.masked_fill_(total == 0, 1.0)), lse


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> ForwardReference:
    """Compute o and lse in float64 on the inputs' device.

    Args:
        problem: Shapes, mask, scale and softcap.
        q: (batch, heads_q, seqlen_q, head_dim), any strides and dtype.
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim_v).
    """
    q4, k4, v4 = (by_kv_head(problem, x) for x in (q, k, v))
    o = q4.new_zeros(*q4.shape[:3], problem.head_dim_v)
    lse = q4.new_full(q4.shape[:3], -torch.inf)
    for tile in tiles(problem, q.device):
        kt, vt = k4[tile.heads, 0, tile.keys], v4[tile.heads, 0, tile.keys]
        s, _ = _logits(problem, q4[tile.heads, :, tile.rows].flatten(1, 2), kt, tile)
        p, row_lse = _softmax(s)
        o[tile.heads, :, tile.rows] = grouped(problem, torch.bmm(p, vt))
        lse[tile.heads, :, tile.rows] = grouped(problem, row_lse)
    return ForwardReference(o.reshape(problem.shape_o), lse.reshape(problem.shape_lse))


def backward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> GradReference:
    """Compute dq, dk and dv in float64 for the gradient ``do`` of o (lse has no gradient).

    Uses ``delta = sum_j P dP``, which equals ``sum_d do o`` and needs no o.

    Args:
        problem: Shapes, mask, scale and softcap.
        q: (batch, heads_q, seqlen_q, head_dim), any strides and dtype.
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        do: (batch, heads_q, seqlen_q, head_dim_v).
    """
    q4, k4, v4, do4 = (by_kv_head(problem, x) for x in (q, k, v, do))
    dq, dk, dv = (torch.zeros_like(x) for x in (q4, k4, v4))
    for tile in tiles(problem, q.device):
        heads, rows, keys = tile.heads, tile.rows, tile.keys
        qt, dot = (x[heads, :, rows].flatten(1, 2) for x in (q4, do4))
        kt, vt = k4[heads, 0, keys], v4[heads, 0, keys]
        s, slope = _logits(problem, qt, kt, tile)
        p, _ = _softmax(s)
        dv[heads, 0, keys] += torch.bmm(p.mT, dot)
        ds = torch.bmm(dot, vt.mT)
        delta = (ds * p).sum(-1, keepdim=True)
        ds.sub_(delta).mul_(p)
        if slope is not None:
            ds.mul_(slope)
        ds.mul_(problem.scale)
        dq[heads, :, rows] = grouped(problem, torch.bmm(ds, kt))
        dk[heads, 0, keys] += torch.bmm(ds.mT, qt)
    return GradReference(
        dq.reshape(problem.shape_q), dk.reshape(problem.shape_k), dv.reshape(problem.shape_v)
    )
