"""How well a prediction explains what was observed."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fa_verify.diagnosis.evidence import Observation

__all__ = ["Compared", "Fit", "compared", "fit"]

# A prediction is made in float64 by a kernel that does not exist: the bound of the right kernel is
# a measure of its rounding errors, not a limit. Four times it is generous; what separates causes is
# the gain.
_GENEROUS = 4.0
_FLOOR = 1.0 / 64.0  # of that: nearer than this nothing distinguishes two predictions
# Unit roundoff, and the spacing of subnormal numbers, of which any rounding may cost one.
_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
_SUBNORMAL = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}


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
        clear: Some wrong element is further from the reference than the prediction's own errors may
            be: else this case does not tell the two apart.
    """

    explained: float
    reproduced: float
    gain: float
    overall: float
    clear: bool = True

    @property
    def merit(self) -> float:
        """What ranks hypotheses: both gains, less what is left unexplained."""
        return math.sqrt(self.gain * max(self.overall, 1.0)) * self.explained**4


class Compared:
    """The elements of an observation that predictions are compared with, of which there are many.

    Attributes:
        places: Of these elements in the flattened tensor.
        got, reference, det, wrong: As the observation has them, there.
        before: How far they are from the reference.
        telling: Those of the wrong ones that are further from it than such a rounding.
        share: The bound as a share of the reference, the median.
        clear: Some are so wrong that more than a rounding must be to blame.
        unit, spacing: The unit roundoff of the tensor's format, and of its subnormal numbers.
    """

    def __init__(self, observation: Observation, dtype: str) -> None:
        """Take out what is compared."""
        usable = observation.written & (torch.isfinite(observation.det) | observation.wrong)
        self.places = usable.flatten().nonzero().flatten()
        self.unit, self.spacing = _UNIT[dtype], _SUBNORMAL[dtype]
        self.got, self.reference, self.wrong, det = (
            x.flatten()[self.places]
            for x in (observation.got, observation.reference, observation.wrong, observation.det)
        )
        self.det = _number(det)
        self.before = _distance(self.got, self.reference).clamp(max=1e300)
        known = (self.reference != 0) & torch.isfinite(self.reference)
        shares = (self.det / self.reference.abs())[known]
        self.share = float(shares.median()) if len(shares) else 0.0
        self.telling = self.wrong & (self.before > 2 * self.spacing)
        self.clear = bool((self.telling & (self.before > self._tolerance(self.reference))).any())

    def _tolerance(self, expected: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """How near is near: the bound of the reference; of what is far larger, its usual share."""
        det, reference = self.det, self.reference.abs()
        if kept is not None:
            det, reference = det[kept], reference[kept]
        size = _number(expected).abs()
        det = torch.where(size > 2 * reference, torch.maximum(det, self.share * size), det)
        return _GENEROUS * (det + 2 * self.unit * size) + self.spacing

    def fit(self, value: torch.Tensor, free: torch.Tensor | None) -> Fit | None:
        """Compare a prediction; None where it says nothing.

        Args:
            value: The prediction.
            free: Where it says nothing, if anywhere.
        """
        got, before, wrong, telling = self.got, self.before, self.wrong, self.telling
        expected = value.flatten()[self.places]
        kept = None
        if free is not None:
            kept = ~free.flatten()[self.places]
            got, before, wrong, telling, expected = (
                x[kept] for x in (got, before, wrong, telling, expected)
            )
        if not len(got):
            return None
        tolerance = self._tolerance(expected, kept)
        error = _distance(got, expected).clamp(max=1e300)
        near = error <= tolerance
        explained = float(near.double().mean())
        reproduced = float(near[wrong].double().mean()) if bool(wrong.any()) else 1.0
        if not bool(telling.any()):
            return Fit(explained=explained, reproduced=reproduced, gain=math.nan, overall=math.nan)
        after = torch.maximum(error, _FLOOR * tolerance)
        # Relative to the tolerance, and capped: one huge element must not speak for all.
        sums = [float((x / tolerance).clamp(max=1.0).sum()) for x in (before, after)]
        return Fit(
            explained=explained,
            reproduced=reproduced,
            gain=float((before[telling] / after[telling]).median()),
            overall=sums[0] / sums[1],
            clear=bool((telling & (before > tolerance)).any()),
        )


def compared(seen: Mapping[str, Observation], dtype: str) -> dict[str, Compared]:
    """Observations by name, ready for comparison; `dtype` is that of the outputs."""
    return {
        name: Compared(observation, "float32" if name == "lse" else dtype)
        for name, observation in seen.items()
    }


def fit(
    seen: Mapping[str, Compared],
    predicted: Mapping[str, torch.Tensor],
    free: Mapping[str, torch.Tensor],
) -> Fit:
    """Compare predictions with observations.

    Args:
        seen: Observations by name.
        predicted: Predicted tensors; names that are missing are not compared.
        free: Where the prediction says nothing, by name.
    """
    parts = [seen[n].fit(x, free.get(n)) for n, x in predicted.items() if n in seen]
    fits = [part for part in parts if part is not None]
    telling = [part for part in fits if not math.isnan(part.gain)]
    return Fit(
        explained=min((part.explained for part in fits), default=1.0),
        reproduced=min((part.reproduced for part in fits), default=1.0),
        gain=min((part.gain for part in telling), default=0.0),
        overall=min((part.overall for part in telling), default=0.0),
        clear=any(part.clear for part in telling),
    )


def _number(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b|; 0 for equal infinities and for two NaN, inf where only one is finite."""
    error = (a - b).abs()
    if bool(torch.isfinite(error).all()):
        return error
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    error = torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf)
    return torch.where(same, torch.zeros_like(error), error)
