"""Forward with a paged cache: keys are split, every sequence has its own length; merged after."""

import triton
import triton.language as tl

from .tiles import LOG2E, in_band, inside, places

_POINTERS = ("q", "k_pages", "v_pages", "table", "lengths", "starts_q", "part_o", "part_lse")
_RUNTIME = (
    "stride_qb", "stride_qh", "stride_qm", "stride_qd",
    "stride_kp", "stride_ks", "stride_kh", "stride_kd",
    "stride_vp", "stride_vs", "stride_vh", "stride_vd",
    "stride_table", "batches", "tokens", "heads_q", "heads_kv", "longest_q",
    "head_dim", "head_dim_v", "window_left", "window_right", "split_keys", "page_size",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def paged_kernel(
    q, k_pages, v_pages, table, lengths, starts_q, part_o, part_lse,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kp, stride_ks, stride_kh, stride_kd,
    stride_vp, stride_vs, stride_vh, stride_vd,
    stride_table, batches, tokens, heads_q, heads_kv, longest_q,
    head_dim, head_dim_v, window_left, window_right, softmax_scale, split_keys, page_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the part of o and lse that one split of a sequence's keys gives, as split_kernel does.

    q, part_o (splits, batches, heads_q, tokens, head_dim_v) and part_lse hold the queries of every
    sequence in its batch entry, or under PACKED one after the other in one.
    """
    blocks = tl.cdiv(longest_q, BLOCK_M)
    first_row = tl.program_id(0) % blocks * BLOCK_M
    sequence = tl.program_id(0) // blocks
    owner = sequence // heads_q
    head = (sequence % heads_q).to(tl.int64)
    head_kv = head // (heads_q // heads_kv)
    split = tl.program_id(1)
    first_token = tl.load(starts_q + owner)
    seqlen_q = tl.load(starts_q + owner + 1) - first_token
    seqlen_k = tl.load(lengths + owner)
    batch = owner.to(tl.int64)
    token = first_row + tl.arange(0, BLOCK_M)
    queries = token
    exists = queries < seqlen_q
    end_row = tl.minimum(first_row + BLOCK_M, seqlen_q)
    if PACKED:
        batch = batch * 0
        token = token + first_token
    shift = seqlen_k - seqlen_q if BOTTOM_RIGHT else 0
    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    q_tile = tl.load(
        places(q + batch * stride_qb + head * stride_qh, token, columns, stride_qm, stride_qd),
        mask=inside(queries, seqlen_q, columns, head_dim),
        other=0.0,
    )
    pages = table + owner.to(tl.int64) * stride_table

    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    end = tl.minimum(split * split_keys + split_keys, seqlen_k)
    for first_key in tl.range(split * split_keys, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        there = keys < end
        # Pages outside the windows of all of these queries may be gone.
        if HAS_LO:
            there = there & (keys >= first_row + shift - window_left)
        if HAS_HI:
            there = there & (keys < end_row + shift + window_right)
        page = tl.load(pages + keys // page_size, mask=there, other=0).to(tl.int64)
        slot = (keys % page_size).to(tl.int64)
        k_rows = k_pages + page * stride_kp + slot * stride_ks + head_kv * stride_kh
        v_rows = v_pages + page * stride_vp + slot * stride_vs + head_kv * stride_vh
        k_tile = tl.load(
            k_rows[:, None] + columns.to(tl.int64)[None, :] * stride_kd,
            mask=there[:, None] & (columns < head_dim)[None, :],
            other=0.0,
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * softmax_scale
        visible = there[None, :] & exists[:, None]
        visible = visible & in_band(
            queries[:, None], keys[None, :], shift - window_left, shift + window_right,
            HAS_LO, HAS_HI,
        )  # fmt: skip
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2((scores - base[:, None]) * LOG2E)
        rescale = tl.exp2((m - base) * LOG2E)
        l = l * rescale + tl.sum(p, 1)  # noqa: E741
        v_tile = tl.load(
            v_rows[:, None] + columns_v.to(tl.int64)[None, :] * stride_vd,
            mask=there[:, None] & (columns_v < head_dim_v)[None, :],
            other=0.0,
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new

    seen = m > float("-inf")
    l = tl.where(seen, l, 1.0)  # noqa: E741
    place = ((split.to(tl.int64) * batches + batch) * heads_q + head) * tokens + token
    tl.store(
        part_o + place[:, None] * head_dim_v + columns_v[None, :],
        acc / l[:, None],
        mask=(exists & seen)[:, None] & (columns_v < head_dim_v)[None, :],
    )
    tl.store(part_lse + place, m + tl.log(l), mask=exists & seen)
