"""What a program of the Hopper forward kernel does with keys: scores, softmax and P V, in order."""

import triton
import triton.language as tl

from .descriptors import load_tile
from .scores import is_visible

__all__ = ["attend", "scores_of"]


@triton.jit
def scores_of(q_tile, q_tail, k_tile, k_tail, TAIL_D: tl.constexpr):
    """Inner products of queries and keys."""
    scores = tl.zeros((q_tile.shape[0], k_tile.shape[0]), dtype=tl.float32)
    if TAIL_D > 0:
        scores = tl.dot(q_tail, k_tail.T)
    return tl.dot(q_tile, k_tile.T, scores)


@triton.jit
def _seen(
    scores, queries, first_key, seqlen_k, band_lo, band_hi,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scores with -inf where a query does not see a key."""
    keys = first_key + tl.arange(0, BLOCK_N)
    visible = is_visible(
        queries[:, None], keys[None, :], seqlen_k, band_lo, band_hi, HAS_LO, HAS_HI
    )
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def attend(
    q_tile, q_tail, k, v, k_rest, v_rest, batch, head_kv, low, begin, edge, end, queries, seqlen_k,
    band_lo, band_hi, scale_log2, scores, m, l, acc, acc_tail,  # noqa: E741
    BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ONE_LOOP: tl.constexpr,
    ORDER: tl.constexpr,
):  # fmt: skip
    """(scores, m, l, acc, acc_tail) after the keys from begin to end.

    MASKED: only the keys seen count; under ONE_LOOP, blocks from low on and before edge are seen
    whole. From ORDER 2 on scores are those of the block at begin, then of that at end.
    """
    for first_key in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        if ORDER < 2:
            k_tile, k_tail = load_tile(
                k, k_rest, batch, head_kv, first_key, BLOCK_N, BLOCK_D, TAIL_D
            )
            if ORDER == 1:
                v_tile, v_tail = load_tile(
                    v, v_rest, batch, head_kv, first_key, BLOCK_N, BLOCK_D, TAIL_D
                )
            scores = scores_of(q_tile, q_tail, k_tile, k_tail, TAIL_D)
        if MASKED:
            hides = not ONE_LOOP
            if ONE_LOOP:
                hides = first_key >= edge
            if HAS_LO:
                hides = hides | (first_key < low)
            if hides:
                scores = _seen(
                    scores, queries, first_key, seqlen_k, band_lo, band_hi, HAS_LO, HAS_HI, BLOCK_N
                )
        m_new = tl.maximum(m, tl.max(scores, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet
        p = tl.exp2(scores * scale_log2 - (shift * scale_log2)[:, None])
        rescale = tl.exp2((m - shift) * scale_log2)
        l = l * rescale + tl.sum(p, 1)  # noqa: E741
        # Triton waits for tiles where they are loaded, once for those loaded side by side.
        if ORDER >= 2:
            k_tile, k_tail = load_tile(
                k, k_rest, batch, head_kv, first_key + BLOCK_N, BLOCK_N, BLOCK_D, TAIL_D
            )
            v_tile, v_tail = load_tile(
                v, v_rest, batch, head_kv, first_key, BLOCK_N, BLOCK_D, TAIL_D
            )
        if ORDER == 3:
            scores = scores_of(q_tile, q_tail, k_tile, k_tail, TAIL_D)
        # After those scores: until they are there, the last step's P V may read its weights.
        weights = p.to(v.dtype)
        if ORDER == 0:
            v_tile, v_tail = load_tile(
                v, v_rest, batch, head_kv, first_key, BLOCK_N, BLOCK_D, TAIL_D
            )
        if TAIL_D > 0:
            acc_tail = tl.dot(weights, v_tail, acc_tail * rescale[:, None])
        acc = tl.dot(weights, v_tile, acc * rescale[:, None])
        if ORDER == 2:
            scores = scores_of(q_tile, q_tail, k_tile, k_tail, TAIL_D)
        m = m_new
    return scores, m, l, acc, acc_tail
