"""Who sees whom, as tensors where a case is judged: each made, and sent to the device, once.

Judging asks some twenty times for the same few vectors; a copy to a card waits until all that was
asked of it before is done. What is returned is everybody's: leave it as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from fa_verify.masks import Mask
    from fa_verify.problem import Problem

__all__ = ["Tile", "any_blind", "blind", "diagonals", "hidden", "intervals", "keys_seen"]

# Elements of a mask that is kept whole: 64 MB of one with gaps, which takes long to make.
_KEPT = 1 << 26
_KEPT_BAND = 1 << 22


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A block of the logits: some key/value heads, queries of their group, and the keys in sight.

    Attributes:
        heads: Which of the batch x heads_kv key/value heads.
        rows: Which queries (of every query head in the group).
        keys: From the first to the last key that any of the rows sees.
        hidden: bool, (rows, keys): True where the query must not see the key; None: sees them all.
    """

    heads: slice
    rows: slice
    keys: slice
    hidden: torch.Tensor | None

    def holds_all(self, problem: Problem) -> bool:
        """Whether it is the only one, and no row or key of the problem is left out."""
        whole = (problem.batch * problem.heads_kv, problem.seqlen_q, problem.seqlen_k)
        return (self.heads, self.rows, self.keys) == tuple(slice(0, n) for n in whole)


def intervals(problem: Problem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """From each query's first key to its last, `Mask.intervals`, int64."""
    return _intervals(problem.mask, problem.seqlen_q, problem.seqlen_k, device)


def hidden(
    problem: Problem,
    queries: torch.Tensor | slice,
    keys: torch.Tensor | slice,
    device: torch.device,
) -> torch.Tensor:
    """Where some queries must not see some keys: bool, (queries, keys)."""
    size = problem.seqlen_q, problem.seqlen_k
    if math.prod(size) <= (_KEPT if problem.mask.pattern else _KEPT_BAND):
        return _hidden(problem.mask, *size, device)[queries][:, keys]
    if not problem.mask.pattern:
        low, high = (ends[queries] for ends in intervals(problem, device))
        return _outside(low, high, size[1], keys)
    rows = queries if isinstance(queries, slice) else queries.cpu().numpy()
    return ~torch.from_numpy(problem.mask.allowed(*size, rows)).to(device)[:, keys]


def blind(problem: Problem, device: torch.device) -> torch.Tensor:
    """Queries that see no key, bool, (seqlen_q,)."""
    return _blind(problem.mask, problem.seqlen_q, problem.seqlen_k, device)


def any_blind(problem: Problem) -> bool:
    """Whether there is such a query."""
    return _any_blind(problem.mask, problem.seqlen_q, problem.seqlen_k)


def diagonals(problem: Problem, device: torch.device) -> torch.Tensor:
    """The key on each query's diagonal, `Mask.diagonals`, int64, (seqlen_q,)."""
    return _diagonals(problem.mask, problem.seqlen_q, problem.seqlen_k, device)


def keys_seen(problem: Problem, device: torch.device) -> torch.Tensor:
    """Which keys some query sees: 1 or 0, float64, (seqlen_k,)."""
    return _keys_seen(problem.mask, problem.seqlen_q, problem.seqlen_k, device)


@functools.lru_cache(maxsize=8)
def _intervals(
    mask: Mask, seqlen_q: int, seqlen_k: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    lo, hi = (torch.from_numpy(x).to(device) for x in mask.intervals(seqlen_q, seqlen_k))
    return lo, hi


@functools.lru_cache(maxsize=3)
def _hidden(mask: Mask, seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor:
    if not mask.pattern:
        return _outside(*_intervals(mask, seqlen_q, seqlen_k, device), seqlen_k, slice(None))
    return ~torch.from_numpy(mask.allowed(seqlen_q, seqlen_k)).to(device)


def _outside(
    low: torch.Tensor, high: torch.Tensor, seqlen_k: int, keys: torch.Tensor | slice
) -> torch.Tensor:
    """Which keys lie outside each query's interval, bool, (queries, keys)."""
    columns = torch.arange(seqlen_k, device=low.device)[keys]
    return (columns < low[:, None]) | (columns >= high[:, None])


@functools.lru_cache(maxsize=8)
def _any_blind(mask: Mask, seqlen_q: int, seqlen_k: int) -> bool:
    lo, hi = mask.intervals(seqlen_q, seqlen_k)
    return bool((lo >= hi).any())


@functools.lru_cache(maxsize=8)
def _blind(mask: Mask, seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor:
    lo, hi = _intervals(mask, seqlen_q, seqlen_k, device)
    return lo >= hi


@functools.lru_cache(maxsize=8)
def _diagonals(mask: Mask, seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(mask.diagonals(seqlen_q, seqlen_k)).to(device)


@functools.lru_cache(maxsize=8)
def _keys_seen(mask: Mask, seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor:
    if mask.pattern:
        seen = np.zeros(seqlen_k, dtype=bool)
        for _, rows in mask.strips(seqlen_q, seqlen_k):
            seen |= rows.any(0)
        return torch.from_numpy(seen.astype(float)).to(device)
    lo, hi = mask.intervals(seqlen_q, seqlen_k)
    ends = np.zeros(seqlen_k + 1)
    np.add.at(ends, lo, 1.0)
    np.add.at(ends, hi, -1.0)
    return torch.from_numpy((ends.cumsum()[:-1] > 0).astype(float)).to(device)
