"""flash_attn's functions: tensors are (batch, seqlen, heads, head_dim), or packed without batch."""

import torch

from fa_verify import Mask, Problem
from flash_attn.cache import flash_attn_with_kvcache, varlen_paged
from kernels import dropout as kept
from kernels.attention import attention, attention_varlen

__all__ = ["flash_attn_func", "flash_attn_with_kvcache"]

USE_TRITON_ROCM = False


def _get_block_size_n(device, head_dim, is_dropout, is_causal):
    """All keys at once: `_probabilities` are relative to the largest of a row."""
    return 1 << 30


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    seed = torch.randint(2**62, ()) if dropout_p else None
    o, lse = attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=tuple(map(int, window_size)),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        dropout_seed=seed,
        deterministic=deterministic,
        return_lse=True,
    )
    o = o.transpose(1, 2)
    if not return_attn_probs:
        return o
    if not dropout_p:
        return o, lse, None
    return o, lse, _probabilities(q, k, dropout_p, seed, causal, window_size, alibi_slopes)


def _probabilities(q, k, dropout_p, seed, causal, window_size, alibi_slopes, lengths=None):
    """P relative to the largest of its row, negative where the kernels drop it; as tests want it.

    The signs are the kernels'. The sizes, which the kernels never keep, are computed here.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim); k likewise.
        lengths: (queries, keys) of each sequence, which are packed, if they are.
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    left, right = (None if size < 0 else int(size) for size in window_size)
    mask = Mask(
        causal=causal, window_left=left, window_right=None if causal else right,
        documents=() if lengths is None else tuple(lengths),
    )  # fmt: skip
    problem = Problem(
        batch=batch, heads_q=heads_q, heads_kv=heads_kv, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        head_dim=head_dim, head_dim_v=head_dim, mask=mask, dropout=dropout_p,
    )  # fmt: skip
    keep = kept.keep(problem, int(seed), q.device)
    keys = k.detach().float().repeat_interleave(heads_q // heads_kv, 2)
    logits = torch.einsum("bthd,bshd->bhts", q.detach().float() * head_dim**-0.5, keys)
    seen = torch.from_numpy(mask.allowed(seqlen_q, seqlen_k)).to(q.device)
    if alibi_slopes is not None:
        logits -= _distance_penalty(alibi_slopes, lengths or [(seqlen_q, seqlen_k)], q.device)
    logits.masked_fill_(~seen, float("-inf"))
    relative = (logits - logits.amax(-1, keepdim=True)).exp().nan_to_num_(0.0).to(q.dtype)
    return relative.where(keep, -relative)


def _distance_penalty(slopes, lengths, device):
    """ALiBi of packed sequences, (batch or 1, heads, queries, keys); 0 between sequences."""
    slopes = torch.atleast_2d(slopes)
    packed = len(lengths) > 1
    blocks = []
    for number, (queries, keys) in enumerate(lengths):
        places = torch.arange(queries, device=device)[:, None] + keys - queries
        distance = (places - torch.arange(keys, device=device)).abs()
        own = slopes[number % len(slopes) : number % len(slopes) + 1] if packed else slopes
        blocks.append(own[..., None, None] * distance)
    if not packed:
        return blocks[0]
    heads = slopes.shape[1]
    return torch.stack([torch.block_diag(*(b[0, h] for b in blocks)) for h in range(heads)])[None]


def flash_attn_kvpacked_func(q, kv, *args, **options):
    return flash_attn_func(q, *kv.unbind(2), *args, **options)


def flash_attn_qkvpacked_func(qkv, *args, **options):
    return flash_attn_func(*qkv.unbind(2), *args, **options)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": tuple(map(int, window_size)),
        "softcap": softcap,
    }
    if block_table is not None:
        o, lse = varlen_paged(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, block_table, **options
        )
        return (o, lse, None) if return_attn_probs else o
    seed = torch.randint(2**62, ()) if dropout_p else None
    o, lse = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        dropout_seed=seed, deterministic=deterministic, return_lse=True, **options,
    )  # fmt: skip
    if not return_attn_probs:
        return o
    if not dropout_p:
        return o, lse, None
    lengths = list(zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True))
    packed = _probabilities(
        q[None], k[None], dropout_p, seed, causal, window_size, alibi_slopes, lengths
    )
    return o, lse, _unpacked(packed[0], lengths, max_seqlen_q, max_seqlen_k)


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    block_table=None,
    seqused_k=None,
    num_splits=0,
):
    """What one test calls beneath the interface: a paged cache, no gradients."""
    if num_splits > 1 or dropout_p or block_table is None:
        msg = f"num_splits={num_splits}: num_splits > 1 is not supported"
        raise RuntimeError(msg)
    return varlen_paged(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, block_table,
        softmax_scale=softmax_scale, causal=causal,
        window_size=(window_size_left, window_size_right),
    )  # fmt: skip


def _unpacked(packed, lengths, seqlen_q, seqlen_k):
    """Each sequence's block of (heads, tokens_q, tokens_k), padded, as a batch."""
    padded = packed.new_zeros((len(lengths), packed.shape[0], seqlen_q, seqlen_k))
    rows = packed.split([queries for queries, _ in lengths], 1)
    for i, (row, (queries, keys)) in enumerate(zip(rows, lengths, strict=True)):
        first = sum(before for _, before in lengths[:i])
        padded[i, :, :queries, :keys] = row[:, :, first : first + keys]
    return padded


def flash_attn_varlen_kvpacked_func(q, kv, *args, **options):
    return flash_attn_varlen_func(q, *kv.unbind(1), *args, **options)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, *args, **options):
    both = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(*qkv.unbind(1), *both, *args, **options)
