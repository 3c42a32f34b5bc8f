"""Which probabilities dropout keeps: bits of Philox 4x32-10, in a kernel and on the host.

The counter is (key // 4, query, query head, batch or document) and the key is the 64-bit seed, so
a bit depends on where an element is, never on tiles, strides or lengths; key % 4 picks one of the
four words. An element is kept where its word, as a signed number, is at least `threshold(p)`: p to
2^-32.
"""

import torch
import triton
import triton.language as tl

__all__ = ["arguments", "keep", "keep_tile", "threshold"]

_WORDS = 4  # of one Philox counter
_LOW = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57  # Salmon et al. 2011, Philox4x32
_WEYL = 0x9E3779B9, 0xBB67AE85


def threshold(probability):
    """The least signed word that is kept, so that a share `probability` of all words is not.

    >>> threshold(0.0), threshold(0.5)
    (-2147483648, 0)
    """
    return min(round(probability * 2**32), _LOW) - 2**31


def arguments(problem, seed):
    """What kernels take of dropout, by name; None where there is none."""
    if seed is None:
        return {"dropout_seed": None, "dropout_threshold": None, "dropout_factor": None}
    return {
        "dropout_seed": (int(seed) + 2**63) % 2**64 - 2**63,  # its low 64 bits, signed
        "dropout_threshold": threshold(problem.dropout),
        "dropout_factor": 1.0 / (1.0 - problem.dropout),
    }


@triton.jit
def keep_tile(
    seed, threshold, batch, head, first_query, first_key,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Which of BLOCK_M x BLOCK_N elements of one head are kept; first_key is a multiple of 4."""
    queries = first_query + tl.arange(0, BLOCK_M)
    quads = first_key // 4 + tl.arange(0, BLOCK_N // 4)
    words = tl.philox(seed, quads[None, :], queries[:, None], head, batch)
    kept0 = words[0].to(tl.int32, bitcast=True) >= threshold
    kept1 = words[1].to(tl.int32, bitcast=True) >= threshold
    kept2 = words[2].to(tl.int32, bitcast=True) >= threshold
    kept3 = words[3].to(tl.int32, bitcast=True) >= threshold
    # Bytes, not bits, are moved between threads; [..., i, j] is word 2 i + j.
    evens = tl.join(kept0.to(tl.int8), kept2.to(tl.int8))
    odds = tl.join(kept1.to(tl.int8), kept3.to(tl.int8))
    return tl.reshape(tl.join(evens, odds), (BLOCK_M, BLOCK_N)) != 0


def keep(problem, seed, device):
    """Which elements of P are kept: bool (batch, heads_q, seqlen_q, seqlen_k), as kernels do it.

    Packed documents count their queries and keys each for itself, and are told apart as sequences
    of a batch would be; between documents there is nothing to keep.
    """
    documents = problem.mask.documents
    if not documents:
        return _keep(
            problem, problem.seqlen_q, problem.seqlen_k, range(problem.batch), seed, device
        )
    kept = torch.zeros(
        (1, problem.heads_q, problem.seqlen_q, problem.seqlen_k), dtype=torch.bool, device=device
    )
    query = key = 0
    for place, (queries, keys) in enumerate(documents):
        own = _keep(problem, queries, keys, range(place, place + 1), seed, device)
        kept[:, :, query : query + queries, key : key + keys] = own
        query, key = query + queries, key + keys
    return kept


def _keep(problem, seqlen_q, seqlen_k, places, seed, device):
    """Of sequences at some places of the batch."""
    axes = (range(-(-seqlen_k // _WORDS)), range(seqlen_q), range(problem.heads_q), places)
    counter = [
        torch.arange(axis.start, axis.stop, device=device).reshape(-1, *(1,) * place)
        for place, axis in enumerate(axes)
    ]
    words = torch.stack(torch.broadcast_tensors(*philox(counter, seed)), -1)
    words = words.flatten(-2)[..., :seqlen_k]
    return words - (words >> 31 << 32) >= threshold(problem.dropout)


def philox(counter, seed):
    """Four words of Philox 4x32-10, as int64, of four such words and a seed of 64 bits.

    A product of two words wraps in int64, but its bits are right, and they are all that is read.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (second >> 32 & _LOW) ^ c1 ^ k0, second & _LOW
        c2, c3 = (first >> 32 & _LOW) ^ c3 ^ k1, first & _LOW
        k0, k1 = k0 + _WEYL[0] & _LOW, k1 + _WEYL[1] & _LOW
    return c0, c1, c2, c3
