"""dK and dV, one program for BLOCK_N keys of one key head; dQ too, atomically, if wanted.

With S the scaled (and soft-capped) logits: P = exp(S - lse), dP = dO V^T, delta = sum_d dO o,
dS = P (dP - delta) (times 1 - tanh^2 under a softcap), dV = P^T dO, dK = scale dS^T Q,
dQ = scale dS K. P and dS are rounded to the input dtype before their products, the scale is applied
to the float32 sums, and everything else is float32.
"""

import triton
import triton.language as tl

from .block_mask import block_seen, listed_row, listed_rows
from .documents import document_band, document_rows, find_document, skip_rows
from .dropout import keep_tile
from .scores import is_visible, load_lse_log2, probabilities, query_range
from .terms import document_terms, head_terms
from .tiles import (
    add_product,
    dot_rows,
    head_start,
    load_rows,
    row_pointers,
    store_rows,
    zero_rows,
)

_POINTERS = (
    "q", "k", "v", "do", "lse", "delta", "dk", "dv", "dq_sum",
    "starts_q", "starts_k", "bias", "alibi_slopes",
)  # fmt: skip
_RUNTIME = (
    "stride_qb", "stride_qh", "stride_qm", "stride_qd",
    "stride_kb", "stride_kh", "stride_kn", "stride_kd",
    "stride_vb", "stride_vh", "stride_vn", "stride_vd",
    "stride_dob", "stride_doh", "stride_dom", "stride_dod",
    "heads_q", "heads_kv", "group", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v",
    "band_lo", "band_hi", "seqlen_bucket", "documents",
    "stride_bias_b", "stride_bias_h", "stride_bias_q", "stride_bias_k",
    "alibi_diagonal", "alibi_stride",
    "dropout_seed", "dropout_threshold", "dropout_factor",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, dq_sum,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    heads_q, heads_kv, group, seqlen_q, seqlen_k, head_dim, head_dim_v,
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
    DOT_PRECISION: tl.constexpr, VECTOR: tl.constexpr, GQA: tl.constexpr, ATOMIC_DQ: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of BLOCK_N keys of one key head; under ATOMIC_DQ add dS K to dq_sum.

    One program visits every query head of the key head's group, so nothing is reduced across
    programs but dq_sum.

    The tensors and numbers that need a word:
        q, k, v, do: (batch, heads, seqlen, head_dim) with any strides.
        lse, delta: (batch, heads_q, seqlen_q) float32, contiguous.
        dk, dv: Shaped as k, v; contiguous.
        dq_sum: Shaped as q; float32, contiguous; receives dQ / softmax_scale. None without
            ATOMIC_DQ.
        The rest: As the forward kernel's.
    """
    blocks = seqlen_k // BLOCK_N + documents if VARLEN else tl.cdiv(seqlen_k, BLOCK_N)
    program = tl.program_id(0)
    sequence = program // blocks  # of all batch * heads_kv
    block = program % blocks
    length_q = seqlen_q
    length_k = seqlen_k
    if VARLEN:
        document, first_key = find_document(starts_k, documents, block, BLOCK_N)
        start_q, length_q = document_rows(starts_q, document)
        start_k, length_k = document_rows(starts_k, document)
        band_lo = document_band(band_lo, length_q, length_k, BOTTOM_RIGHT)
        band_hi = document_band(band_hi, length_q, length_k, BOTTOM_RIGHT)
        if first_key >= length_k:
            length_q = 0  # nothing to do
    else:
        first_key = block * BLOCK_N
    batch = sequence // heads_kv
    head_kv = sequence % heads_kv
    keys = first_key + tl.arange(0, BLOCK_N)
    k_head = head_start(k, batch, head_kv, stride_kb, stride_kh, VECTOR)
    v_head = head_start(v, batch, head_kv, stride_vb, stride_vh, VECTOR)
    if VARLEN:
        k_head = skip_rows(k_head, start_k, stride_kn, VECTOR)
        v_head = skip_rows(v_head, start_k, stride_vn, VECTOR)
    k_tile, k_tail = load_rows(
        k_head, first_key, length_k, head_dim, stride_kn, stride_kd,
        BLOCK_N, BLOCK_D, TAIL_D, True, PADDED_D, VECTOR,
    )  # fmt: skip
    v_tile, v_tail = load_rows(
        v_head, first_key, length_k, head_dim_v, stride_vn, stride_vd,
        BLOCK_N, BLOCK_DV, TAIL_DV, True, PADDED_DV, VECTOR,
    )  # fmt: skip

    query_begin, interior_begin, query_end = query_range(
        first_key, length_q, length_k, band_lo, band_hi, HAS_LO, HAS_HI, BLOCK_M, BLOCK_N
    )

    dk_acc, dk_tail = zero_rows(BLOCK_N, BLOCK_D, TAIL_D)
    dv_acc, dv_tail = zero_rows(BLOCK_N, BLOCK_DV, TAIL_DV)
    # A loop that is known to run once costs no registers.
    for member in range(group if GQA else 1):
        head_q = head_kv * group + member
        q_head = head_start(q, batch, head_q, stride_qb, stride_qh, VECTOR)
        do_head = head_start(do, batch, head_q, stride_dob, stride_doh, VECTOR)
        row = tl.cast(batch * heads_q + head_q, tl.int64) * seqlen_q
        if VARLEN:
            q_head = skip_rows(q_head, start_q, stride_qm, VECTOR)
            do_head = skip_rows(do_head, start_q, stride_dom, VECTOR)
            row += start_q
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
        # Unrolled: the body is compiled with masks, then without (not at all under a lower limit).
        for INTERIOR in tl.static_range(0, 1 if HAS_LO else 2):
            begin = interior_begin if INTERIOR == 1 else query_begin
            end = query_end if INTERIOR == 1 else interior_begin
            if SPARSE > 0:
                begin, end = listed_rows(offsets, first_key // SPARSE, 1 - INTERIOR, SPARSE)
            for step in tl.range(begin, end, BLOCK_M):
                first_query = listed_row(listed, step, SPARSE) if SPARSE > 0 else step
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
                # Transposed tiles (keys, queries), ready to be left operands.
                products = dot_rows(k_tile, k_tail, q_tile, q_tail, TAIL_D, DOT_PRECISION)
                p, slope = probabilities(
                    products, row_lse[None, :], softmax_scale, softcap, terms,
                    first_query, first_key, length_q, length_k,
                    BLOCK_M, BLOCK_N, True, SOFTCAP, BIAS, BIAS_VECTOR, ALIBI,
                )  # fmt: skip
                if INTERIOR == 0:
                    if SPARSE > 0:
                        visible = block_seen(
                            kinds, tiles, first_query, first_key, seqlen_k,
                            BLOCK_M, BLOCK_N, True, SPARSE,
                        )  # fmt: skip
                    else:
                        visible = is_visible(
                            queries[None, :], keys[:, None], length_k, band_lo, band_hi,
                            HAS_LO, HAS_HI,
                        )  # fmt: skip
                    p = tl.where(visible, p, 0.0)
                weights = p
                if DROPOUT:
                    kept = keep_tile(
                        dropout_seed, dropout_threshold, place, head_q, first_query, first_key,
                        BLOCK_M, BLOCK_N,
                    )  # fmt: skip
                    kept = tl.trans(kept)
                    weights = tl.where(kept, p, 0.0)
                dv_acc, dv_tail = add_product(
                    dv_acc,
                    dv_tail,
                    weights.to(do_tile.dtype),
                    do_tile,
                    do_tail,
                    TAIL_DV,
                    DOT_PRECISION,
                )
                dp = dot_rows(v_tile, v_tail, do_tile, do_tail, TAIL_DV, DOT_PRECISION)
                if DROPOUT:
                    dp = tl.where(kept, dp * dropout_factor, 0.0)
                ds = p * (dp - row_delta[None, :]) * slope
                if BIAS != "":
                    ds = tl.where(p == 0.0, 0.0, ds)  # of a bias of -inf, as below
                if INTERIOR == 0:
                    ds = tl.where(visible, ds, 0.0)  # 0 times a dp that overflowed is NaN
                ds = ds.to(q_tile.dtype)
                dk_acc, dk_tail = add_product(
                    dk_acc, dk_tail, ds, q_tile, q_tail, TAIL_D, DOT_PRECISION
                )
                if ATOMIC_DQ:
                    dq_head = dq_sum + row * (head_dim // VECTOR * VECTOR)
                    add_dq(
                        dq_head, first_query, length_q, head_dim, ds, k_tile, k_tail,
                        BLOCK_M, BLOCK_D, TAIL_D, DOT_PRECISION, VECTOR,
                    )  # fmt: skip

    dk_head = dk + tl.cast(sequence, tl.int64) * seqlen_k * (head_dim // VECTOR * VECTOR)
    dv_head = dv + tl.cast(sequence, tl.int64) * seqlen_k * (head_dim_v // VECTOR * VECTOR)
    if VARLEN:
        dk_head = skip_rows(dk_head, start_k, head_dim, VECTOR)
        dv_head = skip_rows(dv_head, start_k, head_dim_v, VECTOR)
    store_rows(
        dk_head, first_key, length_k, head_dim, head_dim,
        dk_acc * softmax_scale, dk_tail * softmax_scale, BLOCK_N, BLOCK_D, TAIL_D, VECTOR,
    )  # fmt: skip
    if DROPOUT:
        dv_acc = dv_acc * dropout_factor
        dv_tail = dv_tail * dropout_factor
    store_rows(
        dv_head, first_key, length_k, head_dim_v, head_dim_v,
        dv_acc, dv_tail, BLOCK_N, BLOCK_DV, TAIL_DV, VECTOR,
    )  # fmt: skip


@triton.jit
def add_dq(
    dq_head, first_query, seqlen_q, head_dim, ds, k_tile, k_tail,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
    DOT_PRECISION: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Add dS K to the rows of one head; ds is transposed, (keys, queries)."""
    dq_acc, dq_tail = zero_rows(BLOCK_M, BLOCK_D, TAIL_D)
    dq_acc, dq_tail = add_product(
        dq_acc, dq_tail, tl.trans(ds), k_tile, k_tail, TAIL_D, DOT_PRECISION
    )
    rows_inside = (first_query + tl.arange(0, BLOCK_M) < seqlen_q)[:, None]
    pointers = row_pointers(dq_head, first_query, 0, head_dim, 1, BLOCK_M, BLOCK_D, VECTOR)
    inside = rows_inside & (tl.arange(0, BLOCK_D) < head_dim)[None, :]
    tl.atomic_add(pointers, dq_acc, mask=inside, sem="relaxed")
    if TAIL_D > 0:
        pointers = row_pointers(dq_head, first_query, BLOCK_D, head_dim, 1, BLOCK_M, TAIL_D, VECTOR)
        inside = rows_inside & (BLOCK_D + tl.arange(0, TAIL_D) < head_dim)[None, :]
        tl.atomic_add(pointers, dq_tail, mask=inside, sem="relaxed")
