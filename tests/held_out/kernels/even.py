"""Attention by heuristics EVEN_M, EVEN_N and EVEN_HEADDIM: bounds are checked only where needed.

With ALiBi and a softcap. The backward pass has a program for each block of keys, which adds to dq
in float32; query heads that share a key head have gradients of their own, summed afterwards.
Defects are planted in it.
"""

import torch
import triton
import triton.language as tl

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs

M, N = 32, 32
_INTS = (
    "sqb", "sqh", "sqm", "sqd", "skb", "skh", "skn", "skd", "svb", "svh", "svn", "svd",
    "sob", "soh", "som", "sod", "nheads", "group", "seqlen_q", "seqlen_k", "headdim",
)  # fmt: skip
_EVEN = triton.heuristics(
    {
        "EVEN_M": lambda args: args["seqlen_q"] % args["BLOCK_M"] == 0,
        "EVEN_N": lambda args: args["seqlen_k"] % args["BLOCK_N"] == 0,
        "EVEN_HEADDIM": lambda args: args["headdim"] == args["BLOCK_D"],
    }
)


@triton.jit
def _read(
    ptrs, rows, offs_d, seqlen, headdim, EVEN_ROWS: tl.constexpr, EVEN_HEADDIM: tl.constexpr
):  # fmt: skip
    if EVEN_ROWS & EVEN_HEADDIM:
        x = tl.load(ptrs)
    elif EVEN_HEADDIM:
        x = tl.load(ptrs, mask=rows[:, None] < seqlen, other=0.0)
    elif EVEN_ROWS:
        x = tl.load(ptrs, mask=offs_d[None, :] < headdim, other=0.0)
    else:
        x = tl.load(
            ptrs, mask=(rows[:, None] < seqlen) & (offs_d[None, :] < headdim), other=0.0
        )  # fmt: skip
    return x


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@_EVEN
@triton.jit(do_not_specialize=_INTS)
def forward_kernel(
    Q, K, V, Out, Lse, Slopes, softmax_scale, softcap,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sob, soh, som, sod,
    nheads, group, seqlen_q, seqlen_k, headdim,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_HEADDIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(1)
    off_hb = tl.program_id(0)
    off_b = (off_hb // nheads).to(tl.int64)
    off_h = (off_hb % nheads).to(tl.int64)
    off_g = off_h // group
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)
    wide_m = offs_m.to(tl.int64)
    q_ptrs = Q + off_b * sqb + off_h * sqh + wide_m[:, None] * sqm + offs_d[None, :] * sqd
    k_ptrs = (
        K + off_b * skb + off_g * skh + offs_n.to(tl.int64)[:, None] * skn + offs_d[None, :] * skd
    )
    v_ptrs = (
        V + off_b * svb + off_g * svh + offs_n.to(tl.int64)[:, None] * svn + offs_d[None, :] * svd
    )
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc_o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if ALIBI:
        slope = tl.load(Slopes + off_h)
    q = _read(q_ptrs, offs_m, offs_d, seqlen_q, headdim, EVEN_M, EVEN_HEADDIM)
    offset = seqlen_k - seqlen_q
    end_n = seqlen_k
    if CAUSAL:
        end_n = tl.minimum((start_m + 1) * BLOCK_M + offset, seqlen_k)
    for start_n in range(0, end_n, BLOCK_N):
        cols = start_n + offs_n
        wide_n = tl.full([], start_n, tl.int64)
        k = _read(k_ptrs + wide_n * skn, cols, offs_d, seqlen_k, headdim, EVEN_N, EVEN_HEADDIM)
        qk = tl.dot(q, tl.trans(k), input_precision=PREC) * softmax_scale
        if SOFTCAP:
            qk = softcap * _tanh(qk / softcap)
        if ALIBI:
            qk -= slope * tl.abs(offs_m[:, None] + offset - cols[None, :]).to(tl.float32)
        if not EVEN_N:
            qk += tl.where(cols[None, :] < seqlen_k, 0.0, float("-inf"))
        if CAUSAL:
            qk += tl.where(offs_m[:, None] + offset >= cols[None, :], 0.0, float("-inf"))
        m_ij = tl.maximum(tl.max(qk, 1), m_i)
        safe = tl.where(m_ij == float("-inf"), 0.0, m_ij)
        p = tl.exp(qk - safe[:, None])
        l_ij = tl.sum(p, 1)
        acc_o_scale = tl.exp(m_i - safe)
        acc_o = acc_o * acc_o_scale[:, None]
        v = _read(v_ptrs + wide_n * svn, cols, offs_d, seqlen_k, headdim, EVEN_N, EVEN_HEADDIM)
        acc_o += tl.dot(p.to(v.dtype), v, input_precision=PREC)
        m_i = m_ij
        l_i = l_i * acc_o_scale + l_ij
    lse_i = m_i + tl.log(tl.where(l_i == 0.0, 1.0, l_i))
    o_scale = tl.exp(m_i - tl.where(lse_i == float("-inf"), 0.0, lse_i))
    acc_o = acc_o * o_scale[:, None]
    tl.store(Lse + off_hb.to(tl.int64) * seqlen_q + offs_m, lse_i, mask=offs_m < seqlen_q)
    tl.store(
        Out + off_b * sob + off_h * soh + wide_m[:, None] * som + offs_d[None, :] * sod,
        acc_o.to(Out.dtype.element_ty),
        mask=(offs_m[:, None] < seqlen_q) & (offs_d[None, :] < headdim),
    )


@triton.jit(do_not_specialize=_INTS)
def dot_kernel(
    Out, DO, Delta, sob, soh, som, sod, sqb, sqh, sqm, sqd, nheads, seqlen_q, headdim,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    off_hb = tl.program_id(0)
    off_b = (off_hb // nheads).to(tl.int64)
    off_h = (off_hb % nheads).to(tl.int64)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    wide_m = offs_m.to(tl.int64)[:, None]
    inside = (offs_m[:, None] < seqlen_q) & (offs_d < headdim)
    o_ptrs = Out + off_b * sob + off_h * soh + wide_m * som + offs_d * sod
    do_ptrs = DO + off_b * sqb + off_h * sqh + wide_m * sqm + offs_d * sqd
    o = tl.load(o_ptrs, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        Delta + off_hb.to(tl.int64) * seqlen_q + offs_m, tl.sum(o * do, 1), mask=offs_m < seqlen_q
    )


@_EVEN
@triton.jit(do_not_specialize=_INTS)
def backward_kernel(
    Q, K, V, DO, DQ, DK, DV, Lse, Delta, Slopes, softmax_scale, softcap,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sob, soh, som, sod,
    nheads, group, seqlen_q, seqlen_k, headdim,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_HEADDIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    start_n = tl.program_id(1)
    off_hb = tl.program_id(0)
    off_b = (off_hb // nheads).to(tl.int64)
    off_h = (off_hb % nheads).to(tl.int64)
    off_g = off_h // group
    line = off_hb.to(tl.int64)
    offs_n = start_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)
    wide_n = offs_n.to(tl.int64)
    k_ptrs = K + off_b * skb + off_g * skh + wide_n[:, None] * skn + offs_d[None, :] * skd
    v_ptrs = V + off_b * svb + off_g * svh + wide_n[:, None] * svn + offs_d[None, :] * svd
    k = _read(k_ptrs, offs_n, offs_d, seqlen_k, headdim, EVEN_N, EVEN_HEADDIM)
    v = _read(v_ptrs, offs_n, offs_d, seqlen_k, headdim, EVEN_N, EVEN_HEADDIM)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if ALIBI:
        slope = tl.load(Slopes + off_h)
    offset = seqlen_k - seqlen_q
    begin_m = 0
    if CAUSAL:
        begin_m = tl.maximum(start_n * BLOCK_N - offset, 0) // BLOCK_M * BLOCK_M
    for start_m in range(begin_m, seqlen_q, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        wide_m = offs_m.to(tl.int64)
        q_ptrs = Q + off_b * sqb + off_h * sqh + wide_m[:, None] * sqm + offs_d[None, :] * sqd
        do_ptrs = DO + off_b * sob + off_h * soh + wide_m[:, None] * som + offs_d[None, :] * sod
        q = _read(q_ptrs, offs_m, offs_d, seqlen_q, headdim, EVEN_M, EVEN_HEADDIM)
        do = _read(do_ptrs, offs_m, offs_d, seqlen_q, headdim, EVEN_M, EVEN_HEADDIM)
        lse_i = tl.load(Lse + line * seqlen_q + offs_m, mask=offs_m < seqlen_q, other=float("inf"))
        lse_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i)
        delta = tl.load(Delta + line * seqlen_q + offs_m, mask=offs_m < seqlen_q, other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision=PREC) * softmax_scale
        if SOFTCAP:
            t = _tanh(qk / softcap)
            qk = softcap * t
        if ALIBI:
            qk -= slope * tl.abs(offs_m[:, None] + offset - offs_n[None, :]).to(tl.float32)
        if not EVEN_N:
            qk = tl.where(offs_n[None, :] < seqlen_k, qk, float("-inf"))
        if CAUSAL:
            qk = tl.where(offs_m[:, None] + offset >= offs_n[None, :], qk, float("-inf"))
        p = tl.exp(qk - lse_i[:, None])
        dv += tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PREC)
        dp = tl.dot(do, tl.trans(v), input_precision=PREC)
        ds = p * (dp - delta[:, None]) * softmax_scale
        if SOFTCAP:
            ds = ds * (1.0 - t * t)
        ds = ds.to(q.dtype)
        dk += tl.dot(tl.trans(ds), q, input_precision=PREC)
        dq = tl.dot(ds, k, input_precision=PREC)
        dq_ptrs = DQ + (line * seqlen_q + wide_m[:, None]) * headdim + offs_d[None, :]
        tl.atomic_add(
            dq_ptrs, dq, mask=(offs_m[:, None] < seqlen_q) & (offs_d[None, :] < headdim)
        )  # fmt: skip
    place = (line * seqlen_k + wide_n[:, None]) * headdim + offs_d[None, :]
    inside = (offs_n[:, None] < seqlen_k) & (offs_d[None, :] < headdim)
    tl.store(DK + place, dk, mask=inside)
    tl.store(DV + place, dv, mask=inside)


def _constants(problem):
    return {
        "ALIBI": problem.alibi,
        "SOFTCAP": problem.softcap > 0,
        "CAUSAL": problem.mask.causal,
        "BLOCK_D": max(16, triton.next_power_of_2(problem.head_dim)),
        "BLOCK_M": M,
        "BLOCK_N": N,
        "PREC": problem.dot_precision,
    }


def _numbers(problem):
    lengths = (problem.seqlen_q, problem.seqlen_k, problem.head_dim)
    return problem.heads_q, problem.group, *lengths


def forward(problem, q, k, v, *, alibi_slopes=None):
    o = torch.empty(problem.shape_o, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    if o.numel():
        grid = (problem.batch * problem.heads_q, triton.cdiv(problem.seqlen_q, M))
        forward_kernel[grid](
            q, k, v, o, lse, alibi_slopes, problem.scale, problem.softcap,
            *q.stride(), *k.stride(), *v.stride(), *o.stride(), *_numbers(problem),
            **_constants(problem),
        )  # fmt: skip
    return Outputs(o, lse)


def backward(problem, q, k, v, outputs, do, *, alibi_slopes=None):
    o, lse = outputs.o, outputs.lse
    shared = (problem.batch, problem.heads_kv, problem.group, problem.seqlen_k, problem.head_dim)
    dq = torch.zeros(problem.shape_q, dtype=torch.float32, device=q.device)
    dk, dv = (torch.zeros(shared, dtype=torch.float32, device=q.device) for _ in range(2))
    delta = torch.empty_like(lse)
    heads = problem.batch * problem.heads_q
    if dq.numel() and dk.numel():
        dot_kernel[(heads, triton.cdiv(problem.seqlen_q, M))](
            o, do, delta, *o.stride(), *do.stride(), problem.heads_q, problem.seqlen_q,
            problem.head_dim, BLOCK_M=M, BLOCK_D=max(16, triton.next_power_of_2(problem.head_dim)),
        )  # fmt: skip
        backward_kernel[(heads, triton.cdiv(problem.seqlen_k, N))](
            q, k, v, do, dq, dk, dv, lse, delta, alibi_slopes, problem.scale, problem.softcap,
            *q.stride(), *k.stride(), *v.stride(), *do.stride(), *_numbers(problem),
            **_constants(problem),
        )  # fmt: skip
    return Grads(dq.to(q.dtype), dk.sum(2).to(q.dtype), dv.sum(2).to(q.dtype))


attention = Kernel(
    name="even",
    forward=forward,
    backward=backward,
    capabilities=Capabilities(
        head_dims=range(1, 129),
        alignments=("bottom-right",),
        softcap=True,
        alibi=True,
    ),
    arithmetic=Arithmetic(dq_atomics=True, merged_by_lse=True, ds_scale="before"),
)
