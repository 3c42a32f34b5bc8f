"""Backward: delta, and dq of BLOCK_M queries of one head a program."""

import triton
import triton.language as tl

from .tiles import LOG2E, in_band, inside, places, tanh

_POINTERS = ("q", "k", "v", "do", "lse", "delta", "dq")
_RUNTIME = (
    "stride_qb", "stride_qh", "stride_qm", "stride_qd",
    "stride_kb", "stride_kh", "stride_kn", "stride_kd",
    "stride_vb", "stride_vh", "stride_vn", "stride_vd",
    "stride_dob", "stride_doh", "stride_dom", "stride_dod",
    "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "band_lo", "band_hi",
)  # fmt: skip


@triton.jit(
    do_not_specialize=(
        "stride_ob", "stride_oh", "stride_om", "stride_od",
        "stride_dob", "stride_doh", "stride_dom", "stride_dod",
        "heads_q", "seqlen_q", "head_dim_v",
    ),
    do_not_specialize_on_alignment=("o", "do", "delta"),
)  # fmt: skip
def delta_kernel(
    o, do, delta,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_dob, stride_doh, stride_dom, stride_dod,
    heads_q, seqlen_q, head_dim_v,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Write delta = sum(do * o) of BLOCK_M queries: (batch, heads_q, seqlen_q) float32."""
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    sequence = tl.program_id(0) // blocks
    batch = (sequence // heads_q).to(tl.int64)
    head = (sequence % heads_q).to(tl.int64)
    rows = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_DV)
    within = inside(rows, seqlen_q, columns, head_dim_v)
    o_head = o + batch * stride_ob + head * stride_oh
    do_head = do + batch * stride_dob + head * stride_doh
    o_tile = tl.load(
        places(o_head, rows, columns, stride_om, stride_od), mask=within, other=0.0
    )  # fmt: skip
    do_tile = tl.load(
        places(do_head, rows, columns, stride_dom, stride_dod), mask=within, other=0.0
    )
    total = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + sequence.to(tl.int64) * seqlen_q + rows, total, mask=rows < seqlen_q)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def dq_kernel(
    q, k, v, do, lse, delta, dq,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_lo, band_hi, softmax_scale, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq of BLOCK_M queries; dq is contiguous."""
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    first_row = tl.program_id(0) % blocks * BLOCK_M
    sequence = tl.program_id(0) // blocks
    batch = (sequence // heads_q).to(tl.int64)
    head = (sequence % heads_q).to(tl.int64)
    head_kv = head // (heads_q // heads_kv)
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    k_head = k + batch * stride_kb + head_kv * stride_kh
    v_head = v + batch * stride_vb + head_kv * stride_vh
    row_start = sequence.to(tl.int64) * seqlen_q
    q_tile = tl.load(
        places(q + batch * stride_qb + head * stride_qh, rows, columns, stride_qm, stride_qd),
        mask=inside(rows, seqlen_q, columns, head_dim),
        other=0.0,
    )
    do_tile = tl.load(
        places(
            do + batch * stride_dob + head * stride_doh, rows, columns_v, stride_dom, stride_dod
        ),
        mask=inside(rows, seqlen_q, columns_v, head_dim_v),
        other=0.0,
    )
    row_lse = tl.load(lse + row_start + rows, mask=rows < seqlen_q, other=float("inf"))
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    row_delta = tl.load(delta + row_start + rows, mask=rows < seqlen_q, other=0.0)
    begin = 0
    end = seqlen_k
    if HAS_LO:
        begin = tl.maximum(first_row + band_lo, 0) // BLOCK_N * BLOCK_N
    if HAS_HI:
        last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
        end = tl.minimum(end, last_row + band_hi + 1)

    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for first_key in tl.range(begin, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        k_tile = tl.load(
            places(k_head, keys, columns, stride_kn, stride_kd),
            mask=inside(keys, seqlen_k, columns, head_dim),
            other=0.0,
        )
        v_tile = tl.load(
            places(v_head, keys, columns_v, stride_vn, stride_vd),
            mask=inside(keys, seqlen_k, columns_v, head_dim_v),
            other=0.0,
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * softmax_scale
        slope = 1.0
        if SOFTCAP:
            capped = tanh(scores / softcap)
            scores = softcap * capped
            slope = 1.0 - capped * capped
        exponent = (scores - row_lse[:, None]) * LOG2E
        p = tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
        visible = (keys < seqlen_k)[None, :]
        visible = visible & in_band(rows[:, None], keys[None, :], band_lo, band_hi, HAS_LO, HAS_HI)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        ds = tl.where(visible, p * (dp - row_delta[:, None]) * slope, 0.0)
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)

    tl.store(
        places(dq + row_start * head_dim, rows, columns, head_dim, 1),
        (acc * softmax_scale).to(dq.dtype.element_ty),
        mask=inside(rows, seqlen_q, columns, head_dim),
    )
