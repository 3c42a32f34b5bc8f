"""What a model calls: `attention`, and the module `FlashAttention`.

Tensors are (batch, heads, seqlen, head_dim) with any strides; heads_q is a multiple of heads_kv.
"""

import torch

from .operators import attention_forward_op

__all__ = ["FlashAttention", "attention", "autocast"]


def attention(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alignment="bottom-right",
    dot_precision="ieee",
    deterministic=True,
    return_lse=False,
):
    """Differentiable attention. Under autocast float32 tensors take autocast's dtype.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim), float16, bfloat16 or float32.
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        softmax_scale: Factor of the logits; None means 1/sqrt(head_dim).
        causal: Hide the keys to the right of the diagonal.
        window_size: Most keys to the left and right of the diagonal; -1: no limit. Under `causal`
            the right one is 0.
        softcap: c > 0 maps a logit x to c*tanh(x/c).
        alignment: "bottom-right": the last query is on the diagonal with the last key.
            "top-left": the first with the first.
        dot_precision: Of float32 inputs: "ieee", "tf32" or "tf32x3".
        deterministic: Compute dq without atomics.
        return_lse: Return (o, lse) instead of o.

    Returns:
        o: (batch, heads_q, seqlen_q, head_dim_v); rows that see no key are 0.
        lse: (batch, heads_q, seqlen_q) float32, natural logarithm; no gradient flows through it.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, or an argument breaks its rule.
    """
    q, k, v = autocast(q, k, v)
    o, lse = attention_forward_op(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size[0],
        -1 if causal else window_size[1],
        softcap,
        alignment,
        dot_precision if q.dtype == torch.float32 else "ieee",
        deterministic,
    )
    return (o, lse) if return_lse else o


def autocast(*tensors):  # noqa: ANN002
    """The tensors as autocast would hand them to PyTorch's own attention: float32 as its dtype."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tensors)


class FlashAttention(torch.nn.Module):
    """`attention` as a module; the constructor takes its options.

    Attributes:
        options: softmax_scale, causal, window_size, softcap, deterministic; see `attention`.
    """

    def __init__(
        self,
        *,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        deterministic=True,
    ) -> None:
        super().__init__()
        self.options = {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": window_size,
            "softcap": softcap,
            "deterministic": deterministic,
        }

    def forward(self, q, k, v):
        """Return o of `attention` for q, k, v of shape (batch, heads, seqlen, head_dim)."""
        return attention(q, k, v, **self.options)

    def extra_repr(self):
        """The options, for print(module)."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())
