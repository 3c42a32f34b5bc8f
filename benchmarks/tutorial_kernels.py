"""Kernels of the kind Triton's tutorials teach, for benchmarks/executor.py."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, inside) + tl.load(y + at, inside), inside)


@triton.jit
def _softmax(x, out, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + at, at < columns, other=float("-inf"))
    top = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * stride + at, top / tl.sum(top, 0), at < columns)


@triton.jit
def _matmul(a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + inner
        left = tl.load(
            a + rows[:, None] * K + k[None, :],
            (rows[:, None] < M) & (k[None, :] < K),
            other=0.0,
        )
        right = tl.load(
            b + k[:, None] * N + columns[None, :],
            (k[:, None] < K) & (columns[None, :] < N),
            other=0.0,
        )
        total = tl.dot(left, right, total)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty), inside)


@triton.jit
def _layer_norm(x, out, weight, bias, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * columns + at, at < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / columns
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * columns + at, at < columns, other=0.0).to(tl.float32)
        away = tl.where(at < columns, values - mean, 0.0)
        square += away * away
    scale = 1 / tl.sqrt(tl.sum(square, 0) / columns + eps)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        w, b = tl.load(weight + at, inside), tl.load(bias + at, inside)
        values = tl.load(x + row * columns + at, inside).to(tl.float32)
        tl.store(out + row * columns + at, (values - mean) * scale * w + b, inside)


def vector_add(device):
    x, y = (torch.randn(98432, device=device) for _ in range(2))
    out = torch.empty_like(x)
    return lambda: _add[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)


def softmax(device):
    x = torch.randn(512, 781, device=device)
    out = torch.empty_like(x)
    return lambda: _softmax[(x.shape[0],)](x, out, x.stride(0), x.shape[1], BLOCK=1024)


def matmul(device):
    a, b = (torch.randn(512, 512, device=device, dtype=torch.float16) for _ in range(2))
    c = torch.empty_like(a)
    return lambda: _matmul[(8, 8)](a, b, c, 512, 512, 512, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32)


def layer_norm(device):
    x = torch.randn(512, 1000, device=device, dtype=torch.float16)
    weight, bias = (torch.randn(1000, device=device) for _ in range(2))
    out = torch.empty_like(x)
    return lambda: _layer_norm[(x.shape[0],)](x, out, weight, bias, 1000, 1e-5, BLOCK=256)


LAUNCHES = {f.__name__: f for f in (vector_add, softmax, matmul, layer_norm)}
