"""`torch.library` operators over the kernels: what autograd, torch.compile and fake tensors see.

An operator takes tensors and plain values only, so a problem travels as `Options` and shapes.
"""

import re
import typing

import torch
import triton

from fa_verify import Mask, Outputs, Problem

from .flash_attention import attention_backward, attention_backward_atomic, attention_forward

__all__ = ["DTYPES", "Options", "attention_forward_op", "triton_runs_on"]

_AXES = 4
DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}

# fa_verify loads this package by path, under a private name: each loaded copy registers its own
# operators, so that none runs, or replaces, another's.
_NAMESPACE = "fa_verify_" + re.sub(r"\W", "_", __package__)
_OPTIONS = (
    "float? softmax_scale, bool causal, int window_left, int window_right, float softcap, "
    "str alignment, str dot_precision, bool deterministic"
)


@torch.compiler.assume_constant_result
def triton_runs_on(device_type):
    """Whether Triton's active driver runs kernels there: on CUDA, or on fa_verify's CPU."""
    try:
        device = triton.runtime.driver.active.get_active_torch_device()
    except RuntimeError:  # no driver at all
        return False
    return device.type == device_type


class Options(typing.NamedTuple):
    """What `attention` is asked for beside its tensors, in the order of the operators' schema."""

    softmax_scale: float | None
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    alignment: str
    dot_precision: str
    deterministic: bool


def _check(q, k, v):
    """Say what does not fit together, before a kernel reads past a tensor."""
    shapes = {name: tuple(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    for name, shape in shapes.items():
        if len(shape) != _AXES:
            msg = f"{name}.shape={shape}: must be (batch, heads, seqlen, head_dim)"
            raise ValueError(msg)
    if q.dtype not in DTYPES:
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


def _problem(q, k, v, options):
    """The problem that these tensors and options pose; says which of them breaks a rule."""
    _check(q, k, v)
    left, right = (
        None if size < 0 else size for size in (options.window_left, options.window_right)
    )
    return Problem(
        batch=q.shape[0],
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seqlen_q=q.shape[2],
        seqlen_k=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=DTYPES[q.dtype],
        dot_precision=options.dot_precision,
        mask=Mask(
            causal=options.causal,
            window_left=left,
            window_right=right,
            alignment=options.alignment,
        ),
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
    )


@torch.library.custom_op(
    f"{_NAMESPACE}::attention_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
)
def attention_forward_op(q, k, v, *options):  # noqa: ANN002
    """The forward pass: o and lse."""
    if not triton_runs_on(q.device.type):
        msg = f"q.device={q.device}: Triton runs no kernel there; move q, k and v to a GPU"
        raise ValueError(msg)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        outputs = attention_forward(_problem(q, k, v, Options(*options)), q, k, v)
    return outputs.o, outputs.lse


@attention_forward_op.register_fake
def _forward_fake(q, k, v, *options):  # noqa: ANN002
    _problem(q, k, v, Options(*options))
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    f"{_NAMESPACE}::attention_backward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)",
)
def _attention_backward_op(q, k, v, o, lse, do, *options):  # noqa: ANN002
    """The backward pass: dq, dk and dv."""
    options = Options(*options)
    gradients = attention_backward if options.deterministic else attention_backward_atomic
    with torch.cuda.device_of(q):
        grads = gradients(_problem(q, k, v, options), q, k, v, Outputs(o, lse), do)
    return grads.dq, grads.dk, grads.dv


@_attention_backward_op.register_fake
def _backward_fake(q, k, v, *_rest):  # noqa: ANN002
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output):
    """Keep what the backward pass reads: q, k, v, o and lse only."""
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = options


def _differentiate(ctx, do, _dlse):
    grads = _attention_backward_op(*ctx.saved_tensors, do, *ctx.options)
    return (*grads, *(None for _ in ctx.options))


attention_forward_op.register_autograd(_differentiate, setup_context=_save)


@_attention_backward_op.register_autograd
def _refuse(_ctx, *_grads):  # noqa: ANN002
    msg = "attention: its gradients have no gradients; use PyTorch's math backend for second ones"
    raise NotImplementedError(msg)
