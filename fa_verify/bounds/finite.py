"""Hidden logits that are finite, where they may have a weight; (B9)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.bounds.inputs import Block, Inputs
    from fa_verify.bounds.model import Model

__all__ = ["come_through", "may_come_through"]

_NOTHING = 104.0  # float32's exp of what is so much below the row's largest logit is 0
_OFF = 2.0**-9  # of a logit's size: what tf32 operands make of it


def may_come_through(model: Model, given: Inputs) -> bool:
    """Whether logits are so large that any may."""
    lowered = -model.arithmetic.masked_logit
    hides = model.problem.mask.hides_anything or given.extent.hides
    if math.isinf(lowered) or not hides:
        return False
    furthest = given.raw * model.scale + given.extent.addend
    return (2 + _OFF) * furthest + _NOTHING > lowered


def come_through(model: Model, block: Block) -> Tensor | None:
    """(heads, rows, keys), the keys of rows in which a hidden one may count; None: there are none.

    A hidden logit becomes the declared number, or has it added.
    """
    lowered = model.arithmetic.masked_logit
    if math.isinf(lowered) or block.hidden is None:
        return None
    logits, _ = dataclasses.replace(block, hidden=None).logits(
        model.problem.scale, model.problem.softcap
    )
    size = logits.abs().amax(-1, keepdim=True)
    seen = logits.masked_fill(block.hidden, -torch.inf).amax(-1, keepdim=True)
    hidden = logits.masked_fill_(~block.hidden, -torch.inf).amax(-1, keepdim=True).clamp(min=0.0)
    counts = hidden + lowered > seen - _NOTHING - _OFF * size
    return counts & seen.isfinite() & ~block.hidden
