"""Products: tl.dot and tl.dot_scaled, one test a pair of formats."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir

M, N, K = 32, 16, 64


@triton.jit
def product(a, b, c, o, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    where = m[:, None] * N + n[None, :]
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    r = tl.dot(x, y, tl.load(c + where), input_precision=PRECISION, out_dtype=o.dtype.element_ty)
    tl.store(o + where, r)


PRODUCTS = [
    (torch.float32, torch.float32, "ieee"), (torch.float32, torch.float32, "tf32"),
    (torch.float32, torch.float32, "tf32x3"), (torch.float32, torch.float32, "bf16x3"),
    (torch.float32, torch.float32, "bf16x6"), (torch.float64, torch.float64, "ieee"),
    (torch.float16, torch.float32, "tf32"), (torch.float16, torch.float16, "tf32"),
    (torch.bfloat16, torch.float32, "tf32"), (torch.float8_e4m3fn, torch.float32, "tf32"),
    (torch.float8_e5m2, torch.float32, "tf32"), (torch.int8, torch.int32, "tf32"),
]  # fmt: skip


@pytest.mark.parametrize(("operand", "result", "precision"), PRODUCTS, ids=str)
def test_dot_of_small_integers_is_exact(operand, result, precision):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, s, generator=g) for s in ((M, K), (K, N)))
    c = torch.randint(-9, 9, (M, N), generator=g)
    o = torch.zeros(M, N, dtype=result)
    with ttir.execute() as run:
        product[(1,)](a.to(operand), b.to(operand), c.to(result), o, precision, M, N, K)
    assert run.incidents == []
    assert torch.equal(o.double(), (a @ b + c).double())


@triton.jit
def scaled(
    a, sa, b, sb, o, LEFT: tl.constexpr, RIGHT: tl.constexpr, ALONG_K: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    pa: tl.constexpr = 2 if LEFT == "e2m1" else 1
    pb: tl.constexpr = 2 if RIGHT == "e2m1" else 1
    bk: tl.constexpr = K // pb if ALONG_K else K
    bn: tl.constexpr = N if ALONG_K else N // pb
    m, n, g = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    x = tl.load(a + m[:, None] * (K // pa) + tl.arange(0, K // pa)[None, :])
    y = tl.load(b + tl.arange(0, bk)[:, None] * bn + tl.arange(0, bn)[None, :])
    left = None
    if sa is not None:
        left = tl.load(sa + m[:, None] * (K // 32) + g[None, :])
    right = None
    if sb is not None:
        right = tl.load(sb + n[:, None] * (K // 32) + g[None, :])
    r = tl.dot_scaled(x, left, LEFT, y, right, RIGHT, rhs_k_pack=ALONG_K)
    tl.store(o + m[:, None] * N + n[None, :], r)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16,
         "fp16": torch.float16}  # fmt: skip


def operand(kind, shape, axis):
    """Small numbers in a format, and what they are; fp4 is packed along `axis`, low half first."""
    g = torch.Generator().manual_seed(len(kind) + shape[0])
    if kind != "e2m1":
        x = torch.randint(-4, 5, shape, generator=g).to(TORCH[kind])
        return (x.view(torch.uint8) if x.element_size() == 1 else x), x.double()
    codes = torch.randint(0, 16, shape, generator=g, dtype=torch.uint8)
    low, high = codes.unflatten(axis, (-1, 2)).unbind(axis + 1)
    return (low | high << 4).contiguous(), E2M1[codes.long()].double()


@pytest.mark.parametrize("along_k", [True, False], ids=["packed along k", "packed along n"])
@pytest.mark.parametrize("sides", ["both", "left", "right"])
@pytest.mark.parametrize(
    ("left", "right"),
    [("e2m1", "e2m1"), ("e4m3", "e2m1"), ("e5m2", "e4m3"), ("bf16", "e4m3"), ("e2m1", "bf16"),
     ("fp16", "e2m1"), ("e5m2", "fp16")],
)  # fmt: skip
def test_dot_scaled(left, right, sides, along_k):
    if not along_k and right != "e2m1":
        pytest.skip("only fp4 is packed")
    a, x = operand(left, (M, K), 1)
    b, y = operand(right, (K, N), 0 if along_k else 1)
    g = torch.Generator().manual_seed(5)
    sa, sb = (torch.randint(125, 130, (s, K // 32), generator=g, dtype=torch.uint8) for s in (M, N))
    if left not in ("bf16", "fp16") and sides != "right":
        x = x * 2.0 ** (sa.double() - 127).repeat_interleave(32, 1)
    else:
        sa = None
    if right not in ("bf16", "fp16") and sides != "left":
        y = y * 2.0 ** (sb.double() - 127).repeat_interleave(32, 1).T
    else:
        sb = None
    o = torch.zeros(M, N)
    with ttir.execute() as run:
        scaled[(1,)](a, sa, b, sb, o, left, right, along_k, M, N, K)
    assert run.incidents == []
    assert torch.equal(o.double(), x @ y)


def test_a_scale_of_255_is_nan():
    a, _ = operand("e4m3", (M, K), 1)
    b, _ = operand("e4m3", (K, N), 0)
    sa, sb = torch.full((M, 2), 127, dtype=torch.uint8), torch.full((N, 2), 127, dtype=torch.uint8)
    sa[3, 1] = 255
    o = torch.zeros(M, N)
    with ttir.execute():
        scaled[(1,)](a, sa, b, sb, o, "e4m3", "e4m3", True, M, N, K)
    assert (o.isnan() == (torch.arange(M) == 3)[:, None]).all()
