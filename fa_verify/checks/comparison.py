"""`Comparison`: one observed tensor beside its float64 reference and bounds, element by element.

The checks and the statistics share it. Nothing here decides what a failure is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify.bounds.probabilistic import Question
from fa_verify.checks.reading import Due, Extent, look, look_closer

if TYPE_CHECKING:
    from fa_verify.bounds import Bounded

__all__ = ["Comparison", "everywhere"]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One tensor, observed and expected.

    Attributes:
        name: o, lse, dq, dk, dv, dbias or dsinks.
        got: What the kernel wrote, in float64.
        dtype: Format of the output (lse is always judged in float32 ulps).
        bounded: Reference and bounds.
        written: bool, False where the backend saw that nobody wrote.
        due: bool, where a finite number is due and the numerics check may judge: written, and not
            in a fully masked row (the nonfinite check owns those).
        conditional: The reference takes the observed o and lse (gradients only).
        all_due: `due` is known to be True everywhere.
    """

    name: str
    got: torch.Tensor
    dtype: str
    bounded: Bounded
    written: torch.Tensor
    due: torch.Tensor
    conditional: bool = False
    all_due: bool = False

    @property
    def reference(self) -> torch.Tensor:
        """The float64 reference."""
        return self.bounded.reference

    @functools.cached_property
    def extent(self) -> Extent:
        """How far its numbers reach."""
        look((self,))
        extent: Extent = self.__dict__["extent"]
        return extent

    @functools.cached_property
    def _due(self) -> Due:
        """Its errors where a number is due."""
        look((self,))
        none = torch.empty_like(self.got)  # `look` leaves an empty tensor alone
        due: Due = self.__dict__.get("_due", Due(none, none, none, none))
        return due

    @property
    def _ordinary(self) -> bool:
        """Nothing is infinite or NaN, nor may be: where a number is due it can be judged."""
        return self.extent.least >= 0

    @property
    def plain(self) -> bool:
        """Every element is a number and is judged."""
        return self.all_due and self._ordinary

    def _nowhere(self) -> torch.Tensor:
        return everywhere(self.got, value=False)

    @functools.cached_property
    def inconclusive(self) -> torch.Tensor:
        """Where the bound says nothing."""
        if self._ordinary:
            return self._nowhere()
        return ~torch.isfinite(self.bounded.det) & self.due

    @functools.cached_property
    def count_inconclusive(self) -> int:
        """How many elements those are."""
        return 0 if self._ordinary else int(self.inconclusive.count_nonzero())

    @functools.cached_property
    def judged(self) -> torch.Tensor:
        """Where error and bound are numbers."""
        if self._ordinary:
            return self.due
        finite = torch.isfinite(self.got) & torch.isfinite(self.reference)
        # A cast may also saturate where the reference overflows the format.
        saturated = self.infinity_allowed & (self.got.abs() == _largest(self.dtype))
        return self.due & finite & torch.isfinite(self.bounded.det) & ~saturated

    @functools.cached_property
    def judges_all(self) -> bool:
        """Whether `judged` is True everywhere."""
        return self.plain or bool(self.judged.all())

    @functools.cached_property
    def infinity_allowed(self) -> torch.Tensor:
        """Where inf is right: the reference overflows the output format on that side of 0.

        With a bound that is wider than the format it may do so on the other side too; (B17).
        """
        if self.bounded.overflow_ok is None or self._ordinary:
            return self._nowhere()
        same_sign = torch.signbit(self.got) == torch.signbit(self.reference)
        either = self.bounded.det - self.reference.abs() >= _largest(self.dtype)
        return torch.as_tensor(self.bounded.overflow_ok, device=self.got.device) & (
            same_sign | either
        )

    @functools.cached_property
    def broken(self) -> torch.Tensor:
        """NaN or inf where a number is due."""
        if self._ordinary:
            return self._nowhere()
        infinite = torch.isinf(self.got) & ~self.infinity_allowed
        return self.due & ~self.inconclusive & (torch.isnan(self.got) | infinite)

    @functools.cached_property
    def any_broken(self) -> bool:
        """Whether there is such an element."""
        return not self._ordinary and bool(self.broken.any())

    @property
    def finite(self) -> bool:
        """Whether no inf or NaN was got where a number is due."""
        return self._ordinary or bool((torch.isfinite(self.got) | ~self.due).all())

    @functools.cached_property
    def ratio(self) -> torch.Tensor:
        """Error over the deterministic bound where judged (0/0 is 0), 0 elsewhere."""
        return self._due.ratio if self.extent.least > 0 else self._over(self.bounded.det)

    @functools.cached_property
    def ratio_prob(self) -> torch.Tensor:
        """Error over the probabilistic bound, likewise."""
        return self.ratio if self.prob is self.bounded.det else self._over(self.prob)

    @functools.cached_property
    def most(self) -> float:
        """The largest ratio, 0 for an empty tensor."""
        if self.extent.least > 0:
            return self.extent.most
        return float(self.ratio.max())

    @functools.cached_property
    def most_prob(self) -> float:
        """The largest ratio_prob, likewise."""
        look_closer((self,))
        most: float = self.__dict__["most_prob"]
        return most

    @functools.cached_property
    def prob(self) -> torch.Tensor:
        """The probabilistic bound, no smaller than needed to judge what was observed."""
        look_closer((self,))
        prob: torch.Tensor = self.__dict__["prob"]
        return prob

    def question(self) -> Question | None:
        """What the probabilistic bound may decide; None: nothing."""
        refiner, elements = self.bounded.refiner, self.got.numel()
        if refiner is None or not elements or self.most <= refiner.least(elements):
            return None
        if refiner.least(elements) >= 1.0:
            return None
        within = self.plain and self.most <= 1
        return Question(refiner, self.bounded.det, self.error, within=within)

    @functools.cached_property
    def difference(self) -> torch.Tensor:
        """What was got less the reference where judged, 0 elsewhere."""
        if self._ordinary:
            return self._due.difference
        return self._due.difference.masked_fill(~self.judged, 0.0)

    @functools.cached_property
    def error(self) -> torch.Tensor:
        """|got - reference| where judged, 0 elsewhere."""
        return self._due.error if self._ordinary else self.difference.abs()

    @property
    def signed(self) -> torch.Tensor:
        """The ratio with the error's sign."""
        if self.extent.least > 0:
            return self._due.signed
        return torch.copysign(self.ratio, self.difference)

    def _over(self, bound: torch.Tensor) -> torch.Tensor:
        return (self.error / bound).masked_fill_(self.error == 0, 0.0)

    def worst(self, ratio: torch.Tensor) -> tuple[int, ...]:
        """Index of the largest ratio; () for an empty tensor."""
        if not ratio.numel():
            return ()
        return self.at(int(ratio.argmax()))

    def at(self, place: int) -> tuple[int, ...]:
        """The index of an element counted row by row."""
        # torch.unravel_index imports sympy: seconds
        return tuple(int(i) for i in np.unravel_index(place, self.got.shape))


def everywhere(like: torch.Tensor, *, value: bool) -> torch.Tensor:
    """A truth value in the shape of a tensor, which takes no memory."""
    return _constant(value, like.device).expand(like.shape)


@functools.cache
def _constant(value: bool, device: torch.device) -> torch.Tensor:  # noqa: FBT001 - a cache's key
    return torch.tensor(value, device=device)


def _largest(dtype: str) -> float:
    return float(torch.finfo(getattr(torch, dtype)).max)
