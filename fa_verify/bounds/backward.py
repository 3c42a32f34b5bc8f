"""The deterministic bound of the backward pass: dq, dk and dv. Equations of docs/bounds.md."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify import foreach, sight
from fa_verify.bounds import eager, stored
from fa_verify.bounds.formats import TF32, Cast
from fa_verify.bounds.further import BiasGradient
from fa_verify.bounds.gradients import BackwardTile, backward_tile, splits
from fa_verify.bounds.inputs import SMALL, Block, Inputs, keeps
from fa_verify.bounds.model import FLUSH, LARGEST, SLACK, Model, U
from fa_verify.reference import grouped, tiles

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.bounds.rows import Rows
    from fa_verify.reference import Tile

__all__ = ["Backward", "backward_det", "reach", "sure"]


@dataclasses.dataclass(frozen=True, slots=True)
class Backward:
    """Exact gradients and bounds before their rounding, by key/value head, float64.

    Attributes:
        dbias: Of the bias, in its shape, and its bound; None without one.
        top: At least every h, as tiles take it.
        tile: The one tile, if one holds the whole problem and is small enough to be kept.
        sink: Error of each row's part of dsinks, as `BackwardTile` has it; None: no more.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_bound: Tensor
    dk_bound: Tensor
    dv_bound: Tensor
    top: float = math.inf
    tile: BackwardTile | None = None
    dbias: tuple[Tensor, Tensor] | None = None
    sink: Tensor | None = None

    def joined(self, other: Backward) -> Backward:
        """Bounds about our values that also hold whatever holds about the other's; (B20)."""

        def wider(ours: Tensor, bound: Tensor, theirs: Tensor, their_bound: Tensor) -> Tensor:
            return torch.maximum(bound, (ours - theirs).abs() + their_bound)

        return Backward(
            self.dq,
            self.dk,
            self.dv,
            wider(self.dq, self.dq_bound, other.dq, other.dq_bound),
            wider(self.dk, self.dk_bound, other.dk, other.dk_bound),
            wider(self.dv, self.dv_bound, other.dv, other.dv_bound),
            dbias=self.dbias and other.dbias and (self.dbias[0], wider(*self.dbias, *other.dbias)),
            sink=None if self.sink is None or other.sink is None else self.sink + other.sink,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over tiles, shaped as the gradients by key/value head."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    @classmethod
    def only(cls, model: Model, part: tuple[Tensor, Tensor, Tensor]) -> _Sums:
        """Those of the one tile that holds the whole problem."""
        dq, dk, dv = part
        return cls(grouped(model.problem, dq.double()), dk.double(), dv.double())

    @classmethod
    def zeros(cls, given: Inputs) -> _Sums:
        return cls(torch.zeros_like(given.q), torch.zeros_like(given.k), torch.zeros_like(given.v))

    def add(self, model: Model, tile: Tile, part: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add one tile's (heads, group * rows, dim) and (heads, keys, dim); a row has one tile."""
        dq, dk, dv = part
        self.dq[tile.heads, :, tile.rows] = grouped(model.problem, dq).double()
        self.dk[tile.heads, tile.keys].add_(dk)
        self.dv[tile.heads, tile.keys].add_(dv)

    def every(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.dq, self.dk, self.dv


def reach(model: Model, given: Inputs, rows: Rows) -> float:
    """At least every h and lse error, by Cauchy-Schwarz; inf where float32 will not do; (B10)."""
    if not rows.lse.numel():
        return 0.0
    if model.arithmetic.eager:
        return math.inf
    h = (model.logit + 3 * U * model.scale) * given.raw + 7 * U * rows.extent.lse
    h += U * (3 * given.extent.addend + given.extent.off)
    floor = model.logit_floor(given.largest) + model.prescale_floor(given.largest)
    h = SLACK * (h + rows.extent.lse_error + model.arithmetic.exp2_ulps * U + floor)
    fine = h <= SMALL and not given.overflows(model)
    return h if fine and given.value < LARGEST else math.inf  # of inf, NaN: not fine


def backward_det(model: Model, given: Inputs, rows: Rows) -> Backward:
    """Bound dq, dk and dv, tile by tile."""
    huge, top = _may_overflow(model, given, rows), reach(model, given, rows)
    sums: list[_Sums] = []
    rounds = any(stored.rounds(model)) or model.halves("")
    kept = None
    bias = BiasGradient.empty(model.problem, given.q) if model.problem.bias else None
    sink = torch.zeros_like(rows.lse) if model.arithmetic.eager and model.problem.sinks else None
    for tile in tiles(model.problem, given.q.device, every=given.overflows(model)):
        block, row = given.block(tile), rows.part(tile.heads, tile.rows)
        part = backward_tile(model, given, row, block, top)
        found = [
            (part.ds @ block.k, part.ds.mT @ block.q, part.dropped.mT @ block.do),
            _bounds(model, row, block, part),
            *([_peaks(block, part, model.scale)] if huge else []),
            *([stored.sizes(model, block, part)] if rounds else []),
        ]
        if bias is not None:
            bias.add(model.problem, tile, part)
        if sink is not None and part.sink is not None:
            own = sink[tile.heads, :, tile.rows]
            own.copy_(part.sink.view_as(own))
        if keeps(model.problem, tile):
            kept, sums = part, [_Sums.only(model, x) for x in found]
            break
        sums = sums or [_Sums.zeros(given) for _ in found]
        for total, x in zip(sums, found, strict=True):
            total.add(model, tile, x)
    exact, bounds, *peaks = sums or [_Sums.zeros(given) for _ in range(4)]
    if rounds:
        stored.add(model, bounds.every(), peaks.pop().every())
    bounds.dq.add_(exact.dq.abs(), alpha=3 * U)  # (B26): scaling
    bounds.dk.add_(exact.dk.abs(), alpha=3 * U)
    floors = _floors(model, given, rows)
    for bound, floor in zip(bounds.every(), floors, strict=True):
        bound.nan_to_num_(nan=torch.inf, posinf=torch.inf).mul_(SLACK).add_(floor)
    for total in peaks:
        for bound, peak in zip(bounds.every(), total.every(), strict=True):
            bound.masked_fill_(~(peak < LARGEST), torch.inf)  # (B9); NaN: 0 * inf
    _mark_unknown(rows, bounds)
    _finite(exact, bounds)
    dbias = None if bias is None else bias.bounded(model.problem, _peak_x(given, rows))
    if dbias is not None and rows.no_ds is not None:  # whatever is summed may be NaN
        dbias[1].fill_(torch.inf)
    return Backward(*exact.every(), *bounds.every(), top, kept, dbias, sink)


def _finite(exact: _Sums, bounds: _Sums) -> None:
    """An observed lse far below S, which rounding alone brings about near 1e9, has no gradient."""
    some = [value for value in exact.every() if value.numel()]
    ends = torch.stack([*foreach.largest(some)]).tolist() if some else []
    for value, bound in zip(exact.every(), bounds.every(), strict=True):
        if all(map(math.isfinite, ends)):
            break
        bound.masked_fill_(~value.isfinite(), torch.inf)
        value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _bounds(
    model: Model, rows: Rows, block: Block, part: BackwardTile
) -> tuple[Tensor, Tensor, Tensor]:
    """One tile's part of the bounds of dq, dk and dv: matrices times magnitudes; (B23), (B25)."""
    work = part.q.dtype
    q, k, do = (x.abs().to(work) for x in (block.q, block.k, block.do))
    dq, dk, dv = torch.bmm(part.q, k).double(), torch.bmm(part.k.mT, q), torch.bmm(part.v.mT, do)
    if splits(model, rows):
        dq += _common(model, rows, block, part)
    if model.arithmetic.prescaled and model.scale:  # (B5): dk from a pre-scaled q, dq from k
        unit, tiny = model.out.unit_roundoff, model.prescale_tiny / model.scale
        if model.problem.dot_precision == "tf32":  # of it, which is not that of q or k
            unit += 2 * Cast(TF32, truncates=True).unit
        if "k" in model.arithmetic.prescaled:
            dq += torch.bmm(part.size, k * unit + tiny)
        if "q" in model.arithmetic.prescaled:
            dk += torch.bmm(part.size.mT, q * unit + tiny)
    return dq, dk, dv


def _common(model: Model, rows: Rows, block: Block, part: BackwardTile) -> Tensor:
    """What errors of lse and delta, common to a row, do to dq; (B24)."""
    weight = part.p if part.slope is None else part.p * part.slope
    shared = torch.bmm(weight, block.k).abs_().mul_(model.scale * rows.delta_error.unsqueeze(-1))
    if rows.lse_error is None:
        return shared
    growth = rows.lse_error.unsqueeze(-1)
    return shared * growth.exp() + torch.bmm(part.ds, block.k).abs_() * growth.expm1()


def _peaks(block: Block, part: BackwardTile, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The most that partial sums of the gradients, scaled or not yet, can reach; (B9)."""
    ds = part.ds.abs() * max(1.0, 1 / scale) if scale else part.p * torch.inf
    return ds @ block.k.abs(), ds.mT @ block.q.abs(), part.dropped.mT @ block.do.abs()


def _may_overflow(model: Model, given: Inputs, rows: Rows) -> bool:
    """Whether a partial sum of a gradient may reach float32's largest number; (B9)."""
    rows_k = model.problem.group * model.problem.seqlen_q
    largest_ds = max(1.0, model.scale) * _peak_x(given, rows)
    length = max(rows_k, model.problem.seqlen_k)
    return length * max(given.largest_do * model.kept, largest_ds * given.largest) >= LARGEST


def _peak_x(given: Inputs, rows: Rows) -> float:
    """At least every |dP - delta|."""
    value = given.value / (1.0 - given.problem.dropout)
    return value + rows.extent.delta


def sure(model: Model, given: Inputs, rows: Rows) -> Rows:
    """The rows, those set apart of which dP may overflow, next to hidden keys too; (B9)."""
    most = eager.limit(model) / (model.kept if model.arithmetic.eager else 1.0)
    most = min(most, model.sums_largest())
    if model.halves("qk") and given.overflows(model):
        rows = _sure_of_logits(model, given, rows)
    if given.value < most:
        return rows
    furthest = torch.linalg.vector_norm(given.v, dim=-1).amax(-1)
    overflows = torch.linalg.vector_norm(given.do, dim=-1) * furthest[:, None, None] >= most
    no_ds = overflows if rows.no_ds is None else rows.no_ds | overflows
    return dataclasses.replace(rows, no_ds=no_ds)


def _sure_of_logits(model: Model, given: Inputs, rows: Rows) -> Rows:
    """The same of rows with a logit that may be infinite: NaN where -inf is added; (B75)."""
    furthest = torch.linalg.vector_norm(given.k, dim=-1).amax(-1)[:, None, None]
    size = torch.linalg.vector_norm(given.q, dim=-1) * furthest * max(1.0, 1.45 * model.scale)
    over = size >= model.sums_largest("qk")
    no_p, no_ds = (over if x is None else x | over for x in (rows.no_p, rows.no_ds))
    return dataclasses.replace(rows, no_p=no_p, no_ds=no_ds)


def _mark_unknown(rows: Rows, bounds: _Sums) -> None:
    """Say nothing about what a row without a finite P or dS may reach; (B9).

    A NaN of one row reaches dk and dv of every key, since 0 * NaN is NaN: of hidden keys too.
    """
    no_p, no_ds = rows.no_p, rows.no_ds
    if no_ds is not None:
        bounds.dq.masked_fill_(no_ds.unsqueeze(-1), torch.inf)
        bounds.dk.masked_fill_(no_ds.any(-1).any(-1)[:, None, None], torch.inf)
    if no_p is not None:
        bounds.dv.masked_fill_(no_p.any(-1).any(-1)[:, None, None], torch.inf)


def _floors(model: Model, given: Inputs, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """What subnormals and flushes to zero may cost dq, dk, dv where a key is in sight; (B27)."""
    problem = model.problem
    row_sees = (~sight.blind(problem, given.q.device)).to(given.q)
    key_seen = sight.keys_seen(problem, given.q.device)
    one_ds = 1.0 + model.scale * (1.0 + problem.head_dim_v + _peak_x(given, rows))
    one_ds *= FLUSH * (1.0 + given.largest)
    rows_k = problem.group * problem.seqlen_q
    return (
        (row_sees * (one_ds * problem.seqlen_k)).unsqueeze(-1),
        (key_seen * (one_ds * rows_k)).unsqueeze(-1),
        (key_seen * (FLUSH * model.kept * (1.0 + given.largest_do) * rows_k)).unsqueeze(-1),
    )
