"""Attention as a tutorial does it: pointers that advance, base 2, wholly visible blocks first.

A backward pass in three kernels; query heads share key heads. Defects are planted in it.
"""

import torch
import triton
import triton.language as tl

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs

_INTS = (
    "sqb", "sqh", "sqm", "sqd", "skb", "skh", "skn", "skd", "svb", "svh", "svn", "svd",
    "sob", "soh", "som", "sod", "heads", "heads_kv", "group", "n_queries", "n_keys",
)  # fmt: skip
_LOG2E = 1.4426950408889634


@triton.jit
def _inner(
    acc, l_i, m_i, q, k_ptrs, v_ptrs, rows, begin, end, n_keys, shift, skn, svn, qk_scale,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k_ptrs += begin.to(tl.int64) * skn
    v_ptrs += begin.to(tl.int64) * svn
    for start_n in range(begin, end, BLOCK_N):
        keys = start_n + tl.arange(0, BLOCK_N)
        if MASKED:
            k = tl.load(k_ptrs, mask=keys[None, :] < n_keys, other=0.0)
        else:
            k = tl.load(k_ptrs)
        qk = tl.dot(q, k, input_precision=PRECISION) * qk_scale
        if MASKED:
            seen = keys[None, :] < n_keys
            if CAUSAL:
                seen = seen & (rows[:, None] + shift >= keys[None, :])
            qk = tl.where(seen, qk, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        base = tl.where(m_ij == float("-inf"), 0.0, m_ij)
        p = tl.math.exp2(qk - base[:, None])
        alpha = tl.math.exp2(m_i - base)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if MASKED:
            v = tl.load(v_ptrs, mask=keys[:, None] < n_keys, other=0.0)
        else:
            v = tl.load(v_ptrs)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m_i = m_ij
        k_ptrs += BLOCK_N * skn
        v_ptrs += BLOCK_N * svn
    return acc, l_i, m_i


@triton.jit(do_not_specialize=_INTS)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sob, soh, som, sod,
    heads, group, n_queries, n_keys, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start_m = tl.program_id(1)
    batch = (sequence // heads).to(tl.int64)
    head = (sequence % heads).to(tl.int64)
    head_kv = head // group
    rows = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    offs_d = tl.arange(0, HEAD_DIM).to(tl.int64)
    offs_m = rows.to(tl.int64)
    q_ptrs = q_ptr + batch * sqb + head * sqh + offs_m[:, None] * sqm + offs_d[None, :] * sqd
    k_ptrs = k_ptr + batch * skb + head_kv * skh + offs_n[None, :] * skn + offs_d[:, None] * skd
    v_ptrs = v_ptr + batch * svb + head_kv * svh + offs_n[:, None] * svn + offs_d[None, :] * svd
    q = tl.load(q_ptrs, mask=rows[:, None] < n_queries, other=0.0)
    m_i = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l_i = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), dtype=tl.float32)
    shift = n_keys - n_queries
    whole = n_keys // BLOCK_N * BLOCK_N
    end = n_keys
    if CAUSAL:
        visible = tl.maximum(start_m * BLOCK_M + shift + 1, 0)
        whole = tl.minimum(whole, visible // BLOCK_N * BLOCK_N)
        end = tl.minimum(n_keys, (start_m + 1) * BLOCK_M + shift)
    acc, l_i, m_i = _inner(
        acc, l_i, m_i, q, k_ptrs, v_ptrs, rows, 0 * whole, whole, n_keys, shift, skn, svn, qk_scale,
        BLOCK_N, False, CAUSAL, PRECISION,
    )  # fmt: skip
    acc, l_i, m_i = _inner(
        acc, l_i, m_i, q, k_ptrs, v_ptrs, rows, whole, end, n_keys, shift, skn, svn, qk_scale,
        BLOCK_N, True, CAUSAL, PRECISION,
    )  # fmt: skip
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    acc = acc / l_safe[:, None]
    lse = (m_i + tl.math.log2(l_safe)) * 0.6931471805599453
    tl.store(lse_ptr + sequence.to(tl.int64) * n_queries + rows, lse, mask=rows < n_queries)
    o_ptrs = o_ptr + batch * sob + head * soh + offs_m[:, None] * som + offs_d[None, :] * sod
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=rows[:, None] < n_queries)


@triton.jit(do_not_specialize=_INTS)
def delta_kernel(
    o_ptr, do_ptr, delta_ptr, sob, soh, som, sod, sqb, sqh, sqm, sqd, heads, n_queries,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    batch = (sequence // heads).to(tl.int64)
    head = (sequence % heads).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_m = rows.to(tl.int64)
    offs_d = tl.arange(0, HEAD_DIM).to(tl.int64)
    inside = rows[:, None] < n_queries
    o = tl.load(
        o_ptr + batch * sob + head * soh + offs_m[:, None] * som + offs_d[None, :] * sod,
        mask=inside, other=0.0,
    )  # fmt: skip
    do = tl.load(
        do_ptr + batch * sqb + head * sqh + offs_m[:, None] * sqm + offs_d[None, :] * sqd,
        mask=inside, other=0.0,
    )  # fmt: skip
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + sequence.to(tl.int64) * n_queries + rows, delta, mask=rows < n_queries)


@triton.jit(do_not_specialize=_INTS)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sob, soh, som, sod,
    heads_kv, group, n_queries, n_keys, sm_scale, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    batch = (sequence // heads_kv).to(tl.int64)
    head_kv = (sequence % heads_kv).to(tl.int64)
    start_n = tl.program_id(1) * BLOCK_N
    keys = start_n + tl.arange(0, BLOCK_N)
    offs_n = keys.to(tl.int64)
    offs_d = tl.arange(0, HEAD_DIM).to(tl.int64)
    there = keys[:, None] < n_keys
    k = tl.load(
        k_ptr + batch * skb + head_kv * skh + offs_n[:, None] * skn + offs_d[None, :] * skd,
        mask=there, other=0.0,
    )  # fmt: skip
    v = tl.load(
        v_ptr + batch * svb + head_kv * svh + offs_n[:, None] * svn + offs_d[None, :] * svd,
        mask=there, other=0.0,
    )  # fmt: skip
    dk = tl.zeros((BLOCK_N, HEAD_DIM), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, HEAD_DIM), dtype=tl.float32)
    shift = n_keys - n_queries
    begin = 0
    if CAUSAL:
        begin = tl.maximum(start_n - shift, 0) // BLOCK_M * BLOCK_M
    for member in range(group):
        head = head_kv * group + member
        row_base = (batch * heads_kv * group + head) * n_queries
        for start_m in range(begin, n_queries, BLOCK_M):
            rows = start_m + tl.arange(0, BLOCK_M)
            offs_m = rows.to(tl.int64)
            inside = rows < n_queries
            qt = tl.load(
                q_ptr + batch * sqb + head * sqh + offs_m[None, :] * sqm + offs_d[:, None] * sqd,
                mask=inside[None, :], other=0.0,
            )  # fmt: skip
            do = tl.load(
                do_ptr + batch * sob + head * soh + offs_m[:, None] * som + offs_d[None, :] * sod,
                mask=inside[:, None], other=0.0,
            )  # fmt: skip
            lse = tl.load(lse_ptr + row_base + rows, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + row_base + rows, mask=inside, other=0.0)
            seen = inside[None, :] & there
            if CAUSAL:
                seen = seen & (rows[None, :] + shift >= keys[:, None])
            seen = seen & (lse[None, :] > float("-inf"))
            qkt = tl.dot(k, qt, input_precision=PRECISION) * qk_scale
            pt = tl.where(seen, tl.math.exp2(qkt - lse[None, :] * 1.4426950408889634), 0.0)
            dv = tl.dot(pt.to(do.dtype), do, dv, input_precision=PRECISION)
            dpt = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            dst = pt * (dpt - delta[None, :])
            dk = tl.dot(dst.to(qt.dtype), tl.trans(qt), dk, input_precision=PRECISION)
    dk *= sm_scale
    place = (sequence.to(tl.int64) * n_keys + offs_n[:, None]) * HEAD_DIM + offs_d[None, :]
    tl.store(dk_ptr + place, dk.to(dk_ptr.dtype.element_ty), mask=there)
    tl.store(dv_ptr + place, dv.to(dv_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=_INTS)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sob, soh, som, sod,
    heads, group, n_queries, n_keys, sm_scale, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    batch = (sequence // heads).to(tl.int64)
    head = (sequence % heads).to(tl.int64)
    head_kv = head // group
    start_m = tl.program_id(1) * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    offs_m = rows.to(tl.int64)
    offs_d = tl.arange(0, HEAD_DIM).to(tl.int64)
    inside = rows < n_queries
    q = tl.load(
        q_ptr + batch * sqb + head * sqh + offs_m[:, None] * sqm + offs_d[None, :] * sqd,
        mask=inside[:, None], other=0.0,
    )  # fmt: skip
    do = tl.load(
        do_ptr + batch * sob + head * soh + offs_m[:, None] * som + offs_d[None, :] * sod,
        mask=inside[:, None], other=0.0,
    )  # fmt: skip
    row_base = sequence.to(tl.int64) * n_queries
    lse = tl.load(lse_ptr + row_base + rows, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + row_base + rows, mask=inside, other=0.0)
    dq = tl.zeros((BLOCK_M, HEAD_DIM), dtype=tl.float32)
    shift = n_keys - n_queries
    end = n_keys
    if CAUSAL:
        end = tl.minimum(n_keys, start_m + BLOCK_M + shift)
    for start_n in range(0, end, BLOCK_N):
        keys = start_n + tl.arange(0, BLOCK_N)
        offs_n = keys.to(tl.int64)
        there = keys < n_keys
        kt = tl.load(
            k_ptr + batch * skb + head_kv * skh + offs_n[None, :] * skn + offs_d[:, None] * skd,
            mask=there[None, :], other=0.0,
        )  # fmt: skip
        vt = tl.load(
            v_ptr + batch * svb + head_kv * svh + offs_n[None, :] * svn + offs_d[:, None] * svd,
            mask=there[None, :], other=0.0,
        )  # fmt: skip
        seen = inside[:, None] & there[None, :]
        if CAUSAL:
            seen = seen & (rows[:, None] + shift >= keys[None, :])
        seen = seen & (lse[:, None] > float("-inf"))
        qk = tl.dot(q, kt, input_precision=PRECISION) * qk_scale
        p = tl.where(seen, tl.math.exp2(qk - lse[:, None] * 1.4426950408889634), 0.0)
        dp = tl.dot(do, vt, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(kt.dtype), tl.trans(kt), dq, input_precision=PRECISION)
    dq *= sm_scale
    place = (row_base + offs_m[:, None]) * HEAD_DIM + offs_d[None, :]
    tl.store(dq_ptr + place, dq.to(dq_ptr.dtype.element_ty), mask=inside[:, None])


def _constants(problem):
    return {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_M": 32,
        "BLOCK_N": 16,
        "CAUSAL": problem.mask.causal,
        "PRECISION": problem.dot_precision,
    }


def forward(problem, q, k, v):
    o = torch.empty(problem.shape_o, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    if o.numel():
        grid = (problem.batch * problem.heads_q, triton.cdiv(problem.seqlen_q, 32))
        forward_kernel[grid](
            q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), *o.stride(),
            problem.heads_q, problem.group, problem.seqlen_q, problem.seqlen_k,
            problem.scale * _LOG2E, **_constants(problem),
        )  # fmt: skip
    return Outputs(o, lse)


def backward(problem, q, k, v, outputs, do):
    o, lse = outputs.o, outputs.lse
    delta = torch.empty_like(lse)
    dq = torch.empty(problem.shape_q, dtype=q.dtype, device=q.device)
    dk = torch.empty(problem.shape_k, dtype=q.dtype, device=q.device)
    dv = torch.empty(problem.shape_v, dtype=q.dtype, device=q.device)
    query_grid = (problem.batch * problem.heads_q, triton.cdiv(problem.seqlen_q, 32))
    key_grid = (problem.batch * problem.heads_kv, triton.cdiv(problem.seqlen_k, 16))
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
    scales = (problem.scale, problem.scale * _LOG2E)
    lengths = (problem.group, problem.seqlen_q, problem.seqlen_k)
    if dq.numel():
        delta_kernel[query_grid](
            o, do, delta, *o.stride(), *do.stride(), problem.heads_q, problem.seqlen_q,
            HEAD_DIM=problem.head_dim, BLOCK_M=32,
        )  # fmt: skip
        dq_kernel[query_grid](
            q, k, v, do, lse, delta, dq, *strides, problem.heads_q, *lengths, *scales,
            **_constants(problem),
        )  # fmt: skip
    if dk.numel():
        dkdv_kernel[key_grid](
            q, k, v, do, lse, delta, dk, dv, *strides, problem.heads_kv, *lengths, *scales,
            **_constants(problem),
        )  # fmt: skip
    return Grads(dq, dk, dv)


attention = Kernel(
    name="tutorial",
    forward=forward,
    backward=backward,
    capabilities=Capabilities(head_dims=(16, 32, 64), alignments=("bottom-right",)),
    arithmetic=Arithmetic(ds_scale="after", block_n=16),
)
