"""How far apart two runs may be that add the same terms in another order; (B50)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.backward import reach
from fa_verify.bounds.formats import FORMATS, Cast
from fa_verify.bounds.gradients import backward_tile
from fa_verify.bounds.inputs import variants
from fa_verify.bounds.model import FLUSH, SLACK, U
from fa_verify.bounds.rows import Seen, row_statistics
from fa_verify.reference import by_kv_head, grouped, tiles
from fa_verify.terms import NO_TERMS, Terms

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.arithmetic import Arithmetic
    from fa_verify.bounds.bounded import Bounded
    from fa_verify.bounds.inputs import Inputs
    from fa_verify.bounds.model import Model
    from fa_verify.bounds.rows import Rows
    from fa_verify.problem import Problem

__all__ = ["dq_spread"]


def dq_spread(  # noqa: PLR0917 -- the operands of attention, in their usual order
    problem: Problem,
    arithmetic: Arithmetic,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    terms: Terms = NO_TERMS,
    o: Tensor,
    lse: Tensor,
    dq: Bounded,
) -> Tensor:
    """Bound the difference of two dq that were summed by atomics from the same o and lse.

    Args:
        problem: The problem.
        arithmetic: The kernel's rounding points.
        q: As given to `bound_backward`, whose `o` and `lse` were the observed ones.
        k: Likewise.
        v: Likewise.
        do: Likewise.
        terms: Likewise.
        o: Likewise.
        lse: Likewise.
        dq: What it said of dq.
    """
    rows = row_statistics(
        problem,
        arithmetic,
        do,
        Seen(by_kv_head(problem, o), None),
        Seen(by_kv_head(problem, lse), None),
        terms,
    )
    total = torch.zeros_like(dq.reference)
    for model, given in variants(problem, arithmetic, q, k, v, do, terms=terms):
        sizes = _sizes(model, given, rows).reshape(problem.shape_q)
        total = torch.maximum(total, sizes.nan_to_num_(nan=torch.inf, posinf=torch.inf))
    blocks, scale = model.blocks(problem.seqlen_k), model.scale
    rounding, tiny = (blocks + 3) * U, FLUSH
    if arithmetic.gradient_dtype == "input":  # (B73)
        rounding += blocks * model.out.unit_roundoff
        tiny += Cast(model.out).tiny
    rounding *= 1 + model.dot(problem.seqlen_k)
    total.mul_(2 * SLACK * rounding).add_(2 * blocks * tiny * (1.0 + scale))
    spread = total + 2 * FORMATS[problem.dtype].half_ulp(dq.reference.abs() + dq.det)
    return spread if dq.overflow_ok is None else spread.masked_fill_(dq.overflow_ok, torch.inf)


def _sizes(model: Model, given: Inputs, rows: Rows) -> Tensor:
    """At least the sum of the sizes of the partial products, (heads, group, rows, head_dim)."""
    top = reach(model, given, rows)
    terms = torch.zeros_like(given.q)
    for tile in tiles(model.problem, given.q.device, every=given.overflows(model)):
        block = given.block(tile)
        part = backward_tile(model, given, rows.part(tile.heads, tile.rows), block, top)
        k = block.k.abs()
        if "k" in (model.arithmetic.prescaled or "") and model.scale:  # (B5)
            k = k * (1 + model.out.unit_roundoff) + model.prescale_tiny / model.scale
        sizes = torch.bmm(part.size, k.to(part.size.dtype)).double()
        terms[tile.heads, :, tile.rows] = grouped(model.problem, sizes)
    return terms
