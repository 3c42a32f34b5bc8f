"""Launcher: `terms`, attention with a bias, sinks, dropout and a gradient of lse."""

import itertools

import torch
import triton

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs

from .dq import delta_kernel
from .launch import DELTA_ROWS, DKDV, FORWARD, block, options
from .terms import backward_terms_kernel, forward_terms_kernel

MOST_LOGITS = 1 << 22  # elements of dbias before it is summed
_WORD, _BITS = (1 << 32) - 1, 24  # of a hash, and of those how many decide


def keep(problem, seed, device):
    """Which elements of P dropout keeps, as the kernels have it: bool, one a logit."""
    shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    count = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    x = torch.arange(count, device=device) * 0x9E3779B1 + seed_word(seed) & _WORD
    x = (x ^ x >> 16) * 0x7FEB352D & _WORD
    x = (x ^ x >> 15) * 0x846CA68B & _WORD
    x ^= x >> 16
    return (x >> 32 - _BITS >= threshold(problem)).view(shape)


def seed_word(seed):
    """What kernels take of a seed of 64 bits."""
    return (seed ^ seed >> 32) & 0x7FFFFFFF


def threshold(problem):
    """The least hash, of `_BITS`, that is kept."""
    return round(problem.dropout * (1 << _BITS))


def further(problem, bias, seed):
    """Arguments of both kernels, by name."""
    given = options(problem)
    left_out = ("softcap", "SOFTCAP")
    return {name: value for name, value in given.items() if name not in left_out} | {
        "seed": 0 if seed is None else seed_word(seed),
        "threshold": threshold(problem),
        "factor": 1.0 / (1.0 - problem.dropout),
        "HAS_BIAS": bias is not None,
        "DROPOUT": seed is not None,
    }


def bias_strides(problem, bias):
    """Strides of a bias along all its axes: 0 where it has one element for all."""
    if bias is None:
        return (0, 0, 0, 0)
    shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    return bias.expand(shape).stride()


def forward(problem, q, k, v, *, bias=None, sinks=None, dropout_seed=None):
    """Return o and lse."""
    o = torch.empty(problem.shape_o, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    if o.numel():
        blocks = triton.cdiv(problem.seqlen_q, FORWARD["BLOCK_M"])
        forward_terms_kernel[(blocks * problem.batch * problem.heads_q,)](
            q, k, v, bias, sinks, o, lse,
            *q.stride(), *k.stride(), *v.stride(), *bias_strides(problem, bias),
            HAS_SINKS=sinks is not None, **further(problem, bias, dropout_seed), **FORWARD,
        )  # fmt: skip
    return Outputs(o, lse)


def backward(
    problem, q, k, v, outputs, do, *, bias=None, sinks=None, dropout_seed=None, dlse=None
):  # fmt: skip
    """Gradients, of bias and sinks too."""
    o, lse = outputs.o, outputs.lse
    delta = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    if delta.numel():
        blocks = triton.cdiv(problem.seqlen_q, DELTA_ROWS)
        delta_kernel[(blocks * problem.batch * problem.heads_q,)](
            o, do, delta, *o.stride(), *do.stride(),
            problem.heads_q, problem.seqlen_q, problem.head_dim_v,
            BLOCK_M=DELTA_ROWS, BLOCK_DV=block(problem.head_dim_v),
        )  # fmt: skip
    if dlse is not None:
        delta -= dlse
    dq = torch.zeros(problem.shape_q, dtype=torch.float32, device=q.device)
    dk = torch.empty(problem.shape_k, dtype=k.dtype, device=k.device)
    dv = torch.empty(problem.shape_v, dtype=v.dtype, device=v.device)
    shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    parts = None if bias is None else torch.empty(shape, dtype=torch.float32, device=q.device)
    if dk.numel():
        blocks = triton.cdiv(problem.seqlen_k, DKDV["BLOCK_N"])
        backward_terms_kernel[(blocks * problem.batch * problem.heads_kv,)](
            q, k, v, bias, do, lse, delta, dq, dk, dv, parts,
            *q.stride(), *k.stride(), *v.stride(), *bias_strides(problem, bias), *do.stride(),
            **further(problem, bias, dropout_seed), **DKDV,
        )  # fmt: skip
    terms = {}
    if bias is not None:
        shared = [axis for axis, size in enumerate(bias.shape) if size == 1]
        parts = parts.sum(shared, keepdim=True) if shared else parts
        terms["dbias"] = parts.to(bias.dtype)
    if sinks is not None:
        seen = lse > float("-inf")  # else the sink is -inf too
        share = torch.where(seen, torch.exp(sinks[:, None] - lse), 0.0)
        terms["dsinks"] = -(share * delta).sum((0, 2))
    return Grads(dq.to(q.dtype), dk, dv, **terms)


terms = Kernel(
    name="terms",
    forward=forward,
    backward=backward,
    dropout_keep=keep,
    capabilities=Capabilities(
        dot_precisions=("ieee", "tf32", "tf32x3"),
        head_dims_v=range(1, 257),
        window=True,
        bias=tuple("".join(x) for n in range(1, 5) for x in itertools.combinations("bhqk", n)),
        sinks=True,
        dropout=True,
        lse_grad=True,
        accepts=lambda p: (
            "many logits" if p.batch * p.heads_q * p.seqlen_q * p.seqlen_k > MOST_LOGITS else None
        ),
    ),
    arithmetic=Arithmetic(ds_scale="after", dq_atomics=True),
)
