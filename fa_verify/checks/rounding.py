"""Gradients beside those of P and dS that are rounded as the kernel declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fa_verify.bounds import rounded_models
from fa_verify.checks.observed import comparisons
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.bounds.rounding import Model
    from fa_verify.checks.comparison import Comparison
    from fa_verify.trial import Trial

__all__ = ["check", "strays"]


def check(trial: Trial) -> Iterator[Failure]:
    """Fail where a gradient is not what the declared roundings of P and dS give.

    Given lse and o these are known but for the error of float32, so this bound is several times
    sharper; it is as provable as the deterministic one, and counts on any case. Where an element is
    outside that one, it is said instead.
    """
    parts = [
        part
        for part in comparisons(trial).values()
        if not part.most > 1 and not part.any_broken and _known(part)
    ]
    for part in _suspects(parts):
        message = strays(part)
        if message:
            yield Failure(
                check="numerics",
                title=f"{part.name} is not what its roundings give",
                message=message,
                tensor=part.name,
            )


def _known(part: Comparison) -> bool:
    """Whether what it is rounded from is known at all."""
    refiner = part.bounded.refiner
    return refiner is not None and bool(refiner.terms and part.conditional and part.got.numel())


def _suspects(parts: list[Comparison]) -> list[Comparison]:
    """Those that the declared roundings do not explain: cheap, and nearly always none."""
    first = [(part, next(_models(part), None)) for part in parts]
    outside = [(part, _Beside(part, model).outside.any()) for part, model in first if model]
    if not outside:
        return []
    read = torch.stack([some for _, some in outside]).tolist()  # one transfer from the device
    return [part for (part, _), some in zip(outside, read, strict=True) if some]


def _models(part: Comparison) -> Iterator[Model]:
    refiner = part.bounded.refiner
    return iter(()) if refiner is None else rounded_models(refiner)


class _Beside:
    """A sample of a tensor beside a model of it."""

    def __init__(self, part: Comparison, model: Model) -> None:
        """Set it beside."""
        refiner = part.bounded.refiner
        assert refiner is not None  # noqa: S101 -- else there is no model
        det, self.got, judged = (
            x.reshape(refiner.linear.shape)[model.place]
            for x in (part.bounded.det, part.got, part.judged)
        )
        self.bound = model.bound + (det - refiner.linear[model.place])
        self.error = (self.got - model.value).abs()
        self.outside = self.error > self.bound
        if not part.plain:
            self.outside &= judged


def strays(part: Comparison) -> str:
    """How far a tensor is from every admitted rounding, if it is too far; else ""; (B46)."""
    if not _known(part):
        return ""
    found = ""
    for model in _models(part):
        beside = _Beside(part, model)
        outside = beside.outside
        if not bool(outside.any()):
            return ""
        ratio = torch.where(outside, beside.error / beside.bound, 0.0).flatten()
        worst = int(ratio.argmax())
        got, value, limit = (
            float(x.flatten()[worst]) for x in (beside.got, model.value, beside.bound)
        )
        found = (
            f"got {got:.9g}; {value:.9g} \u00b1 {limit:.3g} if P and dS are rounded as declared, "
            f"err/bound {float(ratio[worst]):.3g}; {int(outside.sum())} of {outside.numel()} "
            "elements that were looked at are outside; judged given the observed o and lse"
        )
    return found
