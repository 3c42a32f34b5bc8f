"""Attention of packed sequences whose q, k and v lie in one tensor, in two passes over the keys.

The first pass finds the maximum and sum of each row, the second multiplies; scores are transposed.
The backward pass writes one tensor of gradients likewise. Defects are planted in it.
"""

import torch
import triton
import triton.language as tl

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs, cu_seqlens

_INTS = ("heads", "heads_kv", "width", "tokens_q", "tokens", "group")


@triton.jit
def _tile(ptr, token, slot, slots, column, there, width):
    """Rows of one slot (a head of q, k or v) of the stack."""
    at = (token.to(tl.int64) * slots + slot)[:, None] * width + column[None, :]
    return tl.load(ptr + at, mask=there[:, None] & (column[None, :] < width), other=0.0)


@triton.jit
def _scores(
    q, k, query, key, n_q, n_k, scale,
    CAUSAL: tl.constexpr, BOTTOM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores by key and row; -inf where a row does not see a key."""
    st = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
    sees = (key[:, None] < n_k) & (query[None, :] < n_q)
    if CAUSAL:
        limit = query + n_k - n_q if BOTTOM else query
        sees = sees & (key[:, None] <= limit[None, :])
    return tl.where(sees, st, float("-inf"))


@triton.jit(do_not_specialize=_INTS)
def forward_kernel(
    q_ptr, kv_ptr, o_ptr, lse_ptr, starts_q, starts_k,
    heads, heads_kv, group, width, tokens_q, scale,
    R: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    CAUSAL: tl.constexpr, BOTTOM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2)
    document = tl.program_id(0)
    from_q = tl.load(starts_q + document)
    n_q = tl.load(starts_q + document + 1) - from_q
    from_k = tl.load(starts_k + document)
    n_k = tl.load(starts_k + document + 1) - from_k
    if tl.program_id(1) * R >= n_q:
        return
    query = tl.program_id(1) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    mine = head // group
    q = _tile(q_ptr, from_q + query, head, heads, column, query < n_q, width)
    stop = n_k
    if CAUSAL:
        top = tl.program_id(1) * R + R
        stop = tl.minimum(n_k, top + n_k - n_q if BOTTOM else top)
    high = tl.full([R], float("-inf"), tl.float32)
    mass = tl.zeros([R], tl.float32)
    for first in range(0, stop, C):
        key = first + tl.arange(0, C)
        k = _tile(kv_ptr, from_k + key, mine, 2 * heads_kv, column, key < n_k, width)
        st = _scores(q, k, query, key, n_q, n_k, scale, CAUSAL, BOTTOM, PRECISION)
        higher = tl.maximum(high, tl.max(st, 0))
        zero = tl.where(higher > float("-inf"), higher, 0.0)
        mass = mass * tl.exp(high - zero) + tl.sum(tl.exp(st - zero[None, :]), 0)
        high = higher
    mass = tl.where(mass > 0.0, mass, 1.0)
    lse = high + tl.log(mass)
    level = tl.where(high > float("-inf"), high, 0.0)
    out = tl.zeros([R, W], tl.float32)
    for first in range(0, stop, C):
        key = first + tl.arange(0, C)
        k = _tile(kv_ptr, from_k + key, mine, 2 * heads_kv, column, key < n_k, width)
        v = _tile(kv_ptr, from_k + key, heads_kv + mine, 2 * heads_kv, column, key < n_k, width)
        st = _scores(q, k, query, key, n_q, n_k, scale, CAUSAL, BOTTOM, PRECISION)
        pt = tl.exp(st - level[None, :])
        out = tl.dot(tl.trans(pt).to(v.dtype), v, out, input_precision=PRECISION)
    out = out / mass[:, None]
    token = (from_q + query).to(tl.int64)
    tl.store(
        o_ptr + (token * heads + head)[:, None] * width + column[None, :],
        out.to(o_ptr.dtype.element_ty),
        mask=(query[:, None] < n_q) & (column[None, :] < width),
    )
    tl.store(lse_ptr + head * tokens_q + token, lse, mask=query < n_q)


@triton.jit(do_not_specialize=_INTS)
def rows_kernel(
    q_ptr, kv_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, starts_q, starts_k,
    heads, heads_kv, group, width, tokens_q, scale,
    R: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    CAUSAL: tl.constexpr, BOTTOM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Delta, and the gradient of q."""
    head = tl.program_id(2)
    document = tl.program_id(0)
    from_q = tl.load(starts_q + document)
    n_q = tl.load(starts_q + document + 1) - from_q
    from_k = tl.load(starts_k + document)
    n_k = tl.load(starts_k + document + 1) - from_k
    if tl.program_id(1) * R >= n_q:
        return
    query = tl.program_id(1) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    mine = head // group
    real = query < n_q
    q = _tile(q_ptr, from_q + query, head, heads, column, real, width)
    o = _tile(o_ptr, from_q + query, head, heads, column, real, width)
    do = _tile(do_ptr, from_q + query, head, heads, column, real, width)
    place = head * tokens_q + from_q + query
    lse = tl.load(lse_ptr + place, mask=real, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + place, delta, mask=real)
    level = tl.where(lse > float("-inf"), lse, 0.0)
    stop = n_k
    if CAUSAL:
        top = tl.program_id(1) * R + R
        stop = tl.minimum(n_k, top + n_k - n_q if BOTTOM else top)
    dq = tl.zeros([R, W], tl.float32)
    for first in range(0, stop, C):
        key = first + tl.arange(0, C)
        k = _tile(kv_ptr, from_k + key, mine, 2 * heads_kv, column, key < n_k, width)
        v = _tile(kv_ptr, from_k + key, heads_kv + mine, 2 * heads_kv, column, key < n_k, width)
        st = _scores(q, k, query, key, n_q, n_k, scale, CAUSAL, BOTTOM, PRECISION)
        pt = tl.exp(st - level[None, :])
        dpt = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        dst = pt * (dpt - delta[None, :]) * scale
        dq = tl.dot(tl.trans(dst).to(k.dtype), k, dq, input_precision=PRECISION)
    token = (from_q + query).to(tl.int64)
    tl.store(
        dq_ptr + (token * heads + head)[:, None] * width + column[None, :],
        dq.to(dq_ptr.dtype.element_ty),
        mask=real[:, None] & (column[None, :] < width),
    )


@triton.jit(do_not_specialize=_INTS)
def keys_kernel(
    q_ptr, kv_ptr, do_ptr, lse_ptr, delta_ptr, dkv_ptr, starts_q, starts_k,
    heads, heads_kv, group, width, tokens_q, scale,
    R: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    CAUSAL: tl.constexpr, BOTTOM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of k and v."""
    mine = tl.program_id(2)
    document = tl.program_id(0)
    from_q = tl.load(starts_q + document)
    n_q = tl.load(starts_q + document + 1) - from_q
    from_k = tl.load(starts_k + document)
    n_k = tl.load(starts_k + document + 1) - from_k
    if tl.program_id(1) * C >= n_k:
        return
    key = tl.program_id(1) * C + tl.arange(0, C)
    column = tl.arange(0, W)
    k = _tile(kv_ptr, from_k + key, mine, 2 * heads_kv, column, key < n_k, width)
    v = _tile(kv_ptr, from_k + key, heads_kv + mine, 2 * heads_kv, column, key < n_k, width)
    begin = 0
    if CAUSAL:
        begin = tl.program_id(1) * C - (n_k - n_q if BOTTOM else 0)
        begin = tl.maximum(begin, 0) // R * R
    dk = tl.zeros([C, W], tl.float32)
    dv = tl.zeros([C, W], tl.float32)
    for head in range(mine * group, mine * group + group):
        for first in range(begin, n_q, R):
            query = first + tl.arange(0, R)
            real = query < n_q
            q = _tile(q_ptr, from_q + query, head, heads, column, real, width)
            do = _tile(do_ptr, from_q + query, head, heads, column, real, width)
            place = head * tokens_q + from_q + query
            lse = tl.load(lse_ptr + place, mask=real, other=0.0)
            delta = tl.load(delta_ptr + place, mask=real, other=0.0)
            level = tl.where(lse > float("-inf"), lse, 0.0)
            st = _scores(q, k, query, key, n_q, n_k, scale, CAUSAL, BOTTOM, PRECISION)
            pt = tl.exp(st - level[None, :])
            dv = tl.dot(pt.to(do.dtype), do, dv, input_precision=PRECISION)
            dpt = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            dst = pt * (dpt - delta[None, :]) * scale
            dk = tl.dot(dst.to(q.dtype), q, dk, input_precision=PRECISION)
    slot = (from_k + key).to(tl.int64) * 2 * heads_kv + mine
    inside = (key[:, None] < n_k) & (column[None, :] < width)
    at = slot[:, None] * width + column[None, :]
    tl.store(dkv_ptr + at, dk.to(dkv_ptr.dtype.element_ty), mask=inside)
    tl.store(dkv_ptr + at + heads_kv * width, dv.to(dkv_ptr.dtype.element_ty), mask=inside)


def _stack(problem, *tensors):
    """Tokens of all sequences, one after the other, heads of these tensors beside each other."""
    return torch.cat([x.transpose(1, 2).flatten(0, 1) for x in tensors], dim=1).contiguous()


def _unstacked(problem, stacked, seqlen):
    return stacked.unflatten(0, (problem.batch, seqlen)).transpose(1, 2)


def _common(problem, device):
    starts_q, starts_k, most_q, most_k = cu_seqlens(problem, device)
    if problem.batch > 1:
        counts = torch.arange(problem.batch + 1, dtype=torch.int32, device=device)
        starts_q, starts_k = counts * problem.seqlen_q, counts * problem.seqlen_k
    sizes = (
        problem.heads_q, problem.heads_kv, problem.group, problem.head_dim,
        problem.batch * problem.seqlen_q, problem.scale,
    )  # fmt: skip
    flags = {
        "R": 16, "C": 32, "W": max(16, triton.next_power_of_2(problem.head_dim)),
        "CAUSAL": problem.mask.causal, "BOTTOM": problem.mask.alignment == "bottom-right",
        "PRECISION": problem.dot_precision,
    }  # fmt: skip
    documents = len(starts_q) - 1
    grid_q = (documents, triton.cdiv(most_q, 16), problem.heads_q)
    grid_k = (documents, triton.cdiv(most_k, 32), problem.heads_kv)
    return (starts_q, starts_k), sizes, flags, grid_q, grid_k


def forward(problem, q, k, v):
    starts, sizes, flags, grid, _ = _common(problem, q.device)
    q, kv = _stack(problem, q), _stack(problem, k, v)
    o = torch.empty_like(q)
    lse = torch.empty((problem.heads_q, len(q)), dtype=torch.float32, device=q.device)
    if o.numel():
        forward_kernel[grid](q, kv, o, lse, *starts, *sizes, **flags)
    by_head = lse.unflatten(1, (problem.batch, problem.seqlen_q)).transpose(0, 1)
    return Outputs(_unstacked(problem, o, problem.seqlen_q), by_head.contiguous())


def backward(problem, q, k, v, outputs, do):
    starts, sizes, flags, grid_q, grid_k = _common(problem, q.device)
    q, kv, o, do = (_stack(problem, *x) for x in ((q,), (k, v), (outputs.o,), (do,)))
    lse = outputs.lse.transpose(0, 1).flatten(1, 2).contiguous()
    delta, dq, dkv = torch.empty_like(lse), torch.empty_like(q), torch.empty_like(kv)
    if dq.numel():
        rows_kernel[grid_q](q, kv, o, do, lse, delta, dq, *starts, *sizes, **flags)
    if dkv.numel():
        keys_kernel[grid_k](q, kv, do, lse, delta, dkv, *starts, *sizes, **flags)
    dkv = _unstacked(problem, dkv, problem.seqlen_k)
    dk, dv = dkv.split(problem.heads_kv, dim=1)
    return Grads(_unstacked(problem, dq, problem.seqlen_q), dk, dv)


attention = Kernel(
    name="stacked",
    forward=forward,
    backward=backward,
    capabilities=Capabilities(head_dims=range(1, 129), documents=True, int64_offsets=False),
    arithmetic=Arithmetic(ds_scale="before", block_n=32),
)
