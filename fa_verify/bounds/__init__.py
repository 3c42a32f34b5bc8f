"""Elementwise error bounds for attention kernels; the derivation is docs/bounds.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.backward import backward_det
from fa_verify.bounds.bounded import Bounded, rounded
from fa_verify.bounds.forward import Forward, forward_det
from fa_verify.bounds.inputs import inputs, operand_models
from fa_verify.bounds.rows import row_statistics

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.arithmetic import Arithmetic
    from fa_verify.problem import Problem

__all__ = ["Bounded", "bound_backward", "bound_forward"]


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


def bound_backward(  # noqa: PLR0913 -- the operands of attention
    problem: Problem,
    arithmetic: Arithmetic,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    o: Tensor | None = None,
    lse: Tensor | None = None,
    d: float = 1e-6,
) -> tuple[Bounded, Bounded, Bounded]:
    """Bound dq, dk and dv: for the observed o and lse where given, else end to end.

    In the conditional mode the reference is the gradient for the observed o and lse; judge those
    first, since a conditional backward hides the forward's faults.

    Args:
        problem: The problem.
        arithmetic: The kernel's rounding points.
        q: (batch, heads_q, seqlen_q, head_dim) in the problem's dtype, any strides.
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        do: (batch, heads_q, seqlen_q, head_dim_v).
        o: The kernel's o, shaped as do.
        lse: The kernel's lse, natural logarithm, (batch, heads_q, seqlen_q).
        d: Probability with which a right kernel may break one tensor's `prob`.

    Returns:
        dq, dk and dv.
    """
    exact = None
    if o is None or lse is None:
        _, exact = _forward(problem, arithmetic, q, k, v)
    rows = row_statistics(problem, arithmetic, do, exact, o=o, lse=lse)
    union = None
    for model, operands in operand_models(problem, arithmetic, q, k, v, do):
        part = backward_det(model, inputs(problem, *operands), rows)
        union = part if union is None else union.joined(part)
    return tuple(
        rounded(name, getattr(union, name), getattr(union, f"{name}_bound"), model.out, shape)
        for name, shape in (("dq", problem.shape_q), ("dk", problem.shape_k), ("dv", problem.shape_v))
    )


def _forward(problem, arithmetic, q, k, v):
    union = None
    for model, operands in operand_models(problem, arithmetic, q, k, v):
        part = forward_det(model, inputs(problem, *operands))
        union = part if union is None else union.joined(part)
    return model, union
