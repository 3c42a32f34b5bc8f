"""Forward: BLOCK_M queries of one head a program, an online softmax over blocks of keys."""

import triton
import triton.language as tl

from .tiles import LOG2E, in_band, inside, places, tanh

_POINTERS = ("q", "k", "v", "o", "lse")
_RUNTIME = (
    "stride_qb", "stride_qh", "stride_qm", "stride_qd",
    "stride_kb", "stride_kh", "stride_kn", "stride_kd",
    "stride_vb", "stride_vh", "stride_vn", "stride_vd",
    "stride_ob", "stride_oh", "stride_om", "stride_od",
    "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "band_lo", "band_hi",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def forward_kernel(
    q, k, v, o, lse,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_lo, band_hi, softmax_scale, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o and lse (natural logarithm) of BLOCK_M queries; 0 and -inf where no key is seen."""
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

    q_tile = tl.load(
        places(q_head, rows, columns, stride_qm, stride_qd),
        mask=inside(rows, seqlen_q, columns, head_dim),
        other=0.0,
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
        k_tile = tl.load(
            places(k_head, keys, columns, stride_kn, stride_kd),
            mask=inside(keys, seqlen_k, columns, head_dim),
            other=0.0,
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * softmax_scale
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
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        m = m_new

    empty = m == float("-inf")
    l = tl.where(empty, 1.0, l)  # noqa: E741
    tl.store(
        places(o_head, rows, columns_v, stride_om, stride_od),
        (acc / l[:, None]).to(o.dtype.element_ty),
        mask=inside(rows, seqlen_q, columns_v, head_dim_v),
    )
    row_lse = m + tl.log(l)
    tl.store(lse + sequence.to(tl.int64) * seqlen_q + rows, row_lse, mask=rows < seqlen_q)
