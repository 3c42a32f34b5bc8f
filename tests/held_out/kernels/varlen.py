"""Packed sequences by cu_seqlens: a program for each block of each sequence's queries and head.

With windows, a softcap and shared key heads; forward only. Defects are planted in it.
"""

import torch
import triton
import triton.language as tl

from fa_verify import Arithmetic, Capabilities, Kernel, Outputs, cu_seqlens

_INTS = (
    "stride_qt", "stride_qh", "stride_qd", "stride_kt", "stride_kh", "stride_kd",
    "stride_vt", "stride_vh", "stride_vd", "stride_ot", "stride_oh", "total_q",
    "group", "head_dim", "head_dim_v", "left", "right",
)  # fmt: skip


@triton.jit(do_not_specialize=_INTS)
def varlen_kernel(
    Q, K, V, Out, Lse, cu_q, cu_k,
    stride_qt, stride_qh, stride_qd, stride_kt, stride_kh, stride_kd,
    stride_vt, stride_vh, stride_vd, stride_ot, stride_oh,
    total_q, group, head_dim, head_dim_v, left, right, scale, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    document = tl.program_id(2)
    q_begin = tl.load(cu_q + document)
    q_len = tl.load(cu_q + document + 1) - q_begin
    k_begin = tl.load(cu_k + document)
    k_len = tl.load(cu_k + document + 1) - k_begin
    if block * BLOCK_M >= q_len:
        return
    head_kv = head // group
    diagonal = 0
    if BOTTOM_RIGHT:
        diagonal = k_len - q_len
    local_q = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token_q = (q_begin + local_q).to(tl.int64)
    dims = tl.arange(0, D_PAD).to(tl.int64)
    dims_v = tl.arange(0, DV_PAD).to(tl.int64)
    q = tl.load(
        Q + token_q[:, None] * stride_qt + head * stride_qh + dims[None, :] * stride_qd,
        mask=(local_q[:, None] < q_len) & (dims[None, :] < head_dim),
        other=0.0,
    )
    low = 0
    high = k_len
    if HAS_LEFT:
        low = tl.maximum(block * BLOCK_M + diagonal - left, 0) // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        high = tl.minimum(high, tl.minimum(block * BLOCK_M + BLOCK_M, q_len) + diagonal + right)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    for start in range(low, high, BLOCK_N):
        local_k = start + tl.arange(0, BLOCK_N)
        token_k = (k_begin + local_k).to(tl.int64)
        k = tl.load(
            K + token_k[None, :] * stride_kt + head_kv * stride_kh + dims[:, None] * stride_kd,
            mask=(local_k[None, :] < k_len) & (dims[:, None] < head_dim),
            other=0.0,
        )
        v = tl.load(
            V + token_k[:, None] * stride_vt + head_kv * stride_vh + dims_v[None, :] * stride_vd,
            mask=(local_k[:, None] < k_len) & (dims_v[None, :] < head_dim_v),
            other=0.0,
        )
        logits = tl.dot(q, k, input_precision=PRECISION) * scale
        if SOFTCAP:
            x = logits / softcap
            e = tl.exp(-2.0 * tl.abs(x))
            t = (1.0 - e) / (1.0 + e)
            logits = softcap * tl.where(x < 0, -t, t)
        keep = local_k[None, :] < k_len
        if HAS_LEFT:
            keep = keep & (local_k[None, :] >= local_q[:, None] + diagonal - left)
        if HAS_RIGHT:
            keep = keep & (local_k[None, :] <= local_q[:, None] + diagonal + right)
        logits = tl.where(keep, logits, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logits, 1))
        safe = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(logits - safe[:, None])
        correction = tl.exp(running_max - safe)
        running_sum = running_sum * correction + tl.sum(weights, 1)
        out = out * correction[:, None]
        out = tl.dot(weights.to(v.dtype), v, out, input_precision=PRECISION)
        running_max = new_max
    total = tl.where(running_sum > 0, running_sum, 1.0)
    out = out / total[:, None]
    tl.store(
        Out + token_q[:, None] * stride_ot + head * stride_oh + dims_v[None, :],
        out.to(Out.dtype.element_ty),
        mask=(local_q[:, None] < q_len) & (dims_v[None, :] < head_dim_v),
    )
    tl.store(Lse + head * total_q + token_q, running_max + tl.log(total), mask=local_q < q_len)


def forward(problem, q, k, v):
    starts_q, starts_k, max_q, _ = cu_seqlens(problem, q.device)
    tokens = problem.batch * problem.seqlen_q
    if problem.batch > 1:  # sequences of one length are documents too
        counts = torch.arange(problem.batch + 1, dtype=torch.int32, device=q.device)
        starts_q, starts_k = counts * problem.seqlen_q, counts * problem.seqlen_k
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    o = torch.empty((tokens, problem.heads_q, problem.head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((problem.heads_q, tokens), dtype=torch.float32, device=q.device)
    mask = problem.mask
    if o.numel():
        grid = (triton.cdiv(max_q, 16), problem.heads_q, len(starts_q) - 1)
        varlen_kernel[grid](
            q, k, v, o, lse, starts_q, starts_k,
            *q.stride(), *k.stride(), *v.stride(), *o.stride()[:2],
            tokens, problem.group, problem.head_dim, problem.head_dim_v,
            mask.window_left or 0, mask.window_right or 0, problem.scale, problem.softcap,
            BLOCK_M=16, BLOCK_N=32,
            D_PAD=max(16, triton.next_power_of_2(problem.head_dim)),
            DV_PAD=max(16, triton.next_power_of_2(problem.head_dim_v)),
            HAS_LEFT=mask.window_left is not None,
            HAS_RIGHT=mask.causal or mask.window_right is not None,
            SOFTCAP=problem.softcap > 0, BOTTOM_RIGHT=mask.alignment == "bottom-right",
            PRECISION=problem.dot_precision,
        )  # fmt: skip
    return Outputs(
        o.unflatten(0, (problem.batch, problem.seqlen_q)).transpose(1, 2),
        lse.unflatten(1, (problem.batch, problem.seqlen_q)).transpose(0, 1).contiguous(),
    )


attention = Kernel(
    name="varlen",
    forward=forward,
    capabilities=Capabilities(
        head_dims=range(1, 129),
        head_dims_v=range(1, 129),
        window=True,
        softcap=True,
        documents=True,
        backward=False,
    ),
    arithmetic=Arithmetic(block_n=32),
)
