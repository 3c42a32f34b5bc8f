"""Backward: dk and dv of BLOCK_N keys of one key head a program; dq too, by atomics, if wanted."""

import triton
import triton.language as tl

from .tiles import LOG2E, in_band, inside, places, tanh

_POINTERS = ("q", "k", "v", "do", "lse", "delta", "dk", "dv", "dq_sum")
_RUNTIME = (
    "stride_qb", "stride_qh", "stride_qm", "stride_qd",
    "stride_kb", "stride_kh", "stride_kn", "stride_kd",
    "stride_vb", "stride_vh", "stride_vn", "stride_vd",
    "stride_dob", "stride_doh", "stride_dom", "stride_dod",
    "stride_dkb", "stride_dkh", "stride_dkn", "stride_dkd",
    "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "band_lo", "band_hi",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, dq_sum,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_lo, band_hi, softmax_scale, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    ATOMIC_DQ: tl.constexpr,
):  # fmt: skip
    """Write dk and dv, summed over the group's query heads; dv is contiguous.

    dq_sum is contiguous float32 and padded to whole blocks of rows; it receives dQ under ATOMIC_DQ.
    """
    blocks = tl.cdiv(seqlen_k, BLOCK_N)
    first_key = tl.program_id(0) % blocks * BLOCK_N
    sequence = tl.program_id(0) // blocks
    batch = (sequence // heads_kv).to(tl.int64)
    head_kv = (sequence % heads_kv).to(tl.int64)
    group = heads_q // heads_kv
    keys = first_key + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    k_tile = tl.load(
        places(k + batch * stride_kb + head_kv * stride_kh, keys, columns, stride_kn, stride_kd),
        mask=inside(keys, seqlen_k, columns, head_dim),
        other=0.0,
    )
    v_tile = tl.load(
        places(v + batch * stride_vb + head_kv * stride_vh, keys, columns_v, stride_vn, stride_vd),
        mask=inside(keys, seqlen_k, columns_v, head_dim_v),
        other=0.0,
    )
    begin = 0
    end = seqlen_q
    if HAS_HI:
        begin = tl.maximum(first_key - band_hi, 0) // BLOCK_M * BLOCK_M
    if HAS_LO:
        last_key = tl.minimum(first_key + BLOCK_N, seqlen_k) - 1
        end = tl.minimum(end, last_key - band_lo + 1)

    dk_acc = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv_acc = tl.zeros((BLOCK_N, BLOCK_DV), dtype=tl.float32)
    for member in range(group):
        head = head_kv * group + member
        row_start = (batch * heads_q + head) * seqlen_q
        q_head = q + batch * stride_qb + head * stride_qh
        do_head = do + batch * stride_dob + head * stride_doh
        for first_row in tl.range(begin, end, BLOCK_M):
            rows = first_row + tl.arange(0, BLOCK_M)
            q_tile = tl.load(
                places(q_head, rows, columns, stride_qm, stride_qd),
                mask=inside(rows, seqlen_q, columns, head_dim),
                other=0.0,
            )
            do_tile = tl.load(
                places(do_head, rows, columns_v, stride_dom, stride_dod),
                mask=inside(rows, seqlen_q, columns_v, head_dim_v),
                other=0.0,
            )
            row_lse = tl.load(lse + row_start + rows, mask=rows < seqlen_q, other=float("inf"))
            row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
            row_delta = tl.load(delta + row_start + rows, mask=rows < seqlen_q, other=0.0)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * softmax_scale
            slope = 1.0
            if SOFTCAP:
                capped = tanh(scores / softcap)
                scores = softcap * capped
                slope = 1.0 - capped * capped
            exponent = (scores - row_lse[:, None]) * LOG2E
            p = tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
            visible = (keys < seqlen_k)[None, :] & (rows < seqlen_q)[:, None]
            visible = visible & in_band(
                rows[:, None], keys[None, :], band_lo, band_hi, HAS_LO, HAS_HI
            )
            p = tl.where(visible, p, 0.0)
            dv_acc = tl.dot(
                tl.trans(p.to(do_tile.dtype)), do_tile, dv_acc, input_precision=PRECISION
            )
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            ds = tl.where(visible, p * (dp - row_delta[:, None]) * slope, 0.0)
            ds = ds.to(q_tile.dtype)
            dk_acc = tl.dot(tl.trans(ds), q_tile, dk_acc, input_precision=PRECISION)
            if ATOMIC_DQ:
                padded = tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M
                dq_head = dq_sum + (batch * heads_q + head) * padded * head_dim
                tl.atomic_add(
                    places(dq_head, rows, columns, head_dim, 1),
                    tl.dot(ds, k_tile, input_precision=PRECISION) * softmax_scale,
                    mask=inside(rows, padded, columns, head_dim),
                    sem="relaxed",
                )

    dk_head = dk + batch * stride_dkb + head_kv * stride_dkh
    dv_head = dv + sequence.to(tl.int64) * seqlen_k * head_dim_v
    tl.store(
        places(dk_head, keys, columns, stride_dkn, stride_dkd),
        (dk_acc * softmax_scale).to(dk.dtype.element_ty),
        mask=inside(keys, seqlen_k, columns, head_dim),
    )
    tl.store(
        places(dv_head, keys, columns_v, head_dim_v, 1),
        dv_acc.to(dv.dtype.element_ty),
        mask=inside(keys, seqlen_k, columns_v, head_dim_v),
    )
