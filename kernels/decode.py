"""Attention to a cache: a group's query heads share a tile, keys are split among programs.

One key head's queries are the rows of a tile: ``row = query * group + member``, so that keys are
read once for all heads of a group. Each program sees one split of the keys; combine.py merges them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .cache import load_keys, locate
from .scores import LOG2E, tanh
from .terms import add_sink
from .tiles import add_product, dot_rows, zero_rows

_POINTERS = ("q", "k", "v", "o", "lse", "cu_seqlens_q", "cache_lengths", "block_table", "sinks")
_RUNTIME = (
    "stride_qb", "stride_qh", "stride_qm", "stride_qd",
    "stride_kb", "stride_kh", "stride_kn", "stride_kd",
    "stride_vb", "stride_vh", "stride_vn", "stride_vd",
    "stride_os", "stride_ob", "stride_oh", "stride_om", "stride_ls", "stride_lb", "stride_lh",
    "stride_table", "heads_kv", "group", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v",
    "window_left", "window_right", "splits", "split_keys",
)  # fmt: skip


@triton.jit
def row_places(
    base, batch, heads, tokens, stride_batch, stride_head, stride_token, VECTOR: tl.constexpr
):  # fmt: skip
    """Pointers to the first element of rows of q or o, (rows, 1)."""
    start = base + tl.cast(batch, tl.int64) * (stride_batch // VECTOR * VECTOR)
    if VECTOR > 1:
        start = tl.multiple_of(start, 16)
    offsets = heads.to(tl.int64) * (stride_head // VECTOR * VECTOR)
    offsets += tokens.to(tl.int64) * (stride_token // VECTOR * VECTOR)
    return start + offsets[:, None]


@triton.jit
def load_queries(
    rows, exists, first_column, head_dim, stride_column,
    COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A tile of q; what does not exist is 0."""
    columns = (first_column + tl.arange(0, COLUMNS))[None, :]
    inside = exists[:, None] & (columns < head_dim // VECTOR * VECTOR)
    if VECTOR == 1:
        columns = columns.to(tl.int64) * stride_column
    return tl.load(rows + columns, mask=inside, other=0.0)


@triton.jit
def store_outputs(
    rows, tile, first_column, head_dim, stored, COLUMNS: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """Store a tile of o, or of a part of it."""
    columns = (first_column + tl.arange(0, COLUMNS))[None, :]
    inside = stored[:, None] & (columns < head_dim // VECTOR * VECTOR)
    tl.store(rows + columns, tile.to(rows.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def decode_kernel(
    q, k, v, o, lse, cu_seqlens_q, cache_lengths, block_table, sinks,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_os, stride_ob, stride_oh, stride_om, stride_ls, stride_lb, stride_lh,
    stride_table, heads_kv, group, seqlen_q, seqlen_k, head_dim, head_dim_v,
    window_left, window_right, softmax_scale, softcap, splits, split_keys,
    BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, PADDED_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, TAIL_DV: tl.constexpr, PADDED_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    DOT_PRECISION: tl.constexpr, VECTOR: tl.constexpr, PAGE_SIZE: tl.constexpr,
    DEPENDENTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write o and lse of BLOCK_M rows over one split of the keys; see forward.py for the softmax.

    The tensors and numbers that need a word:
        q, o: (batch, heads_q, seqlen_q, head_dim) with any strides; with cu_seqlens_q the tokens of
            all sequences, one after the other, of batch 1. o may be the float32 parts, with
            stride_os from split to split.
        k, v: See cache.py.
        lse: (batch, heads_q, seqlen_q), with stride_ls from split to split.
        cu_seqlens_q: Where the tokens of each sequence begin, and where the last ends; or None.
        cache_lengths: Keys of each sequence; None: seqlen_k.
        block_table: Pages of each sequence, read only as far as keys are visible.
        sinks: (heads_q,) float32, a logit without a key in every row's sum; or None.
        seqlen_q: Of the longest sequence.
        window_left, window_right: Read only under HAS_LO and HAS_HI.
        DEPENDENTS: The launch that follows waits for this one's end by itself.
        split_keys: Keys a split, a multiple of BLOCK_N. Splits are counted from the first block of
            BLOCK_N keys that a row of the tile sees.
    """
    if DEPENDENTS:
        gdc_launch_dependents()
    program = tl.program_id(0)
    split = program % splits
    blocks = tl.cdiv(seqlen_q * group, BLOCK_M)
    first_row = program // splits % blocks * BLOCK_M
    sequence = program // splits // blocks  # of all batch * heads_kv
    batch = sequence // heads_kv
    head_kv = sequence % heads_kv

    first_token = 0
    batch_q = batch
    if cu_seqlens_q is not None:
        first_token = tl.load(cu_seqlens_q + batch)
        seqlen_q = tl.load(cu_seqlens_q + batch + 1) - first_token
        batch_q = 0
    if cache_lengths is not None:
        seqlen_k = tl.load(cache_lengths + batch)
    end_row = seqlen_q * group
    packed = first_row + tl.arange(0, BLOCK_M)
    exists = packed < end_row
    queries = packed // group
    heads = head_kv * group + packed % group
    q_rows = row_places(
        q, batch_q, heads, first_token + queries, stride_qb, stride_qh, stride_qm, VECTOR
    )
    q_tile = load_queries(q_rows, exists, 0, head_dim, stride_qd, BLOCK_D, VECTOR)
    q_tail = q_tile
    if TAIL_D > 0:
        q_tail = load_queries(q_rows, exists, BLOCK_D, head_dim, stride_qd, TAIL_D, VECTOR)
    # Query i sees key j when band_lo <= j - i <= band_hi.
    shift_k = seqlen_k - seqlen_q if BOTTOM_RIGHT else 0
    band_lo = shift_k - window_left
    band_hi = shift_k + window_right
    first_query = first_row // group
    last_query = (tl.minimum(first_row + BLOCK_M, end_row) - 1) // group
    # Keys that some row sees: [key_begin, key_end); keys that every row sees: [every, none_more).
    key_begin = 0
    every = 0
    key_end = seqlen_k
    none_more = seqlen_k
    if HAS_LO:
        key_begin = tl.maximum(first_query + band_lo, 0)
        every = tl.maximum(last_query + band_lo, 0)
    if HAS_HI:
        key_end = tl.minimum(key_end, last_query + band_hi + 1)
        none_more = tl.maximum(tl.minimum(none_more, first_query + band_hi + 1), 0)
    key_end = tl.where(first_row < end_row, key_end, 0)
    begin = key_begin // BLOCK_N * BLOCK_N + split * split_keys
    end = tl.minimum(begin + split_keys, key_end)
    interior_begin = tl.maximum(tl.cdiv(every, BLOCK_N) * BLOCK_N, begin)
    interior_end = tl.maximum(tl.minimum(none_more // BLOCK_N * BLOCK_N, end), interior_begin)

    k_head = k + tl.cast(head_kv, tl.int64) * (stride_kh // VECTOR * VECTOR)
    v_head = v + tl.cast(head_kv, tl.int64) * (stride_vh // VECTOR * VECTOR)
    if VECTOR > 1:
        k_head = tl.multiple_of(k_head, 16)
        v_head = tl.multiple_of(v_head, 16)
    table = block_table
    if PAGE_SIZE > 0:
        table = block_table + tl.cast(batch, tl.int64) * stride_table

    if SOFTCAP:
        score_scale = softcap
    else:
        score_scale = tl.abs(softmax_scale)
        q_tile = tl.where(softmax_scale < 0.0, -q_tile, q_tile)
        q_tail = tl.where(softmax_scale < 0.0, -q_tail, q_tail)
    score_scale_log2 = score_scale * LOG2E

    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)  # noqa: E741
    acc, acc_tail = zero_rows(BLOCK_M, BLOCK_DV, TAIL_DV)
    # Unrolled: with masks up to the interior (where there is a lower limit), without, with.
    for PHASE in tl.static_range(0 if HAS_LO else 1, 3):
        first = begin if PHASE == 0 else (interior_begin if PHASE == 1 else interior_end)
        last = (
            tl.minimum(interior_begin, end) if PHASE == 0 else (interior_end if PHASE == 1 else end)
        )
        for first_key in tl.range(first, last, BLOCK_N):
            keys = first_key + tl.arange(0, BLOCK_N)
            inside = (keys >= key_begin) & (keys < end)
            page, slot = locate(
                table, batch, first_key, key_begin, end, PHASE != 1, PAGE_SIZE, BLOCK_N
            )
            k_tile, k_tail = load_keys(
                k_head, page, slot, stride_kb, stride_kn, stride_kd, inside, head_dim,
                BLOCK_N, BLOCK_D, TAIL_D, PHASE != 1, PADDED_D, VECTOR,
            )  # fmt: skip
            scores = dot_rows(q_tile, q_tail, k_tile, k_tail, TAIL_D, DOT_PRECISION)
            if SOFTCAP:
                scores = tanh(scores * (softmax_scale / softcap))
            if PHASE != 1:
                visible = inside[None, :]
                if HAS_LO:
                    visible = visible & (keys[None, :] - queries[:, None] >= band_lo)
                if HAS_HI:
                    visible = visible & (keys[None, :] - queries[:, None] <= band_hi)
                m_new = tl.maximum(m, tl.max(tl.where(visible, scores, float("-inf")), 1))
            else:
                m_new = tl.maximum(m, tl.max(scores, 1))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet
            p = tl.exp2((scores - shift[:, None]) * score_scale_log2)
            if PHASE != 1:
                p = tl.where(visible, p, 0.0)
            rescale = tl.where(m == float("-inf"), 0.0, tl.exp2((m - shift) * score_scale_log2))
            l = l * rescale + tl.sum(p, 1)  # noqa: E741
            acc = acc * rescale[:, None]
            acc_tail = acc_tail * rescale[:, None]
            v_tile, v_tail = load_keys(
                v_head, page, slot, stride_vb, stride_vn, stride_vd, inside, head_dim_v,
                BLOCK_N, BLOCK_DV, TAIL_DV, PHASE != 1, PADDED_DV, VECTOR,
            )  # fmt: skip
            acc, acc_tail = add_product(
                acc, acc_tail, p.to(v_tile.dtype), v_tile, v_tail, TAIL_DV, DOT_PRECISION
            )
            m = m_new

    if sinks is not None:  # once
        sink = tl.load(sinks + heads, mask=exists & (split == 0), other=float("-inf"))
        m, l, share = add_sink(m * score_scale, l, sink)  # noqa: E741
        score_scale = 1.0
        acc = acc * share[:, None]
        acc_tail = acc_tail * share[:, None]
    empty = l == 0.0  # no key seen (the largest p of any other row is 1)
    l = tl.where(empty, 1.0, l)  # noqa: E741
    tokens = first_token + queries
    o_rows = row_places(
        o + tl.cast(split, tl.int64) * stride_os, batch_q, heads, tokens,
        stride_ob, stride_oh, stride_om, 1,
    )  # fmt: skip
    store_outputs(o_rows, acc / l[:, None], 0, head_dim_v, exists, BLOCK_DV, 1)
    if TAIL_DV > 0:
        store_outputs(o_rows, acc_tail / l[:, None], BLOCK_DV, head_dim_v, exists, TAIL_DV, 1)
    row_lse = tl.where(empty, float("-inf"), m * score_scale + tl.log(l))
    lse_rows = lse + tl.cast(split, tl.int64) * stride_ls + tl.cast(batch_q, tl.int64) * stride_lb
    tl.store(lse_rows + heads.to(tl.int64) * stride_lh + tokens, row_lse, mask=exists)
