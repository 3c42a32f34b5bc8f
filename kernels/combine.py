"""Merge attention over disjoint sets of keys: parts of o and their lse become o and lse."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .scores import LOG2E

__all__ = ["combine", "combine_kernel"]

_POINTERS = ("part_o", "part_lse", "o", "lse")
_RUNTIME = ("stride_ob", "stride_oh", "stride_om", "rows", "heads", "seqlen", "head_dim", "splits")


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def combine_kernel(
    part_o, part_lse, o, lse, stride_ob, stride_oh, stride_om,
    rows, heads, seqlen, head_dim, splits,
    BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_DV columns of one row of o, and its lse.

    A part whose lse is -inf saw no key: it weighs nothing, whatever its o is. BLOCK_S parts are
    summed as a tree, the blocks in order: further parts of -inf change no bit.

    The tensors and numbers that need a word:
        part_o: (splits, batch, heads, seqlen, head_dim) float32, contiguous; part_lse without
            head_dim.
        o: (batch, heads, seqlen, head_dim), head_dim contiguous; lse contiguous.
        rows: batch * heads * seqlen.

    Under DEPENDENT the launch may begin before the kernel that writes the parts has ended.
    """
    if DEPENDENT:
        gdc_wait()
    blocks = tl.cdiv(head_dim, BLOCK_DV)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first_column = tl.program_id(0) % blocks * BLOCK_DV
    columns = first_column + tl.arange(0, BLOCK_DV)
    m = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.full((), 0.0, dtype=tl.float32)
    acc = tl.zeros((BLOCK_DV,), dtype=tl.float32)
    for first in tl.range(0, splits, BLOCK_S):
        parts = first + tl.arange(0, BLOCK_S)
        places = parts.to(tl.int64) * rows + row
        part = tl.load(part_lse + places, mask=parts < splits, other=float("-inf"))
        values = tl.load(
            part_o + (places * head_dim)[:, None] + columns[None, :],
            mask=(parts < splits)[:, None] & (columns < head_dim)[None, :],
            other=0.0,
        )
        values = tl.where((part == float("-inf"))[:, None], 0.0, values)
        m_new = tl.maximum(m, tl.max(part, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet
        weights = tl.exp2((part - shift) * LOG2E)
        rescale = tl.exp2((m - shift) * LOG2E)
        total = total * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * values, 0)
        m = m_new

    empty = total == 0.0  # the largest weight of any other row is 1
    total = tl.where(empty, 1.0, total)
    query = row % seqlen
    head = row // seqlen % heads
    batch = row // seqlen // heads
    o_row = o + batch * stride_ob + head * stride_oh + query * stride_om
    tl.store(o_row + columns, (acc / total).to(o.dtype.element_ty), mask=columns < head_dim)
    row_lse = tl.where(empty, float("-inf"), m + tl.log(total))
    tl.store(lse + row, row_lse, mask=first_column == 0)


# Up to so many parts: BLOCK_S, BLOCK_DV, num_warps. A tile takes 32 registers of each thread.
TILES = {16: (16, 128, 2), 32: (32, 128, 4), 1 << 31: (64, 64, 4)}
INVARIANT = TILES[32]


def combine(part_o, part_lse, o=None, lse=None, *, dependent=False, invariant=False):
    """Merge attention over disjoint sets of keys.

    Args:
        part_o: (splits, batch, heads, seqlen, head_dim) float32, contiguous.
        part_lse: (splits, batch, heads, seqlen) float32, contiguous, natural logarithm; -inf says
            that a part saw no key, whatever its o holds.
        o: Where to write, any dtype, head_dim contiguous; None: a new tensor of float32.
        lse: Where to write, float32, contiguous; None: a new tensor.
        dependent: The kernel launched last writes the parts, and says by
            ``griddepcontrol.launch_dependents`` when this one may be launched.
        invariant: Further parts of -inf change no bit.

    Returns:
        o and lse; a row that no part saw a key for gets 0 and -inf.

    Raises:
        ValueError: The parts do not fit together.
    """
    if part_o.shape[:-1] != part_lse.shape or part_lse.dim() != 4 or not len(part_o):
        msg = (
            f"part_o.shape={tuple(part_o.shape)}, part_lse.shape={tuple(part_lse.shape)}: must be "
            "(splits, batch, heads, seqlen, head_dim), splits at least 1, and the same without "
            "head_dim"
        )
        raise ValueError(msg)
    for name, x in (("part_o", part_o), ("part_lse", part_lse)):
        if x.dtype != torch.float32 or not x.is_contiguous():
            msg = f"{name}={x.dtype}, strides {x.stride()}: must be float32 and contiguous"
            raise ValueError(msg)
    splits, batch, heads, seqlen, head_dim = part_o.shape
    o = torch.empty(part_o.shape[1:], device=part_o.device) if o is None else o
    lse = torch.empty(part_lse.shape[1:], device=part_o.device) if lse is None else lse
    if o.numel():
        rows = batch * heads * seqlen
        fitting = next(tile for most, tile in TILES.items() if splits <= most)
        block_s, block_dv, warps = INVARIANT if invariant else fitting
        block_dv = min(block_dv, triton.next_power_of_2(head_dim))
        combine_kernel[(rows * triton.cdiv(head_dim, block_dv),)](
            part_o, part_lse, o, lse, *o.stride()[:3], rows, heads, seqlen, head_dim, splits,
            BLOCK_S=block_s, BLOCK_DV=block_dv, DEPENDENT=dependent, num_warps=warps,
            **({"launch_pdl": True} if dependent else {}),
        )  # fmt: skip
    return o, lse
