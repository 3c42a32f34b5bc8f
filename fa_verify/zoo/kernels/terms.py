"""Attention with a bias, sinks and dropout: forward, and a backward that adds dq by atomics."""

import triton
import triton.language as tl

from .tiles import LOG2E, in_band, inside, places

_TENSORS = ("q", "k", "v", "o", "bias", "sinks", "lse", "do", "delta", "dq", "dk", "dv", "dbias")
_STRIDES = tuple(
    f"stride_{tensor}{axis}"
    for tensor, axes in (("q", "bhmd"), ("k", "bhnd"), ("v", "bhnd"), ("b", "bhmn"), ("do", "bhmd"))
    for axis in axes
)
_RUNTIME = (
    *_STRIDES,
    *("heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"),
    *("band_lo", "band_hi", "seed", "threshold"),
)


@triton.jit
def kept(seed, threshold, sequence, rows, keys, seqlen_q, seqlen_k):
    """Which of rows x keys dropout keeps: a hash (lowbias32) of an element's place and a seed."""
    place = (sequence * seqlen_q + rows)[:, None] * seqlen_k + keys[None, :]
    x = place.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> 8).to(tl.int32) >= threshold


@triton.jit
def logits(
    q_tile, k_tile, bias, rows, keys, stride_bm, stride_bn, seqlen_q, seqlen_k,
    band_lo, band_hi, softmax_scale,
    HAS_BIAS: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Natural logits of a tile with their bias, -inf where a key is not seen."""
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * softmax_scale
    visible = inside(rows, seqlen_q, keys, seqlen_k)
    if HAS_BIAS:
        added = tl.load(places(bias, rows, keys, stride_bm, stride_bn), mask=visible, other=0.0)
        added = added.to(tl.float32)
        # A product that overflowed must not make NaN of what a bias of -inf hides.
        scores = tl.where(added == float("-inf"), added, scores + added)
    visible = visible & in_band(rows[:, None], keys[None, :], band_lo, band_hi, HAS_LO, HAS_HI)
    return tl.where(visible, scores, float("-inf"))


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_TENSORS)
def forward_terms_kernel(
    q, k, v, bias, sinks, o, lse,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_bb, stride_bh, stride_bm, stride_bn,
    heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_lo, band_hi, softmax_scale, seed, threshold, factor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SINKS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Write o, contiguous, and lse, sinks included, of BLOCK_M queries."""
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    sequence = tl.program_id(0) // blocks
    batch = (sequence // heads_q).to(tl.int64)
    head = (sequence % heads_q).to(tl.int64)
    head_kv = head // (heads_q // heads_kv)
    rows = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    k_head = k + batch * stride_kb + head_kv * stride_kh
    v_head = v + batch * stride_vb + head_kv * stride_vh
    bias_head = bias + batch * stride_bb + head * stride_bh if HAS_BIAS else bias
    q_tile = tl.load(
        places(q + batch * stride_qb + head * stride_qh, rows, columns, stride_qm, stride_qd),
        mask=inside(rows, seqlen_q, columns, head_dim),
        other=0.0,
    )
    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    for first_key in tl.range(0, seqlen_k, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        k_tile = tl.load(
            places(k_head, keys, columns, stride_kn, stride_kd),
            mask=inside(keys, seqlen_k, columns, head_dim),
            other=0.0,
        )
        scores = logits(
            q_tile, k_tile, bias_head, rows, keys, stride_bm, stride_bn, seqlen_q, seqlen_k,
            band_lo, band_hi, softmax_scale, HAS_BIAS, HAS_LO, HAS_HI, PRECISION,
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(scores, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet
        p = tl.exp2((scores - shift[:, None]) * LOG2E)
        rescale = tl.exp2((m - shift) * LOG2E)
        l = l * rescale + tl.sum(p, 1)  # noqa: E741
        if DROPOUT:
            p = tl.where(
                kept(seed, threshold, sequence, rows, keys, seqlen_q, seqlen_k), p * factor, 0.0
            )
        v_tile = tl.load(
            places(v_head, keys, columns_v, stride_vn, stride_vd),
            mask=inside(keys, seqlen_k, columns_v, head_dim_v),
            other=0.0,
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new

    if HAS_SINKS:
        sink = tl.load(sinks + head)
        top = tl.maximum(m, sink)
        shift = tl.where(top == float("-inf"), 0.0, top)
        share = tl.exp2((m - shift) * LOG2E)
        l = l * share + tl.exp2((sink - shift) * LOG2E)  # noqa: E741
        acc = acc * share[:, None]
        m = top
    l = tl.where(m == float("-inf"), 1.0, l)  # noqa: E741
    row_start = sequence.to(tl.int64) * seqlen_q
    tl.store(
        places(o + row_start * head_dim_v, rows, columns_v, head_dim_v, 1),
        (acc / l[:, None]).to(o.dtype.element_ty),
        mask=inside(rows, seqlen_q, columns_v, head_dim_v),
    )
    tl.store(lse + row_start + rows, m + tl.log(l), mask=rows < seqlen_q)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_TENSORS)
def backward_terms_kernel(
    q, k, v, bias, do, lse, delta, dq, dk, dv, dbias,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_bb, stride_bh, stride_bm, stride_bn,
    stride_dob, stride_doh, stride_dom, stride_dod,
    heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_lo, band_hi, softmax_scale, seed, threshold, factor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of BLOCK_N keys of one key head, and dbias of their logits; add to dq.

    dq (float32, zeroed), dk, dv and dbias (float32, one element a logit) are contiguous.
    """
    blocks = tl.cdiv(seqlen_k, BLOCK_N)
    sequence = tl.program_id(0) // blocks
    batch = (sequence // heads_kv).to(tl.int64)
    head_kv = (sequence % heads_kv).to(tl.int64)
    group = heads_q // heads_kv
    keys = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
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
    dk_acc = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv_acc = tl.zeros((BLOCK_N, BLOCK_DV), dtype=tl.float32)
    for member in range(group):
        head = head_kv * group + member
        row_start = (batch * heads_q + head) * seqlen_q
        bias_head = bias + batch * stride_bb + head * stride_bh if HAS_BIAS else bias
        for first_row in tl.range(0, seqlen_q, BLOCK_M):
            rows = first_row + tl.arange(0, BLOCK_M)
            q_tile = tl.load(
                places(
                    q + batch * stride_qb + head * stride_qh, rows, columns, stride_qm, stride_qd
                ),
                mask=inside(rows, seqlen_q, columns, head_dim),
                other=0.0,
            )
            do_tile = tl.load(
                places(
                    do + batch * stride_dob + head * stride_doh,
                    rows,
                    columns_v,
                    stride_dom,
                    stride_dod,
                ),
                mask=inside(rows, seqlen_q, columns_v, head_dim_v),
                other=0.0,
            )
            row_lse = tl.load(lse + row_start + rows, mask=rows < seqlen_q, other=float("inf"))
            row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
            row_delta = tl.load(delta + row_start + rows, mask=rows < seqlen_q, other=0.0)
            scores = logits(
                q_tile, k_tile, bias_head, rows, keys, stride_bm, stride_bn, seqlen_q, seqlen_k,
                band_lo, band_hi, softmax_scale, HAS_BIAS, HAS_LO, HAS_HI, PRECISION,
            )  # fmt: skip
            exponent = (scores - row_lse[:, None]) * LOG2E
            p = tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            weights = p
            if DROPOUT:
                keep = kept(seed, threshold, batch * heads_q + head, rows, keys, seqlen_q, seqlen_k)
                weights = tl.where(keep, p * factor, 0.0)
                dp = tl.where(keep, dp * factor, 0.0)
            dv_acc = tl.dot(
                tl.trans(weights.to(do_tile.dtype)), do_tile, dv_acc, input_precision=PRECISION
            )
            ds = tl.where(p == 0.0, 0.0, p * (dp - row_delta[:, None]))  # not 0 times inf
            if HAS_BIAS:
                tl.store(
                    places(dbias + row_start * seqlen_k, rows, keys, seqlen_k, 1),
                    ds,
                    mask=inside(rows, seqlen_q, keys, seqlen_k),
                )
            ds = ds.to(q_tile.dtype)
            dk_acc = tl.dot(tl.trans(ds), q_tile, dk_acc, input_precision=PRECISION)
            tl.atomic_add(
                places(dq + row_start * head_dim, rows, columns, head_dim, 1),
                tl.dot(ds, k_tile, input_precision=PRECISION) * softmax_scale,
                mask=inside(rows, seqlen_q, columns, head_dim),
                sem="relaxed",
            )

    key_start = sequence.to(tl.int64) * seqlen_k
    tl.store(
        places(dk + key_start * head_dim, keys, columns, head_dim, 1),
        (dk_acc * softmax_scale).to(dk.dtype.element_ty),
        mask=inside(keys, seqlen_k, columns, head_dim),
    )
    tl.store(
        places(dv + key_start * head_dim_v, keys, columns_v, head_dim_v, 1),
        dv_acc.to(dv.dtype.element_ty),
        mask=inside(keys, seqlen_k, columns_v, head_dim_v),
    )
