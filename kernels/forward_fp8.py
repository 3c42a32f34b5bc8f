"""The forward pass of q, k and v in fp8 (e4m3) with scales: o = softmax(s (q qs)(k ks)^T) (v vs).

On Hopper most problems with a scale a head go to hopper_forward.py, v converted beforehand.

q k^T is a product of fp8 operands. P times v's scales is rounded to bfloat16, to which v converts
exactly: Hopper takes fp8 operands only with the summed axis contiguous, which v's is not, and P in
fp8 would cost three quarters of the digits that v has.
"""

import torch
import triton
import triton.language as tl

from fa_verify import Outputs

from . import configs, hopper_forward
from .arguments import arguments, split_columns
from .scores import LOG2E, is_visible, key_range, tanh
from .tiles import add_product, dot_rows, head_start, load_rows, store_rows, zero_rows

__all__ = ["attention_forward_fp8"]

_SMALLEST_FP8_DOT = 32  # columns: on Hopper a product of 8-bit operands sums over 32 at a time
_POINTERS = ("q", "k", "v", "o", "lse", "q_scale", "k_scale", "v_scale")
_RUNTIME = (
    "stride_qb", "stride_qh", "stride_qm", "stride_qd",
    "stride_kb", "stride_kh", "stride_kn", "stride_kd",
    "stride_vb", "stride_vh", "stride_vn", "stride_vd",
    "stride_ob", "stride_oh", "stride_om",
    "scale_qb", "scale_qh", "scale_qn", "rows_q", "scale_kb", "scale_kh", "scale_kn", "rows_k",
    "scale_vb", "scale_vh", "scale_vn", "rows_v",
    "heads_q", "group", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v",
    "band_lo", "band_hi", "seqlen_bucket",
)  # fmt: skip


@triton.jit
def load_scales(
    scale, batch, head, rows, seqlen, stride_batch, stride_head, stride_block, rows_a_block
):  # fmt: skip
    """The scale of each row."""
    start = head_start(scale, batch, head, stride_batch, stride_head, 1)
    blocks = (rows // rows_a_block).to(tl.int64)
    return tl.load(start + blocks * stride_block, mask=rows < seqlen, other=0.0)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_POINTERS)
def forward_fp8_kernel(
    q, k, v, o, lse, q_scale, k_scale, v_scale,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om,
    scale_qb, scale_qh, scale_qn, rows_q, scale_kb, scale_kh, scale_kn, rows_k,
    scale_vb, scale_vh, scale_vn, rows_v,
    heads_q, group, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_lo, band_hi, softmax_scale, softcap, seqlen_bucket,  # noqa: ARG001 (the autotuner's)
    BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, PADDED_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, TAIL_DV: tl.constexpr, PADDED_DV: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, SOFTCAP: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write o and lse of BLOCK_M queries.

    The tensors and numbers that need a word:
        q, k, v: (batch, heads, seqlen, head_dim) float8_e4m3fn with any strides.
        o: (batch, heads_q, seqlen_q, head_dim_v), bfloat16 or float16, head_dim_v contiguous.
        lse: (batch, heads_q, seqlen_q) float32, contiguous, natural logarithm.
        q_scale, k_scale, v_scale: float32, one number a block of rows.
        scale_qb, scale_qh, scale_qn, rows_q: q_scale's strides of batch, head and block, and the
            rows of a block; likewise of k and v. Numbers, not tuples: see arguments.py, `_strides`.
        The rest: As the forward kernel's.
    """
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    sequence = program // blocks  # of all batch * heads_q
    first_query = (blocks - 1 - program % blocks) * BLOCK_M  # causal: the longest rows first
    batch = sequence // heads_q
    head_q = sequence % heads_q
    head_kv = head_q // group
    q_head = head_start(q, batch, head_q, stride_qb, stride_qh, VECTOR)
    k_head = head_start(k, batch, head_kv, stride_kb, stride_kh, VECTOR)
    v_head = head_start(v, batch, head_kv, stride_vb, stride_vh, VECTOR)
    o_head = head_start(o, batch, head_q, stride_ob, stride_oh, 1)
    queries = first_query + tl.arange(0, BLOCK_M)
    q_tile, q_tail = load_rows(
        q_head, first_query, seqlen_q, head_dim, stride_qm, stride_qd,
        BLOCK_M, BLOCK_D, TAIL_D, True, PADDED_D, VECTOR,
    )  # fmt: skip
    q_factors = softmax_scale * load_scales(
        q_scale, batch, head_q, queries, seqlen_q, scale_qb, scale_qh, scale_qn, rows_q
    )
    key_begin, interior_end, key_end = key_range(
        first_query, seqlen_q, seqlen_k, band_lo, band_hi, HAS_LO, HAS_HI, BLOCK_M, BLOCK_N
    )

    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)  # noqa: E741
    acc, acc_tail = zero_rows(BLOCK_M, BLOCK_DV, TAIL_DV)
    for MASKED in tl.static_range(1 if HAS_LO else 0, 2):
        begin = interior_end if MASKED == 1 else key_begin
        end = key_end if MASKED == 1 else interior_end
        for first_key in tl.range(begin, end, BLOCK_N):
            keys = first_key + tl.arange(0, BLOCK_N)
            k_tile, k_tail = load_rows(
                k_head, first_key, seqlen_k, head_dim, stride_kn, stride_kd,
                BLOCK_N, BLOCK_D, TAIL_D, MASKED == 1, PADDED_D, VECTOR,
            )  # fmt: skip
            products = dot_rows(q_tile, q_tail, k_tile, k_tail, TAIL_D, "tf32")
            k_factors = load_scales(
                k_scale, batch, head_kv, keys, seqlen_k, scale_kb, scale_kh, scale_kn, rows_k
            )
            logits = products * q_factors[:, None] * k_factors[None, :]
            if SOFTCAP:
                logits = tanh(logits / softcap) * softcap
            if MASKED == 1:
                visible = is_visible(
                    queries[:, None], keys[None, :], seqlen_k, band_lo, band_hi, HAS_LO, HAS_HI
                )
                logits = tl.where(visible, logits, float("-inf"))
            m_new = tl.maximum(m, tl.max(logits, 1))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet
            p = tl.exp2((logits - shift[:, None]) * LOG2E)
            rescale = tl.exp2((m - shift) * LOG2E)
            l = l * rescale + tl.sum(p, 1)  # noqa: E741
            acc = acc * rescale[:, None]
            acc_tail = acc_tail * rescale[:, None]
            v_tile, v_tail = load_rows(
                v_head, first_key, seqlen_k, head_dim_v, stride_vn, stride_vd,
                BLOCK_N, BLOCK_DV, TAIL_DV, MASKED == 1, PADDED_DV, VECTOR,
            )  # fmt: skip
            v_factors = load_scales(
                v_scale, batch, head_kv, keys, seqlen_k, scale_vb, scale_vh, scale_vn, rows_v
            )
            acc, acc_tail = add_product(
                acc, acc_tail, (p * v_factors[None, :]).to(tl.bfloat16),
                v_tile.to(tl.bfloat16), v_tail.to(tl.bfloat16), TAIL_DV, "tf32",
            )  # fmt: skip
            m = m_new

    empty = l == 0.0  # a fully masked row (the largest p of any other is 1): o = 0, lse = -inf
    l = tl.where(empty, 1.0, l)  # noqa: E741
    store_rows(
        o_head, first_query, seqlen_q, head_dim_v, stride_om,
        acc / l[:, None], acc_tail / l[:, None], BLOCK_M, BLOCK_DV, TAIL_DV, 1,
    )  # fmt: skip
    row_lse = tl.where(empty, float("-inf"), m + tl.log(l))
    lse_head = lse + sequence.to(tl.int64) * seqlen_q
    tl.store(lse_head + queries, row_lse, mask=queries < seqlen_q)


_tuned = configs.autotuned(forward_fp8_kernel, configs.FORWARD)
_TAKEN = (
    "heads_q", "group", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "band_lo", "band_hi",
    "softmax_scale", "softcap", "seqlen_bucket", "BLOCK_DV", "TAIL_DV", "PADDED_DV",
    "HAS_LO", "HAS_HI", "SOFTCAP", "VECTOR",
)  # fmt: skip


def attention_forward_fp8(problem, q, k, v, *, q_scale, k_scale, v_scale):
    """Return o and lse.

    Args:
        problem: Shapes, mask, scale and softcap; its dtype, bfloat16 or float16, is that of o.
        q: (batch, heads_q, seqlen_q, head_dim) float8_e4m3fn, any strides.
        k: (batch, heads_kv, seqlen_k, head_dim), likewise.
        v: (batch, heads_kv, seqlen_k, head_dim_v), likewise.
        q_scale: What q was divided by, float32: (batch, heads_q, blocks), where each axis may be of
            size 1: one number for a tensor is (1, 1, 1), for each head (batch, heads_q, 1). A block
            is the least power of two of rows with which that many blocks reach seqlen_q.
        k_scale: Likewise of k, by heads_kv and seqlen_k.
        v_scale: Likewise of v.
    """
    o = torch.empty(problem.shape_o, dtype=getattr(torch, problem.dtype), device=q.device)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    if o.numel():
        known = arguments(problem, q, k, v)
        scales = (q_scale, k_scale, v_scale)
        if (
            hopper_forward.fits(problem, known, q, k, v)
            and problem.head_dim % _SMALLEST_FP8_DOT == 0
            and all(scale.shape[2] == 1 for scale in scales)
        ):
            v = v.to(torch.bfloat16)
            hopper_forward.forward(problem, known, q, k, v, o, lse, scales=scales)
            return Outputs(o, lse)
        taken = {name: known[name] for name in _TAKEN}
        block, tail, padded = split_columns(problem.head_dim, _SMALLEST_FP8_DOT)
        columns = {"BLOCK_D": block, "TAIL_D": tail, "PADDED_D": padded}
        kernel = _tuned(known, o.element_size())
        sequences = problem.batch * problem.heads_q
        kernel[lambda meta: (triton.cdiv(problem.seqlen_q, meta["BLOCK_M"]) * sequences,)](
            q, k, v, o, lse, q_scale, k_scale, v_scale,
            *q.stride(), *k.stride(), *v.stride(), *o.stride()[:3],
            *_scaling(q_scale, problem.seqlen_q), *_scaling(k_scale, problem.seqlen_k),
            *_scaling(v_scale, problem.seqlen_k), **taken, **columns,
        )  # fmt: skip
    return Outputs(o, lse)


def _scaling(scale, seqlen):
    """Strides of a scale, 0 along the axes that are shared, and the rows of a block."""
    strides = (0 if n == 1 else step for n, step in zip(scale.shape, scale.stride(), strict=True))
    rows = triton.next_power_of_2(max(1, triton.cdiv(seqlen, max(1, scale.shape[2]))))
    return *strides, rows
