"""`Bounded`: one tensor's exact value, and how far from it a right kernel may be."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.bias import allowance
from fa_verify.bounds.formats import Cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from fa_verify.bounds.bias import Allowance
    from fa_verify.bounds.formats import Format
    from fa_verify.bounds.probabilistic import Refiner

    Stored = tuple[Tensor, Tensor]

__all__ = ["Bounded", "as_stored", "rounded"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """One tensor's exact value, and how far from it a right kernel may be.

    Attributes:
        name: "o", "lse", "dq", "dk" or "dv".
        reference: float64.
        det: float64, at least 0: provable under the declared arithmetic; inf where the bound says
            nothing, which makes the element inconclusive.
        overflow_ok: bool: an infinity (or the format's largest number) of the reference's sign is
            right here; None: nowhere.
        refiner: See `prob`; None: the probabilistic bound is the deterministic one.
        bias: What a sum of errors, weighted as it is told, may be; None: it is not known.
        terms: Logits that a row has (a key, for dk and dv): what looking at one costs.
    """

    name: str
    reference: Tensor
    det: Tensor
    overflow_ok: Tensor | None = None
    refiner: Refiner | None = dataclasses.field(default=None, repr=False)
    bias: Callable[[Tensor], Allowance] | None = dataclasses.field(default=None, repr=False)
    terms: int = 1

    def prob(self, observed: Tensor) -> Tensor:
        """Bound that holds with probability 1 - d for the whole tensor: min(det, probabilistic).

        It is looked at only where it can matter to ``observed``: in rows (keys, for dk and dv) with
        an error between the least that the probabilistic bound can be and det. Elsewhere this is
        det, and comparing ``observed`` with it gives the same verdict.

        Args:
            observed: What the kernel returned, shaped as reference.

        Returns:
            float64, shaped as reference.
        """
        if self.refiner is None:
            return self.det
        return self.refiner.refined(self.det, (observed.double() - self.reference).abs())


def as_stored(out: Format, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Stored]:
    """Of some values and bounds the bounds once they are stored, and where that may overflow.

    Several are looked at as one: on a card each operation costs a launch.
    """
    if len(pairs) == 1:
        ((value, bound),) = pairs
    else:
        value, bound = (torch.cat([x.flatten() for x in some]) for some in zip(*pairs, strict=True))
    reach = value.abs().add_(bound)
    det = (bound + Cast(out).error_below(reach)).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    overflow = reach >= out.overflow
    if len(pairs) == 1:
        return [(det, overflow)]
    sizes = [x.numel() for x, _ in pairs]
    return list(zip(torch.split(det, sizes), torch.split(overflow, sizes), strict=True))


def rounded(
    *,
    name: str,
    reference: Tensor,
    bound: Tensor,
    out: Format,
    shape: tuple[int, ...],
    refiner: Refiner | None = None,
    terms: int = 1,
    stored: Stored | None = None,
) -> Bounded:
    """Add the rounding to the output format, and mark where it may overflow; (B17).

    Args:
        name: Of the tensor.
        reference: Its exact value.
        bound: How far from it a right kernel's may be before that rounding.
        out: The format.
        shape: The tensor's.
        refiner: See `Bounded`; terms likewise.
        terms: See `Bounded`.
        stored: What `as_stored` found for it, if it was asked.
    """
    ((det, overflow),) = [stored] if stored else as_stored(out, [(reference, bound)])
    return Bounded(
        name=name,
        reference=reference.reshape(shape),
        det=det.reshape(shape),
        overflow_ok=overflow.reshape(shape),
        refiner=refiner,
        bias=None if refiner is None else functools.partial(allowance, refiner, reference, out),
        terms=max(1, terms),
    )
