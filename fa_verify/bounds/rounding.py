"""Gradients if P and dS are rounded as declared; how far from it a right kernel's may be; (B46).

Only a sample of rows is looked at, the same whatever was observed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.formats import FORMATS, TF32, Cast, floor_power_of_two

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from fa_verify.bounds.probabilistic import Look, Refiner

__all__ = ["Model", "rounded_models"]

_TERMS = 1 << 13  # of sums, that a sample of two heads takes


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A tensor if what is cast is rounded in one of the admitted ways.

    Attributes:
        place: Heads and rows of the sample; shapes are (heads, rows, dim).
        value: Before the rounding of the output.
        bound: How far from it a right kernel's may be, before the rounding of the output.
    """

    place: tuple[slice, slice]
    value: Tensor
    bound: Tensor


def rounded_models(refiner: Refiner) -> Iterator[Model]:
    """Yield a model for each admitted cast; none where what is cast is not known exactly.

    Args:
        refiner: Of the tensor.
    """
    if len(refiner.divisors) > 1:  # nor when
        return
    place = refiner.sample(_TERMS, 2)
    look = refiner.several(*place)
    if look.off is None:
        return
    for cast, divisor in _admitted(refiner):
        yield Model(place, *_model(cast, divisor, look))


def _admitted(refiner: Refiner) -> Iterator[tuple[Cast | None, float]]:
    """A cast, and whatever is more accurate: a kernel may do better than it declares."""
    cast, (divisor,) = refiner.cast, refiner.divisors
    yield cast, divisor
    yield Cast(TF32), divisor  # of a kernel that computes in float32; fp16 without its subnormals
    if cast.format.precision < TF32.precision:
        yield Cast(TF32, truncates=True), divisor
        yield Cast(FORMATS["float16"]), divisor
    yield None, divisor
    if refiner.lifted and cast.format.emin > TF32.emin:
        most = math.frexp(cast.format.largest)[1]
        yield from ((cast, 2.0**-power) for power in range(1, most))


def _model(cast: Cast | None, divisor: float, look: Look) -> tuple[Tensor, Tensor]:
    """The rows of a look with its terms rounded, and how far a right kernel's may be."""
    assert look.off is not None  # noqa: S101 -- else there is no model
    assert look.sign is not None  # noqa: S101 -- a look that knows the one knows the other
    exact = look.logs.exp()
    if cast is None:
        return (exact * look.sign) @ look.weight, look.rest
    off = look.off
    if divisor != 1.0:
        exact, off = exact / divisor, off / divisor
    # What is cast is within off of exact, and rounding is monotone.
    below, middle, above = _rounded(cast, torch.stack((exact - off, exact, exact + off)))
    flips, value = torch.maximum(above - middle, middle - below), middle * look.sign
    if divisor != 1.0:
        flips, value = flips.mul_(divisor), value.mul_(divisor)
    return value @ look.weight, look.rest + flips @ look.size


def _rounded(cast: Cast, x: Tensor) -> Tensor:
    spacing = floor_power_of_two(x.abs()).clamp_(min=2.0**cast.format.emin)
    spacing *= 2 * cast.format.unit_roundoff
    steps = x / spacing
    return (steps.trunc() if cast.truncates else steps.round()) * spacing
