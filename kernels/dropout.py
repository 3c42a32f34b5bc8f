"""Which probabilities dropout keeps: bits of Philox 4x32-7, in a kernel and on the host.

A bit depends on where an element is and on the 64-bit seed, never on tiles, strides or lengths. Of
each 16 x 16 elements, rows r and r + 8 and columns 2 c, 2 c + 1 and those plus 8 share a counter:
(column of counters, row of counters, query head, batch or document). These eight are one thread's
in what a tensor core computes, and two threads' in the transposed tile. Each has 16 bits of the
four words, and is kept where they, as a signed number, are at least `threshold(p)`: p to 2^-17.
Seven rounds are the fewest that pass BigCrush (Salmon et al. 2011).
"""

import numpy as np
import torch
import triton
import triton.language as tl

__all__ = ["arguments", "keep", "keep_tile", "threshold"]

_BITS = 16
_LOW = 0xFFFFFFFF
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
    if problem.mask.documents:
        return _keep_packed(problem, seed, device)
    groups = -(-problem.seqlen_q // 16), -(-problem.seqlen_k // 16)
    sizes = (4 * groups[1], 8 * groups[0], problem.heads_q, problem.batch)
    counter = [
        torch.arange(size, device=device).reshape(-1, *(1,) * place)
        for place, size in enumerate(sizes)
    ]
    kept = _kept(problem, counter, seed)
    tile = kept.reshape(problem.batch, problem.heads_q, groups[0], 8, groups[1], 4, 2, 2, 2)
    whole = tile.permute(0, 1, 2, 6, 3, 4, 7, 5, 8).flatten(5).flatten(2, 4)
    return whole[..., : problem.seqlen_q, : problem.seqlen_k]


def _keep_packed(problem, seed, device):
    """The same of packed documents: a list of the counters of all, and where their bits belong."""
    heads, width = problem.heads_q, problem.seqlen_k
    nowhere = problem.seqlen_q * width
    queries, keys = np.array(problem.mask.documents).T
    columns = -(-keys // 16) * 4
    counts = -(-queries // 16) * 8 * columns
    document = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(document)) - np.repeat(counts.cumsum() - counts, counts)
    row, column = np.divmod(place, columns[document])
    query, key = row + row // 8 * 8, column // 4 * 16 + column % 4 * 2  # of a counter's first bit
    first_query, first_key = ((ends.cumsum() - ends)[document] for ends in (queries, keys))
    first = (first_query + query) * width + first_key + key
    below, right = queries[document] - query, keys[document] - key  # of the document, from there on
    listed = torch.from_numpy(np.stack([column, row, document, first, below, right])).to(device)
    column, row, document, first, below, right = listed
    head = torch.arange(heads, device=device)[:, None]
    kept = _kept(problem, [column, row, head, document], seed)
    bit = torch.arange(8, device=device)
    down, across = bit // 4 * 8, bit // 2 % 2 * 8 + bit % 2
    # What lies past a document's ends goes to one place more than there are.
    inside = (down < below[:, None]) & (across < right[:, None])
    where = torch.where(inside, first[:, None] + down * width + across, nowhere).flatten()
    found = torch.zeros((heads, nowhere + 1), dtype=torch.bool, device=device)
    found.index_copy_(1, where, kept.flatten(-2))
    return found[:, :-1].reshape(1, heads, problem.seqlen_q, width)


def _kept(problem, counter, seed):
    """Which of the eight elements of each counter are kept, (..., 8), the low half first."""
    return philox(counter, seed).view(torch.int16) >= threshold(problem.dropout)


def philox(counter, seed, rounds=_ROUNDS.value):
    """The four words of Philox 4x32, int32 (..., 4), of four such words and a seed of 64 bits.

    Words 0 and 2 go through a round together, and so do 1 and 3. A product of two words wraps in
    int64, but its bits are right, and they are all that is read: of words 1 and 3 the low 32 bits.
    """
    counter = torch.broadcast_tensors(*counter)
    even, odd = torch.stack(counter[::2]), torch.stack(counter[1::2])
    keys = [
        [(seed >> 32 * half) + turn * step & _LOW for half, step in enumerate(_WEYL)]
        for turn in range(rounds)
    ]
    constants = torch.tensor([_MULTIPLIERS, *keys], device=even.device)
    multipliers, *keys = constants.reshape(-1, 2, *(1,) * (even.dim() - 1))
    for key in keys:
        product = (even * multipliers).flip(0)
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(key).bitwise_and_(_LOW)
        odd = product
    words = torch.stack((even, odd), -1).to(torch.int32)  # (2, ..., 2)
    return words.movedim(0, -2).flatten(-2)
