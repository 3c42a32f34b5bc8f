"""P as the kernel has it: exponents, casts, and how far both may be off. docs/bounds.md."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds import eager
from fa_verify.bounds.inputs import SMALL, Block, Inputs, expm1_bound, spread
from fa_verify.bounds.model import SLACK, Model, U

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Slow", "Spread", "exponent_error", "reach", "spread_fast", "spread_slow"]


def reach(model: Model, given: Inputs) -> float:
    """At least every h of the problem, by Cauchy-Schwarz; inf where float32 will not do; (B10)."""
    if model.arithmetic.eager or model.arithmetic.merged_by_sigmoid:  # errors of whole rows
        return math.inf
    size = model.scale * given.raw + given.extent.addend
    h = model.logit * given.raw + 6 * U * size + model.exponentials
    h += U * (given.extent.off + 14 * given.extent.sink + 8 * size * model.problem.sinks)
    if given.extent.of_row and model.problem.sinks:
        h += 50 * U * given.extent.addend
    h += float(model.merge(size)) + 2 * U * size * (model.distances - 3)
    h = SLACK * (h + model.logit_floor(given.largest) + model.prescale_floor(given.largest))
    return h if h <= SMALL and not given.overflows(model) else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """P relative to exp(m), and how far the kernel's may be from it; (B7), (B10) to (B15).

    Attributes:
        p: exp(S - m).
        gain: P e.
        cast: What the cast of P may change, where that is not in gain.
        he: Sum of gain over l, (heads, rows, 1) float64.
        lse: Bound of the log-sum-exp's error from this alone, (heads, rows, 1).
    """

    p: Tensor
    gain: Tensor
    cast: Tensor | None
    he: Tensor
    lse: Tensor


def exponent_error(  # noqa: PLR0917 -- what the forward pass has at hand
    model: Model,
    given: Inputs,
    block: Block,
    x: Tensor,
    m: Tensor,
    merge: Tensor | float,
    top: float,
) -> Tensor:
    """h: error of the exponent of p, a multiple of |q||k|^T, of |S - m| and of 1; (B7), (B67)."""
    work = torch.float32 if top <= SMALL else torch.float64
    constant = SLACK * (model.exponentials + model.logit_floor(given.largest) + merge)
    low = x.to(work).clamp(min=-1000.0 if top <= SMALL else -1e30)
    h = block.logit_errors(model, constant, low, -model.distances * U * SLACK)
    if block.beside.size is not None:
        h.add_(block.beside.size.to(work), alpha=U * SLACK)  # (B60)
    if model.arithmetic.eager:
        h = eager.of_logits(model, h, x, (x + m).abs(), block.beside)
    if given.overflows(model):
        h.masked_fill_(block.overflows(model), torch.inf)
    return h


def spread_fast(model: Model, h: Tensor, p: Tensor, total: Tensor, top: float) -> Spread:
    """For h <= top <= 1/4, in float32."""
    p = p.float()
    depth: Tensor | float = math.exp(3 * top)
    if model.arithmetic.p_normalised:
        depth = (depth * total).float()
    gain, cast = _with_cast(model, p, expm1_bound(h).mul_(p), depth)
    he = gain.sum(-1, keepdim=True).double() / total
    return Spread(p, gain, cast, he, -torch.log1p(-he))  # (B13)


@dataclasses.dataclass(frozen=True, slots=True)
class Slow:
    """What the bound for any h is computed from, float64.

    Attributes:
        x: S - m, -inf where hidden.
        h: Error of the exponent.
        total: l.
        hidden: As in `Block`.
        residual: How far above or below 0 the exponent of the largest key may be, by rows.
    """

    x: Tensor
    h: Tensor
    total: Tensor
    hidden: Tensor | None
    residual: Tensor


def spread_slow(model: Model, given: Slow) -> Spread:
    """For any h, in float64."""
    x, total, hidden = given.x, given.total, given.hidden
    h = given.h if hidden is None else given.h.masked_fill(hidden, 0.0)
    p, top = x.exp(), h.amax(-1, keepdim=True)
    divided = total if model.arithmetic.p_normalised else 1.0
    gain, cast = _with_cast(model, p, spread(x, h, hidden), (2 * h + top).exp_() * divided)
    he = gain.sum(-1, keepdim=True) / total
    lse = torch.where(he < 1, -torch.log1p(-he), torch.inf)  # (B13)
    if not model.arithmetic.l_from_rounded_p:
        lse = torch.minimum(lse, top)
    # (B14): measure every key's error against the largest key's, whose own is then 0.
    best = x.argmax(-1, keepdim=True)
    both = h + h.gather(-1, best)
    other = spread(x, both, hidden).scatter_(-1, best, 0.0)
    above = (x + both).scatter_(-1, best, 0.0).amax(-1, keepdim=True) + given.residual
    depth = torch.add(above, both, alpha=2).scatter_(-1, best, above)
    other, other_cast = _with_cast(model, p, other, depth.exp_() * divided)
    other_he = other.sum(-1, keepdim=True) / total
    better = other_he < he
    gain, he = torch.where(better, other, gain), torch.where(better, other_he, he)
    if cast is not None and other_cast is not None:
        cast = torch.where(better, other_cast, cast)
    return Spread(p, gain, cast, he, lse)


def _with_cast(
    model: Model, p: Tensor, gain: Tensor, depth: Tensor | float
) -> tuple[Tensor, Tensor | None]:
    """P e, and the error of the cast of P where that is not in P e; (B12), (B15).

    Args:
        model: Coefficients.
        p: exp(S - m).
        gain: P e.
        depth: At least (P + P e) over the smallest number that may be cast in its place.
    """
    if model.p is None:
        return gain, None
    high = p + gain
    times = eager.scores(model)
    unit, tiny = SLACK * model.p.unit * times, model.p_tiny * times
    if model.p.format.emin <= -126:  # subnormals are in the floor
        cast = high.mul_(unit)
    elif isinstance(depth, float):
        cast = torch.minimum(high.clamp(min=tiny * depth / unit).mul_(unit), high)
    else:
        cast = torch.minimum(torch.maximum(high * unit, tiny * depth), high)
    if model.arithmetic.l_from_rounded_p:  # the denominator has the cast too
        return gain + cast, cast if model.problem.dropout else None
    return gain, cast
