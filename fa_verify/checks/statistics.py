"""`statistics`: how far each tensor is from float64, for records and reports. Judges nothing."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from fa_verify import foreach
from fa_verify.bounds import FORMATS
from fa_verify.checks.observed import comparisons
from fa_verify.checks.rule_2x import rule_2x
from fa_verify.record import TensorStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.checks.comparison import Comparison
    from fa_verify.trial import Trial

__all__ = ["TensorStats", "statistics"]

_LARGEST = sys.float_info.max  # JSON has no inf
_MEDIAN_OF = 4096  # elements; of 100,000 a median takes as long as 40 other passes


def statistics(trial: Trial) -> dict[str, TensorStats]:
    """One `TensorStats` for each of o, lse, dq, dk, dv that the kernel returned."""
    parts = comparisons(trial)
    allowances = rule_2x(trial, parts)
    judged = {name: part for name, part in parts.items() if part.got.numel() and _any(part)}
    found = dict(zip(judged, _facts(list(judged.values())), strict=True))
    return {
        name: _stats(part, found.get(name, (0.0, 0.0, 0.0, 0.0)), allowances.get(name))
        for name, part in parts.items()
    }


def _any(part: Comparison) -> bool:
    """Whether anything is judged."""
    return part.judges_all or bool(part.judged.any())


def _facts(parts: Sequence[Comparison]) -> list[tuple[float, ...]]:
    """Place of the largest ratio, median ratio, bias, largest error in ulps, of each."""
    if not parts:
        return []
    ratios, biases = [], []
    for part, excess in zip(parts, _excesses(parts), strict=True):
        ratio, over = part.ratio, excess
        if not part.judges_all:
            ratio, over = ratio[part.judged], over[part.judged]
        ratios.append(_some(ratio))
        biases.append(over.mean())
    places = [part.ratio.argmax() for part in parts]
    # One median of all, whose rows are filled up with NaN: it is many operations on a card.
    medians = pad_sequence(ratios, batch_first=True, padding_value=math.nan).nanmedian(-1).values
    read = torch.stack([*places, *medians, *biases, *_ulps(parts)])  # one transfer
    facts: list[list[float]] = read.view(4, -1).T.tolist()
    return list(map(tuple, facts))


def _excesses(parts: Sequence[Comparison]) -> list[torch.Tensor]:
    """Of each element err/bound, positive where it is too large: lse as a number, others in size.

    Values of either sign would hide in their mean that all of them are too small, as a format that
    truncates makes them.
    """
    found = [part.signed for part in parts]
    sized = [i for i, part in enumerate(parts) if part.name != "lse"]
    if sized:
        signs = foreach.signs([parts[i].reference for i in sized])
        outward = foreach.products([found[i] for i in sized], signs)
        for i, excess in zip(sized, outward, strict=True):
            found[i] = excess
    return found


def _stats(part: Comparison, facts: Sequence[float], over_2x: float | None) -> TensorStats:
    place, median, bias, ulps = facts
    ratio, ratio_prob = _number(part.most), _number(part.most_prob)
    worst = part.at(int(place)) if part.got.numel() else ()
    if part.any_broken:
        ratio = ratio_prob = _LARGEST
        worst = part.worst(part.broken.to(torch.float64))
    return TensorStats(
        elements=part.got.numel(),
        inconclusive=part.count_inconclusive,
        ratio=ratio,
        ratio_prob=ratio_prob,
        ratio_median=_number(median),
        ulp=_number(ulps),
        bias=_number(bias),
        rule_2x=over_2x,
        worst=worst,
    )


def _some(values: torch.Tensor) -> torch.Tensor:
    """`_MEDIAN_OF` evenly spaced elements or up to twice as many; a median of all is slow."""
    flat = values.flatten()
    return flat[:: max(1, flat.numel() // _MEDIAN_OF)]


def _ulps(parts: Sequence[Comparison]) -> Sequence[torch.Tensor]:
    """The largest error of each in ulps of its row's largest element.

    Next to it, an element that cancels to almost 0 is not wrong by a million ulps. An ulp belongs
    to a row, so only the row's largest error counts.
    """
    rows = [_largest_of_rows(part) for part in parts]
    found: dict[int, torch.Tensor] = {}
    for dtype in {part.dtype for part in parts}:
        own = [i for i, part in enumerate(parts) if part.dtype == dtype]
        sizes, errors = (torch.cat([rows[i][which] for i in own]) for which in (0, 1))
        lengths = [len(rows[i][0]) for i in own]
        ulps = torch.split(errors / FORMATS[dtype].ulp(sizes), lengths)
        found.update(zip(own, foreach.largest(ulps), strict=True))
    return [found[i] for i in range(len(parts))]


def _largest_of_rows(part: Comparison) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest reference of each row, and the largest error."""
    size, error = part.reference, part.error
    if not part.judges_all:
        size = size.abs().nan_to_num_(posinf=0.0)
    if size.dim() == 4:
        size, error = (torch.linalg.vector_norm(x, math.inf, -1) for x in (size, error))
    return size.flatten(), error.flatten()


def _number(value: float) -> float:
    return max(-_LARGEST, min(value, _LARGEST))
