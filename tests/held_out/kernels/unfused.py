"""Attention that is not fused: scores in memory, a softmax of whole rows, products by one kernel.

The backward pass makes P and dS in memory as well; dq, dk and dv are products of the same kernel,
which sums over the members of a group where heads are shared. Defects are planted in it.
"""

import torch
import triton
import triton.language as tl

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs

TILE = 32
_INTS = (
    "a_b", "a_h", "a_i", "a_j", "b_b", "b_h", "b_i", "b_j", "c_b", "c_h", "c_i", "c_j",
    "heads_a", "heads_b", "heads", "rows", "columns", "inner", "members", "pitch", "n_q", "n_k",
)  # fmt: skip


@triton.jit(do_not_specialize=_INTS)
def product_kernel(
    a_ptr, b_ptr, c_ptr, a_b, a_h, a_i, a_j, b_b, b_h, b_i, b_j, c_b, c_h, c_i, c_j,
    heads_a, heads_b, heads, rows, columns, inner, members, factor,
    T: tl.constexpr, CAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C = factor * the sum over members of A B; heads are shared where there are fewer."""
    sequence = (tl.program_id(2) // heads).to(tl.int64)
    head = (tl.program_id(2) % heads).to(tl.int64)
    i = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    j = (tl.program_id(1) * T + tl.arange(0, T)).to(tl.int64)
    total = tl.zeros([T, T], tl.float32)
    for member in range(members):
        at_a = head * heads_a // heads + member
        at_b = head * heads_b // heads + member % tl.maximum(heads_b // heads, 1)
        for start in range(0, inner, T):
            x = (start + tl.arange(0, T)).to(tl.int64)
            a = tl.load(
                a_ptr + sequence * a_b + at_a * a_h + i[:, None] * a_i + x[None, :] * a_j,
                mask=(i[:, None] < rows) & (x[None, :] < inner), other=0.0,
            )  # fmt: skip
            b = tl.load(
                b_ptr + sequence * b_b + at_b * b_h + x[:, None] * b_i + j[None, :] * b_j,
                mask=(x[:, None] < inner) & (j[None, :] < columns), other=0.0,
            )  # fmt: skip
            if CAST:
                a = a.to(b.dtype)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    total = total * factor
    tl.store(
        c_ptr + sequence * c_b + head * c_h + i[:, None] * c_i + j[None, :] * c_j,
        total.to(c_ptr.dtype.element_ty),
        mask=(i[:, None] < rows) & (j[None, :] < columns),
    )  # fmt: skip


@triton.jit(do_not_specialize=_INTS)
def softmax_kernel(s_ptr, lse_ptr, n_q, n_k, pitch, CAUSAL: tl.constexpr, W: tl.constexpr):
    """Scores of one row give way to its weights."""
    line = tl.program_id(0).to(tl.int64)
    key = tl.arange(0, W)
    sees = key < n_k
    if CAUSAL:
        sees = sees & (key <= line % n_q + n_k - n_q)
    s = tl.load(s_ptr + line * pitch + key, mask=sees, other=float("-inf"))
    top = tl.max(s, 0)
    level = tl.where(top == float("-inf"), 0.0, top)
    e = tl.exp(s - level)
    mass = tl.sum(e, 0)
    some = tl.where(mass == 0.0, 1.0, mass)
    tl.store(s_ptr + line * pitch + key, e / some, mask=key < pitch)
    tl.store(lse_ptr + line, top + tl.log(some))


@triton.jit(do_not_specialize=_INTS)
def slope_kernel(
    s_ptr, dp_ptr, lse_ptr, o_ptr, do_ptr, c_b, c_h, c_i, c_j, a_b, a_h, a_i, a_j,
    heads, n_q, n_k, pitch, columns, factor,
    CAUSAL: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Scores of one row give way to its weights, dP to dS."""
    line = tl.program_id(0).to(tl.int64)
    row, head, sequence = line % n_q, line // n_q % heads, line // n_q // heads
    d = tl.arange(0, D).to(tl.int64)
    o = tl.load(
        o_ptr + sequence * c_b + head * c_h + row * c_i + d * c_j, mask=d < columns, other=0.0
    )
    do = tl.load(
        do_ptr + sequence * a_b + head * a_h + row * a_i + d * a_j, mask=d < columns, other=0.0
    )
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 0)
    key = tl.arange(0, W)
    sees = key < n_k
    if CAUSAL:
        sees = sees & (key <= row + n_k - n_q)
    lse = tl.load(lse_ptr + line)
    sees = sees & (lse > float("-inf"))
    s = tl.load(s_ptr + line * pitch + key, mask=sees, other=float("-inf"))
    p = tl.where(sees, tl.exp(s - lse), 0.0)
    dp = tl.load(dp_ptr + line * pitch + key, mask=sees, other=0.0)
    ds = p * (dp - delta) * factor
    tl.store(s_ptr + line * pitch + key, p, mask=key < pitch)
    tl.store(dp_ptr + line * pitch + key, ds, mask=key < pitch)


def _multiply(problem, a, b, c, *, factor=1.0, members=1, cast=False):
    """C = A B of each sequence and head of C."""
    batch, heads, rows, columns = c.shape
    if c.numel():
        grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE), batch * heads)
        product_kernel[grid](
            a, b, c, *a.stride(), *b.stride(), *c.stride(), a.shape[1], b.shape[1], heads,
            rows, columns, a.shape[3], members, factor,
            T=TILE, CAST=cast, PRECISION=problem.dot_precision,
        )  # fmt: skip
    return c


def _scores(problem, a, b, factor):
    """A B^T, in rows that are as long as whole tiles."""
    pitch = triton.cdiv(problem.seqlen_k, TILE) * TILE
    shape = (problem.batch, problem.heads_q, problem.seqlen_q, pitch)
    whole = torch.empty(shape, dtype=torch.float32, device=a.device)
    _multiply(problem, a, b.transpose(2, 3), whole[..., : problem.seqlen_k], factor=factor)
    return whole


def _sizes(problem):
    return {
        "CAUSAL": problem.mask.causal,
        "W": max(TILE, triton.next_power_of_2(problem.seqlen_k)),
    }


def forward(problem, q, k, v):
    o = torch.zeros(problem.shape_o, dtype=q.dtype, device=q.device)
    lse = torch.full(problem.shape_lse, -torch.inf, dtype=torch.float32, device=q.device)
    if not (o.numel() and problem.seqlen_k):
        return Outputs(o, lse)
    s = _scores(problem, q, k, problem.scale)
    softmax_kernel[(lse.numel(),)](
        s, lse, problem.seqlen_q, problem.seqlen_k, s.shape[3], **_sizes(problem)
    )
    _multiply(problem, s[..., : problem.seqlen_k], v, o, cast=True)
    return Outputs(o, lse)


def backward(problem, q, k, v, outputs, do):
    dq, dk, dv = (
        torch.zeros(shape, dtype=q.dtype, device=q.device)
        for shape in (problem.shape_q, problem.shape_k, problem.shape_v)
    )
    if not (dq.numel() and dk.numel()):
        return Grads(dq, dk, dv)
    p, ds = _scores(problem, q, k, problem.scale), _scores(problem, do, v, 1.0)
    o = outputs.o
    slope_kernel[(outputs.lse.numel(),)](
        p, ds, outputs.lse, o, do, *o.stride(), *do.stride(), problem.heads_q,
        problem.seqlen_q, problem.seqlen_k, p.shape[3], problem.head_dim_v, problem.scale,
        D=triton.next_power_of_2(problem.head_dim_v), **_sizes(problem),
    )  # fmt: skip
    p, ds = (x[..., : problem.seqlen_k] for x in (p, ds))
    _multiply(problem, ds, k, dq, cast=True)
    _multiply(problem, ds.transpose(2, 3), q, dk, members=problem.group, cast=True)
    _multiply(problem, p.transpose(2, 3), do, dv, members=problem.group, cast=True)
    return Grads(dq, dk, dv)


attention = Kernel(
    name="unfused",
    forward=forward,
    backward=backward,
    capabilities=Capabilities(
        head_dims=range(1, 129),
        head_dims_v=range(1, 129),
        alignments=("bottom-right",),
        int64_offsets=False,
    ),
    arithmetic=Arithmetic(p_normalised=True, ds_scale="before"),
)
