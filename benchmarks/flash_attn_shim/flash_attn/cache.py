"""flash_attn_with_kvcache: new keys are written, and positions rotated, in plain PyTorch."""

import torch

from flash_attn.layers.rotary import apply_rotary_emb
from kernels.attention import attention_varlen
from kernels.decode_attention import decode_attention


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    batch, seqlen_q = q.shape[:2]
    capacity = (
        block_table.shape[1] * k_cache.shape[1] if block_table is not None else k_cache.shape[1]
    )
    lengths = torch.as_tensor(
        capacity if cache_seqlens is None else cache_seqlens, dtype=torch.int32, device=q.device
    ).expand(batch)
    if rotary_cos is not None:
        rotate = {"cos": rotary_cos, "sin": rotary_sin, "interleaved": rotary_interleaved}
        k = apply_rotary_emb(k, seqlen_offsets=lengths, **rotate)
        if causal or max(window_size) >= 0:
            q = apply_rotary_emb(q, seqlen_offsets=lengths, **rotate)
        else:  # all queries are at one position
            flat = apply_rotary_emb(q.flatten(1, 2).unsqueeze(1), seqlen_offsets=lengths, **rotate)
            q = flat.view(q.shape)
    seqlen_new = 0 if k is None else k.shape[1]
    needed = int(lengths.max()) + seqlen_new
    if needed > capacity:
        whose = "k_cache" if block_table is None else "block_table"
        msg = f"cache_seqlens: {needed} keys with the new ones, and {whose} holds {capacity}"
        raise RuntimeError(msg)
    rows = (
        torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx.long()
    )
    if seqlen_new:
        places = lengths.long()[:, None] + torch.arange(seqlen_new, device=q.device)
        where = rows[:, None], places
        if block_table is not None:
            page_size = k_cache.shape[1]
            where = block_table.long().gather(1, places // page_size), places % page_size
        k_cache[where], v_cache[where] = k, v
        lengths = lengths + seqlen_new
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": tuple(map(int, window_size)),
        "softcap": softcap,
    }
    if block_table is None and cache_batch_idx is not None:
        k_cache, v_cache = k_cache[rows], v_cache[rows]
    if alibi_slopes is not None or cache_leftpad is not None:
        # The kernels of the cache have neither: what is seen is packed.
        if block_table is not None:
            k_cache, v_cache = (x[block_table.long()].flatten(1, 2) for x in (k_cache, v_cache))
        first = torch.zeros_like(lengths) if cache_leftpad is None else cache_leftpad
        places = torch.arange(k_cache.shape[1], device=q.device)
        seen = (places >= first[:, None]) & (places < lengths[:, None])
        o, lse = attention_varlen(
            q.flatten(0, 1), k_cache[seen], v_cache[seen],
            torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q,
            torch.nn.functional.pad(seen.sum(1).cumsum(0, dtype=torch.int32), (1, 0)),
            alibi_slopes=alibi_slopes, return_lse=True, **options,
        )  # fmt: skip
        o = o.unflatten(0, (batch, seqlen_q))
        lse = lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)
        return (o, lse) if return_softmax_lse else o
    caches = k_cache, v_cache
    if block_table is None:
        caches = (x.transpose(1, 2) for x in caches)
    o, lse = decode_attention(
        q.transpose(1, 2), *caches, block_table=block_table, cache_seqlens=lengths.contiguous(),
        num_splits=num_splits or None, return_lse=True, **options,
    )  # fmt: skip
    o = o.transpose(1, 2)
    return (o, lse) if return_softmax_lse else o


def varlen_paged(
    q, k_cache, v_cache, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, block_table, **options
):
    """Packed queries, the keys in pages: o, lse."""
    return decode_attention(
        q, k_cache, v_cache, block_table=block_table, cache_seqlens=cu_seqlens_k.diff(),
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, return_lse=True, **options,
    )  # fmt: skip
