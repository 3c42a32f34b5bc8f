"""`paged`: k and v as a paged cache whose holes are poison, to verify paged kernels with.

The rest of the harness does not know of it: a kernel's `forward` calls it on what it is given.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from fa_verify import ttir
from fa_verify.errors import InvalidInputError, UnsupportedProblemError
from fa_verify.inputs import reserved

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fa_verify.problem import Problem

__all__ = ["NOWHERE", "Pages", "paged"]

NOWHERE = 0x7FFF_0000
"""Number of no page: what the table holds past a sequence's last page."""

_UNUSED = 3  # pages of the pool that belong to no sequence
_FAR = 1 << 31  # elements from the first one that offsets of 32 bits do not reach


class Pages(NamedTuple):
    """A paged cache.

    Attributes:
        k_pages: (num_pages, page_size, heads_kv, head_dim), contiguous.
        v_pages: (num_pages, page_size, heads_kv, head_dim_v), contiguous.
        block_table: (sequences, pages of the longest + 1) int32: the pages of each sequence.
        cache_lengths: (sequences,) int32: keys of each sequence.
        cu_seqlens_q: (sequences + 1,) int32: where each sequence's queries begin among all of them,
            ``q.transpose(1, 2).flatten(0, 1)``, and where the last ends.
        max_seqlen_q: Most queries of a sequence.
    """

    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    cache_lengths: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int


def paged(
    problem: Problem,
    k: Tensor,
    v: Tensor,
    *,
    page_size: int,
    seed: int = 0,
    evict: bool = False,
    far: bool | None = None,
) -> Pages:
    """Lay k and v out in shuffled pages.

    What a right kernel has no business to read is poison: slots that hold no key and pages of no
    sequence are NaN, and memory that nobody wrote to the CPU executor, which names the line that
    reads there; table entries past a sequence's last page are `NOWHERE`, far outside the pool.

    Args:
        problem: The case's problem.
        k: (batch, heads_kv, seqlen_k, head_dim), any strides.
        v: (batch, heads_kv, seqlen_k, head_dim_v), any strides.
        page_size: Keys a page, at least 1.
        seed: Chooses the order of the pages.
        evict: Pages that no query sees a key of are gone, as engines free what a window has left
            behind: their entries lead to one page of NaN, which may be read and must not matter.
        far: Pages in use lie past 2^31 elements of the larger pool, as they do in pools of some
            gigabytes; None: where k or v itself has elements as far from its first one. On the CPU
            the rest of it takes address space alone.

    Raises:
        InvalidInputError: page_size is less than 1.
        UnsupportedProblemError: A card, where all of a pool takes memory, has no room for it.
    """
    if page_size < 1:
        msg = f"page_size={page_size}: must be at least 1"
        raise InvalidInputError(msg)
    whole = ((problem.seqlen_q, problem.seqlen_k),) * problem.batch
    queries, lengths = np.array(problem.mask.documents or whole).T
    counts = -(-lengths // page_size)
    first_page = np.concatenate([[0], np.cumsum(counts)])
    # For each key of all sequences, one after the other: its sequence's page that holds it.
    places = np.concatenate([np.arange(length) for length in lengths])
    pages = np.repeat(first_page[:-1], lengths) + places // page_size
    kept = np.ones(first_page[-1], dtype=bool)
    if evict:
        kept[:] = False
        kept[pages[np.tile(_seen(problem), problem.batch)]] = True
    # Pages are numbered from `first` on: none in a pool of usual size.
    order = np.random.default_rng(seed).permutation(int(kept.sum()) + _UNUSED)
    far = _lies_far(problem) if far is None else far
    first, k_pages, v_pages = _pools(problem, k, v, len(order), page_size, far=far)
    numbers = np.full(len(kept), order[-1])
    numbers[kept] = order[: kept.sum()]
    table = np.full((len(lengths), int(counts.max(initial=0)) + 1), NOWHERE, dtype=np.int32)
    for row, start, count in zip(table, first_page, counts, strict=False):
        row[:count] = first + numbers[start : start + count]

    there = kept[pages]
    slots = numbers[pages[there]] * page_size + places[there] % page_size
    held = np.bincount(slots // page_size, minlength=len(order))  # keys a page, a prefix of it
    held[order[-1]] = page_size
    owners = np.full(len(order), -1)
    owners[numbers[pages[there]]] = np.repeat(np.arange(len(lengths)), lengths)[there]
    for x, pool in ((k, k_pages), (v, v_pages)):
        rows = x.transpose(1, 2).reshape(-1, *pool.shape[2:])[torch.from_numpy(there).to(x.device)]
        places_of = torch.from_numpy(slots).to(x.device)
        pool[first:].view(-1, *pool.shape[2:])[places_of] = rows
    _tell(problem, {"k": k_pages[first:], "v": v_pages[first:]}, held, owners)
    return Pages(
        k_pages=k_pages,
        v_pages=v_pages,
        block_table=torch.from_numpy(table).to(k.device),
        cache_lengths=torch.from_numpy(lengths.astype(np.int32)).to(k.device),
        cu_seqlens_q=torch.from_numpy(np.cumsum([0, *queries], dtype=np.int32)).to(k.device),
        max_seqlen_q=int(queries.max()),
    )


def _seen(problem: Problem) -> npt.NDArray[np.bool_]:
    """Which keys some query sees, (seqlen_k,)."""
    ends = np.zeros(problem.seqlen_k + 1)
    lo, hi = problem.mask.intervals(problem.seqlen_q, problem.seqlen_k)
    np.add.at(ends, lo, 1)
    np.add.at(ends, hi, -1)
    return ends.cumsum()[:-1] > 0


def _lies_far(problem: Problem) -> bool:
    """Whether k or v has elements past 2^31 of its first one."""
    spans = (problem.layout_k.span(problem.shape_k), problem.layout_v.span(problem.shape_v))
    return max(spans) > _FAR


def _pools(
    problem: Problem, k: Tensor, v: Tensor, count: int, page_size: int, *, far: bool
) -> tuple[int, Tensor, Tensor]:
    """The number of the first page in use, and two pools, NaN from there on."""
    shapes = [(page_size, problem.heads_kv, x.shape[3]) for x in (k, v)]
    first = -(-_FAR // max(map(math.prod, shapes))) if far else 0
    new = _reserved if far else torch.Tensor.new_empty
    k_pages, v_pages = (
        new(x, (first + count, *shape)) for x, shape in zip((k, v), shapes, strict=True)
    )
    for pool in (k_pages, v_pages):
        pool[first:].fill_(torch.nan)
    return first, k_pages, v_pages


def _reserved(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`like.new_empty(shape)` for a large pool of which few pages will be looked at."""
    run = ttir.running()
    if run is None and like.device.type != "cpu":
        try:
            return like.new_empty(shape)
        except torch.OutOfMemoryError as error:
            msg = (
                f"pages past 2^31 elements: a pool of shape {shape} takes memory on a card, which "
                f"has no room for it; the CPU executor reserves it without"
            )
            raise UnsupportedProblemError(msg) from error
    whole = reserved(math.prod(shape), like.dtype).view(shape)
    # A tensor in place of `like`'s, for who follows on which device what is derived from it lies.
    pool = like.new_empty(0).set_(whole.untyped_storage(), 0, whole.shape, whole.stride())
    if run is not None:
        run.declare(pool, "a pool of pages", written=False)
    return pool


def _tell(
    problem: Problem,
    pools: dict[str, Tensor],
    held: npt.NDArray[np.int64],
    owners: npt.NDArray[np.int64],
) -> None:
    """Tell the execution under way, if there is one, what is a hole and which head owns what."""
    run = ttir.running()
    if run is None:
        return
    own = torch.from_numpy(owners if problem.batch > 1 else np.minimum(owners, 0))[:, None]
    labels = torch.where(own < 0, -1, own * problem.heads_kv + torch.arange(problem.heads_kv))
    for name, pool in pools.items():
        live = torch.arange(pool.shape[1]) < torch.from_numpy(held)[:, None]
        run.declare(pool, f"{name}'s pages", written=live[:, :, None, None])
        if problem.batch * problem.heads_q > 1:
            run.label(pool, name, labels[:, None, :, None])
