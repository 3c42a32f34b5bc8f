"""Documents packed into one sequence: which of them a program works on, and where it lies.

A program finds its document in the cumulative lengths by itself: the grid depends only on how many
rows and documents there are, so that nobody has to wait for lengths that lie on the device, and no
program is launched for what the longest document has and the others have not. With blocks of BLOCK
rows, document n gets ``starts[n + 1] // BLOCK - starts[n] // BLOCK + 1`` blocks, numbered from
``starts[n] // BLOCK + n`` on. That is enough for its rows, and one too many at most: a program
whose block lies past the end of its document does nothing.
"""

import triton
import triton.language as tl


@triton.jit
def find_document(starts, documents, block, BLOCK: tl.constexpr):
    """The document that a block of the grid belongs to, and the first row of the block in it."""
    document = 0
    end = documents
    while end - document > 1:  # a binary search for the last one whose blocks begin at or before
        middle = (document + end) // 2
        before = tl.load(starts + middle) // BLOCK + middle <= block
        document = tl.where(before, middle, document)
        end = tl.where(before, end, middle)
    first_block = tl.load(starts + document) // BLOCK + document
    return document, (block - first_block) * BLOCK


@triton.jit
def document_rows(starts, document):
    """First row of a document in the packed sequence, and how many it has."""
    start = tl.load(starts + document)
    return start, tl.load(starts + document + 1) - start


@triton.jit
def skip_rows(head, rows, stride_row, VECTOR: tl.constexpr):
    """The pointer some rows further on."""
    return head + tl.cast(rows, tl.int64) * (stride_row // VECTOR * VECTOR)


@triton.jit
def document_band(band, length_q, length_k, BOTTOM_RIGHT: tl.constexpr):
    """Turn a limit of (key - diagonal) into one of (key - query), in a document."""
    if BOTTOM_RIGHT:
        band += length_k - length_q
    return band
