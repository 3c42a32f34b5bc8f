"""The exact answer in float64: o, lse and the gradients, as the formulas are, tile by tile.

This module knows masks and problems, and nothing about any kernel's arithmetic. A tile holds all
the keys that its rows may see, so memory is O(tile + N) and no online softmax is needed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from fa_verify import sight
from fa_verify.sight import Tile
from fa_verify.terms import NO_TERMS, Place, Terms, summed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from fa_verify.masks import Mask
    from fa_verify.problem import Problem

__all__ = [
    "ForwardReference",
    "GradReference",
    "Tile",
    "backward",
    "by_kv_head",
    "forward",
    "grouped",
    "sink_gradient",
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
        lse: float64 natural logarithm, (batch, heads_q, seqlen_q); in fully masked rows the sink,
            or -inf.
    """

    o: Tensor
    lse: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class GradReference:
    """The exact gradients, float64, shaped as q, k and v, as the bias, and as the sinks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


def by_kv_head(problem: Problem, x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Reorder a (batch, heads, seqlen, dim) or (batch, heads, seqlen) tensor by key/value head.

    Returns:
        (batch * heads_kv, group, seqlen, dim) for tensors with query heads, where ``group`` is 1
        for k and v; without ``dim`` for a 3-d tensor.
    """
    heads = problem.batch * problem.heads_kv
    x = x.to(dtype, memory_format=torch.contiguous_format)
    return x.reshape(heads, x.shape[1] // problem.heads_kv, *x.shape[2:])


def grouped(problem: Problem, x: Tensor) -> Tensor:
    """(heads, group * rows, ...) as (heads, group, rows, ...)."""
    return x.reshape(x.shape[0], problem.group, -1, *x.shape[2:])


def tiles(problem: Problem, device: torch.device, *, every: bool = False) -> Iterator[Tile]:
    """Cut the logits into tiles; those that the mask hides wholly are left out.

    Args:
        problem: The problem.
        device: Of the tiles' masks.
        every: Whether a tile has all keys, those that none of its rows sees as well.
    """
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    heads = problem.batch * problem.heads_kv
    if 0 in (seqlen_q, seqlen_k):
        return
    size = _TILE.get(device.type, _TILE["cuda"])
    row = problem.group * seqlen_k
    step_rows = min(seqlen_q, max(-(-_LEAST_ROWS // problem.group), size // row))
    step_heads = max(1, size // (row * step_rows))
    for rows, keys, whole in _strips(problem.mask, seqlen_q, seqlen_k, step_rows, every=every):
        hidden = None if whole else sight.hidden(problem, rows, keys, device)
        for head in range(0, heads, step_heads):
            yield Tile(slice(head, min(heads, head + step_heads)), rows, keys, hidden)


@functools.lru_cache(maxsize=8)
def _strips(
    mask: Mask, seqlen_q: int, seqlen_k: int, step: int, *, every: bool
) -> tuple[tuple[slice, slice, bool], ...]:
    """Queries, so many at a time, the keys that they see, and whether each of them sees all."""
    lo, hi = mask.intervals(seqlen_q, seqlen_k)
    seen = mask.seen(seqlen_q, seqlen_k)
    found = []
    for start in range(0, seqlen_q, step):
        rows = slice(start, min(seqlen_q, start + step))
        seeing = lo[rows] < hi[rows]
        if seeing.any():
            first, last = int(lo[rows][seeing].min()), int(hi[rows][seeing].max())
            first, last = (0, seqlen_k) if every else (first, last)
            found.append((rows, slice(first, last), not (seen[rows] < last - first).any()))
    return tuple(found)


def _logits(
    problem: Problem, q: Tensor, k: Tensor, tile: Tile, beside: tuple[Terms, Place]
) -> tuple[Tensor, Tensor | None]:
    """Masked logits of a tile, (heads, group * rows, keys), and d logits / d (scaled q k^T)."""
    s = torch.bmm(q, k.mT).mul_(problem.scale)
    slope = None
    if problem.softcap:
        t = s.div_(problem.softcap).tanh_()
        slope = 1.0 - t * t
        s = t.mul_(problem.softcap)
    terms, place = beside
    for addend in (terms.biases(problem, place), terms.distances(problem, place)):
        s = s if addend is None else s.add_(addend)
    if tile.hidden is not None:
        s.masked_fill_(tile.hidden.repeat(problem.group, 1), -torch.inf)
    return s, slope


def _softmax(s: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """P = softmax(s) in place of s, and the log-sum-exp; rows of -inf give 0 and -inf.

    A sink, (heads, rows), is one more logit of the denominator.
    """
    m = s.amax(-1, keepdim=True)
    m = m if sink is None else torch.maximum(m, sink.unsqueeze(-1))
    m.masked_fill_(m == -torch.inf, 0.0)
    p = s.sub_(m).exp_()
    total = p.sum(-1, keepdim=True)
    if sink is not None:
        total.add_((sink.unsqueeze(-1) - m).exp_())
    lse = m.add_(total.log()).squeeze(-1)
    return p.div_(total.masked_fill_(total == 0, 1.0)), lse


def _blind_lse(problem: Problem, q4: Tensor, terms: Terms) -> Tensor:
    """Of rows that see no key, lse: the sink, or -inf; (heads, group, rows)."""
    lse = q4.new_full(q4.shape[:3], -torch.inf)
    if terms.sinks is not None:
        lse[:] = terms.sinks.double().reshape(-1, problem.group, 1).repeat(problem.batch, 1, 1)
    return lse


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Terms = NO_TERMS
) -> ForwardReference:
    """Compute o and lse in float64 on the inputs' device.

    Args:
        problem: Shapes, mask, scale and softcap.
        q: (batch, heads_q, seqlen_q, head_dim), any strides and dtype.
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        terms: What the problem has beside them, scales of fp8 among it.
    """
    q4, k4, v4 = (by_kv_head(problem, x) for x in terms.operands(problem, q, k, v))
    o = q4.new_zeros(*q4.shape[:3], problem.head_dim_v)
    lse = _blind_lse(problem, q4, terms)
    for tile in tiles(problem, q.device):
        place = Place.of(problem, tile, q.device)
        kt, vt = k4[tile.heads, 0, tile.keys], v4[tile.heads, 0, tile.keys]
        s, _ = _logits(
            problem, q4[tile.heads, :, tile.rows].flatten(1, 2), kt, tile, (terms, place)
        )
        p, row_lse = _softmax(s, terms.sink(problem, place))
        weights = terms.weights(problem, place)
        p = p if weights is None else p.mul_(weights)
        o[tile.heads, :, tile.rows] = grouped(problem, torch.bmm(p, vt))
        lse[tile.heads, :, tile.rows] = grouped(problem, row_lse)
    return ForwardReference(o.reshape(problem.shape_o), lse.reshape(problem.shape_lse))


def backward(  # noqa: PLR0917 -- the operands of attention, in their usual order
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, do: Tensor, terms: Terms = NO_TERMS
) -> GradReference:
    """Compute the gradients in float64 for ``do`` of o and, where there is one, ``dlse`` of lse.

    Uses ``delta = sum_j P dP``, which equals ``sum_d do o`` and needs no o. Since lse's derivative
    by a logit is P, its gradient is taken from delta. A sink's logit has no dP.

    Args:
        problem: Shapes, mask, scale and softcap.
        q: (batch, heads_q, seqlen_q, head_dim), any strides and dtype.
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        do: (batch, heads_q, seqlen_q, head_dim_v).
        terms: What the problem has beside them.
    """
    q4, k4, v4, do4 = (by_kv_head(problem, x) for x in (q, k, v, do))
    dq, dk, dv = (torch.zeros_like(x) for x in (q4, k4, v4))
    dbias = None if terms.bias is None else q4.new_zeros(problem.shape_bias)
    row_delta, row_lse = q4.new_zeros(q4.shape[:3]), _blind_lse(problem, q4, terms)
    for tile in tiles(problem, q.device):
        heads, rows, keys = tile.heads, tile.rows, tile.keys
        qt, dot = (x[heads, :, rows].flatten(1, 2) for x in (q4, do4))
        kt, vt = k4[heads, 0, keys], v4[heads, 0, keys]
        place = Place.of(problem, tile, q.device)
        s, slope = _logits(problem, qt, kt, tile, (terms, place))
        p, lse = _softmax(s, terms.sink(problem, place))
        row_lse[heads, :, rows] = grouped(problem, lse)
        weights = terms.weights(problem, place)
        dv[heads, 0, keys] += torch.bmm((p if weights is None else p * weights).mT, dot)
        ds = torch.bmm(dot, vt.mT)
        ds = ds if weights is None else ds.mul_(weights)
        delta = (ds * p).sum(-1, keepdim=True)
        row_delta[heads, :, rows] = grouped(problem, delta.squeeze(-1))
        dlse = terms.row_gradient(problem, place)
        ds.sub_(delta if dlse is None else delta - dlse.unsqueeze(-1)).mul_(p)
        if dbias is not None:
            summed(problem, dbias, ds, tile)
        if slope is not None:
            ds.mul_(slope)
        ds.mul_(problem.scale)
        dq[heads, :, rows] = grouped(problem, torch.bmm(ds, kt))
        dk[heads, 0, keys] += torch.bmm(ds.mT, qt)
    dsinks = None
    if terms.sinks is not None:
        delta, lse = (x.reshape(problem.shape_lse) for x in (row_delta, row_lse))
        dsinks = sink_gradient(terms.sinks, lse, delta, terms.dlse)
    return GradReference(
        dq.reshape(problem.shape_q),
        dk.reshape(problem.shape_k),
        dv.reshape(problem.shape_v),
        dbias,
        dsinks,
    )


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor, dlse: Tensor | None) -> Tensor:
    """The gradient of the sinks, (heads_q,), from row statistics (batch, heads_q, seqlen_q).

    A row that sees no key has lse = sink and delta = 0; where there is no sink either, no weight.
    """
    none = torch.isneginf(lse)
    p_sink = (sinks.double()[:, None] - lse.masked_fill(none, 0.0)).exp().masked_fill_(none, 0.0)
    return (p_sink * (-delta if dlse is None else dlse.double() - delta)).sum((0, 2))
