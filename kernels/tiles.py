"""Tiles of rows, loaded and stored, and products over head_dim.

A head_dim that is no power of two is split: a *tile* of BLOCK_D columns and a *tail* of TAIL_D more
(80 = 64 + 16, 96 = 64 + 32), so that 80 costs 80 columns, not 128. TAIL_D = 0 means no tail; the
tail that the functions then hand around is a dummy, which the compiler drops.

VECTOR says how memory may be read. 1: any strides. More: head_dim is contiguous, and every other
stride, head_dim itself and the addresses are multiples of VECTOR elements (16 bytes), which makes
loads wide. Strides are in elements. Whatever depends on a stride is computed in 64 bits.
"""

import triton
import triton.language as tl


@triton.jit
def head_start(base, batch, head, stride_batch, stride_head, VECTOR: tl.constexpr):
    """Pointer to the first element of one head of one sequence."""
    # `x // VECTOR * VECTOR` is x: it shows the compiler that x is a multiple of VECTOR.
    batch_offset = tl.cast(batch, tl.int64) * (stride_batch // VECTOR * VECTOR)
    head_offset = tl.cast(head, tl.int64) * (stride_head // VECTOR * VECTOR)
    return base + batch_offset + head_offset


@triton.jit
def row_pointers(
    head, first_row, first_column, stride_row, stride_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Pointers to ROWS x COLUMNS elements of a head, from (first_row, first_column) on."""
    stride_row = stride_row // VECTOR * VECTOR
    start = head + tl.cast(first_row, tl.int64) * stride_row
    if VECTOR > 1:
        start = tl.multiple_of(start, 16)
    rows = tl.arange(0, ROWS).to(tl.int64)[:, None] * stride_row
    columns = (first_column + tl.arange(0, COLUMNS))[None, :]
    if VECTOR == 1:
        return start + rows + columns.to(tl.int64) * stride_column
    return start + rows + columns


@triton.jit
def load_columns(
    head, first_row, seqlen, first_column, head_dim, stride_row, stride_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A (ROWS, COLUMNS) tile; what lies past seqlen or head_dim reads as 0 and is not touched."""
    pointers = row_pointers(
        head, first_row, first_column, stride_row, stride_column, ROWS, COLUMNS, VECTOR
    )
    rows_inside = (first_row + tl.arange(0, ROWS) < seqlen)[:, None]
    columns_inside = (first_column + tl.arange(0, COLUMNS) < head_dim // VECTOR * VECTOR)[None, :]
    if MASK_ROWS and MASK_COLUMNS:
        return tl.load(pointers, mask=rows_inside & columns_inside, other=0.0)
    if MASK_ROWS:
        return tl.load(pointers, mask=rows_inside, other=0.0)
    if MASK_COLUMNS:
        return tl.load(pointers, mask=columns_inside, other=0.0)
    return tl.load(pointers)


@triton.jit
def load_rows(
    head, first_row, seqlen, head_dim, stride_row, stride_column,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
    MASK_ROWS: tl.constexpr, PADDED: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a head as (tile, tail); rows past seqlen and columns past head_dim are 0.

    MASK_ROWS=False promises that all rows exist; PADDED says that BLOCK_D + TAIL_D > head_dim.
    """
    tile = load_columns(
        head, first_row, seqlen, 0, head_dim, stride_row, stride_column,
        ROWS, BLOCK_D, MASK_ROWS, PADDED and TAIL_D == 0, VECTOR,
    )  # fmt: skip
    tail = tile
    if TAIL_D > 0:
        tail = load_columns(
            head, first_row, seqlen, BLOCK_D, head_dim, stride_row, stride_column,
            ROWS, TAIL_D, MASK_ROWS, PADDED, VECTOR,
        )  # fmt: skip
    return tile, tail


@triton.jit
def store_rows(
    head, first_row, seqlen, head_dim, stride_row, tile, tail,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Store (tile, tail), cast to the tensor's dtype, to rows whose head_dim is contiguous."""
    rows_inside = (first_row + tl.arange(0, ROWS) < seqlen)[:, None]
    column_end = head_dim // VECTOR * VECTOR
    pointers = row_pointers(head, first_row, 0, stride_row, 1, ROWS, BLOCK_D, VECTOR)
    inside = rows_inside & (tl.arange(0, BLOCK_D) < column_end)[None, :]
    tl.store(pointers, tile.to(head.dtype.element_ty), mask=inside)
    if TAIL_D > 0:
        pointers = row_pointers(head, first_row, BLOCK_D, stride_row, 1, ROWS, TAIL_D, VECTOR)
        inside = rows_inside & (BLOCK_D + tl.arange(0, TAIL_D) < column_end)[None, :]
        tl.store(pointers, tail.to(head.dtype.element_ty), mask=inside)


@triton.jit
def zero_rows(ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr):
    """Float32 accumulators (tile, tail)."""
    tile = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    tail = tl.zeros((ROWS, TAIL_D if TAIL_D > 0 else 16), dtype=tl.float32)
    return tile, tail


@triton.jit
def dot_rows(
    a, a_tail, b, b_tail, TAIL_D: tl.constexpr, DOT_PRECISION: tl.constexpr
):  # fmt: skip
    """Float32 inner products of the rows of a with the rows of b: (rows of a, rows of b)."""
    product = tl.dot(a, tl.trans(b), input_precision=DOT_PRECISION)
    if TAIL_D > 0:
        product = tl.dot(a_tail, tl.trans(b_tail), product, input_precision=DOT_PRECISION)
    return product


@triton.jit
def add_product(
    acc, acc_tail, weights, rows, rows_tail, TAIL_D: tl.constexpr, DOT_PRECISION: tl.constexpr
):  # fmt: skip
    """(acc, acc_tail) + weights @ (rows, rows_tail) in float32."""
    acc = tl.dot(weights, rows, acc, input_precision=DOT_PRECISION)
    if TAIL_D > 0:
        acc_tail = tl.dot(weights, rows_tail, acc_tail, input_precision=DOT_PRECISION)
    return acc, acc_tail
