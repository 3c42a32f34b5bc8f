"""The probabilistic bound: the casts of P and dS lose a random sum instead of the worst one.

It is evaluated lazily. By Cauchy-Schwarz no n-term random sum is below 1/sqrt(n) of the worst one, so
rows (keys, for dk and dv) whose error is below that need no further look. Equations of docs/bounds.md.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.backward import backward_tile
from fa_verify.bounds.forward import forward_tile
from fa_verify.bounds.model import SLACK

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fa_verify.bounds.bounded import Bounded
    from fa_verify.bounds.formats import Cast
    from fa_verify.bounds.inputs import Inputs
    from fa_verify.bounds.model import Model
    from fa_verify.bounds.rows import Rows

__all__ = ["Refiner", "lambda_factor", "multiplicity"]

_CHUNK = 1 << 20  # elements of P that one look may hold
_MOST_COUNTED = 256  # rows or keys a head whose multiplicity is counted; the rest fall back on det
_BLOCKS = (16, 32, 64, 128, 256)


def lambda_factor(elements: int, d: float) -> float:
    """lambda / sqrt(3): deviations of a sum of uniform errors that no element exceeds; (B30)."""
    return math.sqrt(2 * math.log(2 * max(1, elements) / d) / 3)


def multiplicity(values: Tensor, width: float) -> Tensor:
    """How many entries of the same row are within ``width`` of each, itself included; (B31).

    Args:
        values: (rows, n), logarithms of what is cast; -inf entries count for nothing.
        width: Half the window.
    """
    order = values.sort(-1).values
    high = torch.searchsorted(order, values + width, right=True)
    low = torch.searchsorted(order, values - width)
    return (high - low).clamp_(min=1)


def _forward_multiplicity(x: Tensor, block_n: int | None, width: float) -> Tensor:
    """The most over every admitted blocking and both key orders, of what is then cast; (B32)."""
    worst = multiplicity(x, width)
    for block in (block_n,) if block_n else _BLOCKS:
        if block >= x.shape[-1]:
            continue
        padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % block), value=-torch.inf)
        peaks = padded.unflatten(-1, (-1, block)).amax(-1)
        for running in (peaks.cummax(-1).values, peaks.flip(-1).cummax(-1).values.flip(-1)):
            cast = x - running.masked_fill(running == -torch.inf, 0.0).repeat_interleave(block, -1)[
                ..., : x.shape[-1]
            ]
            worst = torch.maximum(worst, multiplicity(cast, width))
    return worst


@dataclasses.dataclass(frozen=True, slots=True)
class Refiner:
    """Refines one tensor's bound where an observed error is between the least and the most it can be.

    Attributes:
        model: Coefficients.
        given: The operands.
        rows: Row statistics of the backward; None for o.
        top: What the tiles take as the bound of h.
        name: Of the tensor.
        linear: Its bound before output rounding, (heads, group, seqlen, dim) or (heads, keys, dim).
        d: Probability.
    """

    model: Model
    given: Inputs
    rows: Rows | None
    top: float
    name: str
    linear: Tensor
    d: float

    def bounded(self, bounded: Bounded) -> Bounded:
        """Attach ourselves, if there is anything to refine."""
        cast = self._cast()
        by_l = self.name == "o" and self.model.arithmetic.l_from_rounded_p
        if cast is None or cast.truncates or by_l or 0 in bounded.det.shape:
            return bounded

        def refine(observed: Tensor, error: Tensor) -> Tensor:
            del observed
            return self._refined(bounded.det, error)

        return dataclasses.replace(bounded, refine=refine)

    def _cast(self) -> Cast | None:
        return self.model.p if self.name in ("o", "dv") else self.model.ds

    def _refined(self, det: Tensor, error: Tensor) -> Tensor:
        factor = lambda_factor(det.numel(), self.d)
        problem = self.model.problem
        by_row = self.name in ("o", "dq")
        terms = problem.seqlen_k if by_row else problem.group * problem.seqlen_q
        least = min(1.0, factor / math.sqrt(terms))
        if least == 1.0:
            return det
        linear = self.linear.reshape(det.shape)
        rounding = det - linear
        asked = ((error > least * linear + rounding) & (error <= det) & det.isfinite()).any(-1)
        if not bool(asked.any()):
            return det
        result = det.clone()
        heads = self.given.q.shape[0]
        asked = asked.reshape(heads, -1)
        flat_error, flat_rounding, flat_result, flat_linear = (
            x.reshape(heads, asked.shape[1], -1) for x in (error, rounding, result, linear)
        )
        look = self._look_at_rows if by_row else self._look_at_keys
        chunk = max(1, _CHUNK // terms)
        for head in asked.any(-1).nonzero().flatten().tolist():
            counted = 0
            for index in asked[head].nonzero().flatten().split(chunk):
                rest, cast, values, weight = look(head, index)
                most, spare = flat_linear[head, index], flat_rounding[head, index]
                bound = torch.minimum(most, _random(rest, cast, None, values, weight, factor, self._tiny()))
                over = (flat_error[head, index] > bound + spare).any(-1).nonzero().flatten()
                bound[over[max(0, _MOST_COUNTED - counted) :]] = most[over[max(0, _MOST_COUNTED - counted) :]]
                over = over[: max(0, _MOST_COUNTED - counted)]
                counted += len(over)
                if len(over):
                    count = self._count(values[over])
                    again = _random(
                        rest[over], cast[over], count, values[over], weight, factor, self._tiny()
                    )
                    bound[over] = torch.minimum(most[over], again)
                flat_result[head, index] = bound + spare
        return flat_result.reshape(det.shape)

    def _count(self, values: Tensor) -> Tensor:
        cast = self._cast()
        assert cast is not None
        if self.name == "o":
            return _forward_multiplicity(values, self.model.arithmetic.block_n, cast.unit / 4)
        return multiplicity(values, cast.unit / 4)

    def _tiny(self) -> float:
        """Logarithm of what is too near the subnormal grid's step to be taken as random; (B33)."""
        cast = self._cast()
        assert cast is not None
        scale = 1.0 if self.name in ("o", "dv") else max(1.0, self.model.scale)
        return math.log(8 * cast.tiny * scale)

    def _hidden(self, queries: Tensor, keys: Tensor) -> Tensor:
        problem = self.model.problem
        lo, hi = problem.mask.intervals(problem.seqlen_q, problem.seqlen_k)
        low, high = (torch.from_numpy(x).to(queries.device)[queries, None] for x in (lo, hi))
        return (keys < low) | (keys >= high)

    def _look_at_rows(self, head: int, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Bound without the cast, the cast's errors, log of what is cast, and what they multiply."""
        problem, given = self.model.problem, self.given
        keys = torch.arange(problem.seqlen_k, device=index.device)
        hidden = self._hidden(index % problem.seqlen_q, keys)
        q = given.q[head].flatten(0, 1)[None, index]
        k, v = given.k[head, None], given.v[head, None]
        if self.name == "o":
            part = forward_tile(self.model, given, q, k, v, hidden, self.top, parts=True)
            assert part.rest is not None
            assert part.p_cast is not None
            assert part.x is not None
            return part.rest[0], part.p_cast[0], part.x[0], v[0]
        assert self.rows is not None
        assert given.do is not None
        rows = self.rows.part(slice(head, head + 1), slice(None)).take(index)
        do = given.do[head].flatten(0, 1)[None, index]
        tile = backward_tile(self.model, given, rows, q, k, v, do, hidden, self.top)
        assert tile.ds_cast is not None
        cast = tile.ds_cast[0].double()
        most = self.linear.flatten(1, 2)[head, index]
        return most - SLACK * (cast @ k[0].abs()), SLACK * cast, tile.ds[0].abs().log(), k[0]

    def _look_at_keys(self, head: int, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same for keys: the sums run over the rows of the whole group."""
        problem, given = self.model.problem, self.given
        assert self.rows is not None
        assert given.do is not None
        queries = torch.arange(problem.seqlen_q, device=index.device).repeat(problem.group)
        hidden = self._hidden(queries, index)
        q, do = given.q[head].flatten(0, 1)[None], given.do[head].flatten(0, 1)[None]
        k, v = given.k[head, None, index], given.v[head, None, index]
        rows = self.rows.part(slice(head, head + 1), slice(None))
        tile = backward_tile(self.model, given, rows, q, k, v, do, hidden, self.top)
        if self.name == "dv":
            error, values, weight = tile.p_cast, tile.p[0].mT, do[0]
        else:
            error, values, weight = tile.ds_cast, tile.ds[0].mT.abs(), q[0]
        assert error is not None
        cast = error[0].mT.double()
        most = self.linear[head, index]
        return most - SLACK * (cast @ weight.abs()), SLACK * cast, values.log(), weight


def _random(  # noqa: PLR0913
    rest: Tensor,
    cast: Tensor,
    count: Tensor | None,
    values: Tensor,
    weight: Tensor,
    factor: float,
    tiny: float,
) -> Tensor:
    """rest + factor sqrt(sum count cast^2 weight^2), subnormals added in full; (B30), (B33)."""
    small = values < tiny
    fixed = cast.masked_fill(~small, 0.0)
    random = cast.masked_fill(small, 0.0).square_()
    if count is not None:
        random *= count
    return rest + fixed @ weight.abs() + factor * (random @ weight.square()).sqrt_()
