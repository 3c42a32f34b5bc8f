"""How far a right kernel's errors may lean one way, summed over a whole tensor; (B40) to (B42)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fa_verify.bounds.formats import Format
    from fa_verify.bounds.probabilistic import Index, Look, Refiner

__all__ = [
    "PARTS",
    "Allowance",
    "Phases",
    "allowance",
    "places",
    "self_normalised",
]

_ALIKE = 2.0**-16  # values within so much of each other are taken to round alike
PARTS = 16  # of a spacing: how finely the place of a value between its neighbours is told


@dataclasses.dataclass(frozen=True, slots=True)
class Allowance:
    """What a weighted sum of a right kernel's errors may be.

    Attributes:
        fixed: Of each row (key, for dk and dv): what may have one sign in every row.
        variance: ``variance()`` is that of all the rest, roundings that go alike counted together;
            it costs many times what ``fixed`` costs.
    """

    fixed: Tensor
    variance: Callable[[], float]


def self_normalised(rows: Tensor, fixed: Tensor, factor: float) -> float:
    """By how much a sum of rows leaves what chance and ``fixed`` allow; negative: it does not.

    Args:
        rows: Sums that are symmetric and independent but for a part within ``fixed``; (B41).
        fixed: As `Allowance.fixed`.
        factor: Lambda.
    """
    total = rows.sum()
    rows = torch.where(total < 0, -rows, rows)
    # The part that explains most is fixed in every row, but where -fixed would raise the norm more.
    norm = (rows - fixed).norm().clamp(min=1e-300)
    turned = (2 * fixed * (factor * rows / norm - 1).clamp(min=0)).sum()
    return float(total.abs() - fixed.sum() - factor * norm - turned)


def places(logs: Tensor, cells: int, parts: int, floor: float) -> tuple[Tensor, Tensor]:
    """Where values lie in their binade, ``cell * parts + part``, on two grids half a cell apart.

    Args:
        logs: Logarithms of the values.
        cells: Cells in a binade.
        parts: Parts in a cell.
        floor: Logarithm of the smallest normal value: below it cells grow no smaller.
    """
    binades = logs.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) / math.log(2)
    place = torch.exp2(binades - binades.floor().clamp_(min=floor / math.log(2)))
    place = torch.where(place < 1, place, place - 1) * (cells * parts)
    last = (cells + 1) * parts - 1
    return place.long().clamp_(0, last), (place + parts / 2).long().clamp_(0, last)


class Phases:
    """Variance of a signed sum of rounding errors of which some go alike; (B42).

    The error of rounding x is a saw tooth of where x lies between two neighbours of the format.
    Values next to the same neighbour move together when what is rounded is scaled by an unknown
    factor; others do not.
    """

    def __init__(self, like: Tensor, cells: int, parts: int = 1, floor: float = -math.inf) -> None:
        """Start empty.

        Args:
            like: A tensor on the device of those that will be added.
            cells: Parts of a binade whose values go together; for a cast, its spacings.
            parts: How finely a place in a cell is told; 1: all in a cell round alike.
            floor: Logarithm of the smallest normal value: below it cells grow no smaller.
        """
        self._cells, self._parts, self._floor = cells, parts, floor
        self._sums = like.new_zeros(2, (cells + 1) * parts, dtype=torch.float64)
        self._squares = like.new_zeros((), dtype=torch.float64)

    def add(self, logs: Tensor, errors: Tensor, alone: Tensor | None = None) -> None:
        """Add values, as logarithms of their magnitude, and the most that each adds to the sum.

        Args:
            logs: Of the values.
            errors: Shaped as logs.
            alone: bool, where an error has nothing to do with the others; None: nowhere.
        """
        errors = errors.masked_fill(~logs.isfinite(), 0.0)
        self._squares += errors.square().sum()
        if alone is not None:
            errors = errors.masked_fill(alone, 0.0)
        grids = places(logs, self._cells, self._parts, self._floor)
        for sums, index in zip(self._sums, grids, strict=True):
            sums.index_add_(0, index.flatten(), errors.flatten())

    def variance(self) -> float:
        """Of the sum of all that was added."""
        n = self._parts
        place = torch.arange(n, dtype=torch.float64, device=self._sums.device)
        apart = (place[:, None] - place).abs() / n
        apart = torch.minimum(apart, 1 - apart)
        # The mean over both parts, each value anywhere in its own; at most 1 - 2/n + 1/n^2.
        alike = 1 - 6 * apart + 6 * apart.square() + 1 / n**2
        if n > 1:
            alike.fill_diagonal_(1 - 2 / n + 1 / n**2)
            alike /= 1 - 2 / n + 1 / n**2
        else:
            alike.fill_(1.0)
        cells = self._sums.reshape(2, -1, n)
        together = ((cells @ alike) * cells).sum((-1, -2))
        if n > 1:  # values that share a place in their cells may be multiples of one number
            places = cells.sum(1)
            together = torch.maximum(together, ((places @ alike) * places).sum(-1))
        return float(together.max() + self._squares) / 3


def allowance(refiner: Refiner, reference: Tensor, out: Format, weights: Tensor) -> Allowance:
    """What ``sum(weights * error)`` may be of a tensor whose casts are random; (B42).

    Args:
        refiner: Of the tensor.
        reference: Exact values.
        out: What they are rounded to in the end.
        weights: Shaped as the tensor.
    """
    weights, reference = (x.reshape(refiner.linear.shape) for x in (weights, reference))
    fixed = weights.new_zeros(weights.shape[:2])
    used = (weights != 0).any(-1)
    for place in refiner.portions(used):
        part = _portion(refiner, weights[place], used[place], place)
        fixed[place] = part.fixed
    return Allowance(fixed, functools.partial(_variance, refiner, reference, out, weights))


@dataclasses.dataclass(frozen=True, slots=True)
class _Portion:
    """Some rows of some heads.

    Attributes:
        look: They in detail.
        fixed: As in `Allowance`.
        errors: (heads, rows, terms), what each term's rounding adds to the weighted sum, signed.
    """

    look: Look
    fixed: Tensor
    errors: Tensor


def _portion(
    refiner: Refiner, weights: Tensor, used: Tensor, place: tuple[slice, Index]
) -> _Portion:
    look = refiner.several(*place)
    errors = look.errors * (weights @ look.weight.mT)
    small = look.logs < refiner.tiny
    fixed = (weights.abs() * look.rest).sum(-1) + errors.masked_fill(~small, 0.0).abs().sum(-1)
    errors.masked_fill_(small | ~used.unsqueeze(-1), 0.0)
    if look.sign is not None:
        errors *= look.sign
    return _Portion(look, torch.where(used, fixed, 0.0), errors)


def _variance(refiner: Refiner, reference: Tensor, out: Format, weights: Tensor) -> float:
    outputs = [
        Phases(weights, round(0.5 / out.unit_roundoff), PARTS, out.emin * math.log(2))
        for _ in range(2)
    ]
    roundings = weights * out.half_ulp(reference) * reference.sign()
    casts: list[Phases] = []
    spacings = round(0.5 / refiner.cast.unit)
    used = (weights != 0).any(-1)
    for place in refiner.portions(used):
        part = _portion(refiner, weights[place], used[place], place)
        logs = reference[place].abs().log()
        multiples = logs - _one_number(part).unsqueeze(-1)
        multiples.masked_fill_(_one_factor(part), 0.0)
        for phases, at in zip(outputs, (logs, multiples), strict=True):
            phases.add(at, roundings[place])
        positive = part.look.sign is None
        for position, logs in enumerate(refiner.across(part.look.logs)):
            if position == len(casts):
                casts.append(Phases(weights, spacings, PARTS, refiner.floor))
            # What p is taken relative to has p = 1, exactly.
            casts[position].add(logs, part.errors, logs == 0 if positive else None)
    last = max(x.variance() for x in outputs)
    return last + max((x.variance() for x in casts), default=0.0)


def _one_number(part: _Portion) -> Tensor:
    """(heads, rows), the logarithm of the number whose copies are cast; 0 where others are too."""
    logs, cast = part.look.logs, part.errors != 0
    largest = logs.masked_fill(~cast, -math.inf).amax(-1)
    alike = largest - logs.masked_fill(~cast, math.inf).amin(-1) < _ALIKE
    return torch.where(alike & largest.isfinite(), largest, 0.0)


def _one_factor(part: _Portion) -> Tensor:
    """(heads, 1, columns), where all that is cast has one factor: sums are coarse, too."""
    weight = part.look.weight
    return (weight == weight[:, :1]).all(1, keepdim=True)
