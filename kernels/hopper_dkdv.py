"""dK and dV of 16-bit tensors on Hopper: tiles by the copy engine, products by wgmma.

The formulas and roundings are those of backward_dkdv.py. What makes it fast:
the transposed scores K Q^T leave P^T and dS^T in the registers that dV += P^T dO and dK += dS^T Q
read their left operand from; no address or mask is held in registers; lse and delta, a value for
each column of those tiles, are fetched only when they are needed.
"""

import triton
import triton.language as tl

from .descriptors import load_tile, load_vector, store_tile
from .order import sequence_and_block
from .scores import LOG2E, is_visible, query_range
from .tiles import add_product, dot_rows, zero_rows

_RUNTIME = ("heads_q", "heads_kv", "group", "seqlen_q", "seqlen_k", "band_lo", "band_hi")


@triton.jit(do_not_specialize=_RUNTIME)
def hopper_dkdv_kernel(
    q, q_tail, k, k_tail, v, v_tail, do, do_tail, lse, delta,
    dk, dk_tail, dv, dv_tail, dq_sum, dq_sum_tail,
    heads_q, heads_kv, group, seqlen_q, seqlen_k, band_lo, band_hi, softmax_scale,
    BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_DV: tl.constexpr, TAIL_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, GQA: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, ATOMIC_DQ: tl.constexpr, DP_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dk (if DK) and dv (if DV) of BLOCK_N keys of one key head.

    The tensors and numbers that need a word:
        q, k, v, do, dk, dv, dq_sum: Described, as (tile, tail) of columns; those that a program
            does not need may be None.
        lse, delta: (batch * heads_q, seqlen_q) float32, described.
        DP_FIRST: dP is computed beside the scores, not beside dV: another order of the same work.
        dq_sum: float32; under ATOMIC_DQ, which needs DK, it receives dQ / softmax_scale.
    """
    blocks = tl.cdiv(seqlen_k, BLOCK_N)
    # Causal: the first keys have the most queries.
    sequence, block = sequence_and_block(blocks, HAS_HI)
    first_key = block * BLOCK_N
    batch = sequence // heads_kv
    head_kv = sequence % heads_kv
    keys = first_key + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    k_tile, k_rest = load_tile(k, k_tail, batch, head_kv, first_key, BLOCK_N, BLOCK_D, TAIL_D)
    if DK:
        v_tile, v_rest = load_tile(v, v_tail, batch, head_kv, first_key, BLOCK_N, BLOCK_DV, TAIL_DV)

    query_begin, interior_begin, query_end = query_range(
        first_key, seqlen_q, seqlen_k, band_lo, band_hi, HAS_LO, HAS_HI, BLOCK_M, BLOCK_N
    )
    logit_scale = softmax_scale * LOG2E
    dk_acc, dk_rest = zero_rows(BLOCK_N, BLOCK_D, TAIL_D)
    dv_acc, dv_rest = zero_rows(BLOCK_N, BLOCK_DV, TAIL_DV)
    for member in range(group if GQA else 1):
        head_q = head_kv * group + member
        sequence_q = batch * heads_q + head_q
        # Unrolled: the body is compiled with masks, then without (not at all under a lower limit).
        for INTERIOR in tl.static_range(0, 1 if HAS_LO else 2):
            begin = interior_begin if INTERIOR == 1 else query_begin
            end = query_end if INTERIOR == 1 else interior_begin
            for first_query in tl.range(begin, end, BLOCK_M):
                q_tile, q_rest = load_tile(
                    q, q_tail, batch, head_q, first_query, BLOCK_M, BLOCK_D, TAIL_D
                )
                do_tile, do_rest = load_tile(
                    do, do_tail, batch, head_q, first_query, BLOCK_M, BLOCK_DV, TAIL_DV
                )
                queries = first_query + rows
                row_lse = load_vector(lse, sequence_q, first_query, BLOCK_M)
                if INTERIOR == 0:  # rows that saw no key get +inf, so that their P is 0
                    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
                products = dot_rows(k_tile, k_rest, q_tile, q_rest, TAIL_D, "tf32")
                if DP_FIRST:
                    dp = dot_rows(v_tile, v_rest, do_tile, do_rest, TAIL_DV, "tf32")
                    row_delta = load_vector(delta, sequence_q, first_query, BLOCK_M)
                # P is at most 1: see scores.probabilities.
                exponent = products * logit_scale - (row_lse * LOG2E)[None, :]
                p = tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
                if INTERIOR == 0:
                    visible = is_visible(
                        queries[None, :], keys[:, None], seqlen_k, band_lo, band_hi, HAS_LO, HAS_HI
                    )
                    p = tl.where(visible, p, 0.0)
                if DV:
                    dv_acc, dv_rest = add_product(
                        dv_acc, dv_rest, p.to(do_tile.dtype), do_tile, do_rest, TAIL_DV, "tf32"
                    )
                if DK:
                    if not DP_FIRST:
                        dp = dot_rows(v_tile, v_rest, do_tile, do_rest, TAIL_DV, "tf32")
                        row_delta = load_vector(delta, sequence_q, first_query, BLOCK_M)
                    ds = p * (dp - row_delta[None, :])
                    if INTERIOR == 0:
                        ds = tl.where(visible, ds, 0.0)  # 0 times a dp that overflowed is NaN
                    ds = ds.to(q_tile.dtype)
                    dk_acc, dk_rest = add_product(
                        dk_acc, dk_rest, ds, q_tile, q_rest, TAIL_D, "tf32"
                    )
                    if ATOMIC_DQ:
                        add_dq(
                            dq_sum, dq_sum_tail, batch, head_q, first_query, ds, k_tile, k_rest,
                            BLOCK_M, BLOCK_D, TAIL_D,
                        )  # fmt: skip

    if DK:
        store_tile(
            dk, dk_tail, batch, head_kv, first_key,
            dk_acc * softmax_scale, dk_rest * softmax_scale, BLOCK_N, BLOCK_D, TAIL_D,
        )  # fmt: skip
    if DV:
        store_tile(
            dv, dv_tail, batch, head_kv, first_key, dv_acc, dv_rest, BLOCK_N, BLOCK_DV, TAIL_DV
        )


@triton.jit
def add_dq(
    dq_sum, dq_sum_tail, batch, head_q, first_query, ds, k_tile, k_rest,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
):  # fmt: skip
    """Add dS K to the rows of one head, by the copy engine; ds is transposed, (keys, queries)."""
    if BLOCK_M < 64:  # wgmma takes 64 rows and more: transposed, rows are columns of k
        dq_acc = tl.trans(tl.dot(tl.trans(k_tile), ds)).reshape(1, 1, BLOCK_M, BLOCK_D)
    else:
        dq_acc = tl.dot(tl.trans(ds), k_tile).reshape(1, 1, BLOCK_M, BLOCK_D)
    dq_sum.atomic_add([batch, head_q, first_query, 0], dq_acc)
    if TAIL_D > 0:
        dq_rest = tl.dot(tl.trans(ds), k_rest).reshape(1, 1, BLOCK_M, TAIL_D)
        dq_sum_tail.atomic_add([batch, head_q, first_query, BLOCK_D], dq_rest)
