"""From dot products to probabilities: the band mask, the softcap, P from a saved lse."""

import triton
import triton.language as tl

from .terms import add_terms

LOG2E = tl.constexpr(1.4426950408889634)
# Absolute error of tanh in units of 2^-24: 3.1 with an exp of 2 ulp, tried on 5 million arguments;
# div.full's 2 ulp add 4.
TANH_ULPS = 8.0


@triton.jit
def key_range(
    first_query, seqlen_q, seqlen_k, band_lo, band_hi,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys that some query of a block may see: (begin, interior_end, end).

    Every query sees every key of the blocks in [begin, interior_end), which needs no mask. A lower
    limit hides keys from the first block on: then there is no such interior.
    """
    begin = 0
    interior_end = seqlen_k
    end = seqlen_k
    if HAS_HI:
        last_query = tl.minimum(first_query + BLOCK_M, seqlen_q) - 1
        end = tl.minimum(end, last_query + band_hi + 1)
        interior_end = tl.maximum(tl.minimum(interior_end, first_query + band_hi + 1), 0)
    interior_end = interior_end // BLOCK_N * BLOCK_N
    if HAS_LO:
        begin = tl.maximum(first_query + band_lo, 0) // BLOCK_N * BLOCK_N
        interior_end = begin
    return begin, interior_end, end


@triton.jit
def query_range(
    first_key, seqlen_q, seqlen_k, band_lo, band_hi,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Queries that may see some key of a block: (begin, interior_begin, end).

    Every query in [interior_begin, end) sees every key of the block, which needs no mask. There is
    no such interior under a lower limit, nor where the keys end inside the block.
    """
    last_key = tl.minimum(first_key + BLOCK_N, seqlen_k) - 1
    begin = 0
    interior_begin = 0
    end = seqlen_q
    if HAS_HI:
        begin = tl.maximum(first_key - band_hi, 0) // BLOCK_M * BLOCK_M
        interior_begin = tl.cdiv(tl.maximum(last_key - band_hi, 0), BLOCK_M) * BLOCK_M
    if HAS_LO:
        end = tl.minimum(end, last_key - band_lo + 1)
        interior_begin = end
    if first_key + BLOCK_N > seqlen_k:
        interior_begin = end
    return begin, tl.minimum(interior_begin, end), end


@triton.jit
def is_visible(
    queries, keys, seqlen_k, band_lo, band_hi, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr
):  # fmt: skip
    """Whether query i sees key j: ``band_lo <= j - i <= band_hi`` and ``j < seqlen_k``."""
    visible = keys < seqlen_k
    if HAS_LO:
        visible = visible & (keys - queries >= band_lo)
    if HAS_HI:
        visible = visible & (keys - queries <= band_hi)
    return visible


@triton.jit
def tanh(x):
    """Compute tanh in float32, to a few units of 2^-24 relative over the whole range."""
    magnitude = tl.abs(x)
    decay = tl.exp(-2.0 * magnitude)
    large = (1.0 - decay) / (1.0 + decay)
    # Below 0.55 that cancels: tanh(x)/x - 1 as a minimax polynomial in x^2 (error 1.1e-9 relative).
    small = tl.minimum(magnitude, 0.55)
    square = small * small
    series = -0.00627424 * square + 0.02107168
    series = series * square - 0.05385231
    series = series * square + 0.13332586
    series = series * square - 0.33333318
    small += small * square * series
    result = tl.where(magnitude < 0.55, small, large)
    return tl.where(x < 0.0, -result, result)


@triton.jit
def tanh_slope(x):
    """1 - tanh(x)^2 of float32, without the cancellation of that formula."""
    decay = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * decay / ((1.0 + decay) * (1.0 + decay))


@triton.jit
def load_lse_log2(head, queries, seqlen_q):
    """Load lse of some queries, in base 2. Rows that saw no key get +inf, so that their P is 0."""
    row_lse = tl.load(head + queries, mask=queries < seqlen_q, other=float("inf"))
    return tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2E)


@triton.jit
def probabilities(
    products, row_lse, softmax_scale, softcap, terms, first_query, first_key, seqlen_q, seqlen_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """P from q k^T and lse (base 2), and the derivative of the softcap (1 without)."""
    TERMS: tl.constexpr = BIAS != "" or ALIBI
    UNIT: tl.constexpr = 1.0 if TERMS else LOG2E
    if SOFTCAP:
        capped = products * (softmax_scale / softcap)
        logits = tanh(capped) * (softcap * UNIT)
        slope = tanh_slope(capped)
    else:
        logits = products * (softmax_scale * UNIT)
        slope = 1.0
    if TERMS:
        logits = LOG2E * add_terms(
            logits, terms, first_query, first_key, seqlen_q, seqlen_k,
            BLOCK_M, BLOCK_N, TRANSPOSED, BIAS, BIAS_VECTOR, ALIBI,
        )  # fmt: skip
    # P is at most 1. Where |logits| > 2^24 the rounding error of the difference alone could
    # exceed that by any factor, up to inf. NaN in the inputs must come through.
    exponent = tl.minimum(logits - row_lse, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(exponent), slope
