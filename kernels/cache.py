"""Where the keys of a cache lie, and tiles of them.

A cache is a tensor (pages, heads_kv, page_size, head_dim) with any strides and a table of the pages
of each sequence, or it is contiguous: one page a sequence, which holds all of its keys. VECTOR and
the tails of tiles are those of tiles.py.
"""

import triton
import triton.language as tl


@triton.jit
def locate(
    table, batch, first_key, begin, end,
    MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Page and first slot of BLOCK_N keys, or page and slot of each where pages are smaller.

    Entries of the table are read only for keys in [begin, end). PAGE_SIZE = 0: contiguous.
    first_key is a multiple of BLOCK_N.
    """
    if PAGE_SIZE == 0:
        page = tl.cast(batch, tl.int64)
        slot = tl.cast(first_key, tl.int64)
    elif PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table + first_key // PAGE_SIZE).to(tl.int64)
        slot = tl.cast(first_key % PAGE_SIZE, tl.int64)
    else:
        keys = first_key + tl.arange(0, BLOCK_N)
        if MASKED:
            inside = (keys >= begin) & (keys < end)
            page = tl.load(table + keys // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(table + keys // PAGE_SIZE).to(tl.int64)
        slot = (keys % PAGE_SIZE).to(tl.int64)
    return page, slot


@triton.jit
def load_columns(
    head, page, slot, stride_page, stride_slot, stride_column, inside, first_column, head_dim,
    MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A (BLOCK_N, COLUMNS) tile; rows that are not inside, and columns past head_dim, are 0."""
    stride_page = stride_page // VECTOR * VECTOR
    stride_slot = stride_slot // VECTOR * VECTOR
    rows = page * stride_page + slot * stride_slot
    columns = (first_column + tl.arange(0, COLUMNS))[None, :]
    columns_inside = columns < head_dim // VECTOR * VECTOR
    if VECTOR == 1:
        columns = columns.to(tl.int64) * stride_column
    if not rows.type.is_block():  # what changes from block to block is one number
        head += rows
        rows = tl.arange(0, BLOCK_N).to(tl.int64) * stride_slot
        if VECTOR > 1:  # said of the last sum of a pointer and a number, since such are folded
            head = tl.multiple_of(head, 16)
    pointers = head + rows[:, None] + columns
    if MASK_ROWS and MASK_COLUMNS:
        return tl.load(pointers, mask=inside[:, None] & columns_inside, other=0.0)
    if MASK_ROWS:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    if MASK_COLUMNS:
        return tl.load(pointers, mask=columns_inside, other=0.0)
    return tl.load(pointers)


@triton.jit
def load_keys(
    head, page, slot, stride_page, stride_slot, stride_column, inside, head_dim,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
    MASK_ROWS: tl.constexpr, PADDED: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of a head's cache as (tile, tail); see `load_columns`."""
    tile = load_columns(
        head, page, slot, stride_page, stride_slot, stride_column, inside, 0, head_dim,
        MASK_ROWS, PADDED and TAIL_D == 0, VECTOR, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    tail = tile
    if TAIL_D > 0:
        tail = load_columns(
            head, page, slot, stride_page, stride_slot, stride_column, inside, BLOCK_D, head_dim,
            MASK_ROWS, PADDED, VECTOR, BLOCK_N, TAIL_D,
        )  # fmt: skip
    return tile, tail
