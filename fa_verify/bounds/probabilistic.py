"""The probabilistic bound: the casts of P and dS lose a random sum instead of the worst one.

It is evaluated lazily. By Cauchy-Schwarz the root of a sum of n squares is at least 1/sqrt(n) of
the sum: rows (keys, for dk and dv) whose error is below that need no further look; docs/bounds.md.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fa_verify.bounds.formats import Cast

__all__ = ["Look", "Refiner", "blocked_multiplicity", "lambda_factor", "multiplicity"]

_CHUNK = 1 << 20  # elements of P that one look may hold
_MOST_COUNTED = 256  # rows or keys a head whose multiplicity is counted; the rest fall back on det
_BLOCKS = (16, 32, 64, 128, 256)


def lambda_factor(elements: int, d: float) -> float:
    """Lambda / sqrt(3): what multiplies the root of the sum of squares; (B30)."""
    return math.sqrt(2 * math.log(2 * max(1, elements) / d) / 3)


def multiplicity(logs: Tensor, width: float, floor: float) -> Tensor:
    """How many entries of the same row round alike with each, itself included; (B31).

    Args:
        logs: (rows, n), logarithms of what is cast.
        width: Half the window, relative to a normal value.
        floor: Logarithm of the smallest normal value: the grid is uniform below, and so is the
            window.
    """
    below = floor + torch.expm1(logs - floor)
    values = torch.where(logs < floor, below, logs)
    order = values.sort(-1).values
    high = torch.searchsorted(order, values + width, right=True)
    low = torch.searchsorted(order, values - width)
    return (high - low).clamp_(min=1)


def blocked_multiplicity(x: Tensor, block_n: int | None, width: float, floor: float) -> Tensor:
    """The most over every admitted blocking and both key orders, of what is then cast; (B32).

    Args:
        x: (rows, keys), S less any number per row.
        block_n: Keys a block if declared.
        width: Half the window, relative.
        floor: Logarithm of the smallest normal value of the cast.
    """
    top = x.amax(-1, keepdim=True)
    worst = multiplicity(x - top.masked_fill(top == -torch.inf, 0.0), width, floor)
    n = x.shape[-1]
    for block in (block_n,) if block_n else _BLOCKS:
        if block >= n:
            continue
        padded = torch.nn.functional.pad(x, (0, -n % block), value=-torch.inf)
        peaks = padded.reshape(padded.shape[0], -1, block).amax(-1)
        for running in (peaks.cummax(-1).values, peaks.flip(-1).cummax(-1).values.flip(-1)):
            running.masked_fill_(running == -torch.inf, 0.0)
            cast = x - running.repeat_interleave(block, -1)[..., :n]
            worst = torch.maximum(worst, multiplicity(cast, width, floor))
    return worst


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """Some rows (keys) of one tensor in detail.

    Attributes:
        rest: (rows, dim), the bound without the cast's part.
        errors: (rows, terms), at most what the cast adds to each term.
        logs: (rows, terms), logarithms of what is cast (of o: up to the block's maximum).
        weight: (terms, dim), what the terms multiply.
    """

    rest: Tensor
    errors: Tensor
    logs: Tensor
    weight: Tensor

    def bound(self, factor: float, tiny: float, rows: Tensor, count: Tensor | None) -> Tensor:
        """Rest + factor sqrt(sum count errors^2 weight^2), the tiny in full; (B30), (B33)."""
        errors = self.errors[rows]
        small = self.logs[rows] < tiny
        fixed = errors.masked_fill(~small, 0.0)
        random = errors.masked_fill(small, 0.0)
        # Scaled so that squares neither overflow nor underflow.
        peak = self.weight.abs().amax().clamp(min=1e-300)
        largest = random.amax(-1, keepdim=True).clamp(min=1e-300)
        random = (random / largest).square_()
        if count is not None:
            random *= count
        root = (random @ (self.weight / peak).square()).sqrt_() * (peak * largest)
        return self.rest[rows] + fixed @ self.weight.abs() + factor * root


@dataclasses.dataclass(frozen=True, slots=True)
class Refiner:
    """Refines one tensor's bound where an observed error is between the least and most it can be.

    Attributes:
        cast: The cast that is taken as random.
        scale: What is cast times this is what the terms are in.
        linear: The tensor's bound before output rounding, (heads, rows, dim).
        terms: Length of the sums.
        look: ``look(head, rows)``.
        count: Multiplicities of a look's logs, ``count(logs, width, floor)``.
        d: Probability.
    """

    cast: Cast
    scale: float
    linear: Tensor
    terms: int
    look: Callable[[int, Tensor], Look]
    count: Callable[[Tensor, float, float], Tensor]
    d: float

    def refined(self, det: Tensor, error: Tensor) -> Tensor:
        """The probabilistic bound where it decides, det elsewhere.

        Args:
            det: The deterministic bound with output rounding, any shape of as many elements.
            error: Observed, shaped as det.
        """
        factor = lambda_factor(det.numel(), self.d)
        least = factor / math.sqrt(max(1, self.terms))
        if least >= 1.0:
            return det
        flat_det, flat_error = det.reshape(self.linear.shape), error.reshape(self.linear.shape)
        rounding = flat_det - self.linear
        open_question = (flat_error > least * self.linear + rounding) & (flat_error <= flat_det)
        asked = (open_question & flat_det.isfinite()).any(-1)
        if not bool(asked.any()):
            return det
        result = flat_det.clone()
        chunk = max(1, _CHUNK // self.terms)
        for head in asked.any(-1).nonzero().flatten().tolist():
            left = _MOST_COUNTED
            for index in torch.split(asked[head].nonzero().flatten(), chunk):
                allowed = flat_error[head, index] - rounding[head, index]
                bound, counted = self._decided(head, index, allowed, factor, left)
                left -= counted
                result[head, index] = bound + rounding[head, index]
        return result.reshape(det.shape)

    def _decided(
        self, head: int, index: Tensor, allowed: Tensor, factor: float, budget: int
    ) -> tuple[Tensor, int]:
        """Bounds of these rows before output rounding, and how many of them were counted in.

        Counting can only raise the bound, so rows within the uncounted one are done.
        """
        tiny = math.log(8 * self.cast.tiny * self.scale)
        look, most = self.look(head, index), self.linear[head, index]
        bound = look.bound(factor, tiny, torch.arange(len(index), device=index.device), None)
        over = (allowed > bound).any(-1).nonzero().flatten()
        counted, uncounted = over[:budget], over[budget:]
        if len(counted):
            floor = math.log(self.cast.tiny / self.cast.unit * self.scale)
            count = self.count(look.logs[counted], self.cast.unit / 4, floor)
            bound[counted] = look.bound(factor, tiny, counted, count)
        bound[uncounted] = most[uncounted]
        return torch.minimum(bound, most), len(counted)
