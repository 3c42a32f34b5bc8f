"""Whether hidden keys come through because the mask adds a finite number, which logits exceed."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING

from fa_verify.checks import masking

if TYPE_CHECKING:
    from fa_verify.trial import Trial

__all__ = ["finite_mask"]

# What kernels mask with: -1e9, the -1e6 of Triton's tutorial, numbers that float16 holds.
_NUMBERS = (-1e9, -1e6, -6e4, -1e4)


def finite_mask(trial: Trial) -> str:
    """The sentence for a kernel that holds back hidden logits below a finite number; else ""."""
    kernel = trial.kernel
    for number in _NUMBERS:
        lenient = copy.copy(trial)  # with all that is known of it
        arithmetic = dataclasses.replace(kernel.arithmetic, masked_logit=number)
        lenient.kernel = dataclasses.replace(kernel, arithmetic=arithmetic)
        if next(masking.finite(lenient), None) is None:
            return (
                "hidden logits have a finite number added, and come through where they exceed it "
                f"(those below {-number / 4:,.0f} do not here): mask with -inf, or declare the "
                "number as Arithmetic(masked_logit=...)"
            )
    return ""
