"""Masks with gaps: which square blocks of the logits are seen, wholly or in part, and which not.

The host sorts blocks of SPARSE queries x SPARSE keys into three kinds. A kernel walks the blocks
that its rows (or its keys) see, those first that need no mask; of the others it reads which
elements are seen, two bytes each. What is stored is O(partial blocks), but for four bytes a block.
"""

import functools
import typing

import numpy as np
import torch
import triton
import triton.language as tl

__all__ = [
    "BlockMask",
    "block_mask",
    "block_seen",
    "create_block_mask",
    "listed_row",
    "listed_rows",
]

_HIDDEN, _WHOLE = -1, -2
# Of bytes and the join in dropout.py, Triton 3.6 and 3.7 make layouts that products of 16 rows are
# wrong with (docs/resources.md).
_TILE = np.int16
_LONG = 2048  # from here on larger blocks: fewer to walk, and tiles of 128 fit in one


class BlockMask(typing.NamedTuple):
    """A mask as kernels take it; int32 but for the tiles, on the kernels' device.

    Attributes:
        kinds: (blocks of queries, blocks of keys): the number of a partial block's tile, or
            whether it is hidden or whole.
        tiles: (partial blocks, SPARSE, SPARSE) int16: 1 where the query (row) sees the key.
        by_query: (offsets, blocks): block i of queries wholly sees the blocks of keys listed
            from ``offsets[2 i]`` on, and partly those from ``offsets[2 i + 1]`` on, up to
            ``offsets[2 i + 2]``.
        by_key: The same of blocks of keys.
        seqlens: Of the queries and keys it was made for; none in a mask made `of` its tensors.
    """

    kinds: torch.Tensor
    tiles: torch.Tensor
    by_query: tuple[torch.Tensor, torch.Tensor]
    by_key: tuple[torch.Tensor, torch.Tensor]
    seqlens: tuple[int, int] | None = None

    @classmethod
    def of(cls, flat):  # noqa: ANN206
        """The mask of which `flat` gave these tensors."""
        kinds, tiles, *lists = flat
        return cls(kinds, tiles, tuple(lists[:2]), tuple(lists[2:]))

    @property
    def flat(self):
        """All its tensors."""
        return [self.kinds, self.tiles, *self.by_query, *self.by_key]

    @property
    def size(self):
        """Queries and keys a block."""
        return self.tiles.shape[1]


def block_mask(problem, device):
    """The mask of a problem with a pattern; everybody's: leave it as it is."""
    return _block_mask(problem.mask, problem.seqlen_q, problem.seqlen_k, torch.device(device))


@functools.lru_cache(maxsize=4)
def _block_mask(mask, seqlen_q, seqlen_k, device):
    def seen(queries):
        return mask.allowed(seqlen_q, seqlen_k, queries)

    return _sorted_blocks(seen, seqlen_q, seqlen_k, device)


def create_block_mask(mask_mod, seqlen_q, seqlen_k, device="cuda"):
    """An arbitrary mask for `attention`, of all batches and heads. Make it once and keep it.

    Args:
        mask_mod: ``mask_mod(query, key)`` is True where the query sees the key; int64 tensors that
            broadcast, on the CPU.
        seqlen_q: Queries.
        seqlen_k: Keys.
        device: Where the kernels will run.
    """

    def seen(queries):
        query = torch.arange(queries.start, queries.stop)[:, None]
        rows = mask_mod(query, torch.arange(seqlen_k)[None, :])
        return rows.expand(len(query), seqlen_k).numpy()

    return _sorted_blocks(seen, seqlen_q, seqlen_k, torch.device(device))


def _sorted_blocks(rows_seen, seqlen_q, seqlen_k, device):
    """The mask of which ``rows_seen(slice)`` is some rows, bool (rows, seqlen_k)."""
    # Queries and keys a block: a multiple of the tiles of the configurations that are used.
    size = 128 if max(seqlen_q, seqlen_k) >= _LONG else 64
    kinds = np.full((triton.cdiv(seqlen_q, size), triton.cdiv(seqlen_k, size)), _HIDDEN, np.int32)
    tiles = []
    for row in range(kinds.shape[0]):
        queries = slice(row * size, min(seqlen_q, (row + 1) * size))
        count = queries.stop - queries.start
        seen = np.zeros((size, kinds.shape[1] * size), dtype=bool)
        seen[:count, :seqlen_k] = rows_seen(queries)
        seen = seen.reshape(size, -1, size)
        whole = seen[:count].all(axis=(0, 2))  # past the last key nothing is seen
        partial = seen.any(axis=(0, 2)) & ~whole
        first = sum(map(len, tiles))
        kinds[row, whole] = _WHOLE
        kinds[row, partial] = np.arange(first, first + partial.sum())
        tiles.append(seen[:, partial].transpose(1, 0, 2).astype(_TILE))
    tiles = np.concatenate([*tiles, np.zeros((1, size, size), _TILE)])  # never of no element
    return BlockMask(
        torch.from_numpy(kinds).to(device),
        torch.from_numpy(tiles).to(device),
        _lists(kinds, device),
        _lists(kinds.T, device),
        (seqlen_q, seqlen_k),
    )


def _lists(kinds, device):
    """Of each row, its whole and then its partial blocks, one row after the other."""
    offsets, blocks = [0], []
    for row in kinds:
        for chosen in (np.flatnonzero(row == _WHOLE), np.flatnonzero(row >= 0)):
            blocks.append(chosen)
            offsets.append(offsets[-1] + len(chosen))
    both = np.array(offsets, np.int32), np.concatenate([*blocks, [0]]).astype(np.int32)
    return tuple(torch.from_numpy(x).to(device) for x in both)


@triton.jit
def listed_rows(offsets, block, PARTIAL: tl.constexpr, SPARSE: tl.constexpr):
    """Steps (begin, end) through the rows of the whole, or the partial, blocks that one sees."""
    first = offsets + 2 * block + PARTIAL
    return tl.load(first) * SPARSE, tl.load(first + 1) * SPARSE


@triton.jit
def listed_row(listed, step, SPARSE: tl.constexpr):
    """The row that a step is at."""
    return tl.load(listed + step // SPARSE) * SPARSE + step % SPARSE


@triton.jit
def block_seen(
    kinds, tiles, first_query, first_key, seqlen_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """Which of BLOCK_M x BLOCK_N elements of one block are seen; (keys, queries) if TRANSPOSED."""
    block = first_query // SPARSE * tl.cdiv(seqlen_k, SPARSE) + first_key // SPARSE
    kind = tl.load(kinds + block)
    tile = tiles + tl.maximum(kind, 0).to(tl.int64) * (SPARSE * SPARSE)
    queries = first_query % SPARSE + tl.arange(0, BLOCK_M)
    keys = first_key % SPARSE + tl.arange(0, BLOCK_N)
    if TRANSPOSED:
        places = queries[None, :] * SPARSE + keys[:, None]
    else:
        places = queries[:, None] * SPARSE + keys[None, :]
    seen = tl.load(tile + places, mask=kind >= 0, other=0) != 0
    return seen | (kind == -2)
