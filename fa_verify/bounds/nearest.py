"""Which rounding of P comes nearest to an o: by blocks, their order and formats; (B47)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from fa_verify.bounds.formats import FORMATS, Cast
from fa_verify.bounds.probabilistic import on_the_grid

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fa_verify.bounds.probabilistic import Refiner

__all__ = ["Nearest", "nearest"]

_TERMS = 1 << 16  # of sums, that a sample of two heads takes


@dataclasses.dataclass(frozen=True, slots=True)
class Nearest:
    """The model of o of which most elements are the same.

    Attributes:
        form: What P is rounded to.
        relative_to: What it is relative to when it is rounded.
        equal: Share of elements that are the same bit for bit.
        elements: How many were looked at.
    """

    form: str
    relative_to: str
    equal: float
    elements: int

    def __str__(self) -> str:
        """As a clause of a message."""
        return (
            f"of what was tried, P rounded to {self.form} relative to {self.relative_to} comes "
            f"nearest: {self.equal:.1%} of {self.elements} elements are the same bit for bit"
        )


def nearest(refiner: Refiner, got: Tensor, dtype: torch.dtype) -> Nearest:
    """Search every admitted blocking, both orders of keys and the formats of 16 bits.

    Args:
        refiner: Of o.
        got: Observed, float64, any shape of as many elements.
        dtype: Of the output.
    """
    got = got.reshape(refiner.linear.shape)
    place = refiner.sample(_TERMS, 2)
    look, seen = refiner.several(*place), got[place]
    total = look.logs.exp().sum(-1, keepdim=True).clamp(min=1e-300)
    counts: dict[tuple[str, str], int] = {}
    for (relative_to, logs), form in _ways(refiner, look.logs):
        p = logs.exp()
        half, missed = on_the_grid(Cast(FORMATS[form]), p)
        # Where a block's maximum is -inf there is no p.
        weight = ((p + missed * half) * (look.logs - logs).exp()).nan_to_num_(nan=0.0)
        o = (weight @ look.weight / total).to(dtype).double()
        counts[form, relative_to] = int((o == seen).sum())
    form, relative_to = max(counts, key=lambda way: counts[way])
    elements = seen.numel()
    return Nearest(form, relative_to, counts[form, relative_to] / elements, elements)


def _ways(refiner: Refiner, logs: Tensor) -> list[tuple[tuple[str, Tensor], str]]:
    own = [name for name, form in FORMATS.items() if form is refiner.cast.format]
    forms = dict.fromkeys([*own, "float16", "bfloat16", "float32"])
    castings = zip(refiner.names, refiner.castings(logs), strict=False)
    return [(casting, form) for casting in castings for form in forms]
