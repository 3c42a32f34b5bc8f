"""Attention in plain PyTorch: a right kernel, and functions with the field's signatures."""

import torch

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs, reference


def _forward(problem, q, k, v):
    exact = reference.forward(problem, q, k, v)
    return Outputs(exact.o.to(q.dtype), exact.lse.float())


def _backward(problem, q, k, v, outputs, do):
    exact = reference.backward(problem, q, k, v, do)
    return Grads(exact.dq.to(q.dtype), exact.dk.to(q.dtype), exact.dv.to(q.dtype))


def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """PyTorch's own, with its signature."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """flash-attn's signature: (batch, seqlen, heads, head_dim), bottom-right causal."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        mask = mask.tril(k.shape[2] - q.shape[2])
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale)
    return o.transpose(1, 2)


right = Kernel(
    name="right",
    forward=_forward,
    backward=_backward,
    capabilities=Capabilities(
        dot_precisions=("ieee", "tf32", "tf32x3"),
        head_dims_v=range(1, 257),
        window=True,
        softcap=True,
    ),
    arithmetic=Arithmetic(delta_from_stored_o=False),
)
