"""What a model calls: `attention`, `attention_varlen` for packed sequences, and a module."""

import functools

import torch

from . import given
from .block_mask import create_block_mask
from .inputs import PRECISIONS, Inputs, Options
from .operators import differentiable_attention

__all__ = ["FlashAttention", "attention", "attention_varlen", "autocast", "create_block_mask"]


def attention(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    bias=None,
    alibi_slopes=None,
    sinks=None,
    dropout_p=0.0,
    dropout_seed=None,
    block_mask=None,
    alignment="bottom-right",
    dot_precision="ieee",
    deterministic=True,
    return_lse=False,
):
    """Differentiable attention. Under autocast float32 q, k and v take autocast's dtype.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim), float16, bfloat16 or float32, any strides.
        k: (batch, heads_kv, seqlen_k, head_dim); heads_q is a multiple of heads_kv.
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        softmax_scale: Factor of the logits; None means 1/sqrt(head_dim).
        causal: Hide the keys to the right of the diagonal.
        window_size: Most keys to the left and right of the diagonal; -1: no limit. Under `causal`
            the right one is 0.
        softcap: c > 0 maps a logit x to c*tanh(x/c).
        bias: Added to the logits after the softcap; broadcasts to (batch, heads_q, seqlen_q,
            seqlen_k), and has a gradient. -inf hides a key.
        alibi_slopes: (heads_q,) or (batch, heads_q) float32; slope times the distance to the
            diagonal is subtracted from the logits. No gradient flows to them.
        sinks: (heads_q,) float32: one more logit of every row, with no value; has a gradient.
        dropout_p: Probability with which an element of the softmax is dropped; the others are
            divided by 1 - dropout_p.
        dropout_seed: Which ones, an int or an int64 tensor on the CPU; None: PyTorch's generator
            draws it.
        block_mask: An arbitrary mask of all batches and heads, made by
            `create_block_mask(mask_mod, seqlen_q, seqlen_k)`; in place of causal and window_size.
        alignment: "bottom-right": the last query is on the diagonal with the last key.
            "top-left": the first with the first.
        dot_precision: Of float32 inputs: "ieee", "tf32" or "tf32x3".
        deterministic: Compute dq without atomics.
        return_lse: Return (o, lse) instead of o.

    Returns:
        o: (batch, heads_q, seqlen_q, head_dim_v), in memory as q: heads within rows, or rows within
            heads; rows that see no key are 0.
        lse: (batch, heads_q, seqlen_q) float32, natural logarithm, sinks included, dropout not.
            Gradients flow through it.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, or an argument breaks its rule.
    """
    given.tensors(q=q, k=k, v=v, bias=bias, optional=("bias",))
    q, k, v = autocast(q, k, v)
    if block_mask is not None and not hasattr(block_mask, "flat"):
        msg = (
            f"block_mask: {type(block_mask).__name__}: must be made by create_block_mask(mask_mod, "
            "seqlen_q, seqlen_k); a dense mask goes into bias, as 0 and -inf"
        )
        raise ValueError(msg)
    seqlens = q.shape[-2], k.shape[-2]
    if block_mask is not None and block_mask.seqlens != seqlens:
        msg = f"block_mask: made for seqlen_q, seqlen_k={block_mask.seqlens}: must be {seqlens}"
        raise ValueError(msg)
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    return _attend(
        (q, k, v, bias, alibi_slopes, sinks),
        (None, None, None if block_mask is None else block_mask.flat),
        dropout_p,
        dropout_seed,
        window_size,
        return_lse,
        softmax_scale=softmax_scale,
        causal=causal,
        softcap=softcap,
        alignment=alignment,
        dot_precision=dot_precision,
        deterministic=deterministic,
    )


def attention_varlen(  # noqa: D417 (the others are those of attention)
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    dropout_p=0.0,
    dropout_seed=None,
    alignment="bottom-right",
    dot_precision="ieee",
    deterministic=True,
    return_lse=False,
):
    """`attention` of sequences packed one after another; each sees its own keys only.

    Args:
        q: (tokens_q, heads_q, head_dim), any strides.
        k: (tokens_k, heads_kv, head_dim).
        v: (tokens_k, heads_kv, head_dim_v).
        cu_seqlens_q: (sequences + 1,) int32, on q's device: where each sequence begins, and where
            the last one ends: from 0 to tokens_q, never falling. They are not read before the
            kernels run, so that nothing waits for them: wrong ones read past the tensors.
        cu_seqlens_k: Likewise of k and v. A sequence may be empty.
        softmax_scale: As all the following, see `attention`. alibi_slopes is (heads_q,), or
            (sequences, heads_q).

    Returns:
        o: (tokens_q, heads_q, head_dim_v).
        lse: (heads_q, tokens_q) float32.

    Raises:
        ValueError: As `attention`.
    """
    given.tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    q, k, v = autocast(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            msg = f"{name}.shape={tuple(x.shape)}: must be (tokens, heads, head_dim)"
            raise ValueError(msg)
    o, lse = _attend(
        (*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), None, alibi_slopes, sinks),
        (cu_seqlens_q, cu_seqlens_k, None),
        dropout_p,
        dropout_seed,
        window_size,
        True,
        softmax_scale=softmax_scale,
        causal=causal,
        softcap=softcap,
        alignment=alignment,
        dot_precision=dot_precision,
        deterministic=deterministic,
    )
    o, lse = o.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (o, lse) if return_lse else o


def _attend(
    tensors, masks, dropout_p, dropout_seed, window_size, return_lse,
    *, softmax_scale, causal, softcap, alignment, dot_precision, deterministic,
):  # fmt: skip
    """Call the operator."""
    _, _, _, _, alibi_slopes, sinks = tensors
    terms = "alibi_slopes", "sinks"
    given.tensors(alibi_slopes=alibi_slopes, sinks=sinks, optional=terms)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        msg = "alibi_slopes.requires_grad=True: slopes get no gradient; use alibi_slopes.detach()"
        raise ValueError(msg)
    window = given.window(window_size)
    asked = (
        softmax_scale, causal, window, softcap, dropout_p, alignment, dot_precision,
        deterministic, tensors[0].dtype == torch.float32,
    )  # fmt: skip
    try:
        options = (
            _options.__wrapped__(*asked) if torch.compiler.is_compiling() else _options(*asked)
        )
    except TypeError:  # something that has no hash
        options = _options.__wrapped__(*asked)
    inputs = Inputs(*tensors, _seed(options.dropout_p, dropout_seed), *masks)
    o, lse = differentiable_attention(inputs, options)
    return (o, lse) if return_lse else o


@functools.lru_cache(maxsize=256, typed=True)
def _options(
    softmax_scale, causal, window, softcap, dropout_p, alignment, dot_precision, deterministic,
    float32,
):  # fmt: skip
    """What is asked for beside tensors, checked; a model asks for the same again and again."""
    causal = given.switch("causal", causal)
    left, right = window
    dot_precision = given.choice("dot_precision", dot_precision, PRECISIONS)
    return Options(
        softmax_scale=given.number("softmax_scale", softmax_scale, optional=True),
        causal=causal,
        window_left=left,
        window_right=-1 if causal else right,
        softcap=given.number("softcap", softcap),
        dropout_p=given.number("dropout_p", dropout_p),
        alignment=alignment,
        # What float32 alone has a choice of.
        dot_precision=dot_precision if float32 else "ieee",
        deterministic=given.switch("deterministic", deterministic),
    )


def _seed(dropout_p, dropout_seed):
    """The seed as the operator takes it: on the CPU, so that reading it waits for nothing."""
    if not 0.0 <= dropout_p < 1.0:
        msg = f"dropout_p={dropout_p}: must be at least 0 and below 1"
        raise ValueError(msg)
    if dropout_p == 0.0:
        return None
    if dropout_seed is None:
        return torch.randint(2**63 - 1, (), device="cpu")
    if isinstance(dropout_seed, torch.Tensor):
        return dropout_seed.to(device="cpu", dtype=torch.int64)
    seed = given.integer("dropout_seed", dropout_seed)
    if not -(1 << 63) <= seed < 1 << 63:
        msg = f"dropout_seed={seed}: must fit 64 bits, with a sign"
        raise ValueError(msg)
    return torch.tensor(seed, device="cpu")


# Asked here: Dynamo of torch 2.11 cannot trace it.
_AUTOCAST = tuple(
    x for x in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia") if torch.amp.is_autocast_available(x)
)


def autocast(*tensors):  # noqa: ANN002
    """The tensors as autocast would hand them to PyTorch's own attention: float32 as its dtype."""
    device_type = tensors[0].device.type
    if device_type not in _AUTOCAST or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tensors)


class FlashAttention(torch.nn.Module):
    """`attention` as a module; the constructor takes its options.

    Attributes:
        options: softmax_scale, causal, window_size, softcap, dropout_p, deterministic; see
            `attention`. Dropout is for training only.
    """

    def __init__(
        self,
        *,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        dropout_p=0.0,
        deterministic=True,
    ) -> None:
        super().__init__()
        self.options = {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": window_size,
            "softcap": softcap,
            "dropout_p": dropout_p,
            "deterministic": deterministic,
        }

    def forward(self, q, k, v, **terms):  # noqa: ANN003
        """`attention` of q, k and v.

        Args:
            q: (batch, heads_q, seqlen_q, head_dim); k and v likewise.
            k: See q.
            v: See q.
            terms: bias, alibi_slopes, sinks and block_mask of `attention`, and return_lse.
        """
        options = self.options if self.training else {**self.options, "dropout_p": 0.0}
        return attention(q, k, v, **options, **terms)

    def extra_repr(self):
        """The options, for print(module)."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())
