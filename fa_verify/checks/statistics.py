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
    return {name: _stats(part, allowances.get(name)) for name, part in parts.items()}


def _stats(part: Comparison, over_2x: float | None) -> TensorStats:
    worst = part.worst(part.ratio)
    ratio, ratio_prob = _number(part.most), _number(part.most_prob)
    if part.any_broken:
        ratio = ratio_prob = _LARGEST
        worst = part.worst(part.broken.to(torch.float64))
    ratios, signed = part.ratio, torch.copysign(part.ratio, part.difference)
    if not part.judges_all:
        ratios, signed = ratios[part.judged], signed[part.judged]
    return TensorStats(
        elements=part.got.numel(),
        inconclusive=int(part.inconclusive.count_nonzero()),
        ratio=ratio,
        ratio_prob=ratio_prob,
        ratio_median=_number(_some(ratios).median()) if ratios.numel() else 0.0,
        ulp=_ulps(part),
        bias=_number(signed.mean()) if signed.numel() else 0.0,
        rule_2x=over_2x,
        worst=worst,
    )


def _some(values: torch.Tensor) -> torch.Tensor:
    """`_MEDIAN_OF` evenly spaced elements or up to twice as many; a median of all is slow."""
    flat = values.flatten()
    return flat[:: max(1, flat.numel() // _MEDIAN_OF)]


def _ulps(part: Comparison) -> float:
    """The largest error in ulps of its row's largest element.

    Next to it, an element that cancels to almost 0 is not wrong by a million ulps. An ulp belongs
    to a row, so only the row's largest error counts.
    """
    if not part.error.numel():
        return 0.0
    size, error = part.reference.abs(), part.error
    if not part.judges_all:
        size = size.nan_to_num_(posinf=0.0)
    if size.dim() == 4:
        size, error = size.amax(-1), error.amax(-1)
    return _number((error / ulp(size, part.dtype)).max())


def _number(value: torch.Tensor | float) -> float:
    return max(-_LARGEST, min(float(value), _LARGEST))
