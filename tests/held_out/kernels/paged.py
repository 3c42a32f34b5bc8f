"""Decoding from pages: keys are split between programs, a page a step; a second kernel merges.

A program holds the queries of one sequence and one key head, all members of its group. Forward
only. Defects are planted in it.
"""

import torch
import triton
import triton.language as tl

from fa_verify import Arithmetic, Capabilities, Kernel, Outputs, paged

PAGE = 16
_INTS = (
    "sq_t", "sq_h", "sq_d", "sk_p", "sk_s", "sk_h", "sv_p", "sv_s", "sv_h", "s_table",
    "heads_kv", "group", "head_dim", "head_dim_v", "splits", "split_pages", "tokens",
)  # fmt: skip


@triton.jit(do_not_specialize=_INTS)
def partial_kernel(
    q_ptr, k_ptr, v_ptr, table, lengths, cu_q, mid_o, mid_lse,
    sq_t, sq_h, sq_d, sk_p, sk_s, sk_h, sv_p, sv_s, sv_h, s_table,
    heads_kv, group, head_dim, head_dim_v, splits, split_pages, tokens, scale,
    ROWS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    head_kv = (tl.program_id(1) % heads_kv).to(tl.int64)
    tile = tl.program_id(1) // heads_kv
    split = tl.program_id(2)
    first = tl.load(cu_q + sequence)
    queries = tl.load(cu_q + sequence + 1) - first
    length = tl.load(lengths + sequence)
    row = tile * ROWS + tl.arange(0, ROWS)
    query = row // group
    head = head_kv * group + row % group
    real = row < queries * group
    if tile * ROWS >= queries * group:
        return
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    token = (first + query).to(tl.int64)
    q = tl.load(
        q_ptr + token[:, None] * sq_t + head[:, None] * sq_h + d.to(tl.int64)[None, :] * sq_d,
        mask=real[:, None] & (d[None, :] < head_dim),
        other=0.0,
    )
    m = tl.full([ROWS], float("-inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV], tl.float32)
    pages = tl.cdiv(length, PAGE)
    last = tl.minimum((split + 1) * split_pages, pages)
    slot = tl.arange(0, PAGE)
    for page in range(split * split_pages, last):
        number = tl.load(table + sequence * s_table + page).to(tl.int64)
        position = page * PAGE + slot
        held = position < length
        k = tl.load(
            k_ptr + number * sk_p + slot[None, :] * sk_s + head_kv * sk_h + d[:, None],
            mask=held[None, :] & (d[:, None] < head_dim),
            other=0.0,
        )
        v = tl.load(
            v_ptr + number * sv_p + slot[:, None] * sv_s + head_kv * sv_h + dv[None, :],
            mask=held[:, None] & (dv[None, :] < head_dim_v),
            other=0.0,
        )
        x = tl.dot(q, k, input_precision=PRECISION) * scale
        seen = held[None, :]
        if CAUSAL:
            seen = seen & (position[None, :] <= query[:, None] + length - queries)
        x = tl.where(seen, x, float("-inf"))
        m_next = tl.maximum(m, tl.max(x, 1))
        reference = tl.where(m_next == float("-inf"), 0.0, m_next)
        p = tl.exp(x - reference[:, None])
        decay = tl.exp(m - reference)
        s = s * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        m = m_next
    place = (token * heads_kv * group + head) * splits + split
    some = tl.where(s == 0.0, 1.0, s)
    tl.store(
        mid_o + place[:, None] * head_dim_v + dv[None, :],
        acc / some[:, None],
        mask=real[:, None] & (dv[None, :] < head_dim_v),
    )
    tl.store(mid_lse + place, m + tl.log(some), mask=real)


@triton.jit(do_not_specialize=_INTS)
def merge_kernel(mid_o, mid_lse, o_ptr, lse_ptr, head_dim_v, splits, DV: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dv = tl.arange(0, DV)
    top = float("-inf")
    for split in range(splits):
        top = tl.maximum(top, tl.load(mid_lse + row * splits + split))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    acc = tl.zeros([DV], tl.float32)
    for split in range(splits):
        weight = tl.exp(tl.load(mid_lse + row * splits + split) - base)
        part = tl.load(
            mid_o + (row * splits + split) * head_dim_v + dv, mask=dv < head_dim_v, other=0.0
        )
        acc += weight * part
        total += weight
    some = tl.where(total == 0.0, 1.0, total)
    tl.store(
        o_ptr + row * head_dim_v + dv,
        (acc / some).to(o_ptr.dtype.element_ty),
        mask=dv < head_dim_v,
    )
    tl.store(lse_ptr + row, top + tl.log(some))


def forward(problem, q, k, v):
    cache = paged(problem, k, v, page_size=PAGE)
    q = q.transpose(1, 2).flatten(0, 1)
    tokens = len(q)
    splits = 3
    longest = int(cache.cache_lengths.max())
    split_pages = max(1, triton.cdiv(triton.cdiv(longest, PAGE), splits))
    shape = (tokens, problem.heads_q)
    mid_o = torch.empty((*shape, splits, problem.head_dim_v), dtype=torch.float32, device=q.device)
    mid_lse = torch.empty((*shape, splits), dtype=torch.float32, device=q.device)
    o = torch.empty((*shape, problem.head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    if o.numel():
        width = max(16, triton.next_power_of_2(problem.head_dim_v))
        tiles = triton.cdiv(cache.max_seqlen_q * problem.group, 16)
        partial_kernel[(len(cache.cache_lengths), problem.heads_kv * tiles, splits)](
            q, cache.k_pages, cache.v_pages, cache.block_table, cache.cache_lengths,
            cache.cu_seqlens_q, mid_o, mid_lse,
            *q.stride(), *cache.k_pages.stride()[:3], *cache.v_pages.stride()[:3],
            cache.block_table.stride(0), problem.heads_kv, problem.group,
            problem.head_dim, problem.head_dim_v, splits, split_pages, tokens, problem.scale,
            ROWS=16, PAGE=PAGE, D=max(16, triton.next_power_of_2(problem.head_dim)), DV=width,
            CAUSAL=problem.mask.causal, PRECISION=problem.dot_precision,
        )  # fmt: skip
        merge_kernel[(tokens * problem.heads_q,)](
            mid_o, mid_lse, o, lse, problem.head_dim_v, splits, DV=width
        )
    return Outputs(
        o.unflatten(0, (problem.batch, problem.seqlen_q)).transpose(1, 2),
        lse.unflatten(0, (problem.batch, problem.seqlen_q)).transpose(1, 2).contiguous(),
    )


attention = Kernel(
    name="paged",
    forward=forward,
    capabilities=Capabilities(
        head_dims=range(1, 129),
        head_dims_v=range(1, 129),
        alignments=("bottom-right",),
        documents=True,
        backward=False,
        int64_offsets=False,
    ),
    arithmetic=Arithmetic(block_n=16, merged_by_lse=True),
)
