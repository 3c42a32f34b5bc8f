"""`decode_attention`: attention to a key-value cache as an operator, and what it refuses.

Forward only, as serving is.
"""

import torch

from . import given
from .cached_attention import attention_with_cache
from .inputs import DTYPES
from .operators import NAMESPACE, eager, on_device
from .replay import Replayed

__all__ = ["decode_attention"]

_MOST_HEAD_DIM = 256


def decode_attention(
    q,
    k_cache,
    v_cache,
    *,
    block_table=None,
    cache_seqlens=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    sinks=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alignment="bottom-right",
    dot_precision="ieee",
    num_splits=None,
    split_keys=None,
    return_lse=False,
):
    """Attention of some queries to a cache, which holds the queries' own keys already.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim), any strides; with cu_seqlens_q (tokens, heads_q,
            head_dim).
        k_cache: (batch, heads_kv, seqlen_k, head_dim), any strides; with block_table pools of
            pages, (num_pages, page_size, heads_kv, head_dim).
        v_cache: Likewise with head_dim_v.
        block_table: (batch, pages) int32: the pages of each sequence. Entries past a sequence's
            last key are not read; the others are trusted, so that nothing waits for them.
        cache_seqlens: (batch,) int32: keys of each sequence, trusted likewise; None: all that there
            is room for.
        cu_seqlens_q: (batch + 1,) int32: where each sequence's tokens begin in q.
        max_seqlen_q: With cu_seqlens_q, the most tokens of a sequence.
        sinks: (heads_q,) float32: one more logit of each row, without a value.
        softmax_scale: Factor of the logits; None means 1/sqrt(head_dim).
        causal: Hide the keys to the right of the diagonal.
        window_size: Most keys to the left and right of the diagonal; -1: no limit.
        softcap: c > 0 maps a logit x to c*tanh(x/c).
        alignment: "bottom-right": a sequence's last query is on the diagonal with its last key.
        dot_precision: Of float32 inputs: "ieee", "tf32" or "tf32x3".
        num_splits: Into how many parts the keys are split; None: as many as fill the card.
        split_keys: Keys a part instead: the same bits then, whatever else is in the batch.
        return_lse: Return (o, lse) instead of o.

    Returns:
        o: As q, with head_dim_v; rows that see no key are 0.
        lse: (batch, heads_q, seqlen_q), or (heads_q, tokens), float32, natural logarithm.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, or an argument breaks its rule.
    """
    given.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    tables = {
        "block_table": block_table,
        "cache_seqlens": cache_seqlens,
        "cu_seqlens_q": cu_seqlens_q,
        "sinks": sinks,
    }
    given.tensors(**tables, optional=tables)
    packed = cu_seqlens_q is not None
    if packed and q.dim() == 3:
        q = q.transpose(0, 1).unsqueeze(0)
    taken = (
        q,
        k_cache,
        v_cache,
        block_table,
        cache_seqlens,
        cu_seqlens_q,
        given.integer("max_seqlen_q", max_seqlen_q, optional=True),
        sinks,
        given.number("softmax_scale", softmax_scale, optional=True),
        given.switch("causal", causal),
        *given.window(window_size),
        given.number("softcap", softcap),
        alignment,
        dot_precision,
        given.integer("num_splits", num_splits, optional=True),
        given.integer("split_keys", split_keys, optional=True),
    )
    o, lse = (_decode_pass if _direct(q, k_cache, v_cache, sinks) else _decode_op)(*taken)
    if packed:
        o, lse = o.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (o, lse) if return_lse else o


def _direct(*tensors):  # noqa: ANN002
    """Whether the operator may be left out: it takes the host longer than the kernels the card."""
    if torch.compiler.is_compiling() or not eager(*tensors):
        return False
    # The operator says that there are no gradients.
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))


@Replayed
def _decode_pass(
    q, k_cache, v_cache, block_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, sinks,
    softmax_scale, causal, window_left, window_right, softcap, alignment, dot_precision,
    num_splits, split_keys,
):  # fmt: skip
    """The forward pass: o and lse."""
    tables = block_table, cache_seqlens, cu_seqlens_q, max_seqlen_q
    _check(q, k_cache, v_cache, *tables, sinks)
    _check_options(softcap, alignment, dot_precision)
    with on_device(q):
        return attention_with_cache(
            q, k_cache, v_cache, block_table=block_table, cache_lengths=cache_seqlens,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, sinks=sinks,
            softmax_scale=softmax_scale,
            causal=causal, window_size=(window_left, window_right), softcap=softcap,
            alignment=alignment, dot_precision=dot_precision, num_splits=num_splits,
            split_keys=split_keys,
        )  # fmt: skip


def _decode(*arguments):  # noqa: ANN002
    return _decode_pass(*arguments)


_decode_op = torch.library.custom_op(
    f"{NAMESPACE}::decode_attention",
    _decode,
    mutates_args=(),
    schema="(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? block_table, Tensor? cache_seqlens, "
    "Tensor? cu_seqlens_q, int? max_seqlen_q, Tensor? sinks, float? softmax_scale, bool causal, "
    "int window_left, int window_right, float softcap, str alignment, str dot_precision, "
    "int? num_splits, int? split_keys) -> (Tensor, Tensor)",
)


@_decode_op.register_fake
def _decode_fake(q, k_cache, v_cache, *rest):  # noqa: ANN002
    _check(q, k_cache, v_cache, *rest[:5])
    _check_options(*rest[9:12])
    return q.new_empty((*q.shape[:3], v_cache.shape[3])), q.new_empty(
        q.shape[:3], dtype=torch.float32
    )


@_decode_op.register_autograd
def _refuse(_ctx, *_grads):  # noqa: ANN002
    msg = "decode_attention: it has no gradient; use attention or attention_varlen for training"
    raise NotImplementedError(msg)


def _check(q, k_cache, v_cache, block_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, sinks):
    """Say what does not fit together, before a kernel reads past a tensor."""
    shapes = {"q": q.shape, "k_cache": k_cache.shape, "v_cache": v_cache.shape}
    for name, shape in shapes.items():
        if len(shape) != 4:
            msg = f"{name}.shape={tuple(shape)}: must have four axes; see decode_attention"
            raise ValueError(msg)
    if q.dtype not in DTYPES:
        msg = f"q.dtype={q.dtype}: must be float16, bfloat16 or float32; convert q and the cache"
        raise ValueError(msg)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype != q.dtype or cache.device != q.device:
            msg = f"{name}={cache.dtype} on {cache.device}: must be as q, {q.dtype} on {q.device}"
            raise ValueError(msg)
    heads_kv = k_cache.shape[1 if block_table is None else 2]
    if k_cache.shape[:3] != v_cache.shape[:3] or q.shape[3] != k_cache.shape[3]:
        msg = (
            f"k_cache.shape={tuple(k_cache.shape)}: must agree with v_cache.shape="
            f"{tuple(v_cache.shape)} up to head_dim, and in head_dim with q.shape={tuple(q.shape)}"
        )
        raise ValueError(msg)
    if not heads_kv or q.shape[1] % heads_kv:
        msg = f"q.shape={tuple(q.shape)}: its heads must be a multiple of the cache's {heads_kv}"
        raise ValueError(msg)
    if not all(1 <= x.shape[3] <= _MOST_HEAD_DIM for x in (q, v_cache)):
        msg = f"head_dim={q.shape[3]}, head_dim_v={v_cache.shape[3]}: must be 1 to {_MOST_HEAD_DIM}"
        raise ValueError(msg)
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if block_table is None and k_cache.shape[0] != batch:
        msg = f"k_cache.shape={tuple(k_cache.shape)}: batch must be {batch}"
        raise ValueError(msg)
    for name, table, shape, dtype in (
        ("block_table", block_table, (batch, -1), torch.int32),
        ("cache_seqlens", cache_seqlens, (batch,), torch.int32),
        ("cu_seqlens_q", cu_seqlens_q, (-1,), torch.int32),
        ("sinks", sinks, (q.shape[1],), torch.float32),
    ):
        if table is None:
            continue
        fits = table.dim() == len(shape) and shape[0] in (-1, table.shape[0])
        if not fits or table.dtype != dtype or table.device != q.device:
            msg = (
                f"{name}: {table.dtype} {tuple(table.shape)} on {table.device}: must be {dtype} "
                f"{shape} on {q.device}"
            )
            raise ValueError(msg)
        if table.stride(-1) != 1:
            msg = f"{name}.stride()={table.stride()}: the last axis must be contiguous"
            raise ValueError(msg)
    if cu_seqlens_q is not None and (q.shape[0] != 1 or max_seqlen_q is None):
        msg = f"max_seqlen_q={max_seqlen_q}: must be given with cu_seqlens_q, and q be packed"
        raise ValueError(msg)


def _check_options(softcap, alignment, dot_precision):
    for name, value, fits, rule in (
        ("softcap", softcap, 0 <= softcap < float("inf"), "must be finite and at least 0"),
        (
            "alignment",
            alignment,
            alignment in ("bottom-right", "top-left"),
            "must be 'bottom-right' or 'top-left'",
        ),
        (
            "dot_precision",
            dot_precision,
            dot_precision in ("ieee", "tf32", "tf32x3"),
            "must be one of ieee, tf32, tf32x3",
        ),
    ):
        if not fits:
            msg = f"{name}={value!r}: {rule}"
            raise ValueError(msg)
