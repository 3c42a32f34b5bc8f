"""Attention by tensor descriptors; its backward pass is one kernel that goes over rows backwards.

Causal masks, windows and a softcap. A backward program holds a block of keys of one key head and
all of its queries; delta is computed where it is used, dq is added up. Defects are planted in it.
"""

import torch
import triton
import triton.language as tl

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs

_INTS = (
    "qb", "qh", "qn", "kb", "kh", "kn", "vb", "vh", "vn", "ob", "oh", "on", "gb", "gh", "gn",
    "heads", "heads_kv", "group", "rows", "keys", "left", "right", "shift",
)  # fmt: skip


@triton.jit
def _view(ptr, length, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    return tl.make_tensor_descriptor(
        ptr, shape=[length, WIDTH], strides=[stride.to(tl.int64), 1], block_shape=[BLOCK, WIDTH]
    )


@triton.jit
def _capped(x, cap):
    e = tl.exp(-2.0 * tl.abs(x / cap))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _sees(at_row, at_key, rows, keys, shift, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    far = at_key[None, :] - at_row[:, None] - shift
    sees = (at_row[:, None] < rows) & (at_key[None, :] < keys)
    if LEFT:
        sees = sees & (far >= -left)
    if RIGHT:
        sees = sees & (far <= right)
    return sees


@triton.jit(do_not_specialize=_INTS)
def attend(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    heads, group, rows, keys, shift, left, right, scale, cap,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    h = (tl.program_id(0) % heads).to(tl.int64)
    b = (tl.program_id(0) // heads).to(tl.int64)
    g = h // group
    q_view = _view(q_ptr + b * qb + h * qh, rows, qn, WIDTH, ROWS)
    k_view = _view(k_ptr + b * kb + g * kh, keys, kn, WIDTH, KEYS)
    v_view = _view(v_ptr + b * vb + g * vh, keys, vn, WIDTH, KEYS)
    o_view = _view(o_ptr + b * ob + h * oh, rows, on, WIDTH, ROWS)
    q = q_view.load([tile * ROWS, 0])
    at_row = tile * ROWS + tl.arange(0, ROWS)
    begin = 0
    if LEFT:
        begin = tl.maximum(0, tile * ROWS + shift - left) // KEYS
    end = tl.cdiv(keys, KEYS)
    if RIGHT:
        last = tl.minimum(rows, tile * ROWS + ROWS) - 1
        end = tl.minimum(end, tl.cdiv(tl.maximum(0, last + shift + right + 1), KEYS))
    m = tl.full([ROWS], -float("inf"), tl.float32)
    z = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, WIDTH], tl.float32)
    block = begin
    while block < end:
        at_key = block * KEYS + tl.arange(0, KEYS)
        k = k_view.load([block * KEYS, 0])
        s = tl.dot(q, k.T, input_precision=PRECISION) * scale
        if CAP:
            s = cap * _capped(s, cap)
        s = tl.where(
            _sees(at_row, at_key, rows, keys, shift, left, right, LEFT, RIGHT), s, -float("inf")
        )
        new = tl.maximum(m, tl.max(s, 1))
        pivot = tl.where(new == -float("inf"), 0.0, new)
        w = tl.exp(s - pivot[:, None])
        fade = tl.exp(m - pivot)
        z = z * fade + tl.sum(w, 1)
        v = v_view.load([block * KEYS, 0])
        y = y * fade[:, None]
        y = tl.dot(w.to(v.dtype), v, y, input_precision=PRECISION)
        m = new
        block += 1
    z = tl.where(z == 0.0, 1.0, z)
    o_view.store([tile * ROWS, 0], (y / z[:, None]).to(o_ptr.dtype.element_ty))
    tl.store(lse_ptr + tl.program_id(0) * rows + at_row, m + tl.log(z), mask=at_row < rows)


@triton.jit(do_not_specialize=_INTS)
def differentiate(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, dq_ptr, dk_ptr, dv_ptr,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, gb, gh, gn,
    heads, heads_kv, group, rows, keys, shift, left, right, scale, cap,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    g = (tl.program_id(0) % heads_kv).to(tl.int64)
    b = (tl.program_id(0) // heads_kv).to(tl.int64)
    k_view = _view(k_ptr + b * kb + g * kh, keys, kn, WIDTH, KEYS)
    v_view = _view(v_ptr + b * vb + g * vh, keys, vn, WIDTH, KEYS)
    k = k_view.load([tile * KEYS, 0])
    v = v_view.load([tile * KEYS, 0])
    at_key = tile * KEYS + tl.arange(0, KEYS)
    column = tl.arange(0, WIDTH)
    first = 0
    if RIGHT:
        first = tl.maximum(0, tile * KEYS - shift - right) // ROWS
    final = tl.cdiv(rows, ROWS)
    if LEFT:
        seen_last = tl.minimum(keys, tile * KEYS + KEYS) - 1
        final = tl.minimum(final, tl.cdiv(tl.maximum(0, seen_last - shift + left + 1), ROWS))
    gk = tl.zeros([KEYS, WIDTH], tl.float32)
    gv = tl.zeros([KEYS, WIDTH], tl.float32)
    for step in range(group * (final - first)):
        member = step // (final - first)
        block = final - 1 - step % (final - first)
        h = g * group + member
        q_view = _view(q_ptr + b * qb + h * qh, rows, qn, WIDTH, ROWS)
        o_view = _view(o_ptr + b * ob + h * oh, rows, on, WIDTH, ROWS)
        do_view = _view(do_ptr + b * gb + h * gh, rows, gn, WIDTH, ROWS)
        q = q_view.load([block * ROWS, 0])
        o = o_view.load([block * ROWS, 0])
        do = do_view.load([block * ROWS, 0])
        at_row = block * ROWS + tl.arange(0, ROWS)
        row = (b * heads + h) * rows + at_row
        lse = tl.load(lse_ptr + row, mask=at_row < rows, other=0.0)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        s = tl.dot(q, k.T, input_precision=PRECISION) * scale
        slope = tl.full([ROWS, KEYS], 1.0, tl.float32)
        if CAP:
            t = _capped(s, cap)
            s = cap * t
            slope = 1.0 - t * t
        sees = _sees(at_row, at_key, rows, keys, shift, left, right, LEFT, RIGHT)
        sees = sees & (lse[:, None] > -float("inf"))
        p = tl.where(sees, tl.exp(s - lse[:, None]), 0.0)
        gv = tl.dot(tl.trans(p).to(do.dtype), do, gv, input_precision=PRECISION)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        ds = (p * (dp - delta[:, None]) * slope).to(q.dtype)
        gk = tl.dot(tl.trans(ds), q, gk, input_precision=PRECISION)
        gq = tl.dot(ds, k, input_precision=PRECISION) * scale
        tl.atomic_add(
            dq_ptr + row[:, None] * WIDTH + column[None, :], gq, mask=at_row[:, None] < rows
        )
    place = (tl.program_id(0).to(tl.int64) * keys + at_key)[:, None] * WIDTH + column[None, :]
    gk = gk * scale
    tl.store(dk_ptr + place, gk.to(dk_ptr.dtype.element_ty), mask=at_key[:, None] < keys)
    tl.store(dv_ptr + place, gv.to(dv_ptr.dtype.element_ty), mask=at_key[:, None] < keys)


def _sizes(problem):
    mask = problem.mask
    shift = problem.seqlen_k - problem.seqlen_q if mask.alignment == "bottom-right" else 0
    sizes = (
        problem.group, problem.seqlen_q, problem.seqlen_k, shift,
        mask.window_left or 0, 0 if mask.causal else mask.window_right or 0,
        problem.scale, problem.softcap,
    )  # fmt: skip
    flags = {
        "WIDTH": problem.head_dim, "ROWS": 32, "KEYS": 16,
        "LEFT": mask.window_left is not None,
        "RIGHT": mask.causal or mask.window_right is not None,
        "CAP": problem.softcap > 0, "PRECISION": problem.dot_precision,
    }  # fmt: skip
    return sizes, flags


def _allocate_on(device):
    """Memory for the descriptors that a kernel makes; Triton asks for it at each launch."""
    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))


def forward(problem, q, k, v):
    _allocate_on(q.device)
    o = torch.empty(problem.shape_o, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    sizes, flags = _sizes(problem)
    if o.numel():
        attend[(problem.batch * problem.heads_q, triton.cdiv(problem.seqlen_q, 32))](
            q, k, v, o, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3],
            problem.heads_q, *sizes, **flags,
        )  # fmt: skip
    return Outputs(o, lse)


def backward(problem, q, k, v, outputs, do):
    _allocate_on(q.device)
    o, lse = outputs.o, outputs.lse
    dq = torch.zeros(problem.shape_q, dtype=torch.float32, device=q.device)
    dk = torch.empty(problem.shape_k, dtype=q.dtype, device=q.device)
    dv = torch.empty(problem.shape_v, dtype=q.dtype, device=q.device)
    sizes, flags = _sizes(problem)
    if dk.numel():
        differentiate[(problem.batch * problem.heads_kv, triton.cdiv(problem.seqlen_k, 16))](
            q, k, v, o, do, lse, dq, dk, dv, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *o.stride()[:3], *do.stride()[:3], problem.heads_q, problem.heads_kv, *sizes, **flags,
        )  # fmt: skip
    return Grads(dq.to(q.dtype), dk, dv)


attention = Kernel(
    name="described",
    forward=forward,
    backward=backward,
    capabilities=Capabilities(head_dims=(16, 32, 64), window=True, softcap=True, layouts=False),
    arithmetic=Arithmetic(ds_scale="after", dq_atomics=True, block_n=16),
)
