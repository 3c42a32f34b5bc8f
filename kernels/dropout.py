"""Which probabilities dropout keeps: bits of Philox 4x32-7, in a kernel and on the host.

A bit depends on where an element is and on the 64-bit seed, never on tiles, strides or lengths. Of
each 16 x 16 elements, rows r and r + 8 and columns 2 c, 2 c + 1 and those plus 8 share a counter:
(column of counters, row of counters, query head, batch or document). These eight are one thread's
in what a tensor core computes, and two threads' in the transposed tile. Each has 16 bits of the
four words, and is kept where they, as a signed number, are at least `threshold(p)`: p to 2^-17.
Seven rounds are the fewest that pass BigCrush (Salmon et al. 2011).
"""

import torch
import triton
import triton.language as tl

__all__ = ["arguments", "keep", "keep_tile", "threshold"]

_BITS = 16
_HALF, _LOW = (1 << _BITS) - 1, 0xFFFFFFFF
_ROUNDS = tl.constexpr(7)
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57  # Salmon et al. 2011, Philox4x32
_WEYL = 0x9E3779B9, 0xBB67AE85


def threshold(probability):
    """The least signed half that is kept, so that a share `probability` of all halves is not.

    >>> threshold(0.0), threshold(0.5)
    (-32768, 0)
    """
    return min(round(probability * 2**_BITS), 2**_BITS - 1) - 2 ** (_BITS - 1)


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
    """Which of BLOCK_M x BLOCK_N elements of one head are kept; the first are multiples of 16."""
    rows = first_query // 16 * 8 + tl.arange(0, BLOCK_M // 2)
    columns = first_key // 16 * 4 + tl.arange(0, BLOCK_N // 4)
    words = tl.philox(seed, columns[None, :], rows[:, None], head, batch, _ROUNDS)
    kept = _bits(words[0], threshold) | _bits(words[1], threshold) << 2
    kept = kept | _bits(words[2], threshold) << 4 | _bits(words[3], threshold) << 6
    kept = tl.reshape(kept, (BLOCK_M // 16, 1, 8, BLOCK_N // 16, 1, 4, 1))
    kept = tl.broadcast_to(kept, (BLOCK_M // 16, 2, 8, BLOCK_N // 16, 2, 4, 2))
    queries, keys = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    bit = (queries // 8 % 2 * 4)[:, None] + (keys // 8 % 2 * 2 + keys % 2)[None, :]
    return (tl.reshape(kept, (BLOCK_M, BLOCK_N)) >> bit & 1) != 0


@triton.jit
def _bits(word, threshold):
    """Whether the low half of a word is kept, and, as 2, the high one."""
    low = tl.where(word.to(tl.int16) >= threshold, 1, 0)
    return low | tl.where((word >> 16).to(tl.int16) >= threshold, 2, 0)


def keep(problem, seed, device):
    """Which elements of P are kept: bool (batch, heads_q, seqlen_q, seqlen_k), as kernels do it.

    Packed documents count their queries and keys each for itself, and are told apart as sequences
    of a batch would be; between documents there is nothing to keep.
    """
    documents = problem.mask.documents
    if not documents:
        return _keep(
            problem, problem.seqlen_q, problem.seqlen_k, torch.arange(problem.batch), seed, device
        )
    kept = torch.zeros(
        (1, problem.heads_q, problem.seqlen_q, problem.seqlen_k), dtype=torch.bool, device=device
    )
    query = key = 0
    for place, (queries, keys) in enumerate(documents):
        own = _keep(problem, queries, keys, torch.tensor([place]), seed, device)
        kept[:, :, query : query + queries, key : key + keys] = own
        query, key = query + queries, key + keys
    return kept


def _keep(problem, seqlen_q, seqlen_k, places, seed, device):
    """Of sequences at some places of the batch."""
    groups = -(-seqlen_q // 16), -(-seqlen_k // 16)
    sizes = (4 * groups[1], 8 * groups[0], problem.heads_q)
    axes = (*(torch.arange(size, device=device) for size in sizes), places.to(device))
    counter = [axis.reshape(-1, *(1,) * place) for place, axis in enumerate(axes)]
    halves = [word >> shift & _HALF for word in philox(counter, seed) for shift in (0, _BITS)]
    least = threshold(problem.dropout)
    kept = [half - (half >> _BITS - 1 << _BITS) >= least for half in halves]
    shape = len(places), problem.heads_q, groups[0], 8, groups[1], 4
    tile = torch.stack(kept).reshape(2, 2, 2, *shape)
    whole = tile.permute(3, 4, 5, 0, 6, 7, 1, 8, 2).flatten(5).flatten(2, 4)
    return whole[..., :seqlen_q, :seqlen_k]


def philox(counter, seed, rounds=_ROUNDS.value):
    """Four words of Philox 4x32, as int64, of four such words and a seed of 64 bits.

    A product of two words wraps in int64, but its bits are right, and they are all that is read.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(rounds):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (second >> 32 & _LOW) ^ c1 ^ k0, second & _LOW
        c2, c3 = (first >> 32 & _LOW) ^ c3 ^ k1, first & _LOW
        k0, k1 = k0 + _WEYL[0] & _LOW, k1 + _WEYL[1] & _LOW
    return c0, c1, c2, c3
