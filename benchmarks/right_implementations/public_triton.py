"""Public Triton kernels, imported from where they are: those that are installed become kernels.

    PYTHONPATH=flash-linear-attention fa-verify check .../public_triton.py:fla
    FUSED_ATTENTION=tutorials/06-fused-attention.py fa-verify check .../public_triton.py:tutorial

What each asserts or says that it cannot do is declared; all else is asked of it, but for fla's
sinks: they are left out of the maximum, so that a sink 89 above it makes lse infinite.
"""

from __future__ import annotations

import importlib.util
import os

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs
from fa_verify.documents import cu_seqlens

_LN2 = 0.6931471805599453


def _fla_forward(problem, q, k, v):
    q, k, v = (x.contiguous() for x in (q, k, v))  # as its public function makes them
    o, lse = parallel.parallel_attn_fwd(q=q, k=k, v=v, sink_bias=None, **_fla_options(problem, q))
    return Outputs(o, (lse * _LN2).transpose(1, 2), saved=(lse,))


def _fla_backward(problem, q, k, v, outputs, do):
    (lse,) = outputs.saved
    q, k, v, do = (x.contiguous() for x in (q, k, v, do))
    dq, dk, dv, *_ = parallel.parallel_attn_bwd(
        q=q, k=k, v=v, o=outputs.o, lse=lse, do=do, **_fla_options(problem, q)
    )
    return Grads(*(x.to(q.dtype) for x in (dq, dk, dv)))


def _fla_options(problem, q):
    left = problem.mask.window_left
    starts = cu_seqlens(problem, q.device)[0].long() if problem.mask.documents else None
    return {
        "g_cumsum": None,
        "scale": problem.scale,
        "window_size": None if left is None else left + 1,
        "cu_seqlens": starts,
    }


def _causal_self_attention(problem):
    """What `parallel_attn` is: as many keys as queries, in each document too."""
    mask = problem.mask
    lengths = mask.documents or ((problem.seqlen_q, problem.seqlen_k),)
    if any(queries != keys for queries, keys in lengths):
        return "seqlen_q != seqlen_k"
    return None if mask.causal else "not causal"


def _tutorial_forward(problem, q, k, v):
    warp_specialize = False
    q, k, v = (x.contiguous() for x in (q, k, v))
    o = fused.attention(q, k, v, problem.mask.causal, problem.scale, warp_specialize)
    lse = o.grad_fn.saved_tensors[4] * _LN2 if o.grad_fn is not None else None
    return Outputs(o, lse)


def _tutorial_takes(problem):
    if problem.seqlen_q != problem.seqlen_k or problem.seqlen_q % 128:
        return "seqlen_q != seqlen_k, or not a multiple of 128"
    if problem.head_dim != problem.head_dim_v:
        return "head_dim_v"
    if str(problem.layout_do) != "bhsd":
        return "do is not contiguous"
    if problem.scale <= 0:
        return "scale <= 0: the maximum is taken before it is scaled"
    mask = problem.mask
    return "sliding window" if mask.window_left is not None else None


if importlib.util.find_spec("fla"):
    from fla.ops.attn import parallel

    fla = Kernel(
        name="fla",
        forward=_fla_forward,
        backward=_fla_backward,
        layout="bshd",
        expressible=Capabilities(
            dot_precisions=("tf32",),  # tl.dot's default
            head_dims_v=range(1, 257),
            window=True,
            documents=True,
            layouts=False,
            empty=False,
            accepts=_causal_self_attention,
        ),
    )

if os.environ.get("FUSED_ATTENTION"):
    _spec = importlib.util.spec_from_file_location("fused_attention", os.environ["FUSED_ATTENTION"])
    fused = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(fused)

    tutorial = Kernel(
        name="tutorial",
        forward=_tutorial_forward,
        backward="autograd",
        # k is pre-scaled in its backward pass; hidden logits get -1e6, in base 2.
        arithmetic=Arithmetic(prescaled="k", masked_logit=-1e6 * _LN2),
        expressible=Capabilities(
            dtypes=("float16",),
            head_dims=(16, 32, 64, 128, 256),
            gqa=False,
            layouts=False,
            empty=False,
            accepts=_tutorial_takes,
        ),
    )
