"""Forward of packed documents: a grid for the most tiles that there may be, most of them used."""

import triton
import triton.language as tl

from .tiles import LOG2E, in_band, inside, places, tanh

_POINTERS = ("q", "k", "v", "o", "lse", "starts_q", "starts_k")
_RUNTIME = (
    "stride_qh", "stride_qm", "stride_qd", "stride_kh", "stride_kn", "stride_kd",
    "stride_vh", "stride_vn", "stride_vd", "stride_oh", "stride_om", "stride_od",
    "documents", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v",
    "window_left", "window_right",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def varlen_kernel(
    q, k, v, o, lse, starts_q, starts_k,
    stride_qh, stride_qm, stride_qd, stride_kh, stride_kn, stride_kd,
    stride_vh, stride_vn, stride_vd, stride_oh, stride_om, stride_od,
    documents, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v,
    window_left, window_right, softmax_scale, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o and lse of one tile of one document, for one head; rows past its end are clamped."""
    tile = tl.program_id(0)
    document = documents
    first_row = 0
    before = 0
    for candidate in range(documents):
        length = tl.load(starts_q + candidate + 1) - tl.load(starts_q + candidate)
        tiles = tl.cdiv(length, BLOCK_M)
        mine = (tile >= before) & (tile < before + tiles)
        document = tl.where(mine, candidate, document)
        first_row = tl.where(mine, (tile - before) * BLOCK_M, first_row)
        before += tiles
    if document == documents:
        return
    start_q = tl.load(starts_q + document)
    start_k = tl.load(starts_k + document)
    length_q = tl.load(starts_q + document + 1) - start_q
    length_k = tl.load(starts_k + document + 1) - start_k
    shift = length_k - length_q if BOTTOM_RIGHT else 0
    head = tl.program_id(1).to(tl.int64)
    head_kv = head // (heads_q // heads_kv)
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    q_head = q + head * stride_qh + start_q.to(tl.int64) * stride_qm
    k_head = k + head_kv * stride_kh + start_k.to(tl.int64) * stride_kn
    v_head = v + head_kv * stride_vh + start_k.to(tl.int64) * stride_vn
    o_head = o + head * stride_oh + start_q.to(tl.int64) * stride_om
    q_tile = tl.load(
        places(q_head, tl.minimum(rows, length_q - 1), columns, stride_qm, stride_qd),
        mask=(columns < head_dim)[None, :],
        other=0.0,
    )
    begin = 0
    end = tl.minimum(length_k, seqlen_k)  # so that a defect's lengths do not run for ever
    if HAS_LO:
        begin = tl.maximum(first_row + shift - window_left, 0) // BLOCK_N * BLOCK_N
    if HAS_HI:
        last_row = tl.minimum(first_row + BLOCK_M, length_q) - 1
        end = tl.minimum(end, last_row + shift + window_right + 1)

    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    for first_key in tl.range(begin, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        k_tile = tl.load(
            places(k_head, keys, columns, stride_kn, stride_kd),
            mask=inside(keys, length_k, columns, head_dim),
            other=0.0,
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * softmax_scale
        if SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        visible = (keys < length_k)[None, :]
        visible = visible & in_band(
            rows[:, None], keys[None, :], shift - window_left, shift + window_right, HAS_LO, HAS_HI
        )
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        highest = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet
        p = tl.exp2((scores - highest[:, None]) * LOG2E)
        rescale = tl.exp2((m - highest) * LOG2E)
        l = l * rescale + tl.sum(p, 1)  # noqa: E741
        v_tile = tl.load(
            places(v_head, keys, columns_v, stride_vn, stride_vd),
            mask=inside(keys, length_k, columns_v, head_dim_v),
            other=0.0,
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new

    l = tl.where(m == float("-inf"), 1.0, l)  # noqa: E741
    tl.store(
        places(o_head, rows, columns_v, stride_om, stride_od),
        (acc / l[:, None]).to(o.dtype.element_ty),
        mask=inside(rows, length_q, columns_v, head_dim_v),
    )
    tl.store(lse + head * seqlen_q + start_q + rows, m + tl.log(l), mask=rows < length_q)
