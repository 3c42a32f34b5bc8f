"""Gradients if P and dS are rounded as declared; how far from it a right kernel's may be; (B46).

Only a sample of rows is looked at, the same whatever was observed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.probabilistic import on_the_grid

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.bounds.formats import Cast
    from fa_verify.bounds.probabilistic import Look, Refiner

__all__ = ["Model", "rounded_models"]

_TERMS = 1 << 13  # of sums, that a sample of two heads takes


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A tensor if what is cast is rounded at one of the admitted moments.

    Attributes:
        heads: Of the sample; shapes are (heads, rows, dim).
        rows: Of the sample.
        value: Before the rounding of the output.
        bound: How far from it a right kernel's may be, before the rounding of the output.
    """

    heads: Tensor
    rows: Tensor
    value: Tensor
    bound: Tensor


def rounded_models(refiner: Refiner) -> list[Model]:
    """A model for each moment at which what is cast may be cast; none if it is not known exactly.

    Args:
        refiner: Of the tensor.
    """
    looks = [(head, index, refiner.look(head, index)) for head, index in refiner.sample(_TERMS, 2)]
    if any(look.off is None for _, _, look in looks):
        return []
    heads = torch.tensor([head for head, _, _ in looks], device=refiner.linear.device)
    models = []
    for divisor in refiner.divisors:
        parts = [_rounded(refiner.cast, divisor, look) for _, _, look in looks]
        value, bound = (torch.stack(part) for part in zip(*parts, strict=True))
        models.append(Model(heads, looks[0][1], value, bound))
    return models


def _rounded(cast: Cast, divisor: float, look: Look) -> tuple[Tensor, Tensor]:
    """The rows of a look with its terms rounded, and how far a right kernel's may be."""
    assert look.off is not None  # noqa: S101 -- else there is no model
    assert look.sign is not None  # noqa: S101 -- a look that knows the one knows the other
    exact, off = look.logs.exp() / divisor, look.off / divisor
    middle = _nearest(cast, exact)
    # What is cast is within off of exact, and rounding is monotone.
    flips = torch.maximum(
        _nearest(cast, exact + off) - middle, middle + _nearest(cast, off - exact)
    )
    value = (middle * look.sign * divisor) @ look.weight
    return value, look.rest + (flips * divisor) @ look.weight.abs()


def _nearest(cast: Cast, x: Tensor) -> Tensor:
    half, missed = on_the_grid(cast, x.abs())
    return x + x.sign() * missed * half
