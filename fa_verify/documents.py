"""`cu_seqlens`: where the documents packed into a sequence begin, as kernels take it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from fa_verify.problem import Problem

__all__ = ["cu_seqlens"]


def cu_seqlens(
    problem: Problem, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Cumulative lengths of the problem's documents, as flash-attention's varlen functions take.

    A problem without documents has one, the whole sequence. The tensors are everybody's: leave
    them as they are.

    Returns:
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k): the first two int32 on the device,
        (documents + 1,): document n is the rows from entry n up to, not including, entry n + 1.

    >>> from fa_verify import Mask, Problem
    >>> mask = Mask(documents=((3, 5), (0, 4)))
    >>> problem = Problem(seqlen_q=3, seqlen_k=9, head_dim=8, head_dim_v=8, mask=mask)
    >>> cu_seqlens(problem, "cpu")
    (tensor([0, 3, 3], dtype=torch.int32), tensor([0, 5, 9], dtype=torch.int32), 3, 5)
    """
    documents = problem.mask.documents or ((problem.seqlen_q, problem.seqlen_k),)
    return _cu_seqlens(documents, torch.device(device))


@functools.lru_cache(maxsize=8)
def _cu_seqlens(
    documents: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    lengths = np.array(documents, dtype=np.int32)
    starts = np.zeros((len(documents) + 1, 2), dtype=np.int32)
    np.cumsum(lengths, axis=0, out=starts[1:])
    starts_q, starts_k = (
        torch.from_numpy(np.ascontiguousarray(starts[:, side])).to(device) for side in (0, 1)
    )
    longest_q, longest_k = lengths.max(axis=0)
    return starts_q, starts_k, int(longest_q), int(longest_k)
