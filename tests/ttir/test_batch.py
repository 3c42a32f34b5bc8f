"""A program's bits do not depend on how many programs run beside it, nor on which place it has."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir
from fa_verify.ttir.engine import program
from fa_verify.ttir.ops import products, reductions

RNG = np.random.default_rng(0)
WIDTHS = (1, 2, 3, 5, 8, 13, 40)
EXTENTS = (16, 32, 64, 128, 256)


def some(width):
    """First, last and one more of `width` places."""
    return sorted({0, width // 2, width - 1})


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
@pytest.mark.parametrize("inner", EXTENTS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (16, 128), (128, 16), (64, 32), (96, 80)])
def test_products(rows, columns, inner, transposed):
    a = RNG.standard_normal((40, rows, inner)).astype(np.float32)
    b = RNG.standard_normal((40, inner, columns)).astype(np.float32)
    if "a" in transposed:
        a = np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2)
    if "b" in transposed:
        b = np.ascontiguousarray(b.swapaxes(1, 2)).swapaxes(1, 2)
    alone = [products._product(a[i : i + 1], b[i : i + 1], None)[0] for i in range(40)]
    shared = [products._product(a[i : i + 1], b[:1], None)[0] for i in range(40)]
    for width in WIDTHS:
        together = products._product(a[:width], b[:width], None)
        with_one = products._product(a[:width], b[:1], None)
        for i in some(width):
            assert (together[i] == alone[i]).all(), (width, i)
            assert (with_one[i] == shared[i]).all(), (width, i)


@pytest.mark.parametrize("columns", [1, 2, 16, 64, 128, 1024])
@pytest.mark.parametrize("rows", [1, 2, 16, 32, 64, 128])
@pytest.mark.parametrize("axis", [1, 2])
def test_sums(axis, rows, columns):
    x = (RNG.standard_normal((40, rows, columns)) * 1e3).astype(np.float32)
    alone = [reductions._sum(x[i : i + 1], axis)[0] for i in range(40)]
    for width in WIDTHS:
        together = reductions._sum(x[:width], axis)
        for i in some(width):
            assert (together[i] == alone[i]).all(), (width, i)


@triton.jit
def attend(q_ptr, k_ptr, o_ptr, n, CAUSAL: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr):
    blocks = tl.cdiv(n, BLOCK)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    rows, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    at = head * n * D + rows[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=rows[:, None] < n, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    last = (block + 1) * BLOCK if CAUSAL else n
    for start in range(0, last, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        k_at = head * n * D + keys[:, None] * D + d[None, :]
        k = tl.load(k_ptr + k_at, mask=keys[:, None] < n, other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * 0.1)
        if CAUSAL:
            p = tl.where(rows[:, None] >= keys[None, :], p, 0.0)
        total += tl.sum(p, 1)
        acc = tl.dot(p.to(k.dtype), k, acc)
    tl.store(o_ptr + at, acc / total[:, None], mask=rows[:, None] < n)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention_in_waves_of_any_width(dtype, block, causal, monkeypatch):
    n, d, heads = 150, 64, 6
    q, k = (torch.randn(heads, n, d).to(dtype) for _ in range(2))
    results = []
    for waves in (1, 40 << 10, 100 << 10, 300 << 10, 1 << 20, 64 << 20):
        monkeypatch.setattr(program, "_WAVE_BYTES", waves)
        for schedule in ("forward", "shuffled"):
            o = torch.zeros(heads, n, d)
            with ttir.execute(ttir.Options(schedule=schedule, schedule_seed=waves)) as run:
                attend[heads * triton.cdiv(n, block),](q, k, o, n, causal, block, d)
            assert not run.incidents
            results.append(o)
    for head in range(heads):  # and alone
        o = torch.zeros(1, n, d)
        with ttir.execute():
            attend[triton.cdiv(n, block),](q[head], k[head], o, n, causal, block, d)
        assert torch.equal(o[0], results[0][head])
    assert all(torch.equal(o, results[0]) for o in results)


def test_finished_programs_cost_nothing(monkeypatch):
    """Causal attention multiplies what its programs need: not a block more."""
    done = []
    product = products._product

    def counted(a, b, c):
        lanes = max(a.shape[0], b.shape[0])
        done.append(lanes * a.shape[1] * a.shape[2] * b.shape[2])
        return product(a, b, c)

    monkeypatch.setattr(products, "_product", counted)
    n, d, heads, block = 512, 48 + 16, 3, 32
    q, o = torch.randn(heads, n, d).half(), torch.zeros(heads, n, d)
    blocks = n // block
    with ttir.execute():
        attend[heads * blocks,](q, q.clone(), o, n, True, block, d)
    needed = heads * blocks * (blocks + 1) // 2 * 2 * block * block * d
    assert sum(done) == needed
