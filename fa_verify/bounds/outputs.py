"""`ForwardTile`: o and lse of one tile of the logits, and their bounds. docs/bounds.md."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds import eager
from fa_verify.bounds.formats import Cast
from fa_verify.bounds.inputs import SMALL, Block, Inputs, with_column
from fa_verify.bounds.model import FLUSH, LARGEST, SLACK, Model, U
from fa_verify.bounds.softmax import Slow, exponent_error, spread_fast, spread_slow

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["CastPart", "ForwardTile", "forward_tile"]


@dataclasses.dataclass(frozen=True, slots=True)
class CastPart:
    """What the cast of P does to o.

    Attributes:
        rest: (heads, rows, head_dim_v), the bound without the cast and without the hull.
        errors: (heads, rows, keys), what the cast adds: at most ``errors @ |v|``.
        x: (heads, rows, keys), S - m, -inf where hidden.
    """

    rest: Tensor
    errors: Tensor
    x: Tensor


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """One tile's exact values and bounds, (heads, rows[, head_dim_v]).

    Attributes:
        share: ``share()`` is the part that the cast of P has in it; None: there is none, or it was
            not asked for.
    """

    o: Tensor
    lse: Tensor
    o_bound: Tensor
    lse_bound: Tensor
    share: Callable[[], CastPart] | None = None

    @functools.cached_property
    def cast(self) -> CastPart:
        """That part."""
        assert self.share is not None  # noqa: S101 -- there is a cast, and it was asked for
        return self.share()


def forward_tile(
    model: Model, given: Inputs, block: Block, top: float, *, parts: bool = False
) -> ForwardTile:
    """Bound the rows of one tile, all of whose visible keys are in it.

    Args:
        model: Coefficients.
        given: The whole problem's ranges.
        block: The tile's operands.
        top: At least every h; inf if that is not known to be at most 1/4.
        parts: What the cast of P accounts for will be asked for.
    """
    v, keys, fast = block.v, block.k.shape[1], top <= SMALL
    sink, hidden, weights = block.beside.sink, block.hidden, block.beside.weights
    x, _ = block.logits(model.problem.scale, model.problem.softcap)
    own = m = x.amax(-1, keepdim=True)
    if sink is not None:
        x, v, hidden, weights = _with_sink(block, x, sink)
        m = x.amax(-1, keepdim=True)
    m.masked_fill_(empty := m == -torch.inf, 0.0)
    furthest = None if fast else _furthest(x, hidden)
    x.sub_(m)
    merge = model.merge(m, _depth(x) if model.arithmetic.merged_by_sigmoid else 0.0)
    h = exponent_error(model, given, block, x[..., :keys], m, merge, top)
    if sink is not None:
        own, sink = (y.masked_fill(y == -torch.inf, 0.0) for y in (own, sink.unsqueeze(-1)))
        h = with_column(h, SLACK * model.sink_error(own.abs(), sink, block.beside.moved))
    p = x.exp() if parts or not fast else x.exp_()
    total = p.sum(-1, keepdim=True).masked_fill_(empty, 1.0)
    o = torch.bmm(p if weights is None else p * weights, v).div_(total)
    lse = torch.where(empty, -torch.inf, m + total.log())
    if furthest is None:
        near = spread_fast(model, h, p, total, top)
    else:
        near = spread_slow(model, Slow(x, h, total, hidden, furthest * (U * SLACK)))

    # (B11): everything is relative to exp(m) until it is divided by l = total.
    loss, accumulate = near.gain, SLACK * model.value_dot(keys)
    loss = loss if near.cast is None else loss + near.cast
    loss = torch.add(loss, near.p + loss, alpha=accumulate + SLACK * model.value_error)
    loss = loss if weights is None else loss.mul_(weights)
    weight = torch.bmm(loss, v.abs().to(loss.dtype)).double().div_(total)
    largest_v = given.largest_v * model.kept
    nu, size = _normalisation(model), o.abs()
    widened = torch.where(near.he < 0.5, SLACK * (1 + nu) / (1 - near.he), torch.inf)
    # What is common to a row does not cancel where parts are merged by lse; (B67).
    bound = torch.addcmul(weight, size, near.he).mul_(widened)
    bound.add_(size.mul_(SLACK * (nu + merge))).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    linear = bound + (floor := _floor(model, v, keys, largest_v))
    hull = _hull(model, o, v, accumulate + nu + merge)
    bound = torch.minimum(bound, hull.mul_(SLACK)).add_(floor)
    logarithm = _logarithm(model, lse, m, own, sink)
    lse_bound = logarithm.add_(model.denominator).mul_(SLACK).add_(near.lse)
    _mark_sums(model, v, largest_v, bound)
    if furthest is not None:
        unknown = _unknown(model, given, furthest, h.isinf() & eager.counts(model, x))
        bound.masked_fill_(unknown, torch.inf)
        lse_bound.masked_fill_(unknown, torch.inf)
    result = ForwardTile(
        o=o,
        lse=lse.squeeze(-1),
        o_bound=bound.masked_fill_(empty, 0.0),
        lse_bound=lse_bound.add_(2.0**-22).masked_fill_(empty, 0.0).squeeze(-1),
    )
    cast = near.cast
    if not parts or cast is None:
        return result

    def share() -> CastPart:
        errors = (cast * widened).div_(total).masked_fill_(empty, 0.0)
        errors = errors if weights is None else errors.mul_(weights)
        return CastPart(linear - torch.bmm(errors, v.abs()), errors, x)

    return dataclasses.replace(result, share=share)


def _with_sink(
    block: Block, x: Tensor, sink: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Logits, values, what is hidden and dropout's factors of keys and a sink; (B61).

    A sink is one more key, whose value is 0.
    """
    none, hidden, weights = sink.isneginf().unsqueeze(-1), block.hidden, block.beside.weights
    hidden = torch.zeros_like(x, dtype=torch.bool) if hidden is None else hidden.expand(x.shape)
    return (
        with_column(x, sink.unsqueeze(-1)),
        torch.nn.functional.pad(block.v, (0, 0, 0, 1)),
        torch.cat((hidden, none), -1),
        None if weights is None else with_column(weights, 1.0),
    )


def _logarithm(model: Model, lse: Tensor, m: Tensor, own: Tensor, sink: Tensor | None) -> Tensor:
    """Error of m + log l, and with a sink of own + log l, own the keys' maximum; (B13), (B61)."""
    error = (lse - m).abs_().mul_(4 * U).add_(m.abs(), alpha=6 * U)
    error.add_(lse.abs(), alpha=(6 if sink is None else 10) * U).add_(10 * U * model.lift)
    return error if sink is None else error.add_(own.abs(), alpha=10 * U)


def _mark_sums(model: Model, v: Tensor, largest: float, bound: Tensor) -> None:
    """Say nothing of a column of o a partial sum of which may overflow; (B9)."""
    most = model.sums_largest("pv")
    if largest * v.shape[1] >= most:
        bound.masked_fill_(v.abs().sum(1, keepdim=True) * model.kept >= most, torch.inf)
    if model.part_error and largest >= model.out.overflow:  # the o of a part, as it is stored
        bound.masked_fill_(
            v.abs().amax(1, keepdim=True) * model.kept >= model.out.overflow, torch.inf
        )


def _floor(model: Model, v: Tensor, keys: int, largest: float) -> Tensor | float:
    """What is lost whatever P is, (heads, 1, head_dim_v) or one number; (B11), (B68), (B72)."""
    arithmetic = model.arithmetic
    floor = FLUSH * keys * max(1.0, largest, model.storage.largest * bool(model.problem.fp8))
    if model.halves("pv"):
        floor += (model.half_tiny(keys, "pv") + 2.0**-24 * keys * largest) * model.kept
    floor /= min(1.0, arithmetic.p_scale)
    if model.part_error:
        floor += arithmetic.merges * Cast(model.out).tiny * model.kept
    if not arithmetic.merged_by_sigmoid:
        return floor
    return floor + 32 * arithmetic.merges * U * v.abs().amax(1, keepdim=True)


def _depth(x: Tensor) -> Tensor:
    """How far the least S - m that a row sees is below 0, (heads, rows, 1)."""
    return x.masked_fill(x == -torch.inf, 0.0).amin(-1, keepdim=True).neg_()


def _furthest(s: Tensor, hidden: Tensor | None) -> Tensor:
    """The largest |S| that each row sees, (heads, rows, 1)."""
    size = s.abs()
    if hidden is not None:
        size.masked_fill_(hidden, 0.0)
    return size.amax(-1, keepdim=True)


def _normalisation(model: Model) -> float:
    """Relative error of the division by l; (B11)."""
    normal = model.denominator
    return SLACK * ((1 + 6 * U) / (1 - normal) - 1) if normal < 1 else math.inf


def _unknown(model: Model, given: Inputs, furthest: Tensor, infinite: Tensor) -> Tensor:
    """Rows of which nothing is said, (heads, rows, 1): P, l or acc may overflow, or a logit; (B9).

    Args:
        model: Coefficients.
        given: The whole problem's ranges.
        furthest: The largest logit that each row sees, (heads, rows, 1).
        infinite: Which logits in sight have no bound, (heads, rows, keys).
    """
    limit = LARGEST / (infinite.shape[-1] * max(1.0, given.largest_v * model.kept))
    limit = min(limit, model.p_overflow, 1.02 if model.halves("pv") else limit)
    # In the fma form the exponent of the largest key is off by as much.
    unknown = furthest * (U * SLACK) >= math.log(max(1.0, limit))
    # A logit may be inf, and inf - inf NaN.
    return unknown | infinite.any(-1, keepdim=True) if given.overflows(model) else unknown


def _hull(model: Model, o: Tensor, v: Tensor, rest: Tensor | float) -> Tensor:
    """Distance to the far end of V's range, plus what can leave the range; (B16), (B62)."""
    low, high = v.aminmax(dim=1, keepdim=True)
    furthest = torch.maximum(-low, high)
    if model.problem.dropout:
        high = furthest = furthest * model.kept
        low = -high
    rest = rest + model.value_error
    rest = rest + SLACK * model.blocks(v.shape[1]) * U  # acc's own roundings when it is rescaled
    if model.p is not None:
        lost = model.p.unit + min(1.0, v.shape[1] * model.p_tiny)
        rest = rest + eager.scores(model) * lost
    return torch.maximum(high - o, o - low).add_(furthest * (1.02 * rest))
