"""Attention to a key-value cache: decoding, and prefix or chunked prefill; contiguous or paged.

Forward only. `attention_with_cache` is what a model calls. The kernels under test: ``decode`` (few
queries; as many splits as fill the card), ``decode_invariant`` (splits of a fixed size, so that a
sequence's bits do not depend on its batch mates), ``decode_paged``, ``prefill_paged``.
"""

import functools

import torch
import triton

from fa_verify import Arithmetic, Capabilities, Kernel, Outputs, paged

from .arguments import clamped_scale, split_columns, vector
from .combine import combine
from .decode import decode_kernel

__all__ = ["attention_with_cache", "contiguous_kernel", "paged_kernel"]

SMALLEST_SPLIT = 128  # keys below which a further split of a busy card costs more than it saves
# Keys of a split from which on two programs side by side on a multiprocessor outweigh the merge:
# 3% at 16,384 (batch 16, 32,768 keys, 4 key heads), nothing at 4096 (batch 1, 131,072 keys).
LONG_SPLIT = 8192
MOST_QUERIES = 16  # of what is called decoding

# (bytes an element, most columns of a q or v row): BLOCK_N, num_warps, num_stages. As in
# configs.py, float32 in "ieee" or "tf32x3" is listed as 8 bytes.
TILES = {
    (2, 128): (64, 4, 3), (2, 256): (32, 4, 3),
    (4, 128): (32, 4, 2), (4, 256): (16, 4, 2),
    (8, 128): (32, 4, 1), (8, 256): (16, 4, 1),
}  # fmt: skip


def attention_with_cache(
    q,
    k_cache,
    v_cache,
    *,
    block_table=None,
    cache_lengths=None,
    sinks=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alignment="bottom-right",
    dot_precision="ieee",
    num_splits=None,
    split_keys=None,
):
    """Attention of some queries to the keys of a cache, which holds the queries' own keys already.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim), any strides; with cu_seqlens_q (1, heads_q, tokens,
            head_dim).
        k_cache: (batch, heads_kv, seqlen_k, head_dim), any strides; with block_table pools
            (num_pages, page_size, heads_kv, head_dim). v_cache likewise with head_dim_v.
        v_cache: See k_cache.
        block_table: (batch, pages) int32, row by row contiguous: the pages of each sequence.
            Entries past a sequence's last key are not read.
        cache_lengths: (batch,) int32: keys of each sequence; None: all that there is room for.
        sinks: (heads_q,) float32, contiguous: one more logit of each row, without a value.
        cu_seqlens_q: (batch + 1,) int32: where each sequence's tokens begin in q.
        max_seqlen_q: With cu_seqlens_q, the most tokens of a sequence.
        softmax_scale: Factor of the logits; None means 1/sqrt(head_dim).
        causal: Hide the keys to the right of the diagonal.
        window_size: Most keys to the left and right of the diagonal; -1: no limit.
        softcap: c > 0 maps a logit x to c*tanh(x/c).
        alignment: "bottom-right": a sequence's last query is on the diagonal with its last key.
        dot_precision: Of float32 inputs: "ieee", "tf32" or "tf32x3".
        num_splits: Into how many parts the keys are split; None: as many as fill the card.
        split_keys: Keys a part instead. The same bits then, whatever else is in the batch.

    Returns:
        o: As q, with head_dim_v; rows that see no key are 0.
        lse: (batch, heads_q, seqlen_q) float32, natural logarithm, sinks included; -inf, or the
            sink, where a row sees no key.

    Raises:
        ValueError: num_splits or split_keys breaks its rule.
    """
    heads_q, head_dim = q.shape[1], q.shape[3]
    page_size = 0
    if block_table is not None:
        page_size = k_cache.shape[1]
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    heads_kv, head_dim_v = k_cache.shape[1], v_cache.shape[3]
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    seqlen_q = q.shape[2] if cu_seqlens_q is None else max_seqlen_q
    seqlen_k = page_size * block_table.shape[1] if page_size else k_cache.shape[2]
    group = heads_q // heads_kv
    o = torch.empty((*q.shape[:3], head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not o.numel() or not batch:
        return o, lse

    precision = dot_precision if q.dtype == torch.float32 else "tf32"
    element_size = q.element_size() if precision == "tf32" else 8
    narrow = max(head_dim, head_dim_v) <= 128
    block_n, warps, stages = TILES[element_size, 128 if narrow else 256]
    if page_size:  # numbers of pages are loaded ahead too, and each kind of load takes half
        stages = 2 * stages - 1
    invariant = split_keys is not None
    block_m = _block_m(seqlen_q * group, element_size, narrow=narrow, fixed=invariant)
    if block_m == 128:
        warps = 8
    left, right = (seqlen_q + seqlen_k if size < 0 else min(size, seqlen_q + seqlen_k)
                   for size in window_size)  # fmt: skip
    has_lo, has_hi = window_size[0] >= 0, causal or window_size[1] >= 0
    reach = min(seqlen_k, left + seqlen_q + (0 if causal else right) + block_n)
    tiles = batch * heads_kv * triton.cdiv(seqlen_q * group, block_m)
    splits, split_keys = _splits(reach, block_n, tiles, num_splits, split_keys)
    into, into_lse = o, lse
    strides = (0, *o.stride()[:3], 0, *lse.stride()[:2])
    if splits > 1:
        into = torch.empty((splits, *o.shape), dtype=torch.float32, device=q.device)
        into_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
        strides = (*into.stride()[:4], *into_lse.stride()[:3])
    block_d, tail_d, padded_d = split_columns(head_dim)
    block_dv, tail_dv, padded_dv = split_columns(head_dim_v)
    dependent = _dependent_launches()
    width = vector(q, k_cache, v_cache)
    scale = clamped_scale(head_dim**-0.5 if softmax_scale is None else softmax_scale)
    decode_kernel[(tiles * splits,)](
        q, k_cache, v_cache, into, into_lse, cu_seqlens_q, cache_lengths, block_table, sinks,
        *q.stride(), *k_cache.stride(), *v_cache.stride(), *strides,
        block_table.stride(0) if page_size else 0,
        heads_kv, group, seqlen_q, seqlen_k, head_dim, head_dim_v,
        left, 0 if causal else right, scale,
        max(clamped_scale(softcap), 1e-38 * abs(scale), 1e-30), splits, split_keys,
        BLOCK_D=block_d, TAIL_D=tail_d, PADDED_D=padded_d,
        BLOCK_DV=block_dv, TAIL_DV=tail_dv, PADDED_DV=padded_dv,
        HAS_LO=has_lo, HAS_HI=has_hi, BOTTOM_RIGHT=alignment == "bottom-right",
        SOFTCAP=softcap > 0, DOT_PRECISION=precision,
        VECTOR=width,
        PAGE_SIZE=page_size, DEPENDENTS=splits > 1 and dependent,
        BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        combine(into, into_lse, o, lse, dependent=dependent, invariant=invariant)
    return o, lse


def _block_m(rows, element_size, *, narrow, fixed):
    """Rows a tile; 16 where the bits may not depend on how many queries the batch mates have."""
    if fixed or rows <= 16 or element_size > 4:
        return 16
    if rows <= 32 or not narrow:  # of 64, 256 columns spill registers
        return 32
    return 128 if rows > 64 and element_size == 2 else 64


def _splits(reach, block_n, tiles, num_splits, split_keys):
    """How many splits, and keys a split.

    Args:
        reach: Most keys that a tile of rows sees, or more.
        block_n: Of which split_keys must be a multiple.
        tiles: Of rows, each of which is split.
        num_splits: As given by the caller.
        split_keys: Likewise.
    """
    if num_splits is not None and split_keys is not None:
        msg = f"num_splits={num_splits}, split_keys={split_keys}: give one of them"
        raise ValueError(msg)
    if split_keys is not None:
        if split_keys < 1 or split_keys % block_n:
            msg = f"split_keys={split_keys}: must be a multiple of {block_n}, the keys a block"
            raise ValueError(msg)
        return max(1, triton.cdiv(reach, split_keys)), split_keys
    if num_splits is None:
        count = _multiprocessors()
        most = max(1, reach // SMALLEST_SPLIT, min(reach // block_n, count // tiles))
        num_splits = filling(tiles, most, count)
        if reach > LONG_SPLIT * num_splits:
            num_splits = filling(tiles, most, 2 * count)
    if num_splits < 1:
        msg = f"num_splits={num_splits}: must be at least 1, or None"
        raise ValueError(msg)
    return num_splits, triton.cdiv(max(1, triton.cdiv(reach, num_splits)), block_n) * block_n


def filling(tiles, most, slots):
    """The fewest splits, up to `most`, that keep nearly as many programs busy as any number does.

    >>> filling(tiles=4, most=512, slots=264), filling(tiles=300, most=9, slots=264)
    (63, 3)
    """

    def busy(splits):
        waves = tiles * splits / slots
        return waves / -(-tiles * splits // slots)

    counts = range(1, min(most, max(1, 4 * slots // tiles)) + 1)
    best = max(map(busy, counts))
    return next(splits for splits in counts if busy(splits) >= 0.95 * best)


@functools.cache
def _multiprocessors():
    device = triton.runtime.driver.active.get_current_device()
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return properties["multiprocessor_count"]


@functools.cache
def _dependent_launches():
    """Whether a launch may begin before the one that it depends on has ended (Hopper and later)."""
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


def _options(problem):
    """What `attention_with_cache` is to compute."""
    mask = problem.mask
    sizes = (mask.window_left, mask.window_right)
    return {
        "softmax_scale": problem.scale,
        "causal": mask.causal,
        "window_size": tuple(-1 if size is None else size for size in sizes),
        "softcap": problem.softcap,
        "alignment": mask.alignment,
        "dot_precision": problem.dot_precision,
    }


def _few(problem):
    documents = problem.mask.documents or ((problem.seqlen_q, problem.seqlen_k),)
    longest = max(queries for queries, _ in documents)
    return f"seqlen_q={longest}" if longest > MOST_QUERIES else None


def _capabilities(**changes):  # noqa: ANN003
    return Capabilities(
        dot_precisions=("ieee", "tf32", "tf32x3"),
        head_dims_v=range(1, 257),
        window=True,
        softcap=True,
        sinks=True,
        backward=False,
        deterministic=True,
        **changes,
    )


def contiguous_kernel(name, *, num_splits=None, split_keys=None):
    """Decoding with a contiguous cache, as a kernel under test."""

    def forward(problem, q, k, v, sinks=None):
        splits = {"num_splits": num_splits, "split_keys": split_keys}
        return Outputs(*attention_with_cache(q, k, v, sinks=sinks, **_options(problem), **splits))

    return Kernel(
        name=name,
        forward=forward,
        capabilities=_capabilities(accepts=_few, batch_invariant=split_keys is not None),
        arithmetic=Arithmetic(merged_by_lse=True),
    )


def paged_kernel(name, page_size, *, prefill=False, far=None, num_splits=None, split_keys=None):
    """Decoding, or with `prefill` any number of queries, with a paged cache; see `paged`."""

    def forward(problem, q, k, v, sinks=None):
        pages = paged(problem, k, v, page_size=page_size, evict=True, far=far)
        packed = {}
        if problem.mask.documents:
            packed = {"cu_seqlens_q": pages.cu_seqlens_q, "max_seqlen_q": pages.max_seqlen_q}
        return Outputs(
            *attention_with_cache(
                q, pages.k_pages, pages.v_pages, block_table=pages.block_table,
                cache_lengths=pages.cache_lengths, **packed, **_options(problem),
                sinks=sinks, num_splits=num_splits, split_keys=split_keys,
            )
        )  # fmt: skip

    return Kernel(
        name=name,
        forward=forward,
        capabilities=_capabilities(
            accepts=None if prefill else _few,
            documents=True,
            batch_invariant=split_keys is not None,
        ),
        arithmetic=Arithmetic(merged_by_lse=True),
    )


# Splits that fill a card are few where keys are few: more of them, empty ones too, in the others.
decode = contiguous_kernel("decode")
decode_invariant = contiguous_kernel("decode_invariant", split_keys=64)
decode_paged = paged_kernel("decode_paged", 16, num_splits=5)
prefill_paged = paged_kernel("prefill_paged", 64, prefill=True)
