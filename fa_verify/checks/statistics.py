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


def statistics(trial: Trial) -> dict[str, TensorStats]:
    """One `TensorStats` for each of o, lse, dq, dk, dv that the kernel returned."""
    parts = comparisons(trial)
    allowances = rule_2x(trial, parts)
    return {name: _stats(part, allowances.get(name)) for name, part in parts.items()}


def _stats(part: Comparison, over_2x: float | None) -> TensorStats:
    worst = part.worst(part.ratio)
    ratio, ratio_prob = _largest(part.ratio), _largest(part.ratio_prob)
    if bool(part.broken.any()):
        ratio = ratio_prob = _LARGEST
        worst = part.worst(part.broken.to(torch.float64))
    ratios = part.ratio[part.judged]
    signed = torch.copysign(ratios, (part.got - part.reference)[part.judged])
    # In ulps at the row's largest element: next to it, an element that cancels to almost 0 is not
    # wrong by a million ulps.
    size = part.reference.abs().nan_to_num(posinf=0.0)
    if size.dim() == 4 and size.numel():
        size = size.amax(-1, keepdim=True).expand_as(size)
    ulps = (part.error / ulp(size, part.dtype))[part.judged]
    return TensorStats(
        elements=part.got.numel(),
        inconclusive=int(part.inconclusive.sum()),
        ratio=ratio,
        ratio_prob=ratio_prob,
        ratio_median=_number(ratios.median()) if ratios.numel() else 0.0,
        ulp=_largest(ulps),
        bias=_number(signed.mean()) if signed.numel() else 0.0,
        rule_2x=over_2x,
        worst=worst,
    )


def _largest(values: torch.Tensor) -> float:
    return _number(values.max()) if values.numel() else 0.0


def _number(value: torch.Tensor) -> float:
    return max(-_LARGEST, min(float(value), _LARGEST))
