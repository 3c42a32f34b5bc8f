"""What is read of several comparisons at once: on a card each transfer costs as much as a launch.

`Comparison` keeps what is found here, and asks for it when somebody asks it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify import foreach

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fa_verify.bounds.probabilistic import Question, Refiner
    from fa_verify.checks.comparison import Comparison

__all__ = ["Due", "Extent", "look", "look_closer"]


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """What is read of a comparison before its elements are judged.

    Attributes:
        least: The least of det if nothing is infinite or NaN, nor may be; else -inf.
        most: The largest ratio, where least is above 0.
    """

    least: float
    most: float


@dataclasses.dataclass(frozen=True, slots=True)
class Due:
    """Errors where a number is due, 0 elsewhere.

    Attributes:
        difference: What was got less the reference; error: without its sign.
        ratio: Error over the deterministic bound; signed: with the error's sign. They mean
            something where that is 0 nowhere.
    """

    difference: torch.Tensor
    error: torch.Tensor
    ratio: torch.Tensor
    signed: torch.Tensor


def look(parts: Iterable[Comparison]) -> None:
    """Find how far the numbers of some comparisons reach, in one transfer from the device."""
    some = []
    for part in parts:
        if part.got.numel():
            some.append(part)
        else:
            part.__dict__["extent"] = Extent(math.inf, 0.0)
    if not some:
        return
    dets, gots, references = ([f(x) for x in some] for f in (_det, _got, _reference))
    differences = foreach.differences(gots, references)
    for part, difference in zip(some, differences, strict=True):
        if not part.all_due:
            difference.masked_fill_(~part.due, 0.0)
    errors, signed = foreach.sizes(differences), foreach.ratios(differences, dets)
    ratios = foreach.sizes(signed)
    largest = foreach.largest([*ratios, *dets, *gots, *references])
    least = [det.amin() for det in dets]
    overflows = [ok.any() for part in some if (ok := part.bounded.overflow_ok) is not None]
    read = torch.stack([*largest, *least, *overflows]).tolist()
    n = len(some)
    ends = [[read[start + i] for start in range(0, 5 * n, n)] for i in range(n)]
    may_overflow = iter(read[5 * n :])
    every = map(Due, differences, errors, ratios, signed)
    for part, (most, *finite), due in zip(some, ends, every, strict=True):
        overflow = part.bounded.overflow_ok is not None and next(may_overflow)
        ordinary = not overflow and all(map(math.isfinite, finite))
        extent = Extent(finite[-1] if ordinary else -math.inf, most)
        part.__dict__.update(extent=extent, _due=due)


def look_closer(parts: Iterable[Comparison]) -> None:
    """Find the probabilistic bounds of some comparisons, in few transfers from the device."""
    every = [part for part in parts if "prob" not in part.__dict__]
    asked = [(part, question) for part in every if (question := part.question()) is not None]
    asked = _where([question.any_asked for _, question in asked], asked)
    small = [(part, question) for part, question in asked if _refiner(part).small]
    bounds = [question.together() for _, question in small]
    over = _where([any_over for _, any_over in bounds], small)
    for (part, _), (prob, _) in zip(small, bounds, strict=True):
        part.__dict__["prob"] = prob
    for part, question in asked:
        if not _refiner(part).small or any(part is other for other, _ in over):
            part.__dict__["prob"] = question.apart()
    for part in every:
        part.__dict__.setdefault("prob", part.bounded.det)
    closer = [part for part, _ in asked]
    if closer:
        largest = torch.stack([*foreach.largest([part.ratio_prob for part in closer])]).tolist()
        for part, most in zip(closer, largest, strict=True):
            part.__dict__["most_prob"] = most
    for part in every:
        part.__dict__.setdefault("most_prob", part.most)


def _where(
    said: list[torch.Tensor], items: list[tuple[Comparison, Question]]
) -> list[tuple[Comparison, Question]]:
    """Those items of which it was said that it is so; one transfer from the device."""
    read = torch.stack(said).tolist() if said else []
    return [item for item, so in zip(items, read, strict=True) if so]


def _refiner(part: Comparison) -> Refiner:
    refiner = part.bounded.refiner
    assert refiner is not None  # noqa: S101 -- else there is no question
    return refiner


def _det(part: Comparison) -> torch.Tensor:
    return part.bounded.det


def _got(part: Comparison) -> torch.Tensor:
    return part.got


def _reference(part: Comparison) -> torch.Tensor:
    return part.reference
