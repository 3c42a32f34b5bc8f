"""Serving attention from pages: a block of rows packs a few queries of all members of a group.

A program finds its sequence by bisection of cu_seqlens_q. With windows, a softcap, ALiBi and sinks
that start the running maximum; forward only, no lse. Defects are planted in it.
"""

import torch
import triton
import triton.language as tl

from fa_verify import Arithmetic, Capabilities, Kernel, Outputs, paged

PAGE = 16
_INTS = (
    "sq_t", "sq_h", "sq_d", "sk_p", "sk_s", "sk_h", "sv_p", "sv_s", "sv_h", "so_t", "so_h",
    "s_table", "sequences", "group", "block_q", "head_dim", "head_dim_v", "left", "right",
)  # fmt: skip


@triton.jit
def _sequence_of(cu_q, block, sequences, block_q):
    """The last sequence whose first block is at most this one."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_q + middle) // block_q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _capped(x, cap):
    e = tl.exp(-2.0 * tl.abs(x) / cap)
    t = (1.0 - e) / (1.0 + e)
    return cap * tl.where(x < 0, -t, t)


@triton.jit(do_not_specialize=_INTS)
def unified_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, sinks_ptr, slopes_ptr, table, lengths, cu_q,
    sq_t, sq_h, sq_d, sk_p, sk_s, sk_h, sv_p, sv_s, sv_h, so_t, so_h, s_table,
    sequences, group, block_q, head_dim, head_dim_v, left, right, scale, softcap,
    BLOCK_M: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of(cu_q, block, sequences, block_q)
    begin = tl.load(cu_q + sequence)
    q_len = tl.load(cu_q + sequence + 1) - begin
    local_block = block - (begin // block_q + sequence)
    if local_block * block_q >= q_len:
        return
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    offs_dv = tl.arange(0, DV)
    offs_n = tl.arange(0, PAGE)
    query_pos = local_block * block_q + offs_m // group
    head = kv_head * group + offs_m % group
    row_mask = (query_pos < q_len) & (offs_m < block_q * group)
    token = (begin + query_pos).to(tl.int64)
    q = tl.load(
        q_ptr + token[:, None] * sq_t + head[:, None] * sq_h + offs_d[None, :] * sq_d,
        mask=row_mask[:, None] & (offs_d[None, :] < head_dim),
        other=0.0,
    )
    seq_len = tl.load(lengths + sequence)
    context = seq_len - q_len
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        m_i = tl.load(sinks_ptr + head, mask=row_mask, other=float("-inf"))
        l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=row_mask, other=0.0)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    first_key = 0
    end_key = seq_len
    if HAS_LEFT:
        first_key = tl.maximum(context + local_block * block_q - left, 0)
    if HAS_RIGHT:
        last_query = tl.minimum(local_block * block_q + block_q, q_len) - 1
        end_key = tl.minimum(end_key, context + last_query + right + 1)
    for page in range(first_key // PAGE, tl.cdiv(end_key, PAGE)):
        physical = tl.load(table + sequence * s_table + page).to(tl.int64)
        key = page * PAGE + offs_n
        held = key < seq_len
        k = tl.load(
            k_ptr + physical * sk_p + offs_n[None, :] * sk_s + kv_head * sk_h + offs_d[:, None],
            mask=held[None, :] & (offs_d[:, None] < head_dim),
            other=0.0,
        )
        v = tl.load(
            v_ptr + physical * sv_p + offs_n[:, None] * sv_s + kv_head * sv_h + offs_dv[None, :],
            mask=held[:, None] & (offs_dv[None, :] < head_dim_v),
            other=0.0,
        )
        S = scale * tl.dot(q, k, input_precision=PRECISION)
        if SOFTCAP:
            S = _capped(S, softcap)
        distance = context + query_pos[:, None] - key[None, :]
        if ALIBI:
            S -= slope[:, None] * tl.abs(distance).to(tl.float32)
        seen = row_mask[:, None] & held[None, :]
        if HAS_LEFT:
            seen = seen & (distance <= left)
        if HAS_RIGHT:
            seen = seen & (distance >= -right)
        S = tl.where(seen, S, float("-inf"))
        m_j = tl.maximum(m_i, tl.max(S, 1))
        base = tl.where(m_j == float("-inf"), 0.0, m_j)
        P = tl.exp(S - base[:, None])
        alpha = tl.exp(m_i - base)
        l_i = l_i * alpha + tl.sum(P, 1)
        acc = acc * alpha[:, None]
        m_i = m_j
        acc += tl.dot(P.to(v.dtype), v, input_precision=PRECISION)
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(
        o_ptr + token[:, None] * so_t + head[:, None] * so_h + offs_dv[None, :],
        acc.to(o_ptr.dtype.element_ty),
        mask=row_mask[:, None] & (offs_dv[None, :] < head_dim_v),
    )


def forward(problem, q, k, v, *, alibi_slopes=None, sinks=None):
    cache = paged(problem, k, v, page_size=PAGE)
    q = q.transpose(1, 2).flatten(0, 1)
    sequences = len(cache.cache_lengths)
    o = torch.empty((len(q), problem.heads_q, problem.head_dim_v), dtype=q.dtype, device=q.device)
    if o.numel():
        mask = problem.mask
        block_m = max(16, triton.next_power_of_2(problem.group))
        block_q = block_m // problem.group
        grid = (len(q) // block_q + sequences, problem.heads_kv)
        unified_kernel[grid](
            q, cache.k_pages, cache.v_pages, o, sinks, alibi_slopes,
            cache.block_table, cache.cache_lengths, cache.cu_seqlens_q,
            *q.stride(), *cache.k_pages.stride()[:3], *cache.v_pages.stride()[:3], *o.stride()[:2],
            cache.block_table.stride(0), sequences, problem.group, block_q,
            problem.head_dim, problem.head_dim_v, mask.window_left or 0, mask.window_right or 0,
            problem.scale, problem.softcap, BLOCK_M=block_m, PAGE=PAGE,
            D=max(16, triton.next_power_of_2(problem.head_dim)),
            DV=max(16, triton.next_power_of_2(problem.head_dim_v)),
            HAS_LEFT=mask.window_left is not None,
            HAS_RIGHT=mask.causal or mask.window_right is not None,
            SOFTCAP=problem.softcap > 0, ALIBI=problem.alibi, SINKS=problem.sinks,
            PRECISION=problem.dot_precision,
        )  # fmt: skip
    return Outputs(o.unflatten(0, (problem.batch, problem.seqlen_q)).transpose(1, 2))


attention = Kernel(
    name="unified",
    forward=forward,
    capabilities=Capabilities(
        head_dims=range(1, 129),
        head_dims_v=range(1, 129),
        alignments=("bottom-right",),
        window=True,
        softcap=True,
        documents=True,
        alibi=True,
        sinks=True,
        backward=False,
        int64_offsets=False,
    ),
    arithmetic=Arithmetic(block_n=16),
)
