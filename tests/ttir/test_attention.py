"""FlashAttention forward and backward: real kernels end to end, against float64 formulas."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803, E741, PTH123

import math

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir


@triton.jit
def forward_inner(
    acc, l, m, q, k_ptr, v_ptr, stride_k, stride_v, low, high, offs_m, offs_n, offs_d,
    seqlen_k, head_dim, scale, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    for start in range(low, high, BLOCK_N):
        n = start + offs_n
        inside = (n[:, None] < seqlen_k) & (offs_d[None, :] < head_dim)
        k = tl.load(k_ptr + n[:, None] * stride_k + offs_d[None, :], mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(n[None, :] < seqlen_k, s, float("-inf"))
        if CAUSAL:
            s = tl.where(offs_m[:, None] >= n[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + n[:, None] * stride_v + offs_d[None, :], mask=inside, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m = m_new
    return acc, l, m


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_qh, stride_q, stride_kh, stride_k, stride_vh,
    stride_v, stride_oh, stride_o, seqlen_q, seqlen_k, head_dim, scale,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    rows = (offs_m[:, None] < seqlen_q) & (offs_d[None, :] < head_dim)
    q_at = q_ptr + head * stride_qh + offs_m[:, None] * stride_q + offs_d[None, :]
    q = tl.load(q_at, mask=rows, other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    high = seqlen_k
    if CAUSAL:
        high = tl.minimum(seqlen_k, (block + 1) * BLOCK_M)
    acc, l, m = forward_inner(
        acc, l, m, q, k_ptr + head * stride_kh, v_ptr + head * stride_vh, stride_k, stride_v, 0,
        high, offs_m, offs_n, offs_d, seqlen_k, head_dim, scale * 1.44269504, CAUSAL, BLOCK_N,
    )  # fmt: skip
    o_at = o_ptr + head * stride_oh + offs_m[:, None] * stride_o + offs_d[None, :]
    tl.store(o_at, (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=rows)
    lse = m * 0.6931471805599453 + tl.log(l)
    tl.store(lse_ptr + head * seqlen_q + offs_m, lse, mask=offs_m < seqlen_q)


@triton.jit
def delta_kernel(
    o_ptr, do_ptr, delta_ptr, rows, head_dim, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    inside = (i[:, None] < rows) & (d[None, :] < head_dim)
    at = i[:, None] * head_dim + d[None, :]
    o = tl.load(o_ptr + at, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta_ptr + i, tl.sum(o * do, 1), mask=i < rows)


@triton.jit
def backward(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    seqlen_q, seqlen_k, head_dim, scale,
    CAUSAL: tl.constexpr, ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1)
    q_base = head * seqlen_q * head_dim
    k_base = head * seqlen_k * head_dim
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k_in = (n[:, None] < seqlen_k) & (d[None, :] < head_dim)
    k_at = k_base + n[:, None] * head_dim + d[None, :]
    k = tl.load(k_ptr + k_at, mask=k_in, other=0.0)
    v = tl.load(v_ptr + k_at, mask=k_in, other=0.0)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    start = 0
    if CAUSAL:
        start = (block * BLOCK_N) // BLOCK_M * BLOCK_M
    for i in range(start, seqlen_q, BLOCK_M):
        m = i + tl.arange(0, BLOCK_M)
        q_in = (m[:, None] < seqlen_q) & (d[None, :] < head_dim)
        q_at = q_base + m[:, None] * head_dim + d[None, :]
        q = tl.load(q_ptr + q_at, mask=q_in, other=0.0)
        do = tl.load(do_ptr + q_at, mask=q_in, other=0.0)
        lse = tl.load(lse_ptr + head * seqlen_q + m, mask=m < seqlen_q, other=0.0)
        delta = tl.load(delta_ptr + head * seqlen_q + m, mask=m < seqlen_q, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        p = tl.exp2((s - lse[:, None]) * 1.4426950408889634)
        p = tl.where((m[:, None] < seqlen_q) & (n[None, :] < seqlen_k), p, 0.0)
        if CAUSAL:
            p = tl.where(m[:, None] >= n[None, :], p, 0.0)
        dv += tl.dot(tl.trans(p.to(do.dtype)), do)
        dp = tl.dot(do, tl.trans(v))
        ds = (p * (dp - delta[:, None])).to(q.dtype)
        dk += tl.dot(tl.trans(ds), q)
        dq = tl.dot(ds, k) * scale
        if ATOMIC:
            tl.atomic_add(dq_ptr + q_at, dq, mask=q_in, sem="relaxed")
        else:
            so_far = tl.load(dq_ptr + q_at, mask=q_in, other=0.0)
            tl.store(dq_ptr + q_at, so_far + dq, mask=q_in)  # the defect
    tl.store(dk_ptr + k_at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=k_in)
    tl.store(dv_ptr + k_at, dv.to(dv_ptr.dtype.element_ty), mask=k_in)


def line_of(text):
    """Number of the line of this file that contains `text`."""
    with open(__file__, encoding="utf-8") as source:
        return next(i for i, line in enumerate(source, 1) if text in line and "line_of" not in line)


def run_forward(q, k, v, *, causal=False, block_m=64, block_n=32):
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    o = torch.empty_like(q)
    lse = torch.empty(batch, heads, seqlen_q)
    forward[(triton.cdiv(seqlen_q, block_m), batch * heads)](
        q, k, v, o, lse, q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1),
        v.stride(2), o.stride(1), o.stride(2), seqlen_q, seqlen_k, head_dim,
        1 / math.sqrt(head_dim),
        causal, block_m, block_n, triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return o, lse


def run_backward(q, k, v, o, lse, do, *, causal=False, atomic=True, block_m=32, block_n=32):
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    block_d = triton.next_power_of_2(head_dim)
    delta = torch.empty(batch, heads, seqlen_q)
    rows = batch * heads * seqlen_q
    delta_kernel[(triton.cdiv(rows, 32),)](o, do, delta, rows, head_dim, 32, block_d)
    dq, dk, dv = torch.zeros(q.shape), torch.empty_like(k), torch.empty_like(v)
    backward[(triton.cdiv(seqlen_k, block_n), batch * heads)](
        q, k, v, do, lse, delta, dq, dk, dv, seqlen_q, seqlen_k, head_dim, 1 / math.sqrt(head_dim),
        causal, atomic, block_m, block_n, block_d,
    )  # fmt: skip
    return dq, dk, dv


def expected(q, k, v, do, *, causal):
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
        s = s.masked_fill(hidden, -math.inf)
    o = s.softmax(-1) @ v
    o.backward(do.double())
    return o.detach(), s.logsumexp(-1).detach(), q.grad, k.grad, v.grad


def inputs(seqlen_q, seqlen_k, head_dim, dtype, heads=2):
    generator = torch.Generator().manual_seed(7)
    shapes = [(1, heads, n, head_dim) for n in (seqlen_q, seqlen_k, seqlen_k, seqlen_q)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 4e-3}  # fp32: tf32 dots


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "head_dim"), [(128, 128, 64), (77, 101, 40)])
def test_forward_and_backward_agree_with_the_formulas(dtype, causal, seqlen_q, seqlen_k, head_dim):
    q, k, v, do = inputs(seqlen_q, seqlen_k, head_dim, dtype)
    o_ref, lse_ref, *grads_ref = expected(q, k, v, do, causal=causal)
    with ttir.execute() as run:
        o, lse = run_forward(q, k, v, causal=causal)
        grads = run_backward(q, k, v, o, lse, do, causal=causal)
        assert not run.unwritten(o).any()
        assert not run.unwritten(lse).any()
    assert run.incidents == []
    assert [launch.kernel for launch in run.launches] == ["forward", "delta_kernel", "backward"]
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(o.double(), o_ref, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), lse_ref, atol=tolerance, rtol=tolerance)
    for got, want in zip(grads, grads_ref, strict=True):
        torch.testing.assert_close(got.double(), want, atol=4 * tolerance, rtol=4 * tolerance)


@pytest.mark.parametrize("schedule", ["forward", "reverse", "shuffled"])
def test_the_schedule_changes_the_order_and_nothing_else(schedule):
    q, k, v, do = inputs(96, 96, 32, torch.float32)
    with ttir.execute(ttir.Options(schedule=schedule, schedule_seed=3)) as run:
        o, lse = run_forward(q, k, v, causal=True)
        dq, _, _ = run_backward(q, k, v, o, lse, do, causal=True)
    with ttir.execute():
        o_forward, lse_forward = run_forward(q, k, v, causal=True)
        dq_forward, _, _ = run_backward(q, k, v, o_forward, lse_forward, do, causal=True)
    assert run.incidents == []
    assert torch.equal(o, o_forward)
    torch.testing.assert_close(dq, dq_forward)


def test_small_waves_give_the_same_bits_as_large_ones():
    q, k, v, _ = inputs(256, 256, 64, torch.float16, heads=4)
    with ttir.execute(ttir.Options(memory_limit=1)):
        one_by_one = run_forward(q, k, v, causal=True)
    with ttir.execute():
        together = run_forward(q, k, v, causal=True)
    assert torch.equal(one_by_one[0], together[0])
    assert torch.equal(one_by_one[1], together[1])


def test_dq_by_load_add_store_is_a_race_and_by_atomics_is_not():
    q, k, v, do = inputs(64, 96, 32, torch.float16)
    with ttir.execute() as run:
        o, lse = run_forward(q, k, v)
        run_backward(q, k, v, o, lse, do, atomic=False)
    races = [x for x in run.incidents if x.kind == "race"]
    assert races
    assert {x.argument for x in races} == {"dq_ptr"}
    assert {x.line for x in races} <= {
        line_of("so_far = tl.load"),
        line_of("# the defect"),
    }
    assert all(x.kernel == "backward" and x.file == __file__ for x in races)
    assert "program (" in races[0].detail
    assert races[0].coordinates is not None
