"""What the kernels are told of a problem: tiles of head_dim, the band mask, alignment, terms."""

import functools

import triton

from fa_verify import cu_seqlens

from . import dropout
from .block_mask import block_mask as block_mask_of

__all__ = [
    "arguments", "blocks_of", "clamped_scale", "empty_as", "of_keys", "split_columns", "vector",
]  # fmt: skip

_LARGEST_SCALE = 2.3e38  # float32 holds log2(e) times it
_BYTES_A_VECTOR = 16
_SMALLEST_DOT = 16  # tl.dot takes no smaller extent


@functools.cache
def split_columns(head_dim, smallest=_SMALLEST_DOT):
    """How a head_dim is tiled: (BLOCK, TAIL, PADDED), powers of two with BLOCK + TAIL >= head_dim.

    >>> split_columns(80), split_columns(96), split_columns(128), split_columns(5)
    ((64, 16, False), (64, 32, False), (128, 0, False), (16, 0, True))
    """
    whole = max(triton.next_power_of_2(head_dim), smallest)
    block = max(whole // 2, smallest)
    tail = max(triton.next_power_of_2(max(head_dim - block, 0)), smallest)
    if block + tail >= whole:
        return whole, 0, whole > head_dim
    return block, tail, block + tail > head_dim


def clamped_scale(x):
    """Clamp a scale to where its float32 arithmetic is finite: inf times 0 is NaN."""
    return min(max(x, -_LARGEST_SCALE), _LARGEST_SCALE)


def empty_as(x, shape):
    """An empty tensor in memory as x: heads within rows if x has them so, or rows within heads.

    Models have them within rows, and need no copy then to join the heads again.
    """
    _, heads, rows, columns = shape
    if x.stride(1) >= x.stride(2):
        return x.new_empty(shape)
    strides = heads * rows * columns, columns, heads * columns, 1
    return x.new_empty_strided(shape, strides)


def vector(*tensors):  # noqa: ANN002
    """Elements in 16 bytes if all tensors can be read 16 bytes at a time, else 1 (see tiles.py)."""
    elements = _BYTES_A_VECTOR // tensors[0].element_size()
    fits = all(
        t.stride(3) == 1
        and t.shape[3] % elements == 0
        and not any(stride % elements for stride in t.stride()[:3])
        and t.data_ptr() % _BYTES_A_VECTOR == 0
        for t in tensors
    )
    return elements if fits else 1


def _band(problem, *, packed, gaps):
    """(band_lo, band_hi, HAS_LO, HAS_HI): query i sees key j when band_lo <= j - i <= band_hi.

    Each packed document has a diagonal of its own: then, limits of j - the diagonal of i. A mask
    with gaps is all in its blocks.
    """
    seqlen_q, seqlen_k, mask = problem.seqlen_q, problem.seqlen_k, problem.mask
    right = 0 if mask.causal else mask.window_right
    if gaps:
        return -seqlen_q, seqlen_k, False, False
    if packed:
        furthest = seqlen_q + seqlen_k  # hides nothing
        left = furthest if mask.window_left is None else min(mask.window_left, furthest)
        band_hi = furthest if right is None else min(right, furthest)
        has_lo = mask.window_left is not None
        return -left, band_hi, has_lo, has_lo or right is not None
    shift = mask.shift(seqlen_q, seqlen_k)
    band_lo = -seqlen_q if mask.window_left is None else shift - mask.window_left
    band_hi = seqlen_k if right is None else shift + right
    has_lo = band_lo > 1 - seqlen_q  # limits that hide nothing are dropped
    has_hi = has_lo or band_hi < seqlen_k - 1  # a variant less to compile
    least, most = -seqlen_q, seqlen_k
    return min(max(band_lo, least), most), min(max(band_hi, least), most), has_lo, has_hi


def _gaps(block_mask):
    """The blocks of a mask with gaps, by queries."""
    if block_mask is None:
        return {"kinds": None, "tiles": None, "offsets": None, "listed": None, "SPARSE": 0}
    kinds, tiles, (offsets, listed) = block_mask[:3]
    return {
        "kinds": kinds, "tiles": tiles, "offsets": offsets, "listed": listed,
        "SPARSE": block_mask.size,
    }  # fmt: skip


def of_keys(problem, arguments, block_mask=None):
    """The arguments of a kernel whose programs each have keys, and not queries."""
    if not arguments["SPARSE"]:
        return arguments
    block_mask = block_mask or block_mask_of(problem, arguments["kinds"].device)
    offsets, listed = block_mask.by_key
    return arguments | {"offsets": offsets, "listed": listed}


def arguments(
    problem, *tensors,  # noqa: ANN002
    bias=None, alibi_slopes=None, dropout_seed=None, starts=None, block_mask=None,
):  # fmt: skip
    """Arguments that all kernels of this problem share, by name.

    Args:
        problem: The problem.
        tensors: All that a kernel reads and writes by rows of head_dim.
        bias: The additive bias, if the problem has one; its axes of size 1 are broadcast.
        alibi_slopes: (heads_q,) float32, or a row for each batch or document, if the problem has
            ALiBi.
        dropout_seed: An integer, if the problem has dropout.
        starts: (documents + 1,) int32 twice: where each packed document begins in q, and in k;
            None: as the problem's mask has it.
        block_mask: A `BlockMask` in place of the problem's mask.
    """
    seqlen_q, seqlen_k, mask = problem.seqlen_q, problem.seqlen_k, problem.mask
    if starts is None and mask.documents and not mask.pattern:  # blocks say that too
        starts = cu_seqlens(problem, tensors[0].device)[:2]
    if block_mask is None and mask.pattern:
        block_mask = block_mask_of(problem, tensors[0].device)
    packed, gaps = starts is not None, block_mask is not None
    band_lo, band_hi, has_lo, has_hi = _band(problem, packed=packed, gaps=gaps)
    block_d, tail_d, padded_d = split_columns(problem.head_dim)
    block_dv, tail_dv, padded_dv = split_columns(problem.head_dim_v)
    return {
        "heads_q": problem.heads_q,
        "group": problem.group,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "band_lo": band_lo,
        "band_hi": band_hi,
        "softmax_scale": clamped_scale(problem.scale),
        # Below 1e-30 every logit is 0 to float32; nor may scale / softcap overflow.
        "softcap": max(
            clamped_scale(problem.softcap), 1e-38 * abs(clamped_scale(problem.scale)), 1e-30
        ),
        "seqlen_bucket": triton.next_power_of_2(max(seqlen_q, seqlen_k, 1)),
        "starts_q": starts[0] if packed else None,
        "starts_k": starts[1] if packed else None,
        "documents": len(starts[0]) - 1 if packed else None,
        "bias": bias,
        **_strides(bias),
        "alibi_slopes": None if alibi_slopes is None else alibi_slopes.contiguous(),
        **_alibi(problem, alibi_slopes),
        **dropout.arguments(problem, dropout_seed),
        **_gaps(block_mask),
        "BLOCK_D": block_d,
        "TAIL_D": tail_d,
        "PADDED_D": padded_d,
        "BLOCK_DV": block_dv,
        "TAIL_DV": tail_dv,
        "PADDED_DV": padded_dv,
        "HAS_LO": has_lo,
        "HAS_HI": has_hi,
        "VARLEN": packed,
        "BOTTOM_RIGHT": packed and mask.alignment == "bottom-right",
        "SOFTCAP": problem.softcap > 0,
        "DOT_PRECISION": problem.dot_precision if problem.dtype == "float32" else "tf32",
        "VECTOR": vector(*tensors),
        "BIAS": "" if bias is None else _tile(bias),
        "BIAS_VECTOR": 1 if bias is None else _bias_vector(problem, bias),
        "ALIBI": alibi_slopes is not None,
        "DROPOUT": dropout_seed is not None,
    }


def blocks_of(documents, rows, block):
    """Blocks that rows are cut into: of each document by itself, for some of them one too many."""
    return triton.cdiv(rows, block) if documents is None else rows // block + documents


def _strides(bias):
    """Strides of a bias, 0 along the axes that are broadcast.

    Numbers, not a tuple: Triton compiles anew for each tuple with other entries that are 1 or a
    multiple of 16, whatever `do_not_specialize` says.
    """
    names = ("stride_bias_b", "stride_bias_h", "stride_bias_q", "stride_bias_k")
    if bias is None:
        return dict.fromkeys(names)
    return {
        name: 0 if size == 1 else stride
        for name, size, stride in zip(names, bias.shape, bias.stride(), strict=True)
    }


def _alibi(problem, alibi_slopes):
    """The diagonal, and how far one place's slopes are from the next one's (terms.py)."""
    if alibi_slopes is None:
        return {"alibi_diagonal": None, "alibi_stride": None}
    return {
        "alibi_diagonal": problem.mask.shift(problem.seqlen_q, problem.seqlen_k),
        "alibi_stride": problem.heads_q * (alibi_slopes.dim() - 1),
    }


def _tile(bias):
    """Along which of (query, key) a bias changes: "qk", "q", "k", or "one"."""
    return "q" * (bias.shape[2] > 1) + "k" * (bias.shape[3] > 1) or "one"


def _bias_vector(problem, bias):
    """Elements of a bias in 16 bytes if they can be read together along keys, else 1 (terms.py)."""
    return 1 if problem.mask.documents or bias.shape[3] == 1 else vector(bias)
