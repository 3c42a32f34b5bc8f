"""Which heads' elements an attention program may read, told by the elements that it writes.

o, lse and dq of a query head are made of that head's q, do, o and lse and of its key head's k and
v; dk and dv of a key head, of that head's k and v and of its query heads' q, do, o and lse.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, TypeGuard

import torch

from fa_verify import ttir

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fa_verify.problem import Problem

__all__ = ["footprints", "label"]

_KEY_SIDE = frozenset({"k", "v", "dk", "dv"})
_READ = ("q", "k", "v", "o", "lse", "do")


def label(run: ttir.Run, problem: Problem, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Tell the run which head the elements of tensors belong to; one head has no neighbour."""
    if problem.batch * problem.heads_q == 1:
        return
    for name, tensor in tensors.items():
        if _fits(tensor, problem, name):
            run.label(tensor, name, _heads(problem.batch, _count(problem, name), tensor.ndim))


def footprints(
    problem: Problem, outputs: Mapping[str, torch.Tensor | None]
) -> list[ttir.Footprint]:
    """What a program that writes a head of each of the outputs may read."""
    return [
        ttir.Footprint(
            tensor=tensor,
            name=name,
            labels=_heads(problem.batch, _count(problem, name), tensor.ndim),
            reads={read: _together(problem, name, read) for read in _READ},
        )
        for name, tensor in outputs.items()
        if _fits(tensor, problem, name)
    ]


def _count(problem: Problem, name: str) -> int:
    return problem.heads_kv if name in _KEY_SIDE else problem.heads_q


def _fits(tensor: torch.Tensor | None, problem: Problem, name: str) -> TypeGuard[torch.Tensor]:
    """Whether there is such a tensor, with elements, with the batches and heads that are due.

    A bias may be several heads', so neither it nor its gradient belongs to one.
    """
    if name not in (*_READ, "dq", "dk", "dv"):
        return False
    due = (problem.batch, _count(problem, name))
    return tensor is not None and bool(tensor.numel()) and tuple(tensor.shape[:2]) == due


@lru_cache(maxsize=64)
def _heads(batch: int, heads: int, rank: int) -> torch.Tensor:
    """(batch, heads, 1, ...): number of each head."""
    return torch.arange(batch * heads).reshape(batch, heads, *(1,) * (rank - 2))


def _together(problem: Problem, written: str, read: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the heads of two tensors: by query head, or by key head if one has only those."""
    by_key = written in _KEY_SIDE or read in _KEY_SIDE
    shape = (problem.batch, problem.heads_q, problem.heads_kv)
    first, second = (
        _numbers(*shape, own=name in _KEY_SIDE or not by_key, key=name in _KEY_SIDE)
        for name in (written, read)
    )
    return first, second


@lru_cache(maxsize=64)
def _numbers(batch: int, heads_q: int, heads_kv: int, *, own: bool, key: bool) -> torch.Tensor:
    """A number for each head, or for each query head that of its key head."""
    numbers = torch.arange(batch * (heads_kv if key else heads_q))
    return numbers if own else numbers // (heads_q // heads_kv)
