"""What a backward pass knows of each row: lse, delta, and how far the kernel's may be."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify import foreach, sight
from fa_verify.bounds.formats import Cast
from fa_verify.bounds.model import FLUSH, SLACK, Model, U
from fa_verify.reference import by_kv_head
from fa_verify.terms import NO_TERMS, Terms

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.arithmetic import Arithmetic
    from fa_verify.problem import Problem

__all__ = ["Rows", "Seen", "row_statistics"]


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """The largest size of each of some rows' statistics; 0 where there are no rows."""

    lse: float
    delta: float
    delta_error: float
    lse_error: float

    @classmethod
    def of(
        cls, lse: Tensor, delta: Tensor, delta_error: Tensor, lse_error: Tensor | None
    ) -> Extent:
        """Read them; one synchronisation with the device."""
        some = [x for x in (lse, delta, delta_error, lse_error) if x is not None and x.numel()]
        found = torch.stack([*foreach.largest(some)]).tolist() if some else []
        return cls(*found, *[0.0] * (4 - len(found)))

    @property
    def finite(self) -> bool:
        """Whether nothing is infinite or NaN."""
        return all(map(math.isfinite, (self.lse, self.delta, self.delta_error, self.lse_error)))


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Row statistics, float64, (heads, group, seqlen_q) or (heads, rows).

    Attributes:
        lse: The log-sum-exp that P is recomputed from; 0 in fully masked rows without a sink.
        delta: sum_d do o, less the gradient of lse.
        lse_error: How far the kernel's lse may be from ours; None: it is the same.
        delta_error: How far the kernel's delta may be from ours.
        no_p: bool: lse is not known to be finite, nor then P; None: it is everywhere.
        no_ds: bool: delta or P is not known to be finite; None: they are everywhere.
        extent: Of all the problem's rows.
    """

    lse: Tensor
    delta: Tensor
    lse_error: Tensor | None
    delta_error: Tensor
    extent: Extent
    no_p: Tensor | None = None
    no_ds: Tensor | None = None

    def part(self, heads: slice, rows: slice) -> Rows:
        """The rows of one tile, (heads, rows)."""
        lse_error = self.lse_error
        return Rows(
            self.lse[heads, :, rows].flatten(1, 2),
            self.delta[heads, :, rows].flatten(1, 2),
            None if lse_error is None else lse_error[heads, :, rows].flatten(1, 2),
            self.delta_error[heads, :, rows].flatten(1, 2),
            self.extent,
        )

    def take(self, index: Tensor) -> Rows:
        """Some rows of a tile's."""
        lse_error = None if self.lse_error is None else self.lse_error[:, index]
        delta, delta_error = self.delta[:, index], self.delta_error[:, index]
        return Rows(self.lse[:, index], delta, lse_error, delta_error, self.extent)


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """A tensor of the forward pass by key/value head, float64, and its error; None: observed."""

    value: Tensor
    error: Tensor | None


def row_statistics(  # noqa: PLR0917
    problem: Problem,
    arithmetic: Arithmetic,
    do: Tensor,
    o: Seen,
    lse: Seen,
    terms: Terms = NO_TERMS,
) -> Rows:
    """Find delta and its error; a row that may not be finite is set apart; (B22).

    Args:
        problem: The problem.
        arithmetic: The kernel's rounding points.
        do: (batch, heads_q, seqlen_q, head_dim_v).
        o: As observed, or exact with its bound before output rounding.
        lse: As observed, or exact with its bound.
        terms: What the problem has beside q, k and v.
    """
    model = Model(problem, arithmetic)
    do4 = by_kv_head(problem, do)
    size, o4 = do4.abs(), o.value
    unsure = o.error
    if o.error is None and not arithmetic.delta_from_stored_o:
        unsure = model.out.half_ulp(o4.abs() * (1 + 2 * model.out.unit_roundoff))
        unsure.clamp_(min=Cast(model.out).tiny)  # what was rounded to 0
    elif unsure is not None and arithmetic.delta_from_stored_o:
        most = o4.abs() + unsure
        unsure = unsure + model.out.half_ulp(most)
        if problem.dropout:  # without, o is in the hull of v: it is stored as inf then
            unsure.masked_fill_(most >= model.out.overflow, torch.inf)
    # A(D_v) of float32, whatever the dots do: delta is an elementwise product and a sum.
    own = SLACK * (model.ieee_dot(problem.head_dim_v) * o4.abs() + FLUSH)
    delta = (do4 * o4).sum(-1)
    if unsure is not None:
        own += unsure + unsure * model.ieee_dot(problem.head_dim_v)
    delta_error = (size * own).sum(-1)
    if arithmetic.eager:  # of each dP, and of each P dP; (B74)
        tiny = SLACK * Cast(model.out).tiny
        delta_error = delta_error + (3 * model.kept + problem.seqlen_k) * tiny
    if arithmetic.delta_from_p_dp and model.halves(""):  # likewise; (B75)
        delta_error = delta_error + 2 * model.half_tiny(problem.head_dim_v) * model.kept
    lse3, lse_error = lse.value, lse.error
    empty = sight.blind(problem, do.device)
    delta, delta_error = (x.masked_fill(empty, 0.0) for x in (delta, delta_error))
    if terms.dlse is not None:  # (B63)
        dlse = by_kv_head(problem, terms.dlse)
        delta_error = delta_error + SLACK * 2 * U * (delta.abs() + dlse.abs())
        delta = delta - dlse
    if terms.sinks is not None:
        empty = empty & terms.sinks.isneginf().view(problem.heads_kv, problem.group, 1).repeat(
            problem.batch, 1, 1
        )
    lse3 = lse3.masked_fill(empty, 0.0)
    extent = Extent.of(lse3, delta, delta_error, lse_error)
    if extent.finite:
        return Rows(lse3, delta, lse_error, delta_error, extent)
    no_p = ~(lse3 if lse_error is None else lse3 + lse_error).isfinite()
    no_ds = no_p | ~(delta + delta_error).isfinite()
    delta, delta_error = (x.masked_fill(no_ds, 0.0) for x in (delta, delta_error))
    lse3 = lse3.masked_fill(no_p, 0.0)  # where it is finite so is P, and dv takes that
    lse_error = None if lse_error is None else lse_error.masked_fill(no_p, 0.0)
    extent = Extent.of(lse3, delta, delta_error, lse_error)
    return Rows(lse3, delta, lse_error, delta_error, extent, no_p, no_ds)
