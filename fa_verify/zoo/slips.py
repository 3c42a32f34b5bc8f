"""What a launcher's slip makes of a problem, inputs, terms, outputs or gradients."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.kernel import Grads, Outputs
    from fa_verify.masks import Alignment
    from fa_verify.problem import Problem
    from fa_verify.zoo.operator import Tensors

__all__ = [
    "by_strides_of_v",
    "key_of_the_next",
    "last_key_dropped",
    "lse_by",
    "masked",
    "nan_at_the_end",
    "o_by",
    "one_key_more",
    "other_alignment",
    "rolled_heads",
    "swapped_grads",
    "term_by",
    "without_last_row",
]


def o_by(change: Callable[[Problem, torch.Tensor], torch.Tensor]) -> Any:
    """A change of o."""

    def outputs(problem: Problem, found: Outputs) -> Outputs:
        return dataclasses.replace(found, o=change(problem, found.o))

    return outputs


def lse_by(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A change of lse."""

    def outputs(_problem: Problem, found: Outputs) -> Outputs:
        return dataclasses.replace(found, lse=None if found.lse is None else change(found.lse))

    return outputs


def without_last_row(_problem: Problem, o: torch.Tensor) -> torch.Tensor:
    """The last row is 0."""
    rows = torch.arange(o.shape[2], device=o.device)[:, None]
    return torch.where(rows == o.shape[2] - 1, torch.zeros_like(o), o)


def nan_at_the_end(_problem: Problem, o: torch.Tensor) -> torch.Tensor:
    """The last element is NaN."""
    flat = torch.arange(o.numel(), device=o.device).reshape(o.shape)
    return torch.where(flat == o.numel() - 1, torch.full_like(o, math.nan), o)


def by_strides_of_v(_problem: Problem, tensors: Tensors) -> Tensors:
    """Address k by the strides of v, where its memory reaches so far."""
    q, k, v = tensors
    strides = v.stride()
    last = sum((size - 1) * stride for size, stride in zip(k.shape, strides, strict=True))
    held = k.untyped_storage().nbytes() // k.element_size() - k.storage_offset()
    return (q, k.as_strided(k.shape, strides) if 0 <= last < held else k, v)


def rolled_heads(_problem: Problem, tensors: Tensors) -> Tensors:
    """Each key head is the one before."""
    q, k, v = tensors
    return q, k.roll(1, dims=1), v.roll(1, dims=1)


def one_key_more(problem: Problem) -> Problem:
    """A mask's right end is one key later."""
    mask = problem.mask
    if mask.causal:
        mask = dataclasses.replace(mask, causal=False, window_right=1)
    elif mask.window_right is not None:
        mask = dataclasses.replace(mask, window_right=mask.window_right + 1)
    return dataclasses.replace(problem, mask=mask)


def other_alignment(problem: Problem) -> Problem:
    """The diagonal ends in the other corner."""
    other: Alignment = "top-left" if problem.mask.alignment == "bottom-right" else "bottom-right"
    return dataclasses.replace(problem, mask=dataclasses.replace(problem.mask, alignment=other))


def masked(**fields: Any) -> Callable[[Problem], Problem]:
    """A change of the mask's fields."""
    return lambda p: dataclasses.replace(p, mask=dataclasses.replace(p.mask, **fields))


def key_of_the_next(problem: Problem) -> Problem:
    """The first document that has one after it with keys takes a key from it."""
    documents = [list(lengths) for lengths in problem.mask.documents]
    for one, following in itertools.pairwise(documents):
        if following[1]:
            one[1], following[1] = one[1] + 1, following[1] - 1
            break
    return masked(documents=tuple((q, k) for q, k in documents))(problem)


def swapped_grads(_problem: Problem, grads: Grads) -> Grads:
    """Swap dk and dv, where their shapes allow it."""
    if grads.dk.shape != grads.dv.shape:
        return grads
    return dataclasses.replace(grads, dk=grads.dv, dv=grads.dk)


def last_key_dropped(_problem: Problem, grads: Grads) -> Grads:
    """The last key of dv is 0."""
    rows = torch.arange(grads.dv.shape[2], device=grads.dv.device)[:, None]
    last = rows == grads.dv.shape[2] - 1
    return dataclasses.replace(grads, dv=torch.where(last, torch.zeros_like(grads.dv), grads.dv))


def term_by(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Something else in the place of a term, where there is one."""

    def terms(given: dict[str, Any]) -> dict[str, Any]:
        return given | {name: change(given[name])} if name in given else given

    return terms
