"""Gradients of what attention has beside q, k and v: of a bias (B64) and of sinks (B65)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.formats import Cast
from fa_verify.bounds.model import FLUSH, LARGEST, SLACK, Model, U
from fa_verify.terms import summed

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.bounds.gradients import BackwardTile
    from fa_verify.bounds.inputs import Inputs
    from fa_verify.bounds.rows import Rows
    from fa_verify.problem import Problem
    from fa_verify.sight import Tile

__all__ = ["BiasGradient", "sink_gradient", "stored_logits"]


def _gamma(terms: int) -> float:
    """Error of a sum in float32, in any order, relative to the sum of sizes; (B8)."""
    n = terms * U
    return n / (1 - n) if n < 0.5 else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class BiasGradient:
    """Sums over tiles, in the bias's shape: of dS, of its error, and of its size."""

    exact: Tensor
    error: Tensor
    size: Tensor

    @classmethod
    def empty(cls, problem: Problem, like: Tensor) -> BiasGradient:
        """Nothing is summed yet."""
        return cls(*(like.new_zeros(problem.shape_bias) for _ in range(3)))

    def add(self, problem: Problem, tile: Tile, part: BackwardTile) -> None:
        """Add a tile."""
        assert part.logits is not None  # noqa: S101 -- a problem with a bias has them
        ds, off = part.logits
        for total, x in ((self.exact, ds), (self.error, off), (self.size, ds.abs() + off)):
            summed(problem, total, x, tile)

    def bounded(self, problem: Problem, peak: float) -> tuple[Tensor, Tensor]:
        """The gradient and its bound before rounding; (B64).

        Args:
            problem: The problem.
            peak: At least every |dP - delta|.
        """
        sizes = {"b": problem.batch, "h": problem.heads_q, "q": problem.seqlen_q}
        sizes["k"] = problem.seqlen_k
        terms = math.prod(size for axis, size in sizes.items() if axis not in problem.bias)
        bound = (self.error + _gamma(terms) * self.size).mul_(SLACK)
        bound.add_(terms * FLUSH * (1.0 + peak)).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        bound.masked_fill_(~(self.size < LARGEST), torch.inf)  # (B9)
        unknown = ~self.exact.isfinite()
        return self.exact.masked_fill(unknown, 0.0), bound.masked_fill_(unknown, torch.inf)


def stored_logits(model: Model, exact: Tensor, off: Tensor) -> Tensor:
    """Error of the logits' gradient, as dS or after its cast; (B64)."""
    cast, high = model.ds, exact.abs() + off
    if model.arithmetic.gqa_dtype == "input":  # autograd's, of a bias that is repeated; (B73)
        cast = Cast(model.out)
    if cast is None:
        return off
    return off + cast.error(high).masked_fill_(~(high < cast.format.overflow), torch.inf)  # (B9)


def sink_gradient(
    model: Model, given: Inputs, rows: Rows, sinks: Tensor, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient of the sinks, (heads_q,), and its bound before rounding; (B65).

    Args:
        model: Coefficients.
        given: The operands.
        rows: Row statistics.
        sinks: (heads_q,).
        beside: Further error of each row's part, shaped as the statistics; (B74).
    """
    problem = model.problem
    shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    lse, delta, delta_error = (x.reshape(shape) for x in (rows.lse, rows.delta, rows.delta_error))
    sink = sinks.double()[:, None]
    none = sink.isneginf()
    below = sink.masked_fill(none, 0.0) - lse
    p = below.exp().masked_fill(none, 0.0)
    h = U * (3 * below.abs() + 4 * lse.abs() + 2 * sink.masked_fill(none, 0.0).abs())
    h = SLACK * (h + model.arithmetic.exp2_ulps * U)
    moved = given.extent.moved(problem, given.terms)
    if moved is not None:
        h = h + SLACK * U * 12 * moved
    if rows.lse_error is not None:
        h = h + rows.lse_error.reshape(shape)
    gain = p * h.expm1()
    high = p + gain
    size = high * (delta.abs() + delta_error)
    error = gain * delta.abs() + high * delta_error + 3 * U * size
    terms = problem.batch * problem.seqlen_q
    lost = 3 * model.out.unit_roundoff if model.arithmetic.eager else 0.0
    if lost:  # P, dS and the sum; (B74)
        error += lost * size + 3 * Cast(model.out).tiny * (1 + delta.abs())
    if beside is not None:
        error += beside.reshape(shape)
    bound = SLACK * (error + _gamma(terms) * size).sum((0, 2))
    bound += terms * FLUSH * (1.0 + delta.abs().amax() if delta.numel() else 1.0)
    bound.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    bound.masked_fill_(~(size.sum((0, 2)) < LARGEST), torch.inf)
    bound.masked_fill_(none[:, 0], 0.0)
    if rows.no_ds is not None:  # 0 times NaN is NaN, without a sink too
        bound.masked_fill_(rows.no_ds.reshape(shape).any(2).any(0), torch.inf)
    exact = -(p * delta).sum((0, 2))
    bound += lost * (exact.abs() + bound) if lost else 0.0
    return exact.nan_to_num_(0.0, 0.0, 0.0), bound
