"""PyTorch's flex_attention, compiled, and as it is without a compiler.

Masks, softcap, bias and ALiBi are functions of the indices, as its users write them. Uncompiled it
rounds the logits of half inputs to their dtype, and P after it was divided, which no `Arithmetic`
declares: there float32 only. The gradient of a bias is left out, and so are sinks, which would
round o twice.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from fa_verify import Capabilities, Kernel, Outputs, patterns

__all__ = ["flex", "flex_forward", "flex_uncompiled"]

_BIAS = ("b", "h", "q", "k", "bh", "bq", "bk", "hq", "hk", "qk", "bhq", "bhk", "bqk", "hqk", "bhqk")


@functools.cache
def _compiled():
    config = torch._dynamo.config  # noqa: SLF001 - its documented name
    config.recompile_limit = config.accumulated_recompile_limit = 1 << 16
    return torch.compile(flex_attention, dynamic=True)


def _forward(problem, q, k, v, bias=None, alibi_slopes=None, *, attention):
    device = q.device
    o, found = attention()(
        q,
        k,
        v,
        score_mod=_score(problem, bias, alibi_slopes, device),
        block_mask=_mask(problem, device),
        scale=problem.scale,
        enable_gqa=problem.group > 1,
        return_aux=AuxRequest(lse=True),
        kernel_options=_options(problem),
    )
    return Outputs(o, found.lse)


def _options(problem):
    """Its kernel for few queries is left with no configuration for groups of heads (torch 2.11)."""
    return {"FORCE_USE_FLEX_ATTENTION": True} if problem.group > 1 else None


def _mask(problem, device):
    if not problem.mask.hides_anything:
        return None
    allowed = problem.mask.allowed(problem.seqlen_q, problem.seqlen_k)
    allowed = torch.from_numpy(allowed.copy()).to(device)

    def sees(_b, _h, query, key):
        return allowed[query, key]

    lengths = problem.seqlen_q, problem.seqlen_k
    return create_block_mask(sees, None, None, *lengths, device=device)


def _score(problem, bias, slopes, device):
    """Softcap, then the bias, then ALiBi; None where there is none of them."""
    terms = []
    if problem.softcap:
        cap = torch.tensor(problem.softcap, device=device)
        terms.append(lambda score, *_: cap * torch.tanh(score / cap))
    if bias is not None:
        whole = bias.expand(problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        terms.append(lambda score, *at: score + whole[at])
    if slopes is not None:
        diagonal = torch.from_numpy(problem.mask.diagonals(problem.seqlen_q, problem.seqlen_k))
        diagonal = diagonal.to(device)
        terms.append(lambda score, _b, h, i, j: score - slopes[h] * (diagonal[i] - j).abs())
    if not terms:
        return None

    def score_mod(score, b, h, i, j):
        for term in terms:
            score = term(score, b, h, i, j)
        return score

    return score_mod


def _kernel(name, attention, dtypes, *, gradients, bias):
    return Kernel(
        name=name,
        forward=functools.partial(_forward, attention=attention),
        backward="autograd" if gradients else None,
        expressible=Capabilities(
            dtypes=dtypes,
            head_dims=(16, 32, 64, 80, 96, 128),
            head_dims_v=(16, 32, 64, 80, 96, 128),
            window=True,
            softcap=True,
            documents=True,
            patterns=patterns.NAMES,
            bias=_BIAS if bias else (),
            alibi=True,
            lse_grad=gradients,
            layouts=False,
            empty=False,
            backward=gradients,
        ),
    )


_ALL = ("float16", "bfloat16", "float32")
flex = _kernel("flex", _compiled, _ALL, gradients=True, bias=False)
flex_forward = _kernel("flex_forward", _compiled, _ALL, gradients=False, bias=True)
flex_uncompiled = _kernel(
    "flex_uncompiled", lambda: flex_attention, ("float32",), gradients=True, bias=False
)
