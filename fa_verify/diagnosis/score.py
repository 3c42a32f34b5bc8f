"""How well a prediction explains what was observed."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fa_verify.diagnosis.evidence import Observation

__all__ = ["Fit", "fit"]

# A prediction is made in float64 by a kernel that does not exist: the bound of the right kernel is
# a measure of its rounding errors, not a limit. Four times it is generous; what separates causes is
# the gain.
_GENEROUS = 4.0
_FLOOR = 1.0 / 64.0  # of that: nearer than this nothing distinguishes two predictions
_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How well one prediction fits.

    Attributes:
        explained: Share of all compared elements within the tolerance of the prediction, the least
            over the tensors.
        reproduced: The same share of the wrong elements alone.
        gain: How many times closer wrong elements are to the prediction than to the reference (the
            median; the least over the tensors).
        overall: The same of the summed errors of all elements: a defect that disturbs everything a
            little shows here although few elements leave their bound.
    """

    explained: float
    reproduced: float
    gain: float
    overall: float

    @property
    def merit(self) -> float:
        """What ranks hypotheses: both gains, less what is left unexplained."""
        return math.sqrt(self.gain * max(self.overall, 1.0)) * self.explained**4


def fit(
    seen: Mapping[str, Observation],
    predicted: Mapping[str, torch.Tensor],
    free: Mapping[str, torch.Tensor],
    dtype: str,
) -> Fit:
    """Compare predictions with observations.

    Args:
        seen: Observations by name.
        predicted: Predicted tensors; names that are missing are not compared.
        free: Where the prediction says nothing, by name.
        dtype: Of the outputs.
    """
    explained, reproduced, gains, overall = 1.0, 1.0, [], []
    for name, value in predicted.items():
        if name not in seen:
            continue
        observation = seen[name]
        compared = observation.written & (torch.isfinite(observation.det) | observation.wrong)
        if name in free:
            compared = compared & ~free[name]
        if not bool(compared.any()):
            continue
        unit = _UNIT["float32" if name == "lse" else dtype]
        got, expected = observation.got[compared], value[compared]
        det = _number(observation.det[compared])
        tolerance = _GENEROUS * (det + 2 * unit * _number(expected).abs()) + 1e-300
        error = _distance(got, expected)
        near = (error <= tolerance).double()
        explained = min(explained, float(near.mean()))
        wrong = observation.wrong[compared]
        if bool(wrong.any()):
            reproduced = min(reproduced, float(near[wrong].mean()))
            before = _distance(got, observation.reference[compared]).clamp(max=1e300)
            after = torch.maximum(error.clamp(max=1e300), _FLOOR * tolerance)
            gains.append(float((before[wrong] / after[wrong]).median()))
            # Relative to the tolerance, and capped: one huge element must not speak for all.
            before, after = ((x / tolerance).clamp(max=1.0) for x in (before, after))
            overall.append(float(before.sum() / after.sum()))
    return Fit(
        explained=explained,
        reproduced=reproduced,
        gain=min(gains, default=0.0),
        overall=min(overall, default=0.0),
    )


def _number(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b|; 0 for equal infinities and for two NaN, inf where only one is finite."""
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    error = torch.nan_to_num((a - b).abs(), nan=torch.inf, posinf=torch.inf)
    return torch.where(same, torch.zeros_like(error), error)
