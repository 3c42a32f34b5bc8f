"""How the probabilistic bound looks at single rows of o and dq, and at single keys of dk and dv."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal

import torch

from fa_verify import sight
from fa_verify.bounds.gradients import BackwardTile, backward_tile
from fa_verify.bounds.inputs import Block
from fa_verify.bounds.model import SLACK
from fa_verify.bounds.outputs import ForwardTile, forward_tile
from fa_verify.bounds.probabilistic import Look, Refiner, blockings, names_of_blockings, shifts
from fa_verify.terms import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fa_verify.bounds.formats import Cast
    from fa_verify.bounds.inputs import Inputs
    from fa_verify.bounds.model import Model
    from fa_verify.bounds.probabilistic import Index
    from fa_verify.bounds.rows import Rows

__all__ = ["Source", "refiner_of_gradient", "refiner_of_o"]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """What a bound was computed from.

    Attributes:
        model: Coefficients.
        given: The operands.
        top: At least every h, as the tiles take it.
        linear: The bound before output rounding, (heads, group, seqlen_q, dim) or
            (heads, keys, dim).
        tile: The elements that it was computed from, if they were kept.
    """

    model: Model
    given: Inputs
    top: float
    linear: Tensor
    tile: ForwardTile | BackwardTile | None = None

    def block(self, heads: slice, rows: Index, keys: Index) -> Block:
        """The operands of some rows, of all query heads of the group, and keys of some heads."""
        given, problem = self.given, self.model.problem
        device = given.q.device
        queries = torch.arange(problem.seqlen_q, device=device).repeat(problem.group)[rows]
        beside = given.beside(Place.some(problem, heads, rows, keys, device))
        return Block(
            given.q[heads].flatten(1, 2)[:, rows],
            given.k[heads, keys],
            given.v[heads, keys],
            given.do[heads].flatten(1, 2)[:, rows],
            beside.hidden(sight.hidden(problem, queries, keys, device)),
            beside,
        )


def refiner_of_o(source: Source, d: float) -> Refiner | None:
    """Refine o; None where no cast of P is taken as random, or not by what (B30) derives it.

    A sink moves what P is relative to, and dropout, v's scale, a scale of P or its division what is
    cast: docs/bounds.md says nothing then.
    """
    problem = source.model.problem
    arithmetic = source.model.arithmetic
    moved = arithmetic.p_scale != 1.0 or arithmetic.p_normalised or source.model.halves("qk")
    if problem.sinks or problem.dropout or problem.fp8 or moved:
        return None
    cast = _random_cast(source.model.p)
    if cast is None or arithmetic.l_from_rounded_p or not source.linear.numel():
        return None
    return Refiner(
        cast=cast,
        scale=1.0,
        divisors=(1.0,),
        linear=source.linear.flatten(1, 2),
        terms=source.model.problem.seqlen_k,
        looks=functools.partial(_look_at_o, source),
        castings=functools.partial(blockings, block_n=arithmetic.block_n),
        names=names_of_blockings(arithmetic.block_n, source.model.problem.seqlen_k),
        across=functools.partial(shifts, block_n=arithmetic.block_n),
        d=d,
    )


def refiner_of_gradient(
    source: Source, rows: Rows, name: Literal["dq", "dk", "dv"], d: float
) -> Refiner | None:
    """Refine dq, dk or dv; None where its cast is not taken as random."""
    model, problem = source.model, source.model.problem
    cast = _random_cast(model.p if name == "dv" else model.ds)
    coarse = model.arithmetic.eager or model.halves("qk")  # equal logits are many; (B75)
    if coarse or (name == "dv" and problem.dropout):  # cast more than once, or when
        return None
    if cast is None or not source.linear.numel():
        return None
    looks = functools.partial(_look_at_dq, source, rows)
    if name != "dq":
        looks = functools.partial(_look_at_key, source, rows, name)
    return Refiner(
        cast=cast,
        scale=1.0 if name == "dv" else max(1.0, model.scale),
        divisors=(1.0,) if name == "dv" else _moments(model),
        linear=source.linear.flatten(1, -2),
        terms=problem.seqlen_k if name == "dq" else problem.group * problem.seqlen_q,
        looks=looks,
        castings=lambda logs: (logs,),
        names=("lse",),
        across=lambda logs: (logs,),
        d=d,
        lifted=name == "dv",
    )


def _moments(model: Model) -> tuple[float, ...]:
    """What dS, with its scale, is over what is cast."""
    when, scale = model.arithmetic.ds_scale, model.scale or 1.0
    return {"before": (1.0,), "after": (scale,), None: (1.0, scale)}[when]


def _random_cast(cast: Cast | None) -> Cast | None:
    """A truncating cast is biased: it is bounded by the worst case."""
    return None if cast is None or cast.truncates else cast


def _look_at_o(source: Source, heads: slice, index: Index) -> Look:
    tile, place = source.tile, (heads, index)
    if not isinstance(tile, ForwardTile):
        block, place = source.block(heads, index, slice(None)), (slice(None), slice(None))
        tile = forward_tile(source.model, source.given, block, source.top, parts=True)
    cast, v = tile.cast, source.given.v[heads]
    return Look(cast.rest[place], cast.errors[place], cast.x[place], v, v.abs())


def _look_at_dq(source: Source, rows: Rows, heads: slice, index: Index) -> Look:
    tile, place = _tile(source, rows, (heads, index, slice(None)))
    found = _known(tile.ds_cast, tile.ds, tile.ds_off)
    most = source.linear.flatten(1, 2)[heads, index]
    return _look(most, [x[place] for x in found], source.given.k[heads])


def _look_at_key(source: Source, rows: Rows, name: str, heads: slice, index: Index) -> Look:
    tile, place = _tile(source, rows, (heads, slice(None), index))
    found, given = (tile.ds_cast, tile.ds, tile.ds_off), source.given.q
    if name == "dv":
        found, given = (tile.p_cast, tile.p, tile.p_off), source.given.do
    some = [x[place].mT for x in _known(*found)]
    return _look(source.linear[heads, index], some, given[heads].flatten(1, 2))


def _tile(
    source: Source, rows: Rows, place: tuple[slice, Index, Index]
) -> tuple[BackwardTile, tuple[slice, Index, Index]]:
    """A tile that has some heads, rows and keys, and where in it they are."""
    if isinstance(source.tile, BackwardTile):
        return source.tile, place
    heads, queries, _ = place
    part = rows.part(heads, slice(None)).take(queries)
    tile = backward_tile(source.model, source.given, part, source.block(*place), source.top)
    return tile, (slice(None), slice(None), slice(None))


def _known(cast: Tensor | None, values: Tensor, off: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert cast is not None  # noqa: S101 -- a Refiner exists only where there is a cast
    return cast, values, off


def _look(most: Tensor, found: Sequence[Tensor], weight: Tensor) -> Look:
    """A look at terms: what the cast adds to each, the terms, and how far they may be off."""
    errors, values, off = found
    cast, size = SLACK * errors.double(), weight.abs()
    return Look(
        most - cast @ size,
        cast,
        values.abs().log_().contiguous(),
        weight,
        size,
        values.sign(),
        SLACK * off.double(),
    )
