"""Attention by a few programs that go through all work: rows of shared heads together, keys split.

Partial sums are kept as they are, in base 2 with their maxima; a second kernel merges them and puts
in the sinks. With bias, ALiBi and a softcap; forward only. Defects are planted in it.
"""

import torch
import triton
import triton.language as tl

from fa_verify import Arithmetic, Capabilities, Kernel, Outputs

_INTS = (
    "s_qb", "s_qh", "s_qn", "s_qd", "s_kb", "s_kh", "s_kn", "s_kd", "s_vb", "s_vh", "s_vn", "s_vd",
    "s_bb", "s_bh", "s_bn", "s_bk", "batch", "heads_kv", "group", "n_q", "n_k", "d_qk", "d_v",
    "tiles", "splits", "per_split", "programs", "s_ob", "s_oh", "s_on",
)  # fmt: skip


@triton.jit(do_not_specialize=_INTS)
def gather_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, slopes_ptr, part_ptr, high_ptr, mass_ptr,
    s_qb, s_qh, s_qn, s_qd, s_kb, s_kh, s_kn, s_kd, s_vb, s_vh, s_vn, s_vd,
    s_bb, s_bh, s_bn, s_bk, batch, heads_kv, group, n_q, n_k, d_qk, d_v,
    tiles, splits, per_split, programs, scale, cap,
    T: tl.constexpr, B: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    CAUSAL: tl.constexpr, CAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    log2e: tl.constexpr = 1.4426950408889634
    e = tl.arange(0, E)
    f = tl.arange(0, F)
    for item in range(tl.program_id(0), batch * heads_kv * tiles * splits, programs):
        split = item % splits
        tile = item // splits % tiles
        g = (item // (splits * tiles) % heads_kv).to(tl.int64)
        b = (item // (splits * tiles * heads_kv)).to(tl.int64)
        packed = tile * T + tl.arange(0, T)
        row = packed // group
        h = g * group + packed % group
        inside = packed < n_q * group
        q = tl.load(
            q_ptr + b * s_qb + h[:, None] * s_qh + row.to(tl.int64)[:, None] * s_qn
            + e.to(tl.int64)[None, :] * s_qd,
            mask=inside[:, None] & (e[None, :] < d_qk), other=0.0,
        )  # fmt: skip
        slope = tl.zeros([T], tl.float32)
        if ALIBI:
            slope = tl.load(slopes_ptr + h, mask=inside, other=0.0)
        m = tl.full([T], float("-inf"), tl.float32)
        l = tl.zeros([T], tl.float32)  # noqa: E741
        a = tl.zeros([T, F], tl.float32)
        end = tl.minimum(n_k, (split + 1) * per_split)
        for at in range(split * per_split, end, B):
            key = at + tl.arange(0, B)
            wide = key.to(tl.int64)
            k = tl.load(
                k_ptr + b * s_kb + g * s_kh + wide[:, None] * s_kn + e.to(tl.int64)[None, :] * s_kd,
                mask=(key[:, None] < end) & (e[None, :] < d_qk), other=0.0,
            )  # fmt: skip
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if CAP:
                y = tl.exp2(-2.0 * log2e * tl.abs(x / cap))
                y = (1.0 - y) / (1.0 + y)
                x = cap * tl.where(x < 0, -y, y)
            if BIAS:
                x += tl.load(
                    bias_ptr + b * s_bb + h[:, None] * s_bh + row.to(tl.int64)[:, None] * s_bn
                    + wide[None, :] * s_bk,
                    mask=inside[:, None] & (key[None, :] < end), other=0.0,
                ).to(tl.float32)  # fmt: skip
            diagonal = row + n_k - n_q
            if ALIBI:
                x -= slope[:, None] * tl.abs(diagonal[:, None] - key[None, :])
            seen = inside[:, None] & (key[None, :] < end)
            if CAUSAL:
                seen = seen & (key[None, :] <= diagonal[:, None])
            x = tl.where(seen, x * log2e, float("-inf"))
            m_next = tl.maximum(m, tl.max(x, 1))
            base = tl.where(m_next == float("-inf"), 0.0, m_next)
            p = tl.exp2(x - base[:, None])
            c = tl.exp2(m - base)
            l = l * c + tl.sum(p, 1)  # noqa: E741
            v = tl.load(
                v_ptr + b * s_vb + g * s_vh + wide[:, None] * s_vn + f.to(tl.int64)[None, :] * s_vd,
                mask=(key[:, None] < end) & (f[None, :] < d_v), other=0.0,
            )  # fmt: skip
            a = tl.dot(p.to(v.dtype), v, a * c[:, None], input_precision=PRECISION)
            m = m_next
        at_part = (((b * heads_kv * group + h) * n_q + row) * splits + split).to(tl.int64)
        tl.store(high_ptr + at_part, m, mask=inside)
        tl.store(mass_ptr + at_part, l, mask=inside)
        tl.store(
            part_ptr + at_part[:, None] * d_v + f[None, :], a,
            mask=inside[:, None] & (f[None, :] < d_v),
        )  # fmt: skip


@triton.jit(do_not_specialize=_INTS)
def merge_kernel(
    part_ptr, high_ptr, mass_ptr, sinks_ptr, o_ptr, lse_ptr, s_ob, s_oh, s_on, heads, n_q, d_v,
    splits, S: tl.constexpr, F: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    log2e: tl.constexpr = 1.4426950408889634
    line = tl.program_id(0).to(tl.int64)
    row = line % n_q
    h = line // n_q % heads
    b = line // n_q // heads
    s = tl.arange(0, S)
    f = tl.arange(0, F)
    high = tl.load(high_ptr + line * splits + s, mask=s < splits, other=float("-inf"))
    mass = tl.load(mass_ptr + line * splits + s, mask=s < splits, other=0.0)
    top = tl.max(high, 0)
    sink = float("-inf")
    if SINKS:
        sink = tl.load(sinks_ptr + h) * log2e
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(high - base)
    total = tl.sum(weight * mass, 0) + tl.exp2(sink - base)
    part = tl.load(
        part_ptr + (line * splits + s)[:, None] * d_v + f[None, :],
        mask=(s[:, None] < splits) & (f[None, :] < d_v), other=0.0,
    )  # fmt: skip
    out = tl.sum(weight[:, None] * part, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(
        o_ptr + b * s_ob + h * s_oh + row * s_on + f, out.to(o_ptr.dtype.element_ty), mask=f < d_v
    )
    lse = top + tl.log2(tl.where(total == 0.0, 1.0, total))
    tl.store(lse_ptr + line, lse / log2e)


def forward(problem, q, k, v, *, bias=None, alibi_slopes=None, sinks=None):
    n_q, n_k, splits, block = problem.seqlen_q, problem.seqlen_k, 4, 32
    o = torch.empty(problem.shape_o, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    lines = (problem.batch * problem.heads_q * n_q, splits)
    part = torch.empty((*lines, problem.head_dim_v), dtype=torch.float32, device=q.device)
    high, mass = (torch.empty(lines, dtype=torch.float32, device=q.device) for _ in range(2))
    per_split = triton.cdiv(triton.cdiv(n_k, splits), block) * block
    full = (problem.batch, problem.heads_q, n_q, n_k)
    by_bias = (0, 0, 0, 0) if bias is None else bias.expand(full).stride()
    wide_v = max(16, triton.next_power_of_2(problem.head_dim_v))
    tiles = triton.cdiv(n_q * problem.group, 16)
    programs = 6
    if o.numel():
        gather_kernel[(programs,)](
            q, k, v, q if bias is None else bias, alibi_slopes, part, high, mass,
            *q.stride(), *k.stride(), *v.stride(), *by_bias, problem.batch, problem.heads_kv,
            problem.group, n_q, n_k, problem.head_dim, problem.head_dim_v, tiles, splits,
            per_split, programs, problem.scale, problem.softcap,
            T=16, B=block, E=max(16, triton.next_power_of_2(problem.head_dim)), F=wide_v,
            CAUSAL=problem.mask.causal, CAP=problem.softcap > 0, BIAS=bias is not None,
            ALIBI=alibi_slopes is not None, PRECISION=problem.dot_precision,
        )  # fmt: skip
        merge_kernel[(lines[0],)](
            part, high, mass, sinks, o, lse, *o.stride()[:3], problem.heads_q, n_q,
            problem.head_dim_v, splits, S=triton.next_power_of_2(splits), F=wide_v,
            SINKS=sinks is not None,
        )  # fmt: skip
    return Outputs(o, lse)


attention = Kernel(
    name="persistent",
    forward=forward,
    capabilities=Capabilities(
        head_dims=range(1, 129),
        head_dims_v=range(1, 129),
        alignments=("bottom-right",),
        softcap=True,
        bias=("h", "k", "hq", "qk", "bhqk"),
        alibi=True,
        sinks=True,
        backward=False,
    ),
    arithmetic=Arithmetic(block_n=32, merged_by_lse=True),
)
