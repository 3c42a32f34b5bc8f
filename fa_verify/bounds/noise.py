"""How large a right kernel's errors of o may be in the root mean square; (B44), (B45).

Only a sample of rows is looked at, the same whatever was observed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.bias import PARTS, places
from fa_verify.bounds.probabilistic import multiplicity, on_the_grid

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.bounds.formats import Format
    from fa_verify.bounds.probabilistic import Look, Refiner

__all__ = ["Noise", "Observed", "noise_of"]

_FEW, _MANY = 1 << 13, 1 << 19  # terms of sums that the first look, and the one that judges, take
_TOGETHER = 0.25  # measured (docs/bounds.md): below 0.1 for independent data
_NEAR = 2.0**-10  # relative distance to a power of two at which the spacing is not known
_MOST_HEADS = 16
# The mean square of a spacing over the largest of its binade, for evenly spread logarithms.
_RELATIVE = 0.75 / math.log(4)


@dataclasses.dataclass(frozen=True, slots=True)
class Observed:
    """What a kernel returned beside what it should, shaped as the refiner's `linear`.

    Attributes:
        reference: Exact values.
        det: The deterministic bound.
        error: |got - reference|, 0 where it does not count.
        dtype: Of the output.
    """

    reference: Tensor
    det: Tensor
    error: Tensor
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """The errors of a sample of elements in the root mean square.

    Attributes:
        size: Over what independent roundings leave.
        allowed: The most that a right kernel's may be.
        elements: How many were looked at.
    """

    size: float
    allowed: float
    elements: int


def noise_of(refiner: Refiner, out: Format, observed: Observed) -> Noise | None:
    """The noise of o if it is more than a right kernel's; (B44).

    Args:
        refiner: Of o.
        out: What it is rounded to in the end.
        observed: What was returned.
    """
    heads, rows, _ = refiner.linear.shape
    chance = 2 * math.log(1 / refiner.d)
    least = 1 + math.sqrt(chance / min(heads * rows, max(1, _MANY // refiner.terms)))
    few = _sample(refiner, observed, _FEW)
    seen, typical = torch.stack((few.seen, few.typical)).tolist()
    if seen <= least**2 * typical:
        return None
    part = _sample(refiner, observed, _MANY)
    cast = _variances(refiner, part)
    variance = float(cast.sum(-1).max()) + _last(part)
    size = math.sqrt(float(part.seen) / variance) if variance else 0.0
    if not size > 1:
        return None
    largest = float(cast.max()) + float(part.last.square().sum(-1).max()) / 3
    allowed = 1 + math.sqrt(chance * largest / variance)
    if not size > allowed or not _by_chance(refiner, part, out):
        return None
    return Noise(size, allowed, part.excess.numel())


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Some rows (keys) of some heads, each in units of what independent roundings leave of it.

    Attributes:
        look: They in detail.
        cast: (heads, rows, terms), at most what the random cast adds to each term, weighted.
        excess: (heads, rows, dim), errors less what need not be random, weighted.
        last: (heads, rows, dim), at most what the rounding of the output adds, weighted.
        missed: (heads, rows, dim), what it adds to the exact value, weighted.
        logs: (heads, rows, dim), logarithms of the exact values.
    """

    look: Look
    cast: Tensor
    excess: Tensor
    last: Tensor
    missed: Tensor
    logs: Tensor

    @property
    def seen(self) -> Tensor:
        """Sum of squares of the errors."""
        return self.excess.square().sum()

    @property
    def typical(self) -> Tensor:
        """Sum of variances, roughly."""
        cast = _times(self.cast_of(self.look.logs).square(), self.look.weight.square().sum(-1))
        return (_RELATIVE * cast.sum() + self.last.square().sum()) / 3

    def cast_of(self, logs: Tensor) -> Tensor:
        """`cast` where this is cast: what p is taken relative to has p = 1, exactly."""
        return self.cast.masked_fill(logs == 0, 0.0)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """(heads, rows, terms) by (heads, terms): (heads, rows)."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _sample(refiner: Refiner, observed: Observed, most: int) -> _Part:
    place = refiner.sample(most, _MOST_HEADS if most == _MANY else 2)
    look, linear = refiner.several(*place), refiner.linear[place]
    last = observed.det[place] - linear
    random = look.errors.masked_fill(look.logs < refiner.tiny, 0.0)
    fixed = look.rest + (look.errors - random) @ look.size
    square = _times(random.square(), look.weight.square().sum(-1)) + last.square().sum(-1)
    square = (square / 3).unsqueeze(-1)
    usable = (square > 0) & square.isfinite()
    weight = torch.where(usable, square.rsqrt(), 0.0)
    exact = observed.reference[place]
    missed = (exact - exact.to(observed.dtype).double()).nan_to_num_(posinf=0.0, neginf=0.0)
    excess = torch.where(usable, (observed.error[place] - fixed).clamp(min=0), 0.0)
    last = torch.where(usable, last, 0.0)
    return _Part(
        look,
        torch.where(usable, random * weight, 0.0),
        excess * weight,
        last * weight,
        torch.where(usable, missed * weight, 0.0),
        exact.abs().log(),
    )


def _last(part: _Part) -> float:
    """Sum of squares that rounding the output leaves: as if random, or as of the exact values."""
    return max(float(part.last.square().sum()) / 3, float(part.missed.square().sum()))


def _variances(refiner: Refiner, part: _Part) -> Tensor:
    """What the cast leaves of each row, squared: as if random, or as of the exact values.

    (ways, rows), for everything that may be cast.
    """
    size, ways = part.look.weight.square().sum(-1), []
    for logs in refiner.across(part.look.logs):
        half, missed = on_the_grid(refiner.cast, logs.exp())
        cast = part.cast_of(logs) * _within(half, logs, refiner.cast.unit)
        alike = multiplicity(logs, refiner.cast.unit / 4, refiner.floor)
        ways.append(_times(cast.square() * alike, size) / 3)
        ways.append(((cast * missed) @ part.look.weight).square().sum(-1))
    return torch.stack(ways).flatten(1)


def _within(half: Tensor, logs: Tensor, unit: float) -> Tensor:
    """Half a spacing over the largest that it may be; next to a power of two it may be either."""
    within = (half / unit / logs.exp()).clamp_(max=1.0)
    return within.masked_fill_(within < 0.5 + _NEAR, 1.0)


def _by_chance(refiner: Refiner, part: _Part, out: Format) -> bool:
    """Whether what is rounded lies between neighbours of its format as chance would have it."""
    spacings = round(0.5 / refiner.cast.unit)
    for logs in refiner.across(part.look.logs):
        if _together(logs, part.cast_of(logs), spacings, refiner.floor) > _TOGETHER:
            return False
    own = round(0.5 / out.unit_roundoff)
    return _together(part.logs, part.last, own, out.emin * math.log(2)) <= _TOGETHER


def _together(logs: Tensor, weights: Tensor, spacings: int, floor: float) -> float:
    """How many values, beyond chance and each itself, lie in one part of a spacing; (B45).

    The mean over values, by the square of their weights.
    """
    sums, square = weights.new_zeros(2, (spacings + 1) * PARTS), weights.square()
    alone = float(square.square().sum())
    for total, index in zip(sums, places(logs, spacings, PARTS, floor), strict=True):
        total.index_add_(0, index.flatten(), square.flatten())
    # A quarter of a spacing apart errors have nothing to do with each other, and chance knows no
    # difference between the two places.
    apart, length = PARTS // 4, spacings * PARTS
    pairs = 0.0
    for total, start in zip(sums, (0, PARTS // 2), strict=True):
        binade = total[start : start + length]
        pairs = max(pairs, float((binade[apart:] - binade[:-apart]).square().sum()) / 2)
    return pairs / alone - 1 if alone else 0.0
