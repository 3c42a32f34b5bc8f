"""Diagnosis: the likely cause of a failure, in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.trial import Trial
    from fa_verify.verdict import Failure

__all__ = ["diagnose"]


def diagnose(_trial: Trial, failures: Sequence[Failure]) -> list[Failure]:
    """Fill in the likely causes."""
    return list(failures)
