"""What a model calls: `attention`, the module `FlashAttention`, a drop-in for PyTorch's SDPA.

Tensors are (batch, heads, seqlen, head_dim) with any strides; heads_q is a multiple of heads_kv.
"""

import torch
import triton
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fa_verify import Mask, Outputs, Problem

from .flash_attention import attention_backward, attention_backward_atomic, attention_forward

__all__ = ["FlashAttention", "attention", "scaled_dot_product_attention"]

# Below this many queries and keys PyTorch's own attention is used. A guess: to be measured.
SHORTEST_TRITON_SEQLEN = 128
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_MOST_HEAD_DIM = 256
_AXES = 4


class _Attention(torch.autograd.Function):
    """The kernels under autograd. Saves q, k, v, o and lse only."""

    @staticmethod
    def forward(ctx, q, k, v, problem, deterministic):  # noqa: ANN205
        outputs = attention_forward(problem, q, k, v)
        ctx.save_for_backward(q, k, v, outputs.o, outputs.lse)
        ctx.problem = problem
        ctx.gradients = attention_backward if deterministic else attention_backward_atomic
        ctx.mark_non_differentiable(outputs.lse)
        return outputs.o, outputs.lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _dlse):  # noqa: ANN205
        q, k, v, o, lse = ctx.saved_tensors
        grads = ctx.gradients(ctx.problem, q, k, v, Outputs(o, lse), do)
        return grads.dq, grads.dk, grads.dv, None, None


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
    """Differentiable attention.

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
    _check(q, k, v)
    left, right = (None if size < 0 else size for size in window_size)
    problem = Problem(
        batch=q.shape[0],
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seqlen_q=q.shape[2],
        seqlen_k=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=_DTYPES[q.dtype],
        dot_precision=dot_precision if q.dtype == torch.float32 else "ieee",
        mask=Mask(
            causal=causal,
            window_left=left,
            window_right=None if causal else right,
            alignment=alignment,
        ),
        softmax_scale=softmax_scale,
        softcap=softcap,
    )
    o, lse = _Attention.apply(q, k, v, problem, deterministic)
    return (o, lse) if return_lse else o


def _check(q, k, v):
    """Say what does not fit together, before a kernel reads past a tensor."""
    shapes = {name: tuple(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    for name, shape in shapes.items():
        if len(shape) != _AXES:
            msg = f"{name}.shape={shape}: must be (batch, heads, seqlen, head_dim)"
            raise ValueError(msg)
    if q.dtype not in _DTYPES:
        msg = f"q.dtype={q.dtype}: must be float16, bfloat16 or float32; convert q, k and v"
        raise ValueError(msg)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype or x.device != q.device:
            msg = f"{name}={x.dtype} on {x.device}: must be as q, {q.dtype} on {q.device}"
            raise ValueError(msg)
    if k.shape[:3] != v.shape[:3]:
        msg = f"v.shape={shapes['v']}: must agree with k.shape={shapes['k']} up to head_dim"
        raise ValueError(msg)
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        msg = f"k.shape={shapes['k']}: batch and head_dim must be those of q.shape={shapes['q']}"
        raise ValueError(msg)


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
    """Drop-in for `torch.nn.functional.scaled_dot_product_attention`, with torch's semantics.

    ``is_causal`` is top-left aligned, as in torch. float32 follows
    `torch.get_float32_matmul_precision`. Short lengths, and whatever the kernels do not take
    (other dtypes, ranks, head dims, tensors off the GPU), go to torch's own function.

    Raises:
        NotImplementedError: attn_mask or dropout_p asks for what the kernels do not have.
        ValueError: Heads differ without enable_gqa.
    """
    if attn_mask is not None:
        msg = (
            f"attn_mask={type(attn_mask).__name__}: arbitrary masks are not supported; use "
            "is_causal, attention(window_size=...), or torch's own function"
        )
        raise NotImplementedError(msg)
    if dropout_p != 0.0:
        msg = f"dropout_p={dropout_p}: dropout is not supported, use 0.0 or torch's own function"
        raise NotImplementedError(msg)
    if not _kernels_take(query, key, value):
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        msg = (
            f"enable_gqa={enable_gqa}: key has {key.shape[1]} heads and query {query.shape[1]}; "
            "pass enable_gqa=True to share key heads"
        )
        raise ValueError(msg)
    exact = torch.get_float32_matmul_precision() == "highest"
    return attention(
        query,
        key,
        value,
        softmax_scale=scale,
        causal=is_causal,
        alignment="top-left",
        dot_precision="ieee" if exact else "tf32",
    )


def _kernels_take(query, key, value):
    """Whether the Triton path is there for these tensors and worth its launch."""
    tensors = (query, key, value)
    if any(x.dim() != _AXES or x.dtype not in _DTYPES for x in tensors):
        return False
    same_place = len({(x.dtype, x.device, x.shape[0]) for x in tensors}) == 1
    narrow = max(query.shape[3], value.shape[3]) <= _MOST_HEAD_DIM
    long = max(query.shape[2], key.shape[2]) >= SHORTEST_TRITON_SEQLEN
    return same_place and narrow and long and min(query.shape) > 0 and _triton_runs(query)


def _triton_runs(tensor):
    """Whether Triton's active driver runs kernels where the tensor is: CUDA, or fa_verify's CPU."""
    try:
        device = triton.runtime.driver.active.get_active_torch_device()
    except RuntimeError:  # no driver at all
        return False
    return device.type == tensor.device.type
