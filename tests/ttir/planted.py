"""Small attention kernels, forward and backward, with one fault planted at a time.

FAULT names the mistake; "" is right. A mistake sits on the line that ends in its name.
"""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803, C901, E741, PLR0912, PLR0915

import triton
import triton.language as tl


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, work_ptr, count_ptr,
    heads, n, qh, qn, kh, kn, vh, vn, oh, on, far,
    FAULT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, start = tl.program_id(1), tl.program_id(0) * BLOCK
    row, column = start + tl.arange(0, BLOCK), tl.arange(0, D)
    inside = row < n
    flat = head * n + row < heads * n
    if FAULT == "assume":
        tl.assume(head < 1)  # assume
    if FAULT == "max_contiguous":
        swapped = column ^ column // 2 % 2 ^ column % 2 * 3  # max_contiguous
        column = tl.max_contiguous(swapped, D)
    at = q_ptr + head * qh + row[:, None] * qn + column[None, :]
    if FAULT == "multiple_of":
        at += tl.multiple_of(head * 3, 16) - head * 3  # multiple_of
    if FAULT == "flat-read":
        q = tl.load(at, mask=flat[:, None], other=0.0)  # flat-read
    else:
        q = tl.load(at, mask=inside[:, None], other=0.0)
    if FAULT == "overflow":
        q += tl.load(q_ptr + (head + 2) * far)  # overflow
    if FAULT == "unwritten-read":
        q += tl.load(work_ptr + head * n + row, mask=inside, other=0.0)[:, None]  # unwritten-read
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for first in range(0, n, BLOCK):
        key = first + tl.arange(0, BLOCK)
        k_at = k_ptr + head * kh + key[:, None] * kn + column[None, :]
        if FAULT == "unmasked-read":
            k = tl.load(k_at)  # unmasked-read
        elif FAULT == "before-start":
            k = tl.load(k_at - 2 * kn, mask=(key < n)[:, None], other=0.0)  # before-start
        elif FAULT == "descriptor":
            base = k_ptr + head * kh + 1
            rows = tl.make_tensor_descriptor(base, [n, D], [kn, 1], [BLOCK, D])  # descriptor
            k = rows.load([first, 0])
        else:
            k = tl.load(k_at, mask=(key < n)[:, None], other=0.0)
        v_at = v_ptr + head * vh + key[:, None] * vn + column[None, :]
        v = tl.load(v_at, mask=(key < n)[:, None], other=0.0)
        visible = (key < n)[None, :] & (row < n)[:, None]
        if FAULT == "nan-born":
            visible = visible & (key[None, :] != 0) & (row != 3)[:, None]
        s = tl.where(visible, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        base = new if FAULT == "nan-born" else tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(s - base[:, None])  # nan-born
        l = l * tl.exp(m - base) + tl.sum(p, 1)
        acc = acc * tl.exp(m - base)[:, None] + tl.dot(p, v, input_precision="ieee")
        m = new
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    o_at = o_ptr + head * oh + row[:, None] * on + column[None, :]
    if FAULT == "flat-write":
        tl.store(o_at, acc, mask=flat[:, None])  # flat-write
    elif FAULT == "unmasked-write":
        tl.store(o_at, acc, mask=(column < D)[None, :])  # unmasked-write
    elif FAULT == "unwritten-output":
        tl.store(o_at, acc, mask=inside[:, None] & (column < D - 1)[None, :])
    else:
        tl.store(o_at, acc, mask=inside[:, None])
    if FAULT == "race-read":
        other = o_ptr + head * oh + (row + BLOCK) % n * on
        l += tl.load(other, mask=inside, other=0.0)  # race-read
    if FAULT == "read-back":
        back = o_ptr + head * oh + row[None, :] * on + column[:, None]
        l += tl.sum(tl.load(back, mask=inside[None, :], other=0.0), 0)  # read-back
    if FAULT == "ticket":
        ticket = tl.atomic_add(count_ptr, 1)  # ticket
        l += ticket
    if FAULT == "relaxed":
        tl.atomic_add(count_ptr, 1, sem="relaxed")
        l += tl.load(count_ptr)  # relaxed
    if FAULT == "race-write":
        tl.store(lse_ptr + row, m + tl.log(l), mask=inside)  # race-write
    else:
        tl.store(lse_ptr + head * n + row, m + tl.log(l), mask=inside)


@triton.jit
def backward(
    q_ptr, k_ptr, do_ptr, dk_ptr, dq_ptr, delta_ptr, count_ptr,
    heads, n, qh, qn, kh, kn, oh, on, dh, dn, far,
    FAULT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, start = tl.program_id(1), tl.program_id(0) * BLOCK
    key, column = start + tl.arange(0, BLOCK), tl.arange(0, D)
    within = key < n
    flat = head * n + key < heads * n
    if FAULT == "assume":
        tl.assume(start == 0)  # backward: assume
    if FAULT == "max_contiguous":
        swapped = column ^ column // 2 % 2 ^ column % 2 * 3  # backward: max_contiguous
        column = tl.max_contiguous(swapped, D)
    k_at = k_ptr + head * kh + key[:, None] * kn + column[None, :]
    if FAULT == "flat-read":
        k = tl.load(k_at, mask=flat[:, None], other=0.0)  # backward: flat-read
    elif FAULT == "descriptor":
        base = k_ptr + head * kh + 1
        rows = tl.make_tensor_descriptor(base, [n, D], [kn, 1], [BLOCK, D])  # backward: descriptor
        k = rows.load([start, 0])
    else:
        k = tl.load(k_at, mask=within[:, None], other=0.0)
    if FAULT == "multiple_of":
        k += tl.load(tl.multiple_of(k_ptr + head * kh + 1, 16))  # backward: multiple_of
    dk = tl.zeros([BLOCK, D], tl.float32)
    for first in range(0, n, BLOCK):
        row = first + tl.arange(0, BLOCK)
        q_at = q_ptr + head * qh + row[:, None] * qn + column[None, :]
        q = tl.load(q_at, mask=(row < n)[:, None], other=0.0)
        do_at = do_ptr + head * oh + row[:, None] * on + column[None, :]
        if FAULT == "unmasked-read":
            do = tl.load(do_at)  # backward: unmasked-read
        elif FAULT == "before-start":
            do_at -= 2 * on
            do = tl.load(do_at, mask=(row < n)[:, None], other=0.0)  # backward: before-start
        else:
            do = tl.load(do_at, mask=(row < n)[:, None], other=0.0)
        delta = tl.load(delta_ptr + head * n + row, mask=row < n, other=0.0)  # backward: delta
        ds = tl.dot(do, tl.trans(k), input_precision="ieee") - delta[:, None]
        if FAULT == "nan-born":
            ds = tl.sqrt(ds - 1e9)  # backward: nan-born
        dk += tl.dot(tl.trans(ds), q, input_precision="ieee")
        dq_at = dq_ptr + head * qh + row[:, None] * qn + column[None, :]
        dq = tl.dot(ds, k, input_precision="ieee")
        if FAULT == "race-update":
            old = tl.load(dq_at, mask=(row < n)[:, None], other=0.0)  # backward: race-update, read
            tl.store(dq_at, old + dq, mask=(row < n)[:, None])  # backward: race-update, write
        elif FAULT == "overflow":
            dq_at += (head + 2) * far  # backward: overflow
            tl.atomic_add(dq_at, dq, mask=(row < n)[:, None])
        else:
            tl.atomic_add(dq_at, dq, mask=(row < n)[:, None])
    dk_at = dk_ptr + head * dh + key[:, None] * dn + column[None, :]
    if FAULT == "flat-write":
        tl.store(dk_at, dk, mask=flat[:, None])  # backward: flat-write
    elif FAULT == "unmasked-write":
        tl.store(dk_at, dk)  # backward: unmasked-write
    elif FAULT == "race-write":
        tl.store(dk_at - head * dh, dk, mask=within[:, None])  # backward: race-write
    elif FAULT == "unwritten-output":
        tl.store(dk_at, dk, mask=within[:, None] & (column < D - 1)[None, :])
    else:
        tl.store(dk_at, dk, mask=within[:, None])
    if FAULT == "read-back":
        row = tl.load(dk_ptr + head * dh + start * dn + column)  # backward: read-back
        tl.store(count_ptr + 1 + head * D + column, row, mask=start + column < 0)
    if FAULT == "race-read":
        other = tl.load(dk_ptr + head * dh + (key + BLOCK) % n * dn)  # backward: race-read
        tl.store(count_ptr + 1 + head * D + column, other, mask=key < 0)
    if FAULT == "relaxed":
        tl.atomic_add(count_ptr, 1.0, sem="relaxed")
        count = tl.load(count_ptr)  # backward: relaxed
        tl.store(count_ptr + 1 + head * D + start // BLOCK, count)
    if FAULT == "ticket":
        tl.store(count_ptr + 1 + head, tl.atomic_add(count_ptr, 1.0))  # backward: ticket
