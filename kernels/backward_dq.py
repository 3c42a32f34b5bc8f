"""delta, which both backward passes need, and dQ, one program for BLOCK_M queries of one head.

The formulas stand in backward_dkdv.py.
"""

import triton
import triton.language as tl

from .block_mask import block_seen, listed_row, listed_rows
from .documents import document_band, document_rows, find_document, skip_rows
from .dropout import keep_tile
from .scores import is_visible, key_range, load_lse_log2, probabilities
from .terms import document_terms, head_terms
from .tiles import add_product, dot_rows, head_start, load_rows, store_rows, zero_rows

_POINTERS = (
    *("q", "k", "v", "do", "lse", "delta", "dq", "starts_q", "starts_k", "bias", "alibi_slopes"),
)
_RUNTIME = (
    "stride_qb", "stride_qh", "stride_qm", "stride_qd",
    "stride_kb", "stride_kh", "stride_kn", "stride_kd",
    "stride_vb", "stride_vh", "stride_vn", "stride_vd",
    "stride_dob", "stride_doh", "stride_dom", "stride_dod",
    "heads_q", "group", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v",
    "band_lo", "band_hi", "seqlen_bucket", "documents",
    "stride_bias_b", "stride_bias_h", "stride_bias_q", "stride_bias_k",
    "alibi_diagonal", "alibi_stride",
    "dropout_seed", "dropout_threshold", "dropout_factor",
)  # fmt: skip


@triton.jit(
    do_not_specialize=(
        "stride_ob", "stride_oh", "stride_om", "stride_od",
        "stride_dob", "stride_doh", "stride_dom", "stride_dod",
        "heads_q", "seqlen_q", "head_dim_v",
    ),
    do_not_specialize_on_alignment=("o", "do", "delta", "dlse"),
)  # fmt: skip
def delta_kernel(
    o, do, delta,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_dob, stride_doh, stride_dom, stride_dod,
    heads_q, seqlen_q, head_dim_v, dlse,
    BLOCK_DV: tl.constexpr, TAIL_DV: tl.constexpr, PADDED_DV: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write delta = sum over head_dim_v of do * o: (batch, heads_q, seqlen_q) float32.

    With a gradient dlse of lse, shaped and contiguous as delta, it is subtracted: dlse P is what it
    adds to dS = P (dP - delta).
    """
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    sequence = program // blocks
    first_query = program % blocks * BLOCK_M
    batch = sequence // heads_q
    head = sequence % heads_q
    o_head = head_start(o, batch, head, stride_ob, stride_oh, VECTOR)
    do_head = head_start(do, batch, head, stride_dob, stride_doh, VECTOR)
    o_tile, o_tail = load_rows(
        o_head, first_query, seqlen_q, head_dim_v, stride_om, stride_od,
        BLOCK_M, BLOCK_DV, TAIL_DV, True, PADDED_DV, VECTOR,
    )  # fmt: skip
    do_tile, do_tail = load_rows(
        do_head, first_query, seqlen_q, head_dim_v, stride_dom, stride_dod,
        BLOCK_M, BLOCK_DV, TAIL_DV, True, PADDED_DV, VECTOR,
    )  # fmt: skip
    total = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if TAIL_DV > 0:
        total += tl.sum(o_tail.to(tl.float32) * do_tail.to(tl.float32), 1)
    queries = first_query + tl.arange(0, BLOCK_M)
    if dlse is not None:
        row_dlse = dlse + tl.cast(sequence, tl.int64) * seqlen_q + queries
        total -= tl.load(row_dlse, mask=queries < seqlen_q, other=0.0)
    delta_head = delta + tl.cast(sequence, tl.int64) * seqlen_q
    tl.store(delta_head + queries, total, mask=queries < seqlen_q)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def dq_kernel(
    q, k, v, do, lse, delta, dq,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    heads_q, group, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_lo, band_hi, softmax_scale, softcap, seqlen_bucket,  # noqa: ARG001 (the autotuner's)
    starts_q, starts_k, documents,
    bias, stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k,
    alibi_slopes, alibi_diagonal, alibi_stride,
    dropout_seed, dropout_threshold, dropout_factor,
    kinds, tiles, offsets, listed,
    BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, PADDED_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, TAIL_DV: tl.constexpr, PADDED_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, SOFTCAP: tl.constexpr,
    VARLEN: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SPARSE: tl.constexpr,
    DOT_PRECISION: tl.constexpr, VECTOR: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dq of BLOCK_M queries of one head. Arguments as those of dkdv_kernel."""
    blocks = seqlen_q // BLOCK_M + documents if VARLEN else tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    sequence = program // blocks  # of all batch * heads_q
    block = blocks - 1 - program % blocks  # causal: the longest rows first
    length_q = seqlen_q
    length_k = seqlen_k
    if VARLEN:
        document, first_query = find_document(starts_q, documents, block, BLOCK_M)
        start_q, length_q = document_rows(starts_q, document)
        start_k, length_k = document_rows(starts_k, document)
        band_lo = document_band(band_lo, length_q, length_k, BOTTOM_RIGHT)
        band_hi = document_band(band_hi, length_q, length_k, BOTTOM_RIGHT)
        if first_query >= length_q:
            length_k = 0  # nothing to do
    else:
        first_query = block * BLOCK_M
    batch = sequence // heads_q
    head_q = sequence % heads_q
    head_kv = head_q // group
    q_head = head_start(q, batch, head_q, stride_qb, stride_qh, VECTOR)
    do_head = head_start(do, batch, head_q, stride_dob, stride_doh, VECTOR)
    k_head = head_start(k, batch, head_kv, stride_kb, stride_kh, VECTOR)
    v_head = head_start(v, batch, head_kv, stride_vb, stride_vh, VECTOR)
    row = tl.cast(sequence, tl.int64) * seqlen_q
    if VARLEN:
        q_head = skip_rows(q_head, start_q, stride_qm, VECTOR)
        do_head = skip_rows(do_head, start_q, stride_dom, VECTOR)
        k_head = skip_rows(k_head, start_k, stride_kn, VECTOR)
        v_head = skip_rows(v_head, start_k, stride_vn, VECTOR)
        row += start_q
    queries = first_query + tl.arange(0, BLOCK_M)
    q_tile, q_tail = load_rows(
        q_head, first_query, length_q, head_dim, stride_qm, stride_qd,
        BLOCK_M, BLOCK_D, TAIL_D, True, PADDED_D, VECTOR,
    )  # fmt: skip
    do_tile, do_tail = load_rows(
        do_head, first_query, length_q, head_dim_v, stride_dom, stride_dod,
        BLOCK_M, BLOCK_DV, TAIL_DV, True, PADDED_DV, VECTOR,
    )  # fmt: skip
    row_lse = load_lse_log2(lse + row, queries, length_q)
    row_delta = tl.load(delta + row + queries, mask=queries < length_q, other=0.0)
    place = batch
    if VARLEN:
        place = document
    terms = head_terms(
        bias, (stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k),
        alibi_slopes, (alibi_diagonal, alibi_stride), batch, place, head_q,
        BIAS, BIAS_VECTOR, ALIBI,
    )  # fmt: skip
    if VARLEN:
        along = document_band(0, length_q, length_k, BOTTOM_RIGHT)
        terms = document_terms(terms, start_q, start_k, along, BIAS)

    key_begin, interior_end, key_end = key_range(
        first_query, length_q, length_k, band_lo, band_hi, HAS_LO, HAS_HI, BLOCK_M, BLOCK_N
    )

    dq_acc, dq_tail = zero_rows(BLOCK_M, BLOCK_D, TAIL_D)
    for MASKED in tl.static_range(1 if HAS_LO else 0, 2):
        begin = interior_end if MASKED == 1 else key_begin
        end = key_end if MASKED == 1 else interior_end
        if SPARSE > 0:
            begin, end = listed_rows(offsets, first_query // SPARSE, MASKED, SPARSE)
        for step in tl.range(begin, end, BLOCK_N):
            first_key = listed_row(listed, step, SPARSE) if SPARSE > 0 else step
            k_tile, k_tail = load_rows(
                k_head, first_key, length_k, head_dim, stride_kn, stride_kd,
                BLOCK_N, BLOCK_D, TAIL_D, MASKED == 1, PADDED_D, VECTOR,
            )  # fmt: skip
            v_tile, v_tail = load_rows(
                v_head, first_key, length_k, head_dim_v, stride_vn, stride_vd,
                BLOCK_N, BLOCK_DV, TAIL_DV, MASKED == 1, PADDED_DV, VECTOR,
            )  # fmt: skip
            products = dot_rows(q_tile, q_tail, k_tile, k_tail, TAIL_D, DOT_PRECISION)
            p, slope = probabilities(
                products, row_lse[:, None], softmax_scale, softcap, terms,
                first_query, first_key, length_q, length_k,
                BLOCK_M, BLOCK_N, False, SOFTCAP, BIAS, BIAS_VECTOR, ALIBI,
            )  # fmt: skip
            if MASKED == 1:
                keys = first_key + tl.arange(0, BLOCK_N)
                if SPARSE > 0:
                    visible = block_seen(
                        kinds, tiles, first_query, first_key, seqlen_k,
                        BLOCK_M, BLOCK_N, False, SPARSE,
                    )  # fmt: skip
                else:
                    visible = is_visible(
                        queries[:, None], keys[None, :], length_k, band_lo, band_hi, HAS_LO, HAS_HI
                    )
                p = tl.where(visible, p, 0.0)
            dp = dot_rows(do_tile, do_tail, v_tile, v_tail, TAIL_DV, DOT_PRECISION)
            if DROPOUT:
                kept = keep_tile(
                    dropout_seed, dropout_threshold, place, head_q, first_query, first_key,
                    BLOCK_M, BLOCK_N,
                )  # fmt: skip
                dp = tl.where(kept, dp * dropout_factor, 0.0)
            ds = p * (dp - row_delta[:, None]) * slope
            if BIAS != "":
                ds = tl.where(p == 0.0, 0.0, ds)  # of a bias of -inf, as below
            if MASKED == 1:
                ds = tl.where(visible, ds, 0.0)  # 0 times a dp that overflowed is NaN
            ds = ds.to(k_tile.dtype)
            dq_acc, dq_tail = add_product(
                dq_acc, dq_tail, ds, k_tile, k_tail, TAIL_D, DOT_PRECISION
            )

    dq_head = dq + row * (head_dim // VECTOR * VECTOR)
    store_rows(
        dq_head, first_query, length_q, head_dim, head_dim,
        dq_acc * softmax_scale, dq_tail * softmax_scale, BLOCK_M, BLOCK_D, TAIL_D, VECTOR,
    )  # fmt: skip
