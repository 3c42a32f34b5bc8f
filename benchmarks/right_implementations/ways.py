"""Forward passes in Triton that go about it in other ways; `ways_launch` launches them.

One program has a block of queries of one head, unless it says otherwise. In all of them natural
logits are in float32, and `shift` is the diagonal of a causal mask, beyond all keys without one.
"""

import triton
import triton.language as tl

__all__ = ["WAYS", "merge_tree", "transposed"]

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(ptr, stride, stride_d, rows, count, D: tl.constexpr, PAD: tl.constexpr):
    """A tile of rows; those outside of the sequence are 0."""
    dims = tl.arange(0, PAD)
    inside = (rows >= 0)[:, None] & (rows < count)[:, None] & (dims < D)[None, :]
    at = rows[:, None].to(tl.int64) * stride + dims[None, :].to(tl.int64) * stride_d
    return tl.load(ptr + at, mask=inside, other=0.0)


@triton.jit
def _scores(q, k, rows, cols, keys, shift, scale, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    seen = (cols >= 0)[None, :] & (cols < keys)[None, :] & (cols[None, :] <= rows[:, None] + shift)
    return tl.where(seen, s, -float("inf"))


@triton.jit
def _finite(m):
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def _cubic(x):
    """2^x, x <= 0, by a polynomial on [0, 1) that is 1 at 0: about 2^-13 off."""
    x = tl.maximum(x, -126.0)
    whole = tl.floor(x)
    f = x - whole
    value = 1.0 + f * (0.6955685 + f * (0.2260670 + f * 0.0782456))
    bits = (whole.to(tl.int32) + 127) << 23
    return tl.where(x <= -126.0, 0.0, value * bits.to(tl.float32, bitcast=True))


@triton.jit
def _step(s, v, m, total, acc, PRECISION: tl.constexpr, CUBIC: tl.constexpr):
    """The usual step of an online softmax."""
    new = tl.maximum(m, tl.max(s, 1))
    safe = _finite(new)
    if CUBIC:
        p, alpha = _cubic((s - safe[:, None]) * _LOG2E), _cubic((m - safe) * _LOG2E)
    else:
        p, alpha = tl.exp(s - safe[:, None]), tl.exp(m - safe)
    products = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return new, total * alpha + tl.sum(p, 1), acc * alpha[:, None] + products


@triton.jit
def _merged(m, total, acc, m2, total2, acc2):
    new = tl.maximum(m, m2)
    left, right = tl.exp(m - _finite(new)), tl.exp(m2 - _finite(new))
    return new, total * left + total2 * right, acc * left[:, None] + acc2 * right[:, None]


@triton.jit
def _ended(ahead, keys, shift, last, BLOCK: tl.constexpr):
    """Where the loop over keys ends: at the last that a row sees, in whole blocks."""
    end = tl.minimum(keys, tl.maximum(last + shift + 1, 0))
    return ahead + tl.cdiv(end - ahead, BLOCK) * BLOCK


@triton.jit
def _finish(o_ptr, lse_ptr, rows, queries, m, total, acc, DV: tl.constexpr, PADV: tl.constexpr):
    """Store o, contiguous, and lse."""
    empty = total == 0.0
    o = acc / tl.where(empty, 1.0, total)[:, None]
    dims = tl.arange(0, PADV)
    inside = (rows < queries)[:, None] & (dims < DV)[None, :]
    at = rows[:, None].to(tl.int64) * DV + dims[None, :]
    tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=inside)
    lse = tl.where(empty, -float("inf"), m + tl.log(tl.where(empty, 1.0, total)))
    tl.store(lse_ptr + rows, lse, mask=rows < queries)


@triton.jit
def attend(  # noqa: C901, PLR0912, PLR0915 - several kernels, of which one is compiled at a time
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    scale, queries, keys, shift, heads, group, tiles, parts,
    D: tl.constexpr, PAD: tl.constexpr, DV: tl.constexpr, PADV: tl.constexpr, WAY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Every way but the transposed one; "split" stores m, total and acc of one part of the keys."""
    last_tile = tiles
    first = tl.program_id(0)
    step = tl.num_programs(0)
    for turn in range(first, last_tile, step):  # one turn, but for the persistent way
        tile = tiles - 1 - turn if WAY == "persistent" else turn
        blocks = tl.cdiv(queries, BLOCK_M)
        head, block = tile // blocks, tile % blocks
        b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
        kv = h // group
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        q = _rows(q_ptr + b * q_b + h * q_h, q_s, q_d, rows, queries, D, PAD)
        k_head, v_head = k_ptr + b * k_b + kv * k_h, v_ptr + b * v_b + kv * v_h
        m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, PADV), tl.float32)
        begin = 0
        if WAY == "ragged":  # blocks begin elsewhere in every tile
            begin = -((tile * 7) % BLOCK_N)
        end = _ended(begin, keys, shift, block * BLOCK_M + BLOCK_M - 1, BLOCK_N)
        part = tl.program_id(1)
        if WAY == "split":
            length = tl.cdiv(tl.cdiv(keys, parts), BLOCK_N) * BLOCK_N
            begin = part * length
            end = tl.minimum(end, begin + length)
        lanes = tl.arange(0, BLOCK_N)
        if WAY == "two passes":
            for start in range(begin, end, BLOCK_N):
                k = _rows(k_head, k_s, k_d, start + lanes, keys, D, PAD)
                s = _scores(q, k, rows, start + lanes, keys, shift, scale, PRECISION)
                m = tl.maximum(m, tl.max(s, 1))
        if WAY == "first block":
            k = _rows(k_head, k_s, k_d, begin + lanes, keys, D, PAD)
            m = tl.max(_scores(q, k, rows, begin + lanes, keys, shift, scale, PRECISION), 1)
        if WAY == "two accumulators":
            m2, total2, acc2 = m, total, acc
        for at in range(begin, end, BLOCK_N):
            start = end - BLOCK_N - at if WAY == "persistent" else at
            cols = start + lanes
            k = _rows(k_head, k_s, k_d, cols, keys, D, PAD)
            v = _rows(v_head, v_s, v_d, cols, keys, DV, PADV)
            s = _scores(q, k, rows, cols, keys, shift, scale, PRECISION)
            if WAY == "two passes":
                p = tl.exp(s - _finite(m)[:, None])
                total += tl.sum(p, 1)
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
            elif WAY == "lazy" or WAY == "first block":  # noqa: PLR1714 - Triton has no sets
                peak = tl.max(s, 1)
                grows = (m == -float("inf")) | (peak - m > 5.5)  # 2^8
                if tl.max(grows.to(tl.int32), 0) > 0:
                    new = tl.where(grows, tl.maximum(m, peak), m)
                    alpha = tl.where(grows, tl.exp(m - _finite(new)), 1.0)
                    m, total, acc = new, total * alpha, acc * alpha[:, None]
                p = tl.exp(s - _finite(m)[:, None])
                total += tl.sum(p, 1)
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
            elif WAY == "two accumulators":
                if (at // BLOCK_N) % 2 == 0:
                    m, total, acc = _step(s, v, m, total, acc, PRECISION, False)
                else:
                    m2, total2, acc2 = _step(s, v, m2, total2, acc2, PRECISION, False)
            else:
                m, total, acc = _step(s, v, m, total, acc, PRECISION, WAY == "cubic")
        if WAY == "two accumulators":
            m, total, acc = _merged(m, total, acc, m2, total2, acc2)
        if WAY == "split":
            at = (part * tiles // blocks + head).to(tl.int64) * queries
            dims = tl.arange(0, PADV)
            inside = (rows < queries)[:, None] & (dims < DV)[None, :]
            at_o = (at + rows[:, None]) * DV + dims[None, :]
            tl.store(o_ptr + at_o, acc, mask=inside)
            tl.store(lse_ptr + (at + rows) * 2, m, mask=rows < queries)
            tl.store(lse_ptr + (at + rows) * 2 + 1, total, mask=rows < queries)
        else:
            at = head.to(tl.int64) * queries
            _finish(o_ptr + at * DV, lse_ptr + at, rows, queries, m, total, acc, DV, PADV)


@triton.jit
def merge_tree(
    acc_ptr, sums_ptr, o_ptr, lse_ptr, queries, all_rows,
    DV: tl.constexpr, PADV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merge the four parts of the keys two by two, in registers."""
    head = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    m, total, acc = _part(acc_ptr, sums_ptr, head * queries, rows, queries, DV, PADV)
    at = all_rows + head * queries
    m1, total1, acc1 = _part(acc_ptr, sums_ptr, at, rows, queries, DV, PADV)
    m, total, acc = _merged(m, total, acc, m1, total1, acc1)
    m2, total2, acc2 = _part(acc_ptr, sums_ptr, at + all_rows, rows, queries, DV, PADV)
    m3, total3, acc3 = _part(acc_ptr, sums_ptr, at + 2 * all_rows, rows, queries, DV, PADV)
    m2, total2, acc2 = _merged(m2, total2, acc2, m3, total3, acc3)
    m, total, acc = _merged(m, total, acc, m2, total2, acc2)
    own = head * queries
    _finish(o_ptr + own * DV, lse_ptr + own, rows, queries, m, total, acc, DV, PADV)


@triton.jit
def _part(acc_ptr, sums_ptr, at, rows, queries, DV: tl.constexpr, PADV: tl.constexpr):
    dims = tl.arange(0, PADV)
    inside = (rows < queries)[:, None] & (dims < DV)[None, :]
    acc = tl.load(acc_ptr + (at + rows[:, None]) * DV + dims[None, :], mask=inside, other=0.0)
    known = rows < queries
    m = tl.load(sums_ptr + (at + rows) * 2, mask=known, other=-float("inf"))
    return m, tl.load(sums_ptr + (at + rows) * 2 + 1, mask=known, other=0.0), acc


@triton.jit
def transposed(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    scale, queries, keys, shift, heads, group,
    D: tl.constexpr, PAD: tl.constexpr, DV: tl.constexpr, PADV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys are rows of the tiles: K Q^T, V^T P; queries are their columns."""
    head = tl.program_id(0)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _rows(q_ptr + b * q_b + h * q_h, q_s, q_d, rows, queries, D, PAD)
    k_head, v_head = k_ptr + b * k_b + h // group * k_h, v_ptr + b * v_b + h // group * v_h
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((PADV, BLOCK_M), tl.float32)
    for start in range(0, keys, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = _rows(k_head, k_s, k_d, cols, keys, D, PAD)
        v = _rows(v_head, v_s, v_d, cols, keys, DV, PADV)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        seen = (cols < keys)[:, None] & (cols[:, None] <= rows[None, :] + shift)
        s = tl.where(seen, s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2((s - _finite(new)[None, :]) * _LOG2E)
        alpha = tl.exp2((m - _finite(new)) * _LOG2E)
        total = total * alpha + tl.sum(p, 0)
        products = tl.dot(tl.trans(v), p.to(v.dtype), input_precision=PRECISION)
        m, acc = new, acc * alpha[None, :] + products
    at = head.to(tl.int64) * queries
    _finish(o_ptr + at * DV, lse_ptr + at, rows, queries, m, total, tl.trans(acc), DV, PADV)


WAYS = (
    *("two passes", "lazy", "first block", "two accumulators", "ragged", "persistent"),
    *("split", "cubic"),
)
