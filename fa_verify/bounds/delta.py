"""Delta as the sum of P dP, which a softmax's own gradient takes; (B22)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.formats import TF32, Cast
from fa_verify.bounds.forward import forward_det
from fa_verify.bounds.model import SLACK, Model
from fa_verify.bounds.rows import Seen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from fa_verify.arithmetic import Arithmetic
    from fa_verify.bounds.inputs import Inputs

__all__ = ["of_products"]


def of_products(known: Iterable[tuple[Model, Inputs]], lse: Seen) -> Seen:
    """The o of which delta is dO's product: `P V`, P from lse and never cast.

    Args:
        known: The operands as dots may read them, the exact ones first.
        lse: As observed, or exact with its bound.
    """
    forwards, sizes, values = [], [], []
    for model, given in known:
        values.append(given.v.abs().sum(1)[:, None, None])
        plain = Model(model.problem, _of_sums(model))
        forwards.append(forward_det(plain, given))
        size = forward_det(plain, dataclasses.replace(given, v=given.v.abs()))
        sizes.append(size.o + size.o_bound)
    exact, *others = forwards
    for other in others:
        exact = exact.joined(other)
    problem = model.problem
    of_row = exact.lse_bound.unsqueeze(-1)
    if model.arithmetic.eager and lse.error is not None:  # P is normalised, and so is ours
        of_row = torch.zeros_like(of_row)
    products = model.dot(problem.head_dim_v) + (2 * TF32.unit_roundoff if others else 0.0)
    error = exact.o_bound + (exact.o.abs() + exact.o_bound) * of_row.expm1()
    error += SLACK * products * of_row.exp() * torch.stack(sizes).amax(0)
    if model.arithmetic.eager:
        error += _stored(model, torch.stack(sizes).amax(0), torch.stack(values).amax(0))
    factor = (exact.lse - lse.value).exp().nan_to_num(nan=0.0).unsqueeze(-1)  # of no key: -inf
    return Seen(exact.o * factor, error * factor)


def _stored(model: Model, size: Tensor, most: Tensor) -> Tensor:
    """What P, dP and their product lose as they are stored, dP once or twice; (B74)."""
    count = 3 + bool(model.problem.dropout)
    lost = model.out.unit_roundoff * size + Cast(model.out).tiny * model.kept * most
    return (1.1 * count) * lost


def _of_sums(model: Model) -> Arithmetic:
    """The arithmetic of those sums: exponents are off from lse, not from the maximum."""
    declared, keys = model.arithmetic, max(1, model.problem.seqlen_k)
    return dataclasses.replace(
        declared,
        p_dtype="float32",
        p_scale=1.0,
        l_from_rounded_p=False,
        merged_by_lse=False,
        merges=1,
        merged_by_sigmoid=False,
        part_dtype="float32",
        half_dots="qk" if model.halves("qk") else None,
        exp2_ulps=declared.exp2_ulps + 3 * math.log(keys) + 4,
    )
