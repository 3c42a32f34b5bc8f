"""dQ of 16-bit tensors on Hopper, one program for BLOCK_M queries of one head.

Formulas and roundings are those of backward_dq.py; see hopper_dkdv.py for what makes it fast.
"""

import triton
import triton.language as tl

from .descriptors import load_tile, load_vector, store_tile
from .order import sequence_and_block
from .scores import LOG2E, is_visible, key_range
from .tiles import add_product, dot_rows, zero_rows

_RUNTIME = ("heads_q", "group", "seqlen_q", "seqlen_k", "band_lo", "band_hi")


@triton.jit(do_not_specialize=_RUNTIME)
def hopper_dq_kernel(
    q, q_tail, k, k_tail, v, v_tail, do, do_tail, lse, delta, dq, dq_tail,
    heads_q, group, seqlen_q, seqlen_k, band_lo, band_hi, softmax_scale,
    BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_DV: tl.constexpr, TAIL_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Write dq of BLOCK_M queries of one head. Arguments as those of hopper_dkdv_kernel.

    IN_REGISTERS: q and do are held there and not in shared memory, which then has room for further
        tiles of k and v, and another program.
    """
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    sequence, block = sequence_and_block(blocks, HAS_HI)
    first_query = (blocks - 1 - block) * BLOCK_M  # causal: the last queries have the most keys
    batch = sequence // heads_q
    head_q = sequence % heads_q
    head_kv = head_q // group
    q_tile, q_rest = load_tile(q, q_tail, batch, head_q, first_query, BLOCK_M, BLOCK_D, TAIL_D)
    do_tile, do_rest = load_tile(
        do, do_tail, batch, head_q, first_query, BLOCK_M, BLOCK_DV, TAIL_DV
    )
    queries = first_query + tl.arange(0, BLOCK_M)
    if IN_REGISTERS:  # what was computed is there. No value changes: rows past the end are 0.
        inside = (queries < seqlen_q)[:, None]
        q_tile, q_rest = tl.where(inside, q_tile, 0.0), tl.where(inside, q_rest, 0.0)
        do_tile, do_rest = tl.where(inside, do_tile, 0.0), tl.where(inside, do_rest, 0.0)
    row_lse = load_vector(lse, sequence, first_query, BLOCK_M)
    row_delta = load_vector(delta, sequence, first_query, BLOCK_M)
    # Rows that saw no key get +inf, so that their P is 0.
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse) * LOG2E

    key_begin, interior_end, key_end = key_range(
        first_query, seqlen_q, seqlen_k, band_lo, band_hi, HAS_LO, HAS_HI, BLOCK_M, BLOCK_N
    )
    logit_scale = softmax_scale * LOG2E
    dq_acc, dq_rest = zero_rows(BLOCK_M, BLOCK_D, TAIL_D)
    for MASKED in tl.static_range(1 if HAS_LO else 0, 2):
        begin = interior_end if MASKED == 1 else key_begin
        end = key_end if MASKED == 1 else interior_end
        for first_key in tl.range(begin, end, BLOCK_N):
            k_tile, k_rest = load_tile(
                k, k_tail, batch, head_kv, first_key, BLOCK_N, BLOCK_D, TAIL_D
            )
            v_tile, v_rest = load_tile(
                v, v_tail, batch, head_kv, first_key, BLOCK_N, BLOCK_DV, TAIL_DV
            )
            products = dot_rows(q_tile, q_rest, k_tile, k_rest, TAIL_D, "tf32")
            dp = dot_rows(do_tile, do_rest, v_tile, v_rest, TAIL_DV, "tf32")
            # P is at most 1: see scores.probabilities.
            exponent = products * logit_scale - row_lse[:, None]
            p = tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
            ds = p * (dp - row_delta[:, None])
            if MASKED == 1:
                keys = first_key + tl.arange(0, BLOCK_N)
                visible = is_visible(
                    queries[:, None], keys[None, :], seqlen_k, band_lo, band_hi, HAS_LO, HAS_HI
                )
                ds = tl.where(visible, ds, 0.0)
            dq_acc, dq_rest = add_product(
                dq_acc, dq_rest, ds.to(k_tile.dtype), k_tile, k_rest, TAIL_D, "tf32"
            )

    store_tile(
        dq, dq_tail, batch, head_q, first_query,
        dq_acc * softmax_scale, dq_rest * softmax_scale, BLOCK_M, BLOCK_D, TAIL_D,
    )  # fmt: skip
