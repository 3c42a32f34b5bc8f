"""A drop-in for `torch.nn.functional.scaled_dot_product_attention`, with torch's semantics.

Whatever the kernels do not take, and whatever torch would refuse, goes to torch's own function: so
do its errors come from there.
"""

import math

import torch
from torch.autograd import forward_ad

# As it is when this loads: what takes its place afterwards may be the function below.
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from .attention import attention, autocast
from .inputs import DTYPES
from .operators import triton_runs_on

__all__ = ["scaled_dot_product_attention"]

# Multiplications and additions of both products, from which on the host's time no longer shows:
# docs/attention.md, "Short sequences".
_LEAST_WORK = 1 << 39
_MOST_HEAD_DIM = 256
_AXES = 4


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,  # noqa: FBT002 (torch's signature)
    scale=None,
    enable_gqa=False,  # noqa: FBT002
):
    """Attention as torch's function computes it, by this package's kernels where they fit.

    ``is_causal`` is top-left aligned, as in torch. float32 follows
    `torch.get_float32_matmul_precision`. Gradients have no gradients; torch's own do in part.
    """
    if not all(isinstance(x, torch.Tensor) for x in (query, key, value)):
        return torch_attention(query, key, value)  # raises
    query, key, value = autocast(query, key, value)
    if attn_mask is not None:
        (attn_mask,) = autocast(attn_mask)
    if not (
        _kernels_take(query, key, value, scale, enable_gqa)
        and _mask_fits(attn_mask, query, key, is_causal)
        and 0.0 <= dropout_p < 1.0
        and not _transformed()
        and faster(query, key, value)
    ):
        return torch_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return attention(
        query,
        key,
        value,
        softmax_scale=scale,
        causal=is_causal,
        bias=None if attn_mask is None else _bias(attn_mask, query.dtype),
        dropout_p=dropout_p,
        alignment="top-left",
        dot_precision=_float32_precision() if query.dtype == torch.float32 else "ieee",
    )


def _transformed():
    """Whether torch.func or forward mode is at work, for which PyTorch's function has its rules."""
    if torch.compiler.is_compiling():
        return False
    transforms = torch._C._are_functorch_transforms_active()  # noqa: SLF001
    return transforms or forward_ad._current_level >= 0  # noqa: SLF001


def _float32_precision():
    """What torch is set to."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _mask_fits(attn_mask, query, key, is_causal):
    """Whether a mask is there or not as torch wants it, and a bias can be made of it."""
    if attn_mask is None:
        return True
    full = (*query.shape[:3], key.shape[2])
    sizes = zip(reversed(attn_mask.shape), reversed(full), strict=False)
    return (
        not is_causal
        and not attn_mask.is_nested
        and attn_mask.device == query.device
        and attn_mask.dtype in (torch.bool, query.dtype)
        and 2 <= attn_mask.dim() <= _AXES
        and all(size in (1, whole) for size, whole in sizes)
    )


def _bias(attn_mask, dtype):
    """What is added to the logits; axes along which the mask was expanded stay small."""
    for axis, stride in enumerate(attn_mask.stride()):
        if stride == 0 and attn_mask.shape[axis] > 1:
            attn_mask = attn_mask.narrow(axis, 0, 1)
    if attn_mask.dtype != torch.bool:
        return attn_mask
    return torch.zeros((), dtype=dtype, device=attn_mask.device).where(attn_mask, -math.inf)


def faster(query, key, value):
    """Whether the kernels are as fast as PyTorch's, as measured on an H200 (docs/attention.md).

    Launching takes the host longer, which short sequences do not make up for. float32 in full
    precision is slower at every length, and what torch is set to is not known while it compiles.
    """
    if query.dtype == torch.float32 and (
        torch.compiler.is_compiling() or _float32_precision() == "ieee"
    ):
        return False
    logits = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    return 2 * logits * (query.shape[3] + value.shape[3]) >= _LEAST_WORK


def _kernels_take(query, key, value, scale, enable_gqa):
    """Whether the kernels are there for these tensors."""
    tensors = (query, key, value)
    if any(x.is_nested or x.dim() != _AXES or x.dtype not in DTYPES for x in tensors):
        return False
    if len({(x.dtype, x.device, x.shape[0]) for x in tensors}) > 1:
        return False
    heads_q, heads_kv = query.shape[1], key.shape[1]
    return (
        min(*query.shape, *key.shape, *value.shape) > 0
        and key.shape[:3] == value.shape[:3]
        and query.shape[3] == key.shape[3]
        and max(query.shape[3], value.shape[3]) <= _MOST_HEAD_DIM
        and (heads_q == heads_kv or (enable_gqa and heads_q % heads_kv == 0))
        and (scale is None or math.isfinite(scale))
        and triton_runs_on(query.device.type)
    )
