"""Checks: plain functions from a trial to failures, cheap ones first; none knows the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fa_verify.checks import (
    bias,
    contract,
    dropout,
    invariants,
    memory,
    noise,
    nonfinite,
    numerics,
    reruns,
    rounding,
    stress,
    unmodified,
)
from fa_verify.checks.comparison import Comparison
from fa_verify.checks.observed import comparisons
from fa_verify.checks.statistics import TensorStats, statistics
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from fa_verify.trial import Trial

__all__ = [
    "ALL",
    "FURTHER",
    "WHOLE",
    "WITHIN",
    "Check",
    "Comparison",
    "TensorStats",
    "comparisons",
    "reruns",
    "statistics",
]

Check = Callable[["Trial"], Iterable[Failure]]

WHOLE: tuple[Check, ...] = (
    contract.check,
    memory.check,
    unmodified.check,
    dropout.check,
)
"""Those that take a run as a whole and need no reference."""

WITHIN: tuple[Check, ...] = (
    memory.unwritten,
    nonfinite.check,
    numerics.check,
    bias.check,
    noise.check,
    rounding.check,
    invariants.hull,
    invariants.value_gradient_sum,
)
"""Those that judge each sequence and head by itself."""

FURTHER: tuple[Check, ...] = (reruns.check, stress.check)
"""Those that run the kernel again."""

ALL: tuple[Check, ...] = (*WHOLE, *WITHIN, *FURTHER)
