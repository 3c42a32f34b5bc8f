"""Attention with bias, ALiBi, sinks, dropout and a softcap; one backward kernel with atomics.

A backward program holds a block of keys of one query head; dq, dbias and dsinks, and dk and dv of
shared heads, are added up in float32. Defects are planted in it.
"""

import torch
import triton
import triton.language as tl

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs

_INTS = (
    "sqb", "sqh", "sqm", "sqd", "skb", "skh", "skn", "skd", "svb", "svh", "svn", "svd",
    "sob", "soh", "som", "sod", "sbb", "sbh", "sbm", "sbn", "heads", "group", "n_q", "n_k",
    "head_dim", "head_dim_v", "seed_lo", "seed_hi", "threshold",
)  # fmt: skip


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _kept(sequence, rows, keys, seed_lo, seed_hi, threshold):
    start = _mix(sequence.to(tl.uint32) ^ seed_lo.to(tl.uint32))
    start = _mix(start ^ seed_hi.to(tl.uint32))
    row = _mix(start + rows.to(tl.uint32) * 0x9E3779B1)
    word = _mix(row[:, None] ^ (keys.to(tl.uint32) * 0x7FEB352D)[None, :])
    return (word >> 1).to(tl.int32) >= threshold


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _logits(
    scores, bias_ptrs, slope, rows, keys, shift, inside, scale, softcap,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Return the logits and the softcap's derivative."""
    x = scores * scale
    slant = tl.full(x.shape, 1.0, tl.float32)
    if SOFTCAP:
        t = _tanh(x / softcap)
        x = softcap * t
        slant = 1.0 - t * t
    if BIAS:
        x += tl.load(bias_ptrs, mask=inside, other=0.0).to(tl.float32)
    if ALIBI:
        x -= slope * tl.abs(rows[:, None] + shift - keys[None, :]).to(tl.float32)
    return x, slant


@triton.jit(do_not_specialize=_INTS)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, bias_ptr, slopes_ptr, sinks_ptr,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sob, soh, som, sod,
    sbb, sbh, sbm, sbn, heads, group, n_q, n_k, head_dim, head_dim_v,
    seed_lo, seed_hi, threshold, scale, softcap, keep_scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    first = tl.program_id(1) * M
    b = (sequence // heads).to(tl.int64)
    h = (sequence % heads).to(tl.int64)
    hk = h // group
    rows = first + tl.arange(0, M)
    wide_rows = rows.to(tl.int64)
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    q = tl.load(
        q_ptr + b * sqb + h * sqh + wide_rows[:, None] * sqm + d.to(tl.int64)[None, :] * sqd,
        mask=(rows[:, None] < n_q) & (d[None, :] < head_dim),
        other=0.0,
    )
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + h)
    shift = n_k - n_q
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741
    acc = tl.zeros([M, DV], tl.float32)
    end = n_k
    if CAUSAL:
        end = tl.minimum(n_k, first + M + shift)
    for start in range(0, end, N):
        keys = start + tl.arange(0, N)
        wide_keys = keys.to(tl.int64)
        k = tl.load(
            k_ptr + b * skb + hk * skh + wide_keys[None, :] * skn + d.to(tl.int64)[:, None] * skd,
            mask=(keys[None, :] < n_k) & (d[:, None] < head_dim),
            other=0.0,
        )
        inside = (rows[:, None] < n_q) & (keys[None, :] < n_k)
        seen = inside
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + shift)
        bias_ptrs = (
            bias_ptr + b * sbb + h * sbh + wide_rows[:, None] * sbm + wide_keys[None, :] * sbn
        )
        x, _ = _logits(
            tl.dot(q, k, input_precision=PRECISION), bias_ptrs, slope, rows, keys, shift, inside,
            scale, softcap, SOFTCAP, BIAS, ALIBI,
        )  # fmt: skip
        x = tl.where(seen, x, float("-inf"))
        top = tl.maximum(m, tl.max(x, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp(x - base[:, None])
        decay = tl.exp(m - base)
        l = l * decay + tl.sum(p, 1)  # noqa: E741
        if DROPOUT:
            p = tl.where(_kept(sequence, rows, keys, seed_lo, seed_hi, threshold), p, 0.0)
        v = tl.load(
            v_ptr + b * svb + hk * svh + wide_keys[:, None] * svn + dv.to(tl.int64)[None, :] * svd,
            mask=(keys[:, None] < n_k) & (dv[None, :] < head_dim_v),
            other=0.0,
        )
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        m = top
    if SINKS:
        sink = tl.load(sinks_ptr + h)
        top = tl.maximum(m, sink)
        base = tl.where(top == float("-inf"), 0.0, top)
        decay = tl.exp(m - base)
        l = l * decay + tl.exp(sink - base)  # noqa: E741
        acc = acc * decay[:, None]
        m = top
    some = tl.where(l == 0.0, 1.0, l)
    o = acc / some[:, None]
    if DROPOUT:
        o = o * keep_scale
    tl.store(
        o_ptr + b * sob + h * soh + wide_rows[:, None] * som + dv.to(tl.int64)[None, :] * sod,
        o.to(o_ptr.dtype.element_ty),
        mask=(rows[:, None] < n_q) & (dv[None, :] < head_dim_v),
    )
    tl.store(lse_ptr + sequence.to(tl.int64) * n_q + rows, m + tl.log(some), mask=rows < n_q)


@triton.jit(do_not_specialize=_INTS)
def delta_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, sinks_ptr, delta_ptr, dsinks_ptr,
    sob, soh, som, sod, sqb, sqh, sqm, sqd, heads, n_q, head_dim_v,
    M: tl.constexpr, DV: tl.constexpr, LSE_GRAD: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    b = (sequence // heads).to(tl.int64)
    h = (sequence % heads).to(tl.int64)
    rows = tl.program_id(1) * M + tl.arange(0, M)
    wide_rows = rows.to(tl.int64)
    dv = tl.arange(0, DV).to(tl.int64)
    inside = (rows[:, None] < n_q) & (dv[None, :] < head_dim_v)
    o = tl.load(
        o_ptr + b * sob + h * soh + wide_rows[:, None] * som + dv[None, :] * sod,
        mask=inside, other=0.0,
    )  # fmt: skip
    do = tl.load(
        do_ptr + b * sqb + h * sqh + wide_rows[:, None] * sqm + dv[None, :] * sqd,
        mask=inside, other=0.0,
    )  # fmt: skip
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    place = sequence.to(tl.int64) * n_q + rows
    if LSE_GRAD:
        delta -= tl.load(dlse_ptr + place, mask=rows < n_q, other=0.0)
    if SINKS:
        lse = tl.load(lse_ptr + place, mask=rows < n_q, other=float("inf"))
        seen = lse > float("-inf")
        weight = tl.exp(tl.load(sinks_ptr + h) - tl.where(seen, lse, float("inf")))
        tl.atomic_add(dsinks_ptr + h, -tl.sum(weight * delta, 0))
    tl.store(delta_ptr + place, delta, mask=rows < n_q)


@triton.jit(do_not_specialize=_INTS)
def backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, bias_ptr, slopes_ptr,
    dq_ptr, dk_ptr, dv_ptr, dbias_ptr,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sob, soh, som, sod,
    sbb, sbh, sbm, sbn, tbb, tbh, tbm, tbn, heads, group, n_q, n_k, head_dim, head_dim_v,
    seed_lo, seed_hi, threshold, scale, softcap, keep_scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start = tl.program_id(1) * N
    b = (sequence // heads).to(tl.int64)
    h = (sequence % heads).to(tl.int64)
    hk = h // group
    keys = start + tl.arange(0, N)
    wide_keys = keys.to(tl.int64)
    d = tl.arange(0, D).to(tl.int64)
    dv = tl.arange(0, DV).to(tl.int64)
    k_mask = (keys[:, None] < n_k) & (d[None, :] < head_dim)
    v_mask = (keys[:, None] < n_k) & (dv[None, :] < head_dim_v)
    k = tl.load(
        k_ptr + b * skb + hk * skh + wide_keys[:, None] * skn + d[None, :] * skd,
        mask=k_mask, other=0.0,
    )  # fmt: skip
    v = tl.load(
        v_ptr + b * svb + hk * svh + wide_keys[:, None] * svn + dv[None, :] * svd,
        mask=v_mask, other=0.0,
    )  # fmt: skip
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + h)
    shift = n_k - n_q
    grad_k = tl.zeros([N, D], tl.float32)
    grad_v = tl.zeros([N, DV], tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(start - shift, 0) // M * M
    for first in range(begin, n_q, M):
        rows = first + tl.arange(0, M)
        wide_rows = rows.to(tl.int64)
        q_mask = (rows[:, None] < n_q) & (d[None, :] < head_dim)
        q = tl.load(
            q_ptr + b * sqb + h * sqh + wide_rows[:, None] * sqm + d[None, :] * sqd,
            mask=q_mask, other=0.0,
        )  # fmt: skip
        do = tl.load(
            do_ptr + b * sob + h * soh + wide_rows[:, None] * som + dv[None, :] * sod,
            mask=(rows[:, None] < n_q) & (dv[None, :] < head_dim_v), other=0.0,
        )  # fmt: skip
        place = sequence.to(tl.int64) * n_q + rows
        lse = tl.load(lse_ptr + place, mask=rows < n_q, other=float("-inf"))
        delta = tl.load(delta_ptr + place, mask=rows < n_q, other=0.0)
        inside = (rows[:, None] < n_q) & (keys[None, :] < n_k)
        seen = inside & (lse > float("-inf"))[:, None]
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + shift)
        bias_ptrs = (
            bias_ptr + b * sbb + h * sbh + wide_rows[:, None] * sbm + wide_keys[None, :] * sbn
        )
        x, slant = _logits(
            tl.dot(q, tl.trans(k), input_precision=PRECISION), bias_ptrs, slope, rows, keys,
            shift, inside, scale, softcap, SOFTCAP, BIAS, ALIBI,
        )  # fmt: skip
        p = tl.where(seen, tl.exp(x - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        used = p
        if DROPOUT:
            kept = _kept(sequence, rows, keys, seed_lo, seed_hi, threshold)
            used = tl.where(kept, p, 0.0)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        grad_v = tl.dot(tl.trans(used).to(do.dtype), do, grad_v, input_precision=PRECISION)
        dx = p * (dp - delta[:, None])
        if BIAS:
            tl.atomic_add(
                dbias_ptr + b * tbb + h * tbh + wide_rows[:, None] * tbm + wide_keys[None, :] * tbn,
                dx, mask=inside,
            )  # fmt: skip
        ds = dx * slant
        ds = ds.to(q.dtype)
        grad_k = tl.dot(tl.trans(ds), q, grad_k, input_precision=PRECISION)
        grad_q = tl.dot(ds, k, input_precision=PRECISION) * scale
        tl.atomic_add(
            dq_ptr + (sequence.to(tl.int64) * n_q + wide_rows[:, None]) * head_dim + d[None, :],
            grad_q, mask=q_mask,
        )  # fmt: skip
    grad_k = grad_k * scale
    if DROPOUT:
        grad_v = grad_v * keep_scale
    row = (b * (heads // group) + hk) * n_k + wide_keys[:, None]
    tl.atomic_add(dk_ptr + row * head_dim + d[None, :], grad_k, mask=k_mask)
    tl.atomic_add(dv_ptr + row * head_dim_v + dv[None, :], grad_v, mask=v_mask)


def _seed(seed):
    """The halves of a seed, as signed 32 bits."""
    seed = int(seed or 0)
    halves = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    return tuple(half - (1 << 32) if half >= 1 << 31 else half for half in halves)


def _shared(problem, q, bias, alibi_slopes, dropout_seed):
    flags = {
        "M": 16, "N": 32,
        "D": max(16, triton.next_power_of_2(problem.head_dim)),
        "DV": max(16, triton.next_power_of_2(problem.head_dim_v)),
        "CAUSAL": problem.mask.causal, "SOFTCAP": problem.softcap > 0,
        "BIAS": bias is not None, "ALIBI": alibi_slopes is not None,
        "DROPOUT": problem.dropout > 0, "PRECISION": problem.dot_precision,
    }  # fmt: skip
    full = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    strides = (0, 0, 0, 0) if bias is None else bias.expand(full).stride()
    sizes = (
        problem.heads_q, problem.group, problem.seqlen_q, problem.seqlen_k,
        problem.head_dim, problem.head_dim_v, *_seed(dropout_seed),
        round(problem.dropout * (1 << 31)), problem.scale, problem.softcap,
        1.0 / (1.0 - problem.dropout),
    )  # fmt: skip
    return flags, strides, sizes, full


def forward(problem, q, k, v, *, bias=None, alibi_slopes=None, sinks=None, dropout_seed=None):
    o = torch.empty(problem.shape_o, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    flags, strides, sizes, _ = _shared(problem, q, bias, alibi_slopes, dropout_seed)
    if o.numel():
        forward_kernel[(problem.batch * problem.heads_q, triton.cdiv(problem.seqlen_q, 16))](
            q, k, v, o, lse, q if bias is None else bias, alibi_slopes, sinks,
            *q.stride(), *k.stride(), *v.stride(), *o.stride(), *strides, *sizes,
            SINKS=sinks is not None, **flags,
        )  # fmt: skip
    return Outputs(o, lse)


def backward(
    problem, q, k, v, outputs, do,
    *, bias=None, alibi_slopes=None, sinks=None, dropout_seed=None, dlse=None,
):  # fmt: skip
    def zeros(shape):
        return torch.zeros(shape, dtype=torch.float32, device=q.device)

    o, lse = outputs.o, outputs.lse
    delta = torch.empty_like(lse)
    dq, dk, dv = zeros(problem.shape_q), zeros(problem.shape_k), zeros(problem.shape_v)
    dsinks = zeros(problem.heads_q) if sinks is not None else None
    dbias = zeros(problem.shape_bias) if bias is not None else None
    flags, strides, sizes, full = _shared(problem, q, bias, alibi_slopes, dropout_seed)
    sequences = problem.batch * problem.heads_q
    if delta.numel():
        delta_kernel[(sequences, triton.cdiv(problem.seqlen_q, 16))](
            o, do, lse, dlse, sinks, delta, dsinks, *o.stride(), *do.stride(),
            problem.heads_q, problem.seqlen_q, problem.head_dim_v,
            M=16, DV=flags["DV"], LSE_GRAD=dlse is not None, SINKS=sinks is not None,
        )  # fmt: skip
    if delta.numel() and problem.seqlen_k:
        targets = (0, 0, 0, 0) if dbias is None else dbias.expand(full).stride()
        backward_kernel[(sequences, triton.cdiv(problem.seqlen_k, 32))](
            q, k, v, do, lse, delta, q if bias is None else bias, alibi_slopes,
            dq, dk, dv, dq if dbias is None else dbias,
            *q.stride(), *k.stride(), *v.stride(), *do.stride(), *strides, *targets, *sizes,
            **flags,
        )  # fmt: skip
    return Grads(
        dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype),
        dbias=None if bias is None else dbias.to(bias.dtype), dsinks=dsinks,
    )  # fmt: skip


def keep(problem, seed, device):
    def mix(x):
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        return x ^ (x >> 16)

    low, high = (half & 0xFFFFFFFF for half in _seed(seed))
    sequences = torch.arange(problem.batch * problem.heads_q, device=device)
    rows = torch.arange(problem.seqlen_q, device=device)
    keys = torch.arange(problem.seqlen_k, device=device)
    start = mix(mix(sequences ^ low) ^ high)[:, None, None]
    row = mix((start + rows[:, None] * 0x9E3779B1) & 0xFFFFFFFF)
    word = mix(row ^ ((keys * 0x7FEB352D) & 0xFFFFFFFF))
    kept = word >> 1 >= round(problem.dropout * (1 << 31))
    return kept.view(problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)


attention = Kernel(
    name="terms",
    forward=forward,
    backward=backward,
    dropout_keep=keep,
    capabilities=Capabilities(
        head_dims=range(1, 129),
        head_dims_v=range(1, 129),
        alignments=("bottom-right",),
        softcap=True,
        bias=("h", "k", "bk", "hq", "qk", "hqk", "bhqk"),
        alibi=True,
        sinks=True,
        dropout=True,
        lse_grad=True,
    ),
    arithmetic=Arithmetic(ds_scale="after", dq_atomics=True, block_n=32),
)
