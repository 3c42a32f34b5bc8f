"""Attention whose backward pass is one kernel by the number of its program: dk and dv, then dq.

Base 2, with scale and log2(e) folded into k before; the rows on the diagonal go in a loop of their
own, and what lies wholly below it in one without mask. Defects are planted in it.
"""

import torch
import triton
import triton.language as tl

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs

BLOCK = 32
_RCP_LN2 = 1.4426950408889634
_INTS = (
    "sqz", "sqh", "sqt", "sqd", "skz", "skh", "skt", "skd", "svz", "svh", "svt", "svd",
    "soz", "soh", "sot", "sod", "H", "n_q", "n_k",
)  # fmt: skip


@triton.jit(do_not_specialize=_INTS)
def forward_kernel(
    Q, K, V, M, Out, sqz, sqh, sqt, sqd, skz, skh, skt, skd, svz, svh, svt, svd, soz, soh, sot, sod,
    H, n_q, n_k, BLOCK: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    off_hz = tl.program_id(0)
    z = (off_hz // H).to(tl.int64)
    h = (off_hz % H).to(tl.int64)
    offs_m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, D).to(tl.int64)
    wide_m = offs_m.to(tl.int64)
    q = tl.load(
        Q + z * sqz + h * sqh + wide_m[:, None] * sqt + offs_d[None, :] * sqd,
        mask=offs_m[:, None] < n_q, other=0.0,
    )  # fmt: skip
    m_i = tl.full([BLOCK], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    hi = n_k
    if CAUSAL:
        hi = tl.minimum(n_k, (tl.program_id(1) + 1) * BLOCK + n_k - n_q)
    for start_n in range(0, hi, BLOCK):
        offs_n = start_n + tl.arange(0, BLOCK)
        wide_n = offs_n.to(tl.int64)
        kT = tl.load(
            K + z * skz + h * skh + wide_n[None, :] * skt + offs_d[:, None] * skd,
            mask=offs_n[None, :] < n_k, other=0.0,
        )  # fmt: skip
        qk = tl.dot(q, kT, input_precision=PREC)
        mask = offs_n[None, :] < n_k
        if CAUSAL:
            mask = mask & (offs_m[:, None] + n_k - n_q >= offs_n[None, :])
        qk = tl.where(mask, qk, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        ref = tl.where(m_ij == float("-inf"), 0.0, m_ij)
        p = tl.math.exp2(qk - ref[:, None])
        alpha = tl.math.exp2(m_i - ref)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(
            V + z * svz + h * svh + wide_n[:, None] * svt + offs_d[None, :] * svd,
            mask=offs_n[:, None] < n_k, other=0.0,
        )  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PREC)
        m_i = m_ij
    l_i = tl.where(l_i == 0.0, 1.0, l_i)
    tl.store(
        Out + z * soz + h * soh + wide_m[:, None] * sot + offs_d[None, :] * sod,
        (acc / l_i[:, None]).to(Out.dtype.element_ty), mask=offs_m[:, None] < n_q,
    )  # fmt: skip
    tl.store(M + off_hz.to(tl.int64) * n_q + offs_m, m_i + tl.math.log2(l_i), mask=offs_m < n_q)


@triton.jit(do_not_specialize=_INTS)
def preprocess_kernel(
    Out, DO, Delta, soz, soh, sot, sod, sqz, sqh, sqt, sqd, H, n_q,
    BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    off_hz = tl.program_id(0)
    z = (off_hz // H).to(tl.int64)
    h = (off_hz % H).to(tl.int64)
    offs_m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide_m = offs_m.to(tl.int64)[:, None]
    offs_d = tl.arange(0, D).to(tl.int64)[None, :]
    here = offs_m[:, None] < n_q
    o = tl.load(Out + z * soz + h * soh + wide_m * sot + offs_d * sod, mask=here, other=0.0)
    do = tl.load(DO + z * sqz + h * sqh + wide_m * sqt + offs_d * sqd, mask=here, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    tl.store(Delta + off_hz.to(tl.int64) * n_q + offs_m, delta, mask=offs_m < n_q)


@triton.jit
def _dkdv(
    dk, dv, Q, k, v, DO, M, Delta, sqt, sqd, sot, sod, n_q, n_k, start_n, start_m, end_m,
    BLOCK: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    offs_n = start_n + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, D).to(tl.int64)
    for curr_m in range(start_m, end_m, BLOCK):
        offs_m = curr_m + tl.arange(0, BLOCK)
        wide_m = offs_m.to(tl.int64)
        qT = tl.load(
            Q + wide_m[None, :] * sqt + offs_d[:, None] * sqd,
            mask=offs_m[None, :] < n_q, other=0.0,
        )  # fmt: skip
        m = tl.load(M + offs_m, mask=offs_m < n_q, other=float("inf"))
        m = tl.where(m == float("-inf"), float("inf"), m)
        qkT = tl.dot(k, qT, input_precision=PREC)
        pT = tl.math.exp2(qkT - m[None, :])
        if MASK:
            pT = tl.where(offs_m[None, :] + n_k - n_q >= offs_n[:, None], pT, 0.0)
        do = tl.load(
            DO + wide_m[:, None] * sot + offs_d[None, :] * sod,
            mask=offs_m[:, None] < n_q, other=0.0,
        )  # fmt: skip
        dv += tl.dot(pT.to(do.dtype), do, input_precision=PREC)
        Di = tl.load(Delta + offs_m, mask=offs_m < n_q, other=0.0)
        dpT = tl.dot(v, tl.trans(do), input_precision=PREC)
        dsT = pT * (dpT - Di[None, :])
        dk += tl.dot(dsT.to(qT.dtype), tl.trans(qT), input_precision=PREC)
    return dk, dv


@triton.jit
def _dq(
    dq, q, K, V, do, m, Di, skt, skd, svt, svd, n_q, n_k, start_m, start_n, end_n,
    BLOCK: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    offs_m = start_m + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, D).to(tl.int64)
    for curr_n in range(start_n, end_n, BLOCK):
        offs_n = curr_n + tl.arange(0, BLOCK)
        wide_n = offs_n.to(tl.int64)
        there = offs_n[None, :] < n_k
        kT = tl.load(K + wide_n[None, :] * skt + offs_d[:, None] * skd, mask=there, other=0.0)
        vT = tl.load(V + wide_n[None, :] * svt + offs_d[:, None] * svd, mask=there, other=0.0)
        qk = tl.dot(q, kT, input_precision=PREC)
        p = tl.math.exp2(qk - m)
        p = tl.where(there, p, 0.0)
        if MASK:
            p = tl.where(offs_m[:, None] + n_k - n_q >= offs_n[None, :], p, 0.0)
        dp = tl.dot(do, vT, input_precision=PREC)
        ds = (p * (dp - Di)).to(kT.dtype)
        dq += tl.dot(ds, tl.trans(kT), input_precision=PREC)
    return dq


@triton.jit(do_not_specialize=_INTS)
def backward_kernel(
    Q, K, V, DO, DQ, DK, DV, M, Delta, sm_scale,
    sqz, sqh, sqt, sqd, skz, skh, skt, skd, svz, svh, svt, svd, soz, soh, sot, sod, H, n_q, n_k,
    BLOCK: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    LN2: tl.constexpr = 0.6931471824645996
    off_hz = tl.program_id(0)
    z = (off_hz // H).to(tl.int64)
    h = (off_hz % H).to(tl.int64)
    off_chz = off_hz.to(tl.int64) * n_q
    Q += z * sqz + h * sqh
    K += z * skz + h * skh
    V += z * svz + h * svh
    DO += z * soz + h * soh
    M += off_chz
    Delta += off_chz
    DQ += off_chz * D
    DK += off_hz.to(tl.int64) * n_k * D
    DV += off_hz.to(tl.int64) * n_k * D
    offs_d = tl.arange(0, D).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    offs = start + tl.arange(0, BLOCK)
    wide = offs.to(tl.int64)

    if start < n_k:
        there = offs[:, None] < n_k
        k = tl.load(K + wide[:, None] * skt + offs_d[None, :] * skd, mask=there, other=0.0)
        v = tl.load(V + wide[:, None] * svt + offs_d[None, :] * svd, mask=there, other=0.0)
        dk = tl.zeros([BLOCK, D], tl.float32)
        dv = tl.zeros([BLOCK, D], tl.float32)
        below = 0
        if CAUSAL:
            first = tl.maximum(start - (n_k - n_q), 0)
            dk, dv = _dkdv(
                dk, dv, Q, k, v, DO, M, Delta, sqt, sqd, sot, sod, n_q, n_k, start, first,
                tl.minimum(first + 2 * BLOCK, n_q), BLOCK, D, True, PREC,
            )  # fmt: skip
            below = first + 2 * BLOCK
        dk, dv = _dkdv(
            dk, dv, Q, k, v, DO, M, Delta, sqt, sqd, sot, sod, n_q, n_k, start, below, n_q,
            BLOCK, D, False, PREC,
        )  # fmt: skip
        dk *= sm_scale
        place = wide[:, None] * D + offs_d[None, :]
        tl.store(DK + place, dk.to(DK.dtype.element_ty), mask=there)
        tl.store(DV + place, dv.to(DV.dtype.element_ty), mask=there)

    if start < n_q:
        here = offs[:, None] < n_q
        q = tl.load(Q + wide[:, None] * sqt + offs_d[None, :] * sqd, mask=here, other=0.0)
        do = tl.load(DO + wide[:, None] * sot + offs_d[None, :] * sod, mask=here, other=0.0)
        m = tl.load(M + offs, mask=offs < n_q, other=float("inf"))[:, None]
        m = tl.where(m == float("-inf"), float("inf"), m)
        Di = tl.load(Delta + offs, mask=offs < n_q, other=0.0)[:, None]
        dq = tl.zeros([BLOCK, D], tl.float32)
        whole = n_k
        if CAUSAL:
            whole = tl.minimum(n_k, tl.maximum(start + n_k - n_q + 1, 0)) // BLOCK * BLOCK
            last = tl.minimum(n_k, start + BLOCK + n_k - n_q)
            dq = _dq(
                dq, q, K, V, do, m, Di, skt, skd, svt, svd, n_q, n_k, start, whole, last,
                BLOCK, D, True, PREC,
            )  # fmt: skip
        dq = _dq(
            dq, q, K, V, do, m, Di, skt, skd, svt, svd, n_q, n_k, start, 0 * whole, whole,
            BLOCK, D, False, PREC,
        )  # fmt: skip
        dq *= LN2
        tl.store(
            DQ + wide[:, None] * D + offs_d[None, :], dq.to(DQ.dtype.element_ty), mask=here
        )  # fmt: skip


def _constants(problem):
    return {
        "BLOCK": BLOCK,
        "D": problem.head_dim,
        "CAUSAL": problem.mask.causal,
        "PREC": problem.dot_precision,
    }


def forward(problem, q, k, v):
    o = torch.empty(problem.shape_o, dtype=q.dtype, device=q.device)
    m = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    arg_k = k * (problem.scale * _RCP_LN2)
    if o.numel():
        grid = (problem.batch * problem.heads_q, triton.cdiv(problem.seqlen_q, BLOCK))
        forward_kernel[grid](
            q, arg_k, v, m, o, *q.stride(), *arg_k.stride(), *v.stride(), *o.stride(),
            problem.heads_q, problem.seqlen_q, problem.seqlen_k, **_constants(problem),
        )  # fmt: skip
    return Outputs(o, m * 0.6931471805599453, (m, arg_k))


def backward(problem, q, k, v, outputs, do):
    m, arg_k = outputs.saved
    dq, dk, dv = (
        torch.empty(shape, dtype=q.dtype, device=q.device)
        for shape in (problem.shape_q, problem.shape_k, problem.shape_v)
    )
    delta = torch.empty_like(m)
    heads = problem.batch * problem.heads_q
    if delta.numel():
        preprocess_kernel[(heads, triton.cdiv(problem.seqlen_q, BLOCK))](
            outputs.o, do, delta, *outputs.o.stride(), *do.stride(), problem.heads_q,
            problem.seqlen_q, BLOCK=BLOCK, D=problem.head_dim,
        )  # fmt: skip
    blocks = triton.cdiv(max(problem.seqlen_q, problem.seqlen_k), BLOCK)
    if blocks:
        backward_kernel[(heads, blocks)](
            q, arg_k, v, do, dq, dk, dv, m, delta, problem.scale,
            *q.stride(), *arg_k.stride(), *v.stride(), *do.stride(),
            problem.heads_q, problem.seqlen_q, problem.seqlen_k, **_constants(problem),
        )  # fmt: skip
    return Grads(dq, dk, dv)


attention = Kernel(
    name="single",
    forward=forward,
    backward=backward,
    capabilities=Capabilities(
        head_dims=(16, 32, 64),
        alignments=("bottom-right",),
        gqa=False,
    ),
    arithmetic=Arithmetic(prescaled="k", ds_scale="after"),
)
