"""How the probabilistic bound looks at single rows of o and dq, and at single keys of dk and dv."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal

import torch

from fa_verify import sight
from fa_verify.bounds.forward import forward_tile
from fa_verify.bounds.gradients import backward_tile
from fa_verify.bounds.inputs import Block
from fa_verify.bounds.model import SLACK
from fa_verify.bounds.probabilistic import Look, Refiner, blockings, names_of_blockings, shifts

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.bounds.formats import Cast
    from fa_verify.bounds.inputs import Inputs
    from fa_verify.bounds.model import Model
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
    """

    model: Model
    given: Inputs
    top: float
    linear: Tensor

    def block(self, head: int, rows: Tensor | slice, keys: Tensor | slice) -> Block:
        """The operands of some rows, of all query heads of the group, and keys of one head."""
        given, problem = self.given, self.model.problem
        device = given.q.device
        queries = torch.arange(problem.seqlen_q, device=device).repeat(problem.group)[rows]
        columns = torch.arange(problem.seqlen_k, device=device)[keys]
        low, high = (ends[queries, None] for ends in sight.intervals(problem, device))
        return Block(
            given.q[head].flatten(0, 1)[None, rows],
            given.k[head, None, keys],
            given.v[head, None, keys],
            given.do[head].flatten(0, 1)[None, rows],
            (columns < low) | (columns >= high),
        )


def refiner_of_o(source: Source, d: float) -> Refiner | None:
    """Refine o; None where no cast of P is taken as random."""
    arithmetic = source.model.arithmetic
    cast = _random_cast(source.model.p)
    if cast is None or arithmetic.l_from_rounded_p or not source.linear.numel():
        return None
    return Refiner(
        cast=cast,
        scale=1.0,
        divisors=(1.0,),
        linear=source.linear.flatten(1, 2),
        terms=source.model.problem.seqlen_k,
        look=functools.partial(_look_at_o, source),
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
    if cast is None or not source.linear.numel():
        return None
    look = functools.partial(_look_at_dq, source, rows)
    if name != "dq":
        look = functools.partial(_look_at_key, source, rows, name)
    return Refiner(
        cast=cast,
        scale=1.0 if name == "dv" else max(1.0, model.scale),
        divisors=(1.0,) if name == "dv" else _moments(model),
        linear=source.linear.flatten(1, -2),
        terms=problem.seqlen_k if name == "dq" else problem.group * problem.seqlen_q,
        look=look,
        castings=lambda logs: (logs,),
        names=("lse",),
        across=lambda logs: (logs,),
        d=d,
    )


def _moments(model: Model) -> tuple[float, ...]:
    """What dS, with its scale, is over what is cast."""
    when, scale = model.arithmetic.ds_scale, model.scale or 1.0
    return {"before": (1.0,), "after": (scale,), None: (1.0, scale)}[when]


def _random_cast(cast: Cast | None) -> Cast | None:
    """A truncating cast is biased: it is bounded by the worst case."""
    return None if cast is None or cast.truncates else cast


def _look_at_o(source: Source, head: int, index: Tensor) -> Look:
    block = source.block(head, index, slice(None))
    part = forward_tile(source.model, source.given, block, source.top, parts=True).cast
    assert part is not None  # noqa: S101 -- there is a cast, and it was asked for
    return Look(part.rest[0], part.errors[0], part.x[0], block.v[0])


def _look_at_dq(source: Source, rows: Rows, head: int, index: Tensor) -> Look:
    block = source.block(head, index, slice(None))
    part = rows.part(slice(head, head + 1), slice(None)).take(index)
    tile = backward_tile(source.model, source.given, part, block, source.top)
    most = source.linear.flatten(1, 2)[head, index]
    return _look(most, tile.ds_cast, tile.ds, tile.ds_off, block.k[0])


def _look_at_key(source: Source, rows: Rows, name: str, head: int, index: Tensor) -> Look:
    block = source.block(head, slice(None), index)
    part = rows.part(slice(head, head + 1), slice(None))
    tile = backward_tile(source.model, source.given, part, block, source.top)
    errors, values, off, weight = tile.ds_cast, tile.ds, tile.ds_off, block.q
    if name == "dv":
        errors, values, off, weight = tile.p_cast, tile.p, tile.p_off, block.do
    errors = None if errors is None else errors.mT
    return _look(source.linear[head, index], errors, values.mT, off.mT, weight[0])


def _look(most: Tensor, errors: Tensor | None, values: Tensor, off: Tensor, weight: Tensor) -> Look:
    assert errors is not None  # noqa: S101 -- a Refiner exists only where there is a cast
    cast = SLACK * errors[0].double()
    sign = values[0].sign()
    logs = values[0].abs().log().contiguous()
    off = SLACK * off[0].double()
    return Look(most - cast @ weight.abs(), cast, logs, weight, sign, off)
