"""Elementwise error bounds for attention kernels; the derivation is docs/bounds.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.bounded import Bounded, rounded
from fa_verify.bounds.forward import Forward, forward_det
from fa_verify.bounds.inputs import inputs, operand_models

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.arithmetic import Arithmetic
    from fa_verify.problem import Problem

__all__ = ["Bounded", "bound_forward"]


def bound_forward(
    problem: Problem, arithmetic: Arithmetic, q: Tensor, k: Tensor, v: Tensor, *, d: float = 1e-6
) -> tuple[Bounded, Bounded]:
    """Bound o and lse.

    Args:
        problem: The problem.
        arithmetic: The kernel's rounding points.
        q: (batch, heads_q, seqlen_q, head_dim) in the problem's dtype, any strides.
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        d: Probability with which a right kernel may break one tensor's `prob`.

    Returns:
        o and lse.
    """
    model, exact = _forward(problem, arithmetic, q, k, v)
    return (
        rounded("o", exact.o, exact.o_bound, model.out, problem.shape_o),
        Bounded(
            name="lse",
            reference=exact.lse.reshape(problem.shape_lse),
            det=exact.lse_bound.reshape(problem.shape_lse),
        ),
    )


def _forward(problem, arithmetic, q, k, v):
    union = None
    for model, operands in operand_models(problem, arithmetic, q, k, v):
        part = forward_det(model, inputs(problem, *operands))
        union = part if union is None else union.joined(part)
    return model, union
