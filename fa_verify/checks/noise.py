"""Errors of o that are too large in the root mean square, though each is within its bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fa_verify.bounds import FORMATS, Observed, noise_of
from fa_verify.checks.nearest import nearest
from fa_verify.checks.observed import comparisons
from fa_verify.trial import RUN_CASES, RUN_RISK
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.bounds import Noise
    from fa_verify.checks.comparison import Comparison
    from fa_verify.trial import Trial

__all__ = ["check", "noisy"]


def check(trial: Trial) -> Iterator[Failure]:
    """Fail where the errors of o, taken together, are more than roundings leave by chance.

    What P is rounded relative to is not known; of gradients it is, see `rounding`. It holds with a
    stated probability on cases drawn independently of any search, and counts only on such. Where an
    element is outside its bound that is said instead.
    """
    if not trial.independent:
        return
    part = comparisons(trial).get("o")
    if part is None or part.most_prob > 1 or part.any_broken:
        return
    found = noisy(part)
    if found is not None:
        yield Failure(
            check="numerics",
            title="o is too noisy",
            message=(
                f"the root mean square of the errors of {found.elements} elements of o is "
                f"{found.size:.3g} times what its roundings leave; a right kernel's is at most "
                f"{found.allowed:.3g} "
                f"(odds for right kernels: {RUN_RISK:g} in a run of {RUN_CASES} cases)"
                f"{nearest(part)}"
            ),
            tensor="o",
        )


def noisy(part: Comparison) -> Noise | None:
    """The noise of o, if it is more than a right kernel's may be; (B44)."""
    refiner = part.bounded.refiner
    if refiner is None or not refiner.terms or not part.got.numel():
        return None
    # Of n terms a random sum is at least the worst one over sqrt(3 n), which bounds what is left.
    if float(part.ratio.square().mean()) * 3 * refiner.terms <= 1:
        return None
    shape, bounded = refiner.linear.shape, part.bounded
    observed = Observed(
        bounded.reference.reshape(shape),
        bounded.det.reshape(shape),
        part.error.reshape(shape),
        getattr(torch, part.dtype),
    )
    return noise_of(refiner, FORMATS[part.dtype], observed)
