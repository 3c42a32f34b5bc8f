"""Forward under any mask: a byte for each query and key says whether it is seen."""

import triton
import triton.language as tl

from .tiles import LOG2E, inside, places, tanh

_POINTERS = ("q", "k", "v", "o", "lse", "allowed")
_RUNTIME = (
    "stride_qb", "stride_qh", "stride_qm", "stride_qd",
    "stride_kb", "stride_kh", "stride_kn", "stride_kd",
    "stride_vb", "stride_vh", "stride_vn", "stride_vd",
    "stride_ob", "stride_oh", "stride_om", "stride_od",
    "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def masked_kernel(
    q, k, v, o, lse, allowed,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, softmax_scale, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o and lse of BLOCK_M queries; allowed is (seqlen_q, seqlen_k) int8, contiguous."""
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    first_row = tl.program_id(0) % blocks * BLOCK_M
    sequence = tl.program_id(0) // blocks
    batch = (sequence // heads_q).to(tl.int64)
    head = (sequence % heads_q).to(tl.int64)
    head_kv = head // (heads_q // heads_kv)
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    q_tile = tl.load(
        places(q + batch * stride_qb + head * stride_qh, rows, columns, stride_qm, stride_qd),
        mask=inside(rows, seqlen_q, columns, head_dim),
        other=0.0,
    )
    k_head = k + batch * stride_kb + head_kv * stride_kh
    v_head = v + batch * stride_vb + head_kv * stride_vh
    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    end = seqlen_k
    for first_key in tl.range(0, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        k_tile = tl.load(
            places(k_head, keys, columns, stride_kn, stride_kd),
            mask=inside(keys, seqlen_k, columns, head_dim),
            other=0.0,
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * softmax_scale
        if SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        seen = tl.load(
            places(allowed, rows, keys, seqlen_k, 1),
            mask=inside(rows, seqlen_q, keys, seqlen_k),
            other=0,
        )
        scores = tl.where(seen != 0, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet
        p = tl.exp2((scores - shift[:, None]) * LOG2E)
        rescale = tl.exp2((m - shift) * LOG2E)
        l = l * rescale + tl.sum(p, 1)  # noqa: E741
        v_tile = tl.load(
            places(v_head, keys, columns_v, stride_vn, stride_vd),
            mask=inside(keys, seqlen_k, columns_v, head_dim_v),
            other=0.0,
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new

    l = tl.where(m == float("-inf"), 1.0, l)  # noqa: E741
    tl.store(
        places(o + batch * stride_ob + head * stride_oh, rows, columns_v, stride_om, stride_od),
        (acc / l[:, None]).to(o.dtype.element_ty),
        mask=inside(rows, seqlen_q, columns_v, head_dim_v),
    )
    tl.store(
        lse + sequence.to(tl.int64) * seqlen_q + rows, m + tl.log(l), mask=rows < seqlen_q
    )  # fmt: skip
