"""What the kernels share: places of a tile, the band mask, tanh."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def places(head, rows, columns, stride_row, stride_column):
    """Pointers to rows x columns of one head; offsets in 64 bits."""
    return (
        head
        + rows.to(tl.int64)[:, None] * stride_row
        + columns.to(tl.int64)[None, :] * stride_column
    )


@triton.jit
def inside(rows, row_end, columns, column_end):
    """Which of rows x columns exist."""
    return (rows < row_end)[:, None] & (columns < column_end)[None, :]


@triton.jit
def in_band(rows, keys, band_lo, band_hi, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Whether ``band_lo <= key - row <= band_hi``."""
    seen = keys >= 0
    if HAS_LO:
        seen = seen & (keys - rows >= band_lo)
    if HAS_HI:
        seen = seen & (keys - rows <= band_hi)
    return seen


@triton.jit
def tanh(x):
    """Compute tanh without overflow."""
    decay = tl.exp(-2.0 * tl.abs(x))
    result = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -result, result)
