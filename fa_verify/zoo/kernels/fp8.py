"""Forward of fp8 operands: P is lifted to the range of e4m3, and rounded to it."""

import triton
import triton.language as tl

from .tiles import LOG2E, in_band, inside, places, tanh

LIFT = tl.constexpr(256.0)  # the largest power of two that a P of at most 1 may be multiplied by
_POINTERS = ("q", "k", "v", "o", "lse", "q_scale", "k_scale", "v_scale")
_RUNTIME = (
    "stride_qb", "stride_qh", "stride_qm", "stride_qd",
    "stride_kb", "stride_kh", "stride_kn", "stride_kd",
    "stride_vb", "stride_vh", "stride_vn", "stride_vd",
    "stride_ob", "stride_oh", "stride_om", "stride_od",
    "stride_qsb", "stride_qsh", "stride_qsm", "stride_ksb", "stride_ksh", "stride_ksn",
    "stride_vsb", "stride_vsh", "stride_vsn", "scaled_rows",
    "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "band_lo", "band_hi",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def fp8_kernel(
    q, k, v, o, lse, q_scale, k_scale, v_scale,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_qsb, stride_qsh, stride_qsm, stride_ksb, stride_ksh, stride_ksn,
    stride_vsb, stride_vsh, stride_vsn, scaled_rows,
    heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_lo, band_hi, softmax_scale, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Write o and lse (natural logarithm) of BLOCK_M queries; 0 and -inf where no key is seen.

    A block of rows with one scale is a multiple of BLOCK_M and of BLOCK_N.
    """
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    first_row = tl.program_id(0) % blocks * BLOCK_M
    sequence = tl.program_id(0) // blocks
    batch = (sequence // heads_q).to(tl.int64)
    head = (sequence % heads_q).to(tl.int64)
    head_kv = head // (heads_q // heads_kv)
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    q_head = q + batch * stride_qb + head * stride_qh
    k_head = k + batch * stride_kb + head_kv * stride_kh
    v_head = v + batch * stride_vb + head_kv * stride_vh
    o_head = o + batch * stride_ob + head * stride_oh
    k_scales = k_scale + batch * stride_ksb + head_kv * stride_ksh
    v_scales = v_scale + batch * stride_vsb + head_kv * stride_vsh

    q_tile = tl.load(
        places(q_head, rows, columns, stride_qm, stride_qd),
        mask=inside(rows, seqlen_q, columns, head_dim),
        other=0.0,
    )
    q_factor = tl.load(
        q_scale + batch * stride_qsb + head * stride_qsh + first_row // scaled_rows * stride_qsm
    )
    begin = 0
    end = seqlen_k
    if HAS_LO:
        begin = tl.maximum(first_row + band_lo, 0) // BLOCK_N * BLOCK_N
    if HAS_HI:
        last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
        end = tl.minimum(end, last_row + band_hi + 1)

    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    for first_key in tl.range(begin, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        block = first_key // scaled_rows
        k_tile = tl.load(
            places(k_head, keys, columns, stride_kn, stride_kd),
            mask=inside(keys, seqlen_k, columns, head_dim),
            other=0.0,
        )
        k_factor = tl.load(k_scales + block * stride_ksn)
        scores = tl.dot(q_tile, tl.trans(k_tile)) * (q_factor * k_factor * softmax_scale)
        if SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        visible = (keys < seqlen_k)[None, :]
        visible = visible & in_band(rows[:, None], keys[None, :], band_lo, band_hi, HAS_LO, HAS_HI)
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet
        p = tl.exp2((scores - shift[:, None]) * LOG2E)
        rescale = tl.exp2((m - shift) * LOG2E)
        l = l * rescale + tl.sum(p, 1)  # noqa: E741
        acc = acc * rescale[:, None]
        v_tile = tl.load(
            places(v_head, keys, columns_v, stride_vn, stride_vd),
            mask=inside(keys, seqlen_k, columns_v, head_dim_v),
            other=0.0,
        )
        v_factor = tl.load(v_scales + block * stride_vsn)
        acc += tl.dot((p * LIFT).to(v_tile.dtype), v_tile) * v_factor
        m = m_new

    empty = m == float("-inf")
    l = tl.where(empty, 1.0, l)  # noqa: E741
    tl.store(
        places(o_head, rows, columns_v, stride_om, stride_od),
        (acc / (l * LIFT)[:, None]).to(o.dtype.element_ty),
        mask=inside(rows, seqlen_q, columns_v, head_dim_v),
    )
    row_lse = m + tl.log(l)
    tl.store(lse + sequence.to(tl.int64) * seqlen_q + rows, row_lse, mask=rows < seqlen_q)
