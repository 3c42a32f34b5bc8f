"""The forward pass on Hopper: tiles of q, k and v by TMA, small programs, several on each SM.

Same function as forward.py, for what a model trains on most: fp16 or bf16, head dims of 64 to 256,
full, causal or within a window, sinks, no softcap and no other terms. `fits` says what is such.
q and k may be fp8 with a scale for each head; v is in 16 bits then too.

What makes it fast: tensor descriptors (no addresses in registers, reads past the end are zeros, so
no masked loads); P as exp2(s c - m c), one FMA and one exp2 an element; masks only in the blocks
on the edge; two to five programs on an SM, one's softmax under the others' products, since Triton
waits for each S before it goes on; steps that begin with a softmax, beside which their tiles come
and, at 96 columns, the P V of the step before goes on; causal programs in the order of their work,
the heads that run at a time few enough for the L2 to hold their keys.
"""

import functools

import triton
import triton.language as tl

from . import configs
from .descriptors import columns, describable, hopper, load_tile
from .hopper_attend import attend, scores_of
from .scores import LOG2E, key_range
from .terms import add_sink
from .tuned import Tuned

__all__ = ["fits", "forward"]

_HEAD_DIMS = {64: (64, 0), 80: (64, 16), 96: (64, 32), 128: (128, 0), 256: (256, 0)}
_LARGEST_SCALE = 2.0**20  # scale * log2(e) * score is finite in float32 for any fp16 q and k
_L2_SHARE = 6 << 20  # bytes of keys and values of heads that run at a time (docs/speed_forward.md)
_SHORTEST, _LONGEST = 512, 16384  # lengths that tables tell apart
_WIDEST = 128  # keys of a block, of any configuration
SMALLEST = tl.constexpr(2.0**-126)  # that is normal in float32
_FEATURES = ("SOFTCAP", "VARLEN", "SPARSE", "BIAS", "ALIBI", "DROPOUT")


@triton.jit
def _store(head, queries, seqlen_q, stride_om, column, head_dim, tile, COLUMNS: tl.constexpr):
    """Rows of o, from one column on."""
    columns = column + tl.arange(0, COLUMNS)
    pointers = head + queries.to(tl.int64)[:, None] * stride_om + columns[None, :]
    inside = (queries < seqlen_q)[:, None] & (columns < head_dim)[None, :]
    tl.store(pointers, tile.to(head.dtype.element_ty), mask=inside)


@triton.jit
def _head_scale(scale, batch, head, stride_batch, stride_head):
    """The scale of one head."""
    return tl.load(scale + batch * stride_batch + head * stride_head)


# Compiling again for a length or a number of heads that is 1 or a multiple of 16 buys nothing.
_RUNTIME = (
    "sequences", "heads_q", "group", "seqlen_q", "seqlen_k", "band_lo", "band_hi", "together",
    "seqlen_bucket", "scale_qb", "scale_qh", "scale_kb", "scale_kh", "scale_vb", "scale_vh",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME)
def hopper_forward_kernel(
    q, k, v, q_rest, k_rest, v_rest, o, lse, stride_ob, stride_oh, stride_om,
    sequences, heads_q, group, seqlen_q, seqlen_k, head_dim, band_lo, band_hi, together,
    softmax_scale, seqlen_bucket,  # noqa: ARG001 (the autotuner's)
    q_scale, k_scale, v_scale, scale_qb, scale_qh, scale_kb, scale_kh, scale_vb, scale_vh, sinks,
    BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    WHOLE: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_LOOP: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Write o and lse of BLOCK_M queries of one head.

    The tensors and numbers that need a word:
        q, k, v: Descriptors of (batch, heads, seqlen, head_dim), blocks (1, 1, rows, BLOCK_D);
            q_rest, k_rest, v_rest: of the same with blocks of TAIL_D columns, None without a tail.
        o: (batch, heads_q, seqlen_q, head_dim), head_dim contiguous.
        lse: (batch, heads_q, seqlen_q) float32, contiguous, natural logarithm.
        sequences: Batch times heads_q.
        band_lo: Query i sees key j when ``band_lo <= j - i <= band_hi``; read only under HAS_LO.
        band_hi: See band_lo; read only under HAS_HI.
        together: Heads whose programs are interleaved, under HAS_HI.
        softmax_scale: Above 0.
        q_scale, k_scale, v_scale: float32, under SCALED: a number a head, by strides of batch and
            head. Where q's times k's is below 0, o and lse are NaN.
        sinks: (heads_q,) float32, a logit without a key in every row's sum; or None.
        WHOLE: No key is hidden and blocks divide seqlen_k: no block needs a mask.
        ONE_LOOP: One loop over all keys asks of each block whether it needs a mask; else those
            that do have a loop of their own, filled and drained once more.
        ORDER: In which order a step over a block works.
            0: k is copied, scores, softmax, v is copied, P V.
            1: k and v are copied, scores, softmax, P V.
            2: softmax, v and the next k are there, P V, the next scores.
            3: softmax, v and the next k are there, the next scores, P V, which goes on beside the
            next softmax.

    Accumulates in float32; P is rounded to v's dtype before P V.
    """
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    if HAS_HI:  # the longest rows of some heads, the next longest, ...
        first_sequence = program // (together * blocks) * together
        heads = tl.minimum(together, sequences - first_sequence)
        turn = program - first_sequence * blocks
        sequence = first_sequence + turn % heads
        first_query = (blocks - 1 - turn // heads) * BLOCK_M
    else:
        sequence = program // blocks
        first_query = program % blocks * BLOCK_M
    batch = sequence // heads_q
    head_q = sequence % heads_q
    head_kv = head_q // group
    queries = first_query + tl.arange(0, BLOCK_M)
    q_tile, q_tail = load_tile(q, q_rest, batch, head_q, first_query, BLOCK_M, BLOCK_D, TAIL_D)
    begin, interior_end, end = key_range(
        first_query, seqlen_q, seqlen_k, 0, band_hi, False, HAS_HI, BLOCK_M, BLOCK_N
    )
    low = 0
    if HAS_LO:
        tl.static_assert(ONE_LOOP)
        begin = tl.maximum(first_query + band_lo, 0) // BLOCK_N * BLOCK_N
        low = first_query + BLOCK_M - 1 + band_lo

    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    acc_tail = tl.zeros((BLOCK_M, TAIL_D if TAIL_D > 0 else 16), dtype=tl.float32)
    scale = softmax_scale
    if SCALED:
        q_factor = _head_scale(q_scale, batch, head_q, scale_qb, scale_qh)
        factor = q_factor * _head_scale(k_scale, batch, head_kv, scale_kb, scale_kh)
        scale *= tl.where(factor < 0.0, float("nan"), factor)
        scale = tl.where(scale == 0.0, SMALLEST, scale)  # -inf times it is -inf
    scale_log2 = scale * LOG2E
    scores = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if ORDER >= 2:  # noqa: SIM102 (known when compiled)
        if begin < end:  # in a block of its own, so that its tiles' memory is free in the loop
            k_tile, k_tail = load_tile(k, k_rest, batch, head_kv, begin, BLOCK_N, BLOCK_D, TAIL_D)
            scores = scores_of(q_tile, q_tail, k_tile, k_tail, TAIL_D)
    if not ONE_LOOP or WHOLE:
        scores, m, l, acc, acc_tail = attend(  # noqa: E741
            q_tile, q_tail, k, v, k_rest, v_rest, batch, head_kv, low, begin, interior_end,
            interior_end, queries, seqlen_k, band_lo, band_hi, scale_log2, scores, m, l, acc,
            acc_tail, BLOCK_D, TAIL_D, HAS_LO, HAS_HI, False, BLOCK_N, None, ONE_LOOP, ORDER,
        )  # fmt: skip
        begin = interior_end
    if not WHOLE:
        STAGES: tl.constexpr = None if ONE_LOOP or ORDER >= 2 else 1
        scores, m, l, acc, acc_tail = attend(  # noqa: E741
            q_tile, q_tail, k, v, k_rest, v_rest, batch, head_kv, low, begin, interior_end,
            end, queries, seqlen_k, band_lo, band_hi, scale_log2, scores, m, l, acc,
            acc_tail, BLOCK_D, TAIL_D, HAS_LO, HAS_HI, True, BLOCK_N, STAGES, ONE_LOOP, ORDER,
        )  # fmt: skip

    share = 1.0
    if sinks is not None:
        m, l, share = add_sink(m * scale, l, tl.load(sinks + head_q))  # noqa: E741
        scale = 1.0
    empty = l == 0.0  # a fully masked row (the largest p of any other is 1): o = 0, lse = -inf
    l = tl.where(empty, 1.0, l)  # noqa: E741
    o_head = o + batch.to(tl.int64) * stride_ob + head_q.to(tl.int64) * stride_oh
    share = (share / l)[:, None]
    if SCALED:
        share *= _head_scale(v_scale, batch, head_kv, scale_vb, scale_vh)
    _store(o_head, queries, seqlen_q, stride_om, 0, head_dim, acc * share, BLOCK_D)
    if TAIL_D > 0:
        _store(o_head, queries, seqlen_q, stride_om, BLOCK_D, head_dim, acc_tail * share, TAIL_D)
    row_lse = tl.where(empty, float("-inf"), m * scale + tl.log(l))
    lse_head = lse + sequence.to(tl.int64) * seqlen_q
    tl.store(lse_head + queries, row_lse, mask=queries < seqlen_q)


def fits(problem, arguments, q, k, v):
    """Whether the kernel takes a problem; `arguments` are those of the general kernel."""
    return (
        problem.dtype != "float32"
        and problem.head_dim in _HEAD_DIMS
        and problem.head_dim_v == problem.head_dim
        and problem.seqlen_k > 0
        and 0 < problem.scale <= _LARGEST_SCALE
        and not any(arguments[name] for name in _FEATURES)
        and arguments["VECTOR"] > 1
        and describable(q, k, v)
        and hopper()
    )


def forward(problem, arguments, q, k, v, o, lse, *, scales=(), sinks=None):
    """Compute o and lse, which are given empty, of a problem that `fits`.

    Args:
        problem: The problem.
        arguments: Those of the general kernel.
        q: (batch, heads_q, seqlen_q, head_dim).
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim), of 16 bits.
        o: As q, of 16 bits.
        lse: (batch, heads_q, seqlen_q) float32, contiguous.
        scales: Of q, k and v, float32 (batch or 1, heads or 1, 1); none: q and k are of 16 bits.
        sinks: (heads_q,) float32, or None.
    """
    block_d, tail_d = _HEAD_DIMS[problem.head_dim]
    sequences = problem.batch * problem.heads_q
    keys = 2 * problem.seqlen_k * problem.head_dim * k.element_size()  # bytes, and values
    tiles, tails = zip(*(columns(x, 1, block_d, tail_d) for x in (q, k, v)), strict=True)
    strides = (
        0 if n == 1 else step
        for scale in scales
        for n, step in zip(scale.shape[:2], scale.stride()[:2], strict=True)
    )
    kernel = _tuned(problem.head_dim, bool(scales), arguments["HAS_LO"])
    kernel[lambda meta: (triton.cdiv(problem.seqlen_q, meta["BLOCK_M"]) * sequences,)](
        *tiles, *tails, o, lse, *o.stride()[:3],
        sequences, problem.heads_q, problem.group, problem.seqlen_q, problem.seqlen_k,
        problem.head_dim, arguments["band_lo"], arguments["band_hi"],
        min(max(_L2_SHARE // keys, 1) * problem.group, sequences),
        problem.scale, min(max(arguments["seqlen_bucket"], _SHORTEST), _LONGEST),
        *((*scales, *strides) or (None,) * 9), sinks,
        BLOCK_D=block_d, TAIL_D=tail_d, HAS_LO=arguments["HAS_LO"], HAS_HI=arguments["HAS_HI"],
        WHOLE=not (arguments["HAS_LO"] or arguments["HAS_HI"]) and problem.seqlen_k % _WIDEST == 0,
        SCALED=bool(scales),
    )  # fmt: skip


def _set_rows(arguments):
    """Give the descriptors the rows of a configuration, before it is launched."""
    for rows, names in (("BLOCK_M", ("q", "q_rest")), ("BLOCK_N", ("k", "v", "k_rest", "v_rest"))):
        for name in names:
            if arguments[name] is not None:
                arguments[name].block_shape[2] = arguments[rows]


@functools.cache
def _tuned(head_dim, scaled=False, lower=False):  # noqa: FBT002
    """The kernel, autotuned over the configurations of a head_dim; a lower limit takes one loop."""
    table = configs.HOPPER_FORWARD_FP8 if scaled else configs.HOPPER_FORWARD
    found = configs.described(table, head_dim, _set_rows)
    found = [config for config in found if config.kwargs["ONE_LOOP"] or not lower]
    key = ["head_dim", "HAS_HI", "seqlen_bucket", *["SCALED"] * scaled, *["HAS_LO"] * lower]
    return Tuned(hopper_forward_kernel, found, key)
