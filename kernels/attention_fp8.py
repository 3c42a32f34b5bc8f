"""`attention_fp8`: q, k and v in fp8 with scales, as an operator. Forward only."""

import torch

from fa_verify import Arithmetic, Capabilities, Kernel, Mask, Problem

from . import given
from .forward_fp8 import attention_forward_fp8
from .inputs import DTYPES
from .operators import NAMESPACE, on_device

__all__ = ["attention_fp8", "flash_fp8"]

_DTYPE = torch.float8_e4m3fn
_OTHER_FP8 = torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
_RESULTS = torch.bfloat16, torch.float16

flash_fp8 = Kernel(
    name="flash_fp8",
    forward=attention_forward_fp8,
    capabilities=Capabilities(
        dtypes=("bfloat16", "float16"),
        fp8=("tensor", "head", "block"),
        head_dims_v=range(1, 257),
        window=True,
        softcap=True,
        backward=False,
        deterministic=True,
        batch_invariant=True,
    ),
    arithmetic=Arithmetic(p_dtype="bfloat16"),
)


def attention_fp8(
    q,
    k,
    v,
    q_descale,
    k_descale,
    v_descale,
    *,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alignment="bottom-right",
    out_dtype=torch.bfloat16,
    return_lse=False,
):
    """Attention of q * q_descale, k * k_descale and v * v_descale.

    Args:
        q: (batch, heads_q, seqlen_q, head_dim) float8_e4m3fn, any strides.
        k: (batch, heads_kv, seqlen_k, head_dim), likewise.
        v: (batch, heads_kv, seqlen_k, head_dim_v), likewise.
        q_descale: (batch, heads_q, blocks) float32, each axis in full or of size 1: of a tensor (1,
            1, 1), of each head (batch, heads_q, 1). A block is the least power of two of rows with
            which that many blocks reach seqlen_q. No descale is below 0: NaN may come of it.
        k_descale: Likewise of k, by heads_kv and seqlen_k.
        v_descale: Likewise of v.
        softmax_scale: Factor of the logits; None means 1/sqrt(head_dim).
        causal: Hide the keys to the right of the diagonal.
        window_size: Most keys to the left and right of the diagonal; -1: no limit.
        softcap: c > 0 maps a logit x to c*tanh(x/c).
        alignment: "bottom-right": the last query is on the diagonal with the last key.
        out_dtype: Of o: bfloat16 or float16.
        return_lse: Return (o, lse) instead of o.

    Returns:
        o: (batch, heads_q, seqlen_q, head_dim_v); rows that see no key are 0.
        lse: (batch, heads_q, seqlen_q) float32, natural logarithm.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, or an argument breaks its rule.
    """
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    given.tensors(q=q, k=k, v=v, **descales)
    left, right = given.window(window_size)
    causal = given.switch("causal", causal)
    softmax_scale = given.number("softmax_scale", softmax_scale, optional=True)
    softcap = given.number("softcap", softcap)
    if out_dtype not in _RESULTS:
        msg = f"out_dtype={out_dtype}: must be bfloat16 or float16"
        raise ValueError(msg)
    o, lse = _fp8_op(
        q, k, v, q_descale, k_descale, v_descale, softmax_scale, causal, left,
        -1 if causal else right, softcap, alignment, out_dtype,
    )  # fmt: skip
    return (o, lse) if return_lse else o


def _problem(q, k, v, descales, options):
    """The problem that these pose; says which of them breaks a rule."""
    softmax_scale, causal, left, right, softcap, alignment, out_dtype = options
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.dtype != _DTYPE or x.device != q.device:
            hint = ""
            if x.dtype in _OTHER_FP8:
                hint = f"; other formats of 8 bits are not taken: quantise again to {_DTYPE}"
            msg = (
                f"{name}: {x.dtype} {tuple(x.shape)} on {x.device}: must be {_DTYPE} (batch, "
                f"heads, seqlen, head_dim) on {q.device}{hint}"
            )
            raise ValueError(msg)
    if k.shape[:3] != v.shape[:3] or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        msg = (
            f"k.shape={tuple(k.shape)}: must agree with v.shape={tuple(v.shape)} up to head_dim, "
            f"and with q.shape={tuple(q.shape)} in batch and head_dim"
        )
        raise ValueError(msg)
    for name, scale, x in zip("qkv", descales, (q, k, v), strict=True):
        fits = scale.dim() == 3 and all(
            size in (1, whole) for size, whole in zip(scale.shape, x.shape[:2], strict=False)
        )
        if not fits or scale.dtype != torch.float32 or scale.device != q.device:
            msg = (
                f"{name}_descale: {scale.dtype} {tuple(scale.shape)} on {scale.device}: must be "
                f"float32 (1 or {x.shape[0]}, 1 or {x.shape[1]}, blocks) on {q.device}"
            )
            raise ValueError(msg)
    left, right = (None if size < 0 else size for size in (left, right))
    return Problem(
        batch=q.shape[0],
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seqlen_q=q.shape[2],
        seqlen_k=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=DTYPES[out_dtype],
        mask=Mask(causal=causal, window_left=left, window_right=right, alignment=alignment),
        softmax_scale=softmax_scale,
        softcap=softcap,
    )


@torch.library.custom_op(
    f"{NAMESPACE}::attention_fp8",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, "
    "float? softmax_scale, bool causal, int window_left, int window_right, float softcap, "
    "str alignment, ScalarType out_dtype) -> (Tensor, Tensor)",
)
def _fp8_op(q, k, v, q_descale, k_descale, v_descale, *options):  # noqa: ANN002
    """The forward pass: o and lse."""
    problem = _problem(q, k, v, (q_descale, k_descale, v_descale), options)
    with on_device(q):
        outputs = attention_forward_fp8(
            problem, q, k, v, q_scale=q_descale, k_scale=k_descale, v_scale=v_descale
        )
    return outputs.o, outputs.lse


@_fp8_op.register_fake
def _fp8_fake(q, k, v, q_descale, k_descale, v_descale, *options):  # noqa: ANN002
    problem = _problem(q, k, v, (q_descale, k_descale, v_descale), options)
    o = q.new_empty(problem.shape_o, dtype=options[-1])
    return o, q.new_empty(problem.shape_lse, dtype=torch.float32)
