"""The forward kernel: blockwise online softmax, one program for BLOCK_M queries of one head."""

import triton
import triton.language as tl

from .block_mask import block_seen, listed_row, listed_rows
from .documents import document_band, document_rows, find_document, skip_rows
from .dropout import keep_tile
from .scores import LOG2E, is_visible, key_range, tanh
from .terms import add_sink, add_terms, document_terms, head_terms
from .tiles import add_product, dot_rows, head_start, load_rows, store_rows, zero_rows

# Compiling again for every length and stride that happens to be 1 or a multiple of 16 buys nothing
# here: VECTOR already tells what matters.
_POINTERS = (*("q", "k", "v", "o", "lse", "starts_q", "starts_k", "bias", "alibi_slopes", "sinks"),)
_RUNTIME = (
    "stride_qb", "stride_qh", "stride_qm", "stride_qd",
    "stride_kb", "stride_kh", "stride_kn", "stride_kd",
    "stride_vb", "stride_vh", "stride_vn", "stride_vd",
    "stride_ob", "stride_oh", "stride_om",
    "heads_q", "group", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v",
    "band_lo", "band_hi", "seqlen_bucket", "documents",
    "stride_bias_b", "stride_bias_h", "stride_bias_q", "stride_bias_k",
    "alibi_diagonal", "alibi_stride",
    "dropout_seed", "dropout_threshold", "dropout_factor",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def forward_kernel(
    q, k, v, o, lse,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om,
    heads_q, group, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_lo, band_hi, softmax_scale, softcap, seqlen_bucket,  # noqa: ARG001 (the autotuner's)
    starts_q, starts_k, documents,
    bias, stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k,
    alibi_slopes, alibi_diagonal, alibi_stride,
    dropout_seed, dropout_threshold, dropout_factor, sinks,
    kinds, tiles, offsets, listed,
    BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, PADDED_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, TAIL_DV: tl.constexpr, PADDED_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, SOFTCAP: tl.constexpr,
    VARLEN: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SPARSE: tl.constexpr,
    DOT_PRECISION: tl.constexpr, VECTOR: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write o and lse of BLOCK_M queries.

    The running maximum m is kept of the *scores*: q k^T where there is no softcap (of -q k^T where
    softmax_scale is negative), tanh(softmax_scale q k^T / softcap) where there is one. A logit is
    score_scale * score. Subtracting m before scaling keeps logits of any size exact near their
    maximum and leaves no product that a fused multiply-add could round differently. With terms
    (terms.py) scores are natural logits.

    The tensors and numbers that need a word:
        q, k, v: (batch, heads, seqlen, head_dim) with any strides.
        o: (batch, heads_q, seqlen_q, head_dim_v), head_dim_v contiguous.
        lse: (batch, heads_q, seqlen_q) float32, contiguous, natural logarithm.
        group: Query heads per key head.
        band_lo, band_hi: Query i sees key j when ``band_lo <= j - i <= band_hi``; read only under
            HAS_LO and HAS_HI. Under VARLEN limits of j - the diagonal of i instead.
        starts_q, starts_k: (documents + 1,) int32, under VARLEN: the packed document's rows; it is
            aligned as BOTTOM_RIGHT says.
        bias, stride_bias_*, alibi_slopes, alibi_*: See terms.py; None without BIAS and ALIBI.
        dropout_seed, dropout_threshold, dropout_factor: See dropout.py; None without DROPOUT.
        sinks: (heads_q,) float32, a logit without a key in every row's sum; or None.

    Accumulates in float32; P is rounded to v's dtype before P V.
    """
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
    k_head = head_start(k, batch, head_kv, stride_kb, stride_kh, VECTOR)
    v_head = head_start(v, batch, head_kv, stride_vb, stride_vh, VECTOR)
    o_head = head_start(o, batch, head_q, stride_ob, stride_oh, VECTOR)
    if VARLEN:
        q_head = skip_rows(q_head, start_q, stride_qm, VECTOR)
        k_head = skip_rows(k_head, start_k, stride_kn, VECTOR)
        v_head = skip_rows(v_head, start_k, stride_vn, VECTOR)
        o_head = skip_rows(o_head, start_q, stride_om, VECTOR)
    queries = first_query + tl.arange(0, BLOCK_M)

    q_tile, q_tail = load_rows(
        q_head, first_query, length_q, head_dim, stride_qm, stride_qd,
        BLOCK_M, BLOCK_D, TAIL_D, True, PADDED_D, VECTOR,
    )  # fmt: skip
    if SOFTCAP:
        score_scale = softcap
    else:
        score_scale = tl.abs(softmax_scale)
        q_tile = tl.where(softmax_scale < 0.0, -q_tile, q_tile)
        q_tail = tl.where(softmax_scale < 0.0, -q_tail, q_tail)
    logit_scale = score_scale
    if BIAS != "" or ALIBI:
        score_scale = 1.0
    score_scale_log2 = score_scale * LOG2E
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

    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)  # noqa: E741
    acc, acc_tail = zero_rows(BLOCK_M, BLOCK_DV, TAIL_DV)
    # Unrolled: the body is compiled for the interior, without masks, then for the rest, with masks.
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
            scores = dot_rows(q_tile, q_tail, k_tile, k_tail, TAIL_D, DOT_PRECISION)
            if SOFTCAP:
                scores = tanh(scores * (softmax_scale / softcap))
            if BIAS != "" or ALIBI:
                scores = add_terms(
                    scores * logit_scale, terms, first_query, first_key, length_q, length_k,
                    BLOCK_M, BLOCK_N, False, BIAS, BIAS_VECTOR, ALIBI,
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
                m_new = tl.maximum(m, tl.max(tl.where(visible, scores, float("-inf")), 1))
            else:
                m_new = tl.maximum(m, tl.max(scores, 1))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet
            p = tl.exp2((scores - shift[:, None]) * score_scale_log2)
            if MASKED == 1:
                p = tl.where(visible, p, 0.0)
            rescale = tl.where(m == float("-inf"), 0.0, tl.exp2((m - shift) * score_scale_log2))
            l = l * rescale + tl.sum(p, 1)  # noqa: E741
            if DROPOUT:
                kept = keep_tile(
                    dropout_seed, dropout_threshold, place, head_q, first_query, first_key,
                    BLOCK_M, BLOCK_N,
                )  # fmt: skip
                p = tl.where(kept, p, 0.0)
            acc = acc * rescale[:, None]
            acc_tail = acc_tail * rescale[:, None]
            v_tile, v_tail = load_rows(
                v_head, first_key, length_k, head_dim_v, stride_vn, stride_vd,
                BLOCK_N, BLOCK_DV, TAIL_DV, MASKED == 1, PADDED_DV, VECTOR,
            )  # fmt: skip
            acc, acc_tail = add_product(
                acc, acc_tail, p.to(v_tile.dtype), v_tile, v_tail, TAIL_DV, DOT_PRECISION
            )
            m = m_new

    if DROPOUT:
        acc = acc * dropout_factor
        acc_tail = acc_tail * dropout_factor
    if sinks is not None:
        m, l, share = add_sink(m * score_scale, l, tl.load(sinks + head_q))  # noqa: E741
        score_scale = 1.0
        acc = acc * share[:, None]
        acc_tail = acc_tail * share[:, None]
    empty = l == 0.0  # a fully masked row (the largest p of any other is 1): o = 0, lse = -inf
    l = tl.where(empty, 1.0, l)  # noqa: E741
    store_rows(
        o_head, first_query, length_q, head_dim_v, stride_om,
        acc / l[:, None], acc_tail / l[:, None], BLOCK_M, BLOCK_DV, TAIL_DV, VECTOR,
    )  # fmt: skip
    row_lse = tl.where(empty, float("-inf"), m * score_scale + tl.log(l))
    lse_head = lse + sequence.to(tl.int64) * seqlen_q
    if VARLEN:
        lse_head += start_q
    tl.store(lse_head + queries, row_lse, mask=queries < length_q)
