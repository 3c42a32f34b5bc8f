"""Attention as models write it: operations on whole matrices in the inputs' dtype, and autograd.

Every operation rounds its result, the logits too, which `Arithmetic(eager=True)` declares.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa_verify import Arithmetic, Capabilities, Kernel, Outputs, patterns

from .emulation import BIAS, WORK, keep

# On a card sums that are split between programs would be added in half, which is not declared.
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

__all__ = [
    "eager",
    "eager_prescaled_q",
    "eager_sinks",
    "eager_stored",
    "eager_upcast",
    "sdpa_math_reduced",
]


def _hidden(problem, device):
    allowed = problem.mask.allowed(problem.seqlen_q, problem.seqlen_k)
    return ~torch.from_numpy(allowed).to(device)


def _repeated(problem, x):
    return x.repeat_interleave(problem.group, 1) if problem.group > 1 else x


def _forward(problem, q, k, v, *, first=False, up=False, stored=False, **terms):
    """O alone: such attention has no lse.

    The scale multiplies q ("first") or the logits; softmax's result is float32 ("up") and then
    cast, or the inputs' dtype; its backward pass is `_StoredProducts` ("stored").
    """
    q = q * problem.scale if first else q
    s = q @ _repeated(problem, k).mT
    s = s if first else s * problem.scale
    if problem.softcap:
        s = torch.tanh(s / problem.softcap) * problem.softcap
    p = _softmax(problem, s, up, stored=stored, **terms)
    return Outputs(p @ _repeated(problem, v))


class _StoredProducts(torch.autograd.Function):
    """Softmax as PyTorch has it on GPUs, whose backward pass stores P dP in the inputs' dtype."""

    @staticmethod
    def forward(ctx, s):
        p = torch.softmax(s, -1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, dp):
        (p,) = ctx.saved_tensors
        products = (p * dp).float()
        return (products - p.float() * products.sum(-1, keepdim=True)).to(p.dtype)


def _softmax(
    problem, s, up, *, stored=False, bias=None, alibi_slopes=None, sinks=None, dropout_seed=None
):
    if bias is not None:
        s = s + bias
    if alibi_slopes is not None:
        diagonal = torch.from_numpy(problem.mask.diagonals(problem.seqlen_q, problem.seqlen_k))
        distance = (diagonal[:, None] - torch.arange(problem.seqlen_k)).abs().to(s.device, s.dtype)
        s = s - alibi_slopes.to(s.dtype)[:, None, None] * distance
    s = s.masked_fill(_hidden(problem, s.device), -torch.inf)
    if sinks is not None:
        column = sinks.to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat((s, column), -1)
        s = s - s.amax(-1, keepdim=True)
    if stored:
        p = _StoredProducts.apply(s)
    else:
        p = torch.softmax(s, -1, dtype=torch.float32 if up else None).to(s.dtype)
    p = p if sinks is None else p[..., :-1]
    if dropout_seed is None:
        return p
    return p * keep(problem, dropout_seed, s.device) * (1 / (1 - problem.dropout))


def _no_empty_row(problem):
    lo, hi = problem.mask.intervals(problem.seqlen_q, problem.seqlen_k)
    own = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    if own * (problem.head_dim + problem.head_dim_v) > WORK:
        return f"more than {WORK:g} multiply-adds"
    return "a fully masked row" if (hi <= lo).any() else None


def _kernel(name, forward, arithmetic, **takes):
    return Kernel(
        name=name,
        forward=forward,
        backward="autograd",
        dropout_keep=keep,
        arithmetic=arithmetic,
        expressible=Capabilities(
            **{
                "head_dims_v": range(1, 257),
                "window": True,
                "documents": True,
                "patterns": patterns.NAMES,
                "accepts": _no_empty_row,
                "empty": False,
                **takes,
            }
        ),
    )


def _reduced(problem, q, k, v):
    """PyTorch's own, where it may compute in half: the root of the scale goes into q and into k."""
    allowed = None if not problem.mask.hides_anything else ~_hidden(problem, q.device)
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            o = scaled_dot_product_attention(
                q, k, v, attn_mask=allowed, scale=problem.scale, enable_gqa=problem.group > 1
            )
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
    return Outputs(o)


_HALF = ("float16", "bfloat16")
_EAGER = Arithmetic(eager=True)
eager = _kernel("eager", _forward, _EAGER, softcap=True, bias=BIAS, alibi=True, dropout=True)
eager_upcast = _kernel(
    "eager_upcast", functools.partial(_forward, up=True), _EAGER, softcap=True, bias=BIAS
)
eager_stored = _kernel(
    "eager_stored", functools.partial(_forward, stored=True), _EAGER, sinks=True, bias=BIAS
)
eager_sinks = _kernel("eager_sinks", _forward, _EAGER, sinks=True, bias=BIAS)
eager_prescaled_q = _kernel(
    "eager_prescaled_q",
    functools.partial(_forward, first=True, up=True),
    Arithmetic(eager=True, prescaled="q"),
)
sdpa_math_reduced = _kernel(
    "sdpa_math_reduced", _reduced, Arithmetic(eager=True, prescaled="qk"), dtypes=_HALF
)
