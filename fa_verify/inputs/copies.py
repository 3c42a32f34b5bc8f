"""Copies that checks compare: hidden keys changed, keys or heads moved, a sequence elsewhere."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify.errors import InvalidInputError
from fa_verify.inputs.buffers import lay_out, overwrite
from fa_verify.inputs.tensors import OF_HEADS, SCALES, has_batch, layout_of
from fa_verify.values import Facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from fa_verify.case import Case
    from fa_verify.inputs.tensors import Inputs
    from fa_verify.problem import Problem

__all__ = [
    "among_others",
    "permute_batch_heads",
    "permute_keys",
    "perturb_hidden",
    "select_sequence",
]


def perturb_hidden(
    case: Case,
    inputs: Inputs,
    rng: np.random.Generator,
    *,
    row: int | None = None,
    masked_logit: float = -math.inf,
    reach: float = 2.0**112,
    prescale: float = 0.0,
) -> tuple[Inputs, Tensor]:
    """Replace every key and value hidden from one query row by other, large, finite ones.

    Keys hidden from all queries are among them. A right kernel gives the same bits (up to the sign
    of zero) for every row that sees none of the changed keys.

    Args:
        case: The case of the inputs.
        inputs: The inputs; left alone.
        rng: Chooses the row and the new values.
        masked_logit: What hidden logits become: the new ones stay below a quarter of it.
        reach: What hidden logits and dP stay below.
        prescale: What k is multiplied by in its dtype before the dots: hidden, it stays finite.
        row: The query row; by default one of those from which something is hidden.

    Returns:
        The changed copy, and the rows that must not change: bool, (seqlen_q,), on the CPU. When
        nothing is hidden from any row (or from `row`) no row is marked: there is nothing to check.
    """
    p = case.problem
    seen = p.mask.seen(p.seqlen_q, p.seqlen_k)
    candidates = np.flatnonzero(seen < p.seqlen_k)
    if row is None and len(candidates):
        row = int(rng.choice(candidates))
    if row is None or seen[row] == p.seqlen_k:
        return inputs, torch.zeros(p.seqlen_q, dtype=torch.bool)
    changed = ~p.mask.allowed(p.seqlen_q, p.seqlen_k, slice(row, row + 1))[0]
    keeps = torch.from_numpy(_blind_to(p, changed))
    largest = Facts.of(p.storage, 1.0).largest
    # q k' and do v' stay finite: inf - inf in a masked tile is no fault of a kernel.
    reach /= max(1.0, abs(p.scale))
    below = abs(masked_logit) / 4 / max(2.0**-126, abs(p.scale))
    of_k = _magnitude(inputs.q) * _magnitude(inputs.q_scale) * _magnitude(inputs.k_scale)
    most = largest / max(1.0, 2 * prescale)
    size_k = min(most, min(reach, below) / (of_k * p.head_dim))
    of_v = _magnitude(inputs.do) * _magnitude(inputs.v_scale)
    size_v = min(largest, reach * (1.0 - p.dropout) / (of_v * p.head_dim_v))
    where = torch.from_numpy(changed).to(inputs.k.device)
    new = {}
    for name, size in (("k", size_k), ("v", size_v)):
        tensor: Tensor = getattr(inputs, name)
        noise = rng.uniform(0.5, 1.0, (tensor.shape[0], tensor.shape[1], *tensor.shape[2:]))
        noise *= size * np.where(rng.random(noise.shape) < 0.5, -1.0, 1.0)
        other = torch.from_numpy(noise).to(tensor.dtype).to(tensor.device)
        new[name] = overwrite(tensor, torch.where(where[:, None], other, tensor))
    return inputs.having(new), keeps


def _blind_to(p: Problem, keys: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Queries that see none of these keys."""
    if not p.mask.pattern:
        lo, hi = p.mask.intervals(p.seqlen_q, p.seqlen_k)
        before = np.concatenate([[0], np.cumsum(keys)])
        blind: npt.NDArray[np.bool_] = before[hi] == before[lo]
        return blind
    strips = p.mask.strips(p.seqlen_q, p.seqlen_k)
    return np.concatenate([~(rows & keys).any(1) for _, rows in strips])


def _magnitude(tensor: Tensor | None) -> float:
    if tensor is None or tensor.numel() == 0:
        return 1.0
    return max(1.0, float(_wide(tensor).abs().max()))


def _wide(tensor: Tensor) -> Tensor:
    """Of fp8, which has no arithmetic, float32."""
    return tensor.float() if tensor.element_size() == 1 else tensor


def permute_keys(inputs: Inputs, order: Sequence[int]) -> Inputs:
    """Key and value rows in another order: nothing but rounding may change where no mask is.

    Nor what knows where a key is, as ALiBi, dropout and scales of rows do.
    """
    index = torch.as_tensor(order, device=inputs.k.device)
    if sorted(order) != list(range(inputs.k.shape[2])):
        msg = f"order={order!r}: must be a permutation of the {inputs.k.shape[2]} keys"
        raise InvalidInputError(msg)
    bias = inputs.bias
    if bias is not None and bias.shape[3] > 1:
        bias = overwrite(bias, bias[..., index])
    return dataclasses.replace(
        inputs,
        k=overwrite(inputs.k, inputs.k[:, :, index]),
        v=overwrite(inputs.v, inputs.v[:, :, index]),
        bias=bias,
    )


def permute_batch_heads(
    inputs: Inputs, batch_order: Sequence[int], kv_head_order: Sequence[int]
) -> tuple[Inputs, tuple[int, ...]]:
    """Sequences and heads in another order; the query heads of a group move together.

    Returns:
        The permuted copy, and the order of the query heads: output ``o'[b, h]`` of the copy must
        be ``o[batch_order[b], head_order[h]]`` of the original.
    """
    batch, heads_kv = inputs.k.shape[:2]
    for name, order, size in (
        ("batch_order", batch_order, batch),
        ("kv_head_order", kv_head_order, heads_kv),
    ):
        if sorted(order) != list(range(size)):
            msg = f"{name}={order!r}: must be a permutation of range({size})"
            raise InvalidInputError(msg)
    group = inputs.q.shape[1] // heads_kv
    head_order = tuple(h * group + member for h in kv_head_order for member in range(group))
    moved = {}
    for name, tensor in inputs.named():
        heads = kv_head_order if name[0] in "kv" else head_order
        b = torch.as_tensor(batch_order, device=tensor.device)
        h = torch.as_tensor(heads, device=tensor.device)
        if name in OF_HEADS:
            moved[name] = overwrite(tensor, tensor[h])
            continue
        other = tensor[b] if tensor.shape[0] == batch else tensor
        other = other[:, h] if other.shape[1] == len(heads) else other
        moved[name] = overwrite(tensor, other)
    return inputs.having(moved), head_order


def select_sequence(case: Case, inputs: Inputs, batch_index: int) -> tuple[Case, Inputs]:
    """One sequence alone, in fresh poisoned buffers of the same layouts.

    The case describes the shapes; its seed does not reproduce the elements.
    """
    if not 0 <= batch_index < case.problem.batch:
        msg = f"batch_index={batch_index}: must be in range({case.problem.batch})"
        raise InvalidInputError(msg)
    alone = dataclasses.replace(case, problem=dataclasses.replace(case.problem, batch=1))
    tensors = {
        name: lay_out(
            (tensor[batch_index : batch_index + 1] if has_batch(case, name) else tensor).cpu(),
            layout_of(case, name),
            tensor.dtype,
            str(tensor.device),
        )
        for name, tensor in inputs.named()
    }
    return alone, inputs.having(tensors)


def among_others(
    case: Case, inputs: Inputs, batch_index: int, *, batch: int, place: int
) -> tuple[Case, Inputs]:
    """One sequence at a place in another batch, in fresh poisoned buffers of the same layouts.

    Its mates hold the same numbers negated, rows in reverse order: finite, and never its own. The
    case describes the shapes; its seed does not reproduce the elements.
    """
    if not 0 <= batch_index < case.problem.batch or not 0 <= place < batch:
        msg = f"batch_index={batch_index}, place={place}: must be in the old and the new batch"
        raise InvalidInputError(msg)
    other = dataclasses.replace(case, problem=dataclasses.replace(case.problem, batch=batch))
    tensors = {}
    for name, tensor in inputs.named():
        own = _wide(tensor.cpu())
        if has_batch(case, name):
            own = own[batch_index : batch_index + 1]
            mates = -own.flip(2).expand(batch, *own.shape[1:])
            mates[mates == torch.inf] = 0.0  # where a bias hides a key
            mates = mates.abs() if name in SCALES else mates
            mates[place] = own[0]
            own = mates
        layout = layout_of(case, name)
        tensors[name] = lay_out(own, layout, tensor.dtype, str(tensor.device))
    return other, inputs.having(tensors)
