"""Terms of the logits beside q k^T, an additive bias and ALiBi's slopes, and attention sinks.

They come after the softcap: logit = softcap(scale q.k) + bias - slope |i + diagonal - j|. Each axis
of a bias, (batch, head, query, key), is there in full or of size 1. Where it is 1 the stride is 0,
and a tile is as small as BIAS says: "qk", "q", "k", or "one" number for all. No bias is "".
BIAS_VECTOR > 1 promises of a bias along keys what VECTOR does of rows (tiles.py), and that seqlen_k
is a multiple of it too.

A sink is one more logit of every row of a head, with no key and no value.
"""

import triton
import triton.language as tl

from .tiles import head_start, row_pointers


@triton.jit
def head_terms(
    bias, bias_strides, alibi_slopes, alibi, batch, place, head,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """What `add_terms` needs of one head: bias and its strides along it, slope and diagonal.

    `alibi` is the diagonal and how far the slopes of one place, a batch or a packed document, are
    from the next one's: 0 where they share them.
    """
    along_bias = (0, 0, 0)
    along_alibi = (0.0, 0)
    if BIAS != "":
        start = head_start(bias, batch, head, bias_strides[0], bias_strides[1], BIAS_VECTOR)
        along_bias = (start, bias_strides[2], bias_strides[3])
    if ALIBI:
        along_alibi = (tl.load(alibi_slopes + place * alibi[1] + head), alibi[0])
    return along_bias, along_alibi


@triton.jit
def document_terms(terms, start_q, start_k, diagonal, BIAS: tl.constexpr):
    """The terms of a document that begins at these rows of a packed sequence."""
    along_bias, along_alibi = terms
    if BIAS != "":
        start, stride_query, stride_key = along_bias
        start += tl.cast(start_q, tl.int64) * stride_query
        start += tl.cast(start_k, tl.int64) * stride_key
        along_bias = (start, stride_query, stride_key)
    return along_bias, (along_alibi[0], diagonal)


@triton.jit
def add_terms(
    logits, terms, first_query, first_key, seqlen_q, seqlen_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Natural logits of a tile with all their terms; (keys, queries) if TRANSPOSED."""
    queries = first_query + tl.arange(0, BLOCK_M)[:, None]
    keys = first_key + tl.arange(0, BLOCK_N)[None, :]
    if BIAS != "":
        start, stride_query, stride_key = terms[0]
        queries_inside = queries < seqlen_q
        keys_inside = keys < seqlen_k // BIAS_VECTOR * BIAS_VECTOR
        if BIAS == "qk":
            pointers = row_pointers(
                start, first_query, first_key, stride_query, stride_key,
                BLOCK_M, BLOCK_N, BIAS_VECTOR,
            )  # fmt: skip
            bias = tl.load(pointers, mask=queries_inside & keys_inside, other=0.0)
        elif BIAS == "q":
            pointers = start + queries.to(tl.int64) * stride_query
            bias = tl.load(pointers, mask=queries_inside, other=0.0)
        elif BIAS == "k":
            pointers = start + keys.to(tl.int64) * stride_key
            bias = tl.load(pointers, mask=keys_inside, other=0.0)
        else:
            bias = tl.load(start)
        if TRANSPOSED and BIAS != "one":
            bias = tl.trans(bias)
        bias = bias.to(tl.float32)
        # A product that overflowed must not make NaN of what a bias of -inf hides.
        logits = tl.where(bias == float("-inf"), float("-inf"), logits + bias)
    if ALIBI:
        slope, diagonal = terms[1]
        distance = tl.abs(queries + diagonal - keys)
        if TRANSPOSED:
            distance = tl.trans(distance)
        logits -= slope * distance.to(tl.float32)
    return logits


@triton.jit
def add_sink(m, l, sink):  # noqa: E741
    """Add a sink to rows of maximum m and sum l: both anew, and the factor of what was summed."""
    m = tl.where(l == 0.0, float("-inf"), m)  # no key seen, and a scale of 0 made NaN of it
    top = tl.maximum(m, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp(m - shift)
    return top, l * share + tl.exp(sink - shift), share
