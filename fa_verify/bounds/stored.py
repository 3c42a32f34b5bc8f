"""Gradients that are rounded to the inputs' dtype before all of them is added; (B73)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.formats import Cast

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.bounds.gradients import BackwardTile
    from fa_verify.bounds.inputs import Block
    from fa_verify.bounds.model import Model

__all__ = ["add", "rounds", "sizes"]


def rounds(model: Model) -> tuple[int, int, int]:
    """How often a part of dq, dk and dv is rounded on its way."""
    problem, arithmetic = model.problem, model.arithmetic
    by_row = by_key = 0
    if arithmetic.gradient_dtype == "input":
        by_row = model.blocks(problem.seqlen_k)
        by_key = model.blocks(problem.group * problem.seqlen_q)
    if arithmetic.gqa_dtype == "input" and problem.group > 1:
        by_key += 1
    scaled = int(arithmetic.eager and arithmetic.prescaled is not None)
    return by_row + scaled, by_key + scaled, by_key


def sizes(model: Model, block: Block, part: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    """At least the sizes of what is rounded, of one tile: sums of all terms, or of each head's."""
    work = part.q.dtype
    q, k, do = (x.abs().to(work) for x in (block.q, block.k, block.do))
    ds, p = part.ds.abs().to(work), part.dropped.to(work)
    if model.arithmetic.gradient_dtype == "input" or model.halves(""):
        return (ds + part.q) @ k, (ds + part.k).mT @ q, (p + part.v).mT @ do
    exact = part.ds @ block.k, _by_head(model, part.ds, block.q), _by_head(model, p, block.do)
    errors = part.q @ k, part.k.mT @ q, part.v.mT @ do
    dq, dk, dv = (abs(x) + y for x, y in zip(exact, errors, strict=True))
    return dq, dk, dv


def _by_head(model: Model, left: Tensor, right: Tensor) -> Tensor:
    """Sum over a group's heads of the sizes of their products."""
    shape = (left.shape[0], model.problem.group, left.shape[1] // model.problem.group, -1)
    return (left.reshape(shape).mT @ right.to(left.dtype).reshape(shape)).abs().sum(1)


def add(model: Model, bounds: tuple[Tensor, ...], sizes: tuple[Tensor, ...]) -> None:
    """Add to bounds what the roundings of parts lose whose sizes add up to those."""
    out, problem = model.out, model.problem
    rows = problem.group * problem.seqlen_q
    lengths = (problem.seqlen_k, rows, rows)
    factor = max(1.0, model.scale) * model.kept  # of what is rounded, afterwards
    for bound, size, count, k in zip(bounds, sizes, rounds(model), lengths, strict=True):
        if model.halves(""):  # (B75)
            bound.add_(model.half_tiny(k) * factor)
            bound.masked_fill_(~(size * _unscaled(model) < model.sums_largest()), torch.inf)
        n = count * out.unit_roundoff
        if n >= 0.5:
            bound.fill_(torch.inf)
        elif count:
            least = problem.group * count * Cast(out).tiny
            bound.add_(size, alpha=n / (1 - n)).add_(least * factor)
            bound.masked_fill_(~(size * _unscaled(model) < out.overflow), torch.inf)  # (B9)


def _unscaled(model: Model) -> float:
    """What is rounded over what it becomes, at most: the scale may be a factor of the sum."""
    arithmetic = model.arithmetic
    summed = arithmetic.gradient_dtype == "input" or model.halves("")
    after = summed and arithmetic.ds_scale != "before"
    after = after or (arithmetic.eager and arithmetic.prescaled is not None)
    if not after:
        return 1.0
    return max(1.0, 1 / model.scale) if model.scale else math.inf  # 0: nothing is known
