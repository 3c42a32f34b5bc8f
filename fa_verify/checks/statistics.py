"""`statistics`: how far each tensor is from float64, for records and reports. Judges nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from fa_verify.checks.comparison import Comparison, comparisons, ulp
from fa_verify.checks.rule_2x import rule_2x
from fa_verify.record import TensorStats

if TYPE_CHECKING:
    from fa_verify.trial import Trial

__all__ = ["TensorStats", "statistics"]

_LARGEST = sys.float_info.max  # JSON has no inf
_MEDIAN_OF = 4096  # elements; of 100,000 a median takes as long as 40 other passes


def statistics(trial: Trial) -> dict[str, TensorStats]:
    """One `TensorStats` for each of o, lse, dq, dk, dv that the kernel returned."""
    parts = comparisons(trial)
    allowances = rule_2x(trial, parts)
    judged = {name: ratios for name, part in parts.items() if (ratios := _ratios(part))[0].numel()}
    facts = [_facts(parts[name], *ratios) for name, ratios in judged.items()]
    read = torch.stack(facts).tolist() if facts else []  # one transfer from the device
    found = dict(zip(judged, read, strict=True))
    return {
        name: _stats(part, found.get(name, [0.0] * 4), allowances.get(name))
        for name, part in parts.items()
    }


def _ratios(part: Comparison) -> tuple[torch.Tensor, torch.Tensor]:
    """Error over bound, and the same with the error's sign, of what is judged."""
    signed = torch.copysign(part.ratio, part.difference)
    if part.judges_all:
        return part.ratio, signed
    return part.ratio[part.judged], signed[part.judged]


def _facts(part: Comparison, ratios: torch.Tensor, signed: torch.Tensor) -> torch.Tensor:
    """The place of the largest ratio, the median ratio, the bias, the largest error in ulps."""
    return torch.stack([part.ratio.argmax(), _some(ratios).median(), signed.mean(), _ulps(part)])


def _stats(part: Comparison, facts: list[float], over_2x: float | None) -> TensorStats:
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


def _ulps(part: Comparison) -> torch.Tensor:
    """The largest error in ulps of its row's largest element.

    Next to it, an element that cancels to almost 0 is not wrong by a million ulps. An ulp belongs
    to a row, so only the row's largest error counts.
    """
    size, error = part.reference.abs(), part.error
    if not part.judges_all:
        size = size.nan_to_num_(posinf=0.0)
    if size.dim() == 4:
        size, error = size.amax(-1), error.amax(-1)
    return (error / ulp(size, part.dtype)).max()


def _number(value: float) -> float:
    return max(-_LARGEST, min(value, _LARGEST))
