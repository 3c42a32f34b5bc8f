"""`Terms`: what attention has beside q, k and v, as a tile of the logits sees it.

A tile's tensors are by key/value head, (heads, group * rows, keys) or (heads, group * rows).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify import sight

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.problem import Problem
    from fa_verify.sight import Tile

__all__ = ["NO_TERMS", "Terms", "summed"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Tensors that a problem has beside q, k and v; None where it has none.

    Attributes:
        bias: `Problem.shape_bias`, any dtype and strides; -inf hides a key.
        slopes: ALiBi's, (heads_q,).
        sinks: (heads_q,); -inf is none.
        dlse: Gradient of lse, (batch, heads_q, seqlen_q).
        keep: bool, (batch, heads_q, seqlen_q, seqlen_k): elements of P that dropout keeps.
    """

    bias: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    dlse: Tensor | None = None
    keep: Tensor | None = None

    @property
    def addends(self) -> bool:
        """Whether anything is added to the logits."""
        return self.bias is not None or self.slopes is not None

    def biases(self, problem: Problem, tile: Tile) -> Tensor | None:
        """The bias of a tile's logits, float64."""
        if self.bias is None:
            return None
        part = _of_tile(problem, self.bias, tile).double()
        return _spread(problem, part, tile)

    def distances(self, problem: Problem, tile: Tile) -> Tensor | None:
        """What ALiBi adds to a tile's logits, float64: -slope |diagonal - key|."""
        if self.slopes is None:
            return None
        keys = torch.arange(tile.keys.start, tile.keys.stop, device=self.slopes.device)
        diagonal = sight.diagonals(problem, self.slopes.device)[tile.rows]
        distance = (diagonal[:, None] - keys).abs_().double()
        return (_by_head(problem, self.slopes, tile)[..., None, None] * -distance).flatten(1, 2)

    def sink(self, problem: Problem, tile: Tile) -> Tensor | None:
        """The sink of each row of a tile, float64, (heads, group * rows)."""
        if self.sinks is None:
            return None
        rows = tile.rows.stop - tile.rows.start
        return _by_head(problem, self.sinks, tile).repeat_interleave(rows, 1)

    def row_gradient(self, problem: Problem, tile: Tile) -> Tensor | None:
        """The gradient of each row's lse, float64, (heads, group * rows)."""
        if self.dlse is None:
            return None
        by_head = self.dlse.double().reshape(-1, problem.group, problem.seqlen_q)
        return by_head[tile.heads, :, tile.rows].flatten(1, 2)

    def weights(self, problem: Problem, tile: Tile) -> Tensor | None:
        """What dropout multiplies a tile of P by, float64: 0 or 1 / (1 - dropout)."""
        if self.keep is None:
            return None
        kept = _of_tile(problem, self.keep, tile).double()
        return kept.flatten(1, 2).div_(1.0 - problem.dropout)


NO_TERMS = Terms()


def _of_tile(problem: Problem, x: Tensor, tile: Tile) -> Tensor:
    """A tile's part of what is shaped as a bias, (heads, group, rows, keys) or 1 of any."""
    batch, head = _numbers(problem, tile, x.device)
    heads = (problem.heads_kv, problem.group) if x.shape[1] > 1 else (1, 1)
    x = x.view(x.shape[0], *heads, *x.shape[2:])
    if x.shape[3] > 1:
        x = x[:, :, :, tile.rows]
    if x.shape[4] > 1:
        x = x[..., tile.keys]
    return x[batch if x.shape[0] > 1 else batch * 0, head if x.shape[1] > 1 else head * 0]


def _spread(problem: Problem, part: Tensor, tile: Tile) -> Tensor:
    rows, keys = (s.stop - s.start for s in (tile.rows, tile.keys))
    return part.expand(part.shape[0], problem.group, rows, keys).flatten(1, 2)


def _by_head(problem: Problem, x: Tensor, tile: Tile) -> Tensor:
    """Numbers of query heads, (heads, group), float64."""
    _, head = _numbers(problem, tile, x.device)
    return x.double().reshape(problem.heads_kv, problem.group)[head]


def _numbers(problem: Problem, tile: Tile, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequence and key head of each of a tile's heads."""
    number = torch.arange(tile.heads.start, tile.heads.stop, device=device)
    return number // problem.heads_kv, number % problem.heads_kv


def summed(problem: Problem, total: Tensor, part: Tensor, tile: Tile) -> None:
    """Add a tile to a tensor of `Problem.shape_bias`, summed over the axes that this has not.

    Args:
        problem: The problem.
        total: Is added to.
        part: (heads, group * rows, keys).
        tile: Where it is.
    """
    batch, head = _numbers(problem, tile, total.device)
    rows, keys = (s.stop - s.start for s in (tile.rows, tile.keys))
    part = part.reshape(-1, problem.group, rows, keys)
    for axis, dim in (("h", 1), ("q", 2), ("k", 3)):
        part = part if axis in problem.bias else part.sum(dim, keepdim=True)
    own = "h" in problem.bias
    heads = (problem.heads_kv, problem.group) if own else (1, 1)
    of = total.view(total.shape[0], *heads, *total.shape[2:])
    of = of[:, :, :, tile.rows if "q" in problem.bias else slice(None)]
    of = of[..., tile.keys if "k" in problem.bias else slice(None)]
    at = (batch if "b" in problem.bias else batch * 0, head if own else head * 0)
    of.index_put_(at, part.to(total), accumulate=True)
