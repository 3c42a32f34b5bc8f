"""What rounding of P an o that is wrong by little comes nearest to: evidence, no verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fa_verify import bounds

if TYPE_CHECKING:
    from fa_verify.checks.comparison import Comparison

__all__ = ["nearest"]

_MOST = 8.0  # err/bound: P in bf16 instead of fp16, and less


def nearest(part: Comparison) -> str:
    """A clause that says so for an o of 16 bits whose errors are of the size of roundings; else "".

    A right kernel whose blocks are none of those tried, or that rescales late, is also far from
    every model (docs/bounds.md B47).
    """
    refiner = part.bounded.refiner
    if part.name != "o" or refiner is None or not refiner.terms or not part.most <= _MOST:
        return ""
    return f"; {bounds.nearest(refiner, part.got, getattr(torch, part.dtype))}"
