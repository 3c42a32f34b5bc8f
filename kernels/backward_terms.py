"""Gradients of the bias and of the sinks, from what both backward passes have.

With dL = P (dP - delta), the gradient of the logits after the softcap, dbias is the sum of dL over
the axes along which the bias is broadcast, and dsinks = -sum exp(sink - lse) delta. Each sum is
made in one fixed order, without atomics. P and dP are computed once more, so that nothing as large
as the logits is stored but a dbias that is itself so large.
"""

import torch
import triton
import triton.language as tl

from . import configs
from .arguments import blocks_of
from .block_mask import block_seen
from .documents import document_band, document_rows, find_document, skip_rows
from .dropout import keep_tile
from .scores import is_visible, key_range, load_lse_log2, probabilities, query_range
from .terms import document_terms, head_terms
from .tiles import dot_rows, head_start, load_rows

__all__ = ["bias_gradient", "sinks_gradient"]

_PROGRAMS = 512  # enough to fill a card of 132 multiprocessors
_BLOCK = 64  # a usual one, to count programs by
_ROWS = 1024

_POINTERS = (
    "q", "k", "v", "do", "lse", "delta", "dbias", "starts_q", "starts_k", "bias", "alibi_slopes",
)  # fmt: skip
_RUNTIME = (
    "stride_qb", "stride_qh", "stride_qm", "stride_qd",
    "stride_kb", "stride_kh", "stride_kn", "stride_kd",
    "stride_vb", "stride_vh", "stride_vn", "stride_vd",
    "stride_dob", "stride_doh", "stride_dom", "stride_dod",
    "own_heads", "shared_heads", "sharers", "splits",
    "heads_q", "group", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v",
    "band_lo", "band_hi", "seqlen_bucket", "documents",
    "stride_bias_b", "stride_bias_h", "stride_bias_q", "stride_bias_k",
    "alibi_diagonal", "alibi_stride",
    "dropout_seed", "dropout_threshold", "dropout_factor",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def dbias_kernel(
    q, k, v, do, lse, delta, dbias,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    own_heads, shared_heads, sharers, splits,
    heads_q, group, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_lo, band_hi, softmax_scale, softcap, seqlen_bucket,  # noqa: ARG001 (the autotuner's)
    starts_q, starts_k, documents,
    bias, stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k,
    alibi_slopes, alibi_diagonal, alibi_stride,
    dropout_seed, dropout_threshold, dropout_factor,
    kinds, tiles, offsets, listed,  # noqa: ARG001 (others walk lists of blocks; this visits all)
    BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, PADDED_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, TAIL_DV: tl.constexpr, PADDED_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, SOFTCAP: tl.constexpr,
    VARLEN: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SPARSE: tl.constexpr,
    DOT_PRECISION: tl.constexpr, VECTOR: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dL of one block of queries, of keys, or of both, summed over the rest.

    The tensors and numbers that need a word:
        dbias: (batches and heads that the bias tells apart, splits, seqlen_q, seqlen_k), without
            the axes that BY_QUERY and BY_KEY deny; contiguous.
        own_heads: Heads that the bias tells apart; shared_heads: heads that share each.
        sharers: Heads of all batches that share an element; a program sums every splits-th.
    """
    query_blocks = 1
    if BY_QUERY:
        query_blocks = seqlen_q // BLOCK_M + documents if VARLEN else tl.cdiv(seqlen_q, BLOCK_M)
    key_blocks = 1
    if BY_KEY:
        key_blocks = seqlen_k // BLOCK_N + documents if VARLEN else tl.cdiv(seqlen_k, BLOCK_N)
    program = tl.program_id(0)
    own_key = program % key_blocks * BLOCK_N
    own_query = program // key_blocks % query_blocks * BLOCK_M
    slice_ = program // key_blocks // query_blocks  # of all own batches * own heads * splits
    owned = slice_ // splits
    split = slice_ % splits
    length_q = seqlen_q
    length_k = seqlen_k
    if VARLEN:
        # Of both kinds of blocks the document is the queries': blocks of keys are counted in it.
        if BY_QUERY:
            document, own_query = find_document(starts_q, documents, own_query // BLOCK_M, BLOCK_M)
        else:
            document, own_key = find_document(starts_k, documents, own_key // BLOCK_N, BLOCK_N)
        start_q, length_q = document_rows(starts_q, document)
        start_k, length_k = document_rows(starts_k, document)
        band_lo = document_band(band_lo, length_q, length_k, BOTTOM_RIGHT)
        band_hi = document_band(band_hi, length_q, length_k, BOTTOM_RIGHT)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for sharer in range(split, sharers, splits):
        batch = owned // own_heads + sharer // shared_heads
        head_q = owned % own_heads + sharer % shared_heads
        head_kv = head_q // group
        q_head = head_start(q, batch, head_q, stride_qb, stride_qh, VECTOR)
        do_head = head_start(do, batch, head_q, stride_dob, stride_doh, VECTOR)
        k_head = head_start(k, batch, head_kv, stride_kb, stride_kh, VECTOR)
        v_head = head_start(v, batch, head_kv, stride_vb, stride_vh, VECTOR)
        row = tl.cast(batch * heads_q + head_q, tl.int64) * seqlen_q
        place = batch
        if VARLEN:
            place = document
        terms = head_terms(
            bias, (stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k),
            alibi_slopes, (alibi_diagonal, alibi_stride), batch, place, head_q,
            BIAS, BIAS_VECTOR, ALIBI,
        )  # fmt: skip
        if VARLEN:
            q_head = skip_rows(q_head, start_q, stride_qm, VECTOR)
            do_head = skip_rows(do_head, start_q, stride_dom, VECTOR)
            k_head = skip_rows(k_head, start_k, stride_kn, VECTOR)
            v_head = skip_rows(v_head, start_k, stride_vn, VECTOR)
            row += start_q
            along = document_band(0, length_q, length_k, BOTTOM_RIGHT)
            terms = document_terms(terms, start_q, start_k, along, BIAS)
        if BY_QUERY:
            query_begin = own_query
            query_end = tl.minimum(own_query + BLOCK_M, length_q)
        else:
            query_begin, _interior, query_end = query_range(
                own_key, length_q, length_k, band_lo, band_hi,
                HAS_LO, HAS_HI, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        for first_query in tl.range(query_begin, query_end, BLOCK_M):
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
            key_begin, _inside, key_end = key_range(
                first_query, length_q, length_k, band_lo, band_hi, HAS_LO, HAS_HI, BLOCK_M, BLOCK_N
            )
            if BY_KEY:
                key_begin = tl.maximum(key_begin, own_key)
                key_end = tl.minimum(key_end, own_key + BLOCK_N)
            for first_key in tl.range(key_begin, key_end, BLOCK_N):
                k_tile, k_tail = load_rows(
                    k_head, first_key, length_k, head_dim, stride_kn, stride_kd,
                    BLOCK_N, BLOCK_D, TAIL_D, True, PADDED_D, VECTOR,
                )  # fmt: skip
                v_tile, v_tail = load_rows(
                    v_head, first_key, length_k, head_dim_v, stride_vn, stride_vd,
                    BLOCK_N, BLOCK_DV, TAIL_DV, True, PADDED_DV, VECTOR,
                )  # fmt: skip
                products = dot_rows(q_tile, q_tail, k_tile, k_tail, TAIL_D, DOT_PRECISION)
                p, _slope = probabilities(
                    products, row_lse[:, None], softmax_scale, softcap, terms,
                    first_query, first_key, length_q, length_k,
                    BLOCK_M, BLOCK_N, False, SOFTCAP, BIAS, BIAS_VECTOR, ALIBI,
                )  # fmt: skip
                dp = dot_rows(do_tile, do_tail, v_tile, v_tail, TAIL_DV, DOT_PRECISION)
                if DROPOUT:
                    kept = keep_tile(
                        dropout_seed, dropout_threshold, place, head_q, first_query, first_key,
                        BLOCK_M, BLOCK_N,
                    )  # fmt: skip
                    dp = tl.where(kept, dp * dropout_factor, 0.0)
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
                # 0 times a dp that overflowed is NaN.
                total += tl.where(visible & (p != 0.0), p * (dp - row_delta[:, None]), 0.0)

    queries = own_query + tl.arange(0, BLOCK_M)
    keys = own_key + tl.arange(0, BLOCK_N)
    query_inside = queries < length_q
    key_inside = keys < length_k
    if VARLEN:
        queries += start_q
        keys += start_k
    start = tl.cast(slice_, tl.int64)
    if BY_QUERY and BY_KEY:
        pointers = dbias + (start * seqlen_q + queries[:, None]) * seqlen_k + keys[None, :]
        inside = query_inside[:, None] & key_inside[None, :]
        tl.store(pointers, total.to(dbias.dtype.element_ty), mask=inside)
    elif BY_QUERY:
        sums = tl.sum(total, 1).to(dbias.dtype.element_ty)
        tl.store(dbias + start * seqlen_q + queries, sums, mask=query_inside)
    else:
        sums = tl.sum(total, 0).to(dbias.dtype.element_ty)
        tl.store(dbias + start * seqlen_k + keys, sums, mask=key_inside)


_dbias_tuned = configs.autotuned(dbias_kernel, configs.DQ)


def bias_gradient(problem, q, k, v, do, lse, delta, arguments):
    """dbias, shaped as the bias and in its dtype.

    Where many batches or heads share a bias of few elements, several programs sum a share each and
    their float32 sums are added: at most _PROGRAMS blocks of workspace, however long the sequences.
    A bias that is constant along both queries and keys is summed by queries first.
    """
    bias = arguments["bias"]
    if not (q.numel() and k.numel()):
        return torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
    batches, heads, queries, keys = bias.shape
    by_key = keys > 1
    by_query = queries > 1 or not by_key
    sharers = problem.batch // batches * (problem.heads_q // heads)
    blocks = (triton.cdiv(problem.seqlen_q, _BLOCK) if by_query else 1) * (
        triton.cdiv(problem.seqlen_k, _BLOCK) if by_key else 1
    )
    splits = min(sharers, max(1, _PROGRAMS // (blocks * batches * heads)))
    whole = splits == 1 and (by_query == (queries > 1))
    shape = (batches, heads, splits, problem.seqlen_q if by_query else 1, keys)
    # What lies between documents is written by no program.
    new = torch.zeros if arguments["documents"] is not None and by_query and by_key else torch.empty
    sums = new(shape, dtype=bias.dtype if whole else torch.float32, device=bias.device)
    kernel = _dbias_tuned(arguments, q.element_size())

    def grid(meta):
        query_blocks = (
            blocks_of(arguments["documents"], problem.seqlen_q, meta["BLOCK_M"]) if by_query else 1
        )
        key_blocks = (
            blocks_of(arguments["documents"], problem.seqlen_k, meta["BLOCK_N"]) if by_key else 1
        )
        return (query_blocks * key_blocks * batches * heads * splits,)

    kernel[grid](
        q, k, v, do, lse, delta, sums, *q.stride(), *k.stride(), *v.stride(), *do.stride(),
        own_heads=heads, shared_heads=problem.heads_q // heads, sharers=sharers, splits=splits,
        BY_QUERY=by_query, BY_KEY=by_key, **arguments,
    )  # fmt: skip
    if whole:
        return sums.squeeze(2)
    return sums.sum(2).sum_to_size(bias.shape).to(bias.dtype)


@triton.jit(
    do_not_specialize=("batch", "heads_q", "seqlen_q"),
    do_not_specialize_on_alignment=("sinks", "lse", "delta", "dsinks"),
)
def dsinks_kernel(
    sinks, lse, delta, dsinks, batch, heads_q, seqlen_q, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Write dsinks of one head; lse and delta are (batch, heads_q, seqlen_q), contiguous."""
    head = tl.program_id(0)
    sink = tl.load(sinks + head)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for sequence in range(batch):
        row = tl.cast(sequence * heads_q + head, tl.int64) * seqlen_q
        for first_query in range(0, seqlen_q, BLOCK_M):
            queries = first_query + tl.arange(0, BLOCK_M)
            inside = queries < seqlen_q
            row_lse = tl.load(lse + row + queries, mask=inside, other=float("inf"))
            row_delta = tl.load(delta + row + queries, mask=inside, other=0.0)
            # A row that sees nothing, not even a sink, has no gradient.
            p = tl.where(row_lse == float("-inf"), 0.0, tl.exp(sink - row_lse))
            total -= p * row_delta
    tl.store(dsinks + head, tl.sum(total, 0))


def sinks_gradient(problem, sinks, lse, delta):
    """dsinks, (heads_q,) float32."""
    dsinks = torch.zeros(sinks.shape, dtype=torch.float32, device=sinks.device)
    if delta.numel():
        dsinks_kernel[(problem.heads_q,)](
            sinks, lse, delta, dsinks, problem.batch, problem.heads_q, problem.seqlen_q,
            BLOCK_M=_ROWS,
        )  # fmt: skip
    return dsinks
