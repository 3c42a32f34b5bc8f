"""Forward for few queries: a group's query heads share a tile; keys are split, then merged."""

import triton
import triton.language as tl

from .tiles import LOG2E, in_band, inside, places, tanh

_POINTERS = ("q", "k", "v", "o", "lse", "part_o", "part_lse")
_RUNTIME = (
    "stride_qb", "stride_qh", "stride_qm", "stride_qd",
    "stride_kb", "stride_kh", "stride_kn", "stride_kd",
    "stride_vb", "stride_vh", "stride_vn", "stride_vd",
    "stride_ob", "stride_oh", "stride_om", "stride_od",
    "batches", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v",
    "band_lo", "band_hi", "splits", "split_keys",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def split_kernel(
    q, k, v, part_o, part_lse,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    batches, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_lo, band_hi, softmax_scale, softcap, split_keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the part of o and lse that one split of the keys gives; nothing where it sees no key.

    A row of the tile is a query and a member of the group: ``row = query * group + member``.
    part_o (splits, batch, heads_q, seqlen_q, head_dim_v) and part_lse are contiguous float32;
    part_lse holds -inf beforehand.
    """
    group = heads_q // heads_kv
    blocks = tl.cdiv(seqlen_q * group, BLOCK_M)
    first_row = tl.program_id(0) % blocks * BLOCK_M
    sequence = tl.program_id(0) // blocks
    batch = (sequence // heads_kv).to(tl.int64)
    head_kv = (sequence % heads_kv).to(tl.int64)
    split = tl.program_id(1)
    packed = first_row + tl.arange(0, BLOCK_M)
    queries = packed // group
    heads = head_kv * group + packed % group
    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    exists = packed < seqlen_q * group
    q_rows = q + batch * stride_qb + heads * stride_qh + queries.to(tl.int64) * stride_qm
    q_tile = tl.load(
        q_rows[:, None] + columns.to(tl.int64)[None, :] * stride_qd,
        mask=exists[:, None] & (columns < head_dim)[None, :],
        other=0.0,
    )
    k_head = k + batch * stride_kb + head_kv * stride_kh
    v_head = v + batch * stride_vb + head_kv * stride_vh

    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    end = tl.minimum(split * split_keys + split_keys, seqlen_k)
    for first_key in tl.range(split * split_keys, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        k_tile = tl.load(
            places(k_head, keys, columns, stride_kn, stride_kd),
            mask=inside(keys, end, columns, head_dim),
            other=0.0,
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * softmax_scale
        if SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        visible = (keys < end)[None, :] & exists[:, None]
        visible = visible & in_band(
            queries[:, None], keys[None, :], band_lo, band_hi, HAS_LO, HAS_HI
        )
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2((scores - shift[:, None]) * LOG2E)
        rescale = tl.exp2((m - shift) * LOG2E)
        l = l * rescale + tl.sum(p, 1)  # noqa: E741
        v_tile = tl.load(
            places(v_head, keys, columns_v, stride_vn, stride_vd),
            mask=inside(keys, end, columns_v, head_dim_v),
            other=0.0,
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new

    seen = m > float("-inf")
    l = tl.where(seen, l, 1.0)  # noqa: E741
    part = split.to(tl.int64) * batches * heads_q + batch * heads_q
    place = (part + heads) * seqlen_q + queries
    tl.store(
        part_o + place[:, None] * head_dim_v + columns_v[None, :],
        acc / l[:, None],
        mask=(exists & seen)[:, None] & (columns_v < head_dim_v)[None, :],
    )
    tl.store(part_lse + place, m + tl.log(l), mask=exists & seen)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def merge_kernel(
    part_o, part_lse, o, lse,
    stride_ob, stride_oh, stride_om, stride_od,
    batches, heads_q, seqlen_q, head_dim_v, splits,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Merge the parts of BLOCK_M queries of one head; a split that saw no key weighs nothing."""
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    first_row = tl.program_id(0) % blocks * BLOCK_M
    sequence = tl.program_id(0) // blocks
    batch = (sequence // heads_q).to(tl.int64)
    head = (sequence % heads_q).to(tl.int64)
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_DV)
    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    for split in range(splits):
        start = ((split * batches + batch) * heads_q + head) * seqlen_q
        part = tl.load(part_lse + start + rows, mask=rows < seqlen_q, other=float("-inf"))
        seen = part > float("-inf")
        value = tl.load(
            places(part_o + start * head_dim_v, rows, columns, head_dim_v, 1),
            mask=seen[:, None] & (columns < head_dim_v)[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m, part)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2((part - shift) * LOG2E)
        rescale = tl.exp2((m - shift) * LOG2E)
        l = l * rescale + weight  # noqa: E741
        acc = acc * rescale[:, None] + weight[:, None] * value
        m = m_new
    l = tl.where(m == float("-inf"), 1.0, l)  # noqa: E741
    o_head = o + batch * stride_ob + head * stride_oh
    tl.store(
        places(o_head, rows, columns, stride_om, stride_od),
        (acc / l[:, None]).to(o.dtype.element_ty),
        mask=inside(rows, seqlen_q, columns, head_dim_v),
    )
    row_lse = m + tl.log(l)
    tl.store(lse + sequence.to(tl.int64) * seqlen_q + rows, row_lse, mask=rows < seqlen_q)
