"""The deterministic bound of the forward pass: o and lse. Equations of docs/bounds.md."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.inputs import Inputs, keeps
from fa_verify.bounds.model import SLACK, Model, U
from fa_verify.bounds.outputs import ForwardTile, forward_tile
from fa_verify.bounds.softmax import reach
from fa_verify.reference import grouped, tiles

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Forward", "forward_det"]


@dataclasses.dataclass(frozen=True, slots=True)
class Forward:
    """Exact values and bounds before the rounding of o, float64.

    All are (heads, group, seqlen_q), o and o_bound with head_dim_v.

    Attributes:
        tile: The one tile, if one holds the whole problem and is small enough to be kept.
    """

    o: Tensor
    lse: Tensor
    o_bound: Tensor
    lse_bound: Tensor
    tile: ForwardTile | None = None

    def joined(self, other: Forward) -> Forward:
        """Bounds about our values that also hold whatever holds about the other's; (B20)."""
        lse_gap = torch.where(self.lse == other.lse, 0.0, (self.lse - other.lse).abs())
        return Forward(
            self.o,
            self.lse,
            torch.maximum(self.o_bound, (self.o - other.o).abs() + other.o_bound),
            torch.maximum(self.lse_bound, lse_gap + other.lse_bound),
        )


def forward_det(model: Model, given: Inputs) -> Forward:
    """Bound o and lse of every row."""
    problem, top, result = model.problem, reach(model, given), None
    for tile in tiles(problem, given.q.device, every=given.overflows(model)):
        kept = keeps(problem, tile)
        part = forward_tile(model, given, given.block(tile), top, parts=kept)
        if kept:
            return Forward(
                grouped(problem, part.o),
                grouped(problem, part.lse),
                grouped(problem, part.o_bound),
                grouped(problem, part.lse_bound),
                part,
            )
        result = result or _nowhere(model, given)
        result.o[tile.heads, :, tile.rows] = grouped(problem, part.o)
        result.lse[tile.heads, :, tile.rows] = grouped(problem, part.lse)
        result.o_bound[tile.heads, :, tile.rows] = grouped(problem, part.o_bound)
        result.lse_bound[tile.heads, :, tile.rows] = grouped(problem, part.lse_bound)
    return result or _nowhere(model, given)


def _nowhere(model: Model, given: Inputs) -> Forward:
    """What rows have that see no key."""
    o = given.q.new_zeros(*given.q.shape[:3], model.problem.head_dim_v)
    lse = given.q.new_full(given.q.shape[:3], -torch.inf)
    result = Forward(o, lse, torch.zeros_like(o), torch.zeros_like(lse))
    if given.terms.sinks is not None:
        _blind(model, given, given.terms.sinks, result)
    return result


def _blind(model: Model, given: Inputs, sinks: Tensor, result: Forward) -> None:
    """Of rows that see no key, lse is the sink; (B61)."""
    problem = model.problem
    sink = sinks.double().view(problem.heads_kv, problem.group, 1).repeat(problem.batch, 1, 1)
    sink = sink.expand_as(result.lse)
    none, size = sink.isneginf(), sink.abs().nan_to_num_(posinf=0.0)
    moved = given.extent.moved(problem, given.terms)
    moved = None if moved is None else moved.reshape(size.shape)
    error = model.sink_error(torch.zeros_like(size), size, moved) + model.denominator
    bound = (SLACK * (error + 16 * U * size) + 2.0**-22).masked_fill(none, 0.0)
    result.lse.copy_(sink)
    result.lse_bound.copy_(bound)
