"""Gradients beside those of P and dS that are rounded as the kernel declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.bounds import rounded_models
from fa_verify.checks.comparison import Comparison, comparisons
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.trial import Trial

__all__ = ["check", "strays"]


def check(trial: Trial) -> Iterator[Failure]:
    """Fail where a gradient is not what the declared roundings of P and dS give.

    Given lse and o these are known but for the error of float32, so this bound is several times
    sharper; it is as provable as the deterministic one, and counts on any case. Where an element is
    outside that one, it is said instead.
    """
    for part in comparisons(trial).values():
        if part.most > 1 or part.any_broken:
            continue
        message = strays(part)
        if message:
            yield Failure(
                check="numerics",
                title=f"{part.name} is not what its roundings give",
                message=message,
                tensor=part.name,
            )


def strays(part: Comparison) -> str:
    """How far a tensor is from every admitted rounding, if it is too far; else ""; (B46)."""
    refiner = part.bounded.refiner
    if refiner is None or not refiner.terms or not part.conditional or not part.got.numel():
        return ""
    shape = refiner.linear.shape
    found = ""
    for model in rounded_models(refiner):
        det, got, judged = (
            x.reshape(shape)[model.place] for x in (part.bounded.det, part.got, part.judged)
        )
        bound = model.bound + (det - refiner.linear[model.place])
        ratio = ((got - model.value).abs() / bound).masked_fill(~judged, 0.0).nan_to_num(nan=0.0)
        outside = ratio > 1
        if not bool(outside.any()):
            return ""
        worst = int(ratio.flatten().argmax())
        got_, value, limit, most = (
            float(x.flatten()[worst]) for x in (got, model.value, bound, ratio)
        )
        found = (
            f"got {got_:.9g}; {value:.9g} \u00b1 {limit:.3g} if P and dS are rounded as declared, "
            f"err/bound {most:.3g}; {int(outside.sum())} of {outside.numel()} elements that were "
            "looked at are outside; judged given the observed o and lse"
        )
    return found
