"""FlashAttention for training: o = softmax(softcap(scale q k^T) + mask) v, its lse and gradients.

Also with an additive bias, ALiBi and sinks (terms.py), dropout (dropout.py), a gradient of lse, of
packed documents (documents.py) and under masks with gaps (block_mask.py).

Two kernels under test share one forward pass. ``flash`` computes its gradients without atomics and
gives the same bits on every run; ``flash_atomic`` adds dQ atomically into a float32 buffer.
Everything accumulates in float32; P and dS are rounded to the input dtype before their products.
"""

import dataclasses

import torch
import triton

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs, patterns

from . import configs, dropout, hopper_backward, hopper_forward
from .arguments import arguments as arguments_of
from .arguments import blocks_of, empty_as, of_keys, vector
from .backward_dkdv import dkdv_kernel
from .backward_dq import delta_kernel, dq_kernel
from .backward_terms import bias_gradient, sinks_gradient
from .forward import forward_kernel
from .scores import TANH_ULPS

__all__ = ["attention_forward", "flash"]

_forward_tuned = configs.autotuned(forward_kernel, configs.FORWARD)
_dkdv_tuned = configs.autotuned(dkdv_kernel, configs.DKDV)
_dkdv_atomic_tuned = configs.autotuned(dkdv_kernel, configs.DKDV, reset_to_zero=["dq_sum"])
_dq_tuned = configs.autotuned(dq_kernel, configs.DQ)


def attention_forward(
    problem, q, k, v,
    *, bias=None, alibi_slopes=None, sinks=None, dropout_seed=None, starts=None, block_mask=None,
):  # fmt: skip
    """Return o and lse.

    Args:
        problem: Shapes, mask, scale, softcap and the probability of dropout.
        q: (batch, heads_q, seqlen_q, head_dim), any strides.
        k: (batch, heads_kv, seqlen_k, head_dim), any strides.
        v: (batch, heads_kv, seqlen_k, head_dim_v), any strides.
        bias: Added to the logits after the softcap; each axis of (batch, heads_q, seqlen_q,
            seqlen_k) in full or of size 1, any strides and dtype. -inf hides a key.
        alibi_slopes: (heads_q,) float32, or a row for each batch or document; slope * |distance to
            the diagonal| is subtracted.
        sinks: (heads_q,) float32, one more logit of each row, without a value.
        dropout_seed: 64 bits that choose which probabilities are kept (dropout.py).
        starts: Where packed documents begin in q and in k, (documents + 1,) int32 each; None: as
            the problem's mask has it.
        block_mask: A `BlockMask` in place of the problem's mask.

    Returns:
        o in q's dtype, heads within rows in memory if q has them so, and lse in float32 (natural
        logarithm, sinks included, before dropout); rows that see no key get 0 and -inf, or their
        sink.
    """
    o = empty_as(q, problem.shape_o)
    lse = q.new_empty(problem.shape_lse, dtype=torch.float32)
    if o.numel():
        arguments = arguments_of(
            problem, q, k, v, o,
            bias=bias, alibi_slopes=alibi_slopes, dropout_seed=dropout_seed, starts=starts,
            block_mask=block_mask,
        )  # fmt: skip
        sinks = None if sinks is None else sinks.contiguous()
        if hopper_forward.fits(problem, arguments, q, k, v):
            hopper_forward.forward(problem, arguments, q, k, v, o, lse, sinks=sinks)
            return Outputs(o, lse)
        kernel = _forward_tuned(arguments, q.element_size())
        kernel[_query_blocks(problem, arguments["documents"])](
            q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), *o.stride()[:3],
            sinks=sinks, **arguments,
        )  # fmt: skip
    return Outputs(o, lse)


def attention_backward(
    problem, q, k, v, outputs, do,
    *, sinks=None, dlse=None, needs_dbias=True, **terms,  # noqa: ANN003
):  # fmt: skip
    """dq, dk, dv (and dbias, dsinks) without atomics: the same bits on every run.

    Args:
        problem: As given to the forward pass.
        q: As given to the forward pass.
        k: As given to the forward pass.
        v: As given to the forward pass.
        outputs: What `attention_forward` returned; o and lse are read.
        do: (batch, heads_q, seqlen_q, head_dim_v), any strides, the dtype of o.
        sinks: As given to the forward pass.
        dlse: Gradient of lse, if it has one; float32.
        needs_dbias: Whether a bias gets its gradient: computing P once more.
        terms: bias, alibi_slopes, dropout_seed, starts and block_mask, as given to the forward
            pass.
    """
    dq = q.new_empty(problem.shape_q)
    arguments, delta, dk, dv = _backward_start(problem, q, k, v, outputs, do, dq, dlse, terms)
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
    if hopper_backward.fits(problem, q, k, v, do, arguments):
        hopper_backward.gradients(problem, q, k, v, do, outputs.lse, delta, dq, dk, dv, arguments)
        further = _further(problem, q, k, v, outputs, do, delta, sinks, arguments, needs_dbias)
        return Grads(dq, dk, dv, **further)
    if dk.numel():
        kernel = _dkdv_tuned(arguments, q.element_size())
        kernel[_key_blocks(problem, arguments["documents"])](
            q, k, v, do, outputs.lse, delta, dk, dv, None, *strides,
            heads_kv=problem.heads_kv, GQA=problem.group > 1, ATOMIC_DQ=False,
            **of_keys(problem, arguments, terms.get("block_mask")),
        )  # fmt: skip
    if dq.numel():
        kernel = _dq_tuned(arguments, q.element_size())
        kernel[_query_blocks(problem, arguments["documents"])](
            q, k, v, do, outputs.lse, delta, dq, *strides, **arguments
        )
    further = _further(problem, q, k, v, outputs, do, delta, sinks, arguments, needs_dbias)
    return Grads(dq, dk, dv, **further)


def attention_backward_atomic(
    problem, q, k, v, outputs, do,
    *, sinks=None, dlse=None, needs_dbias=True, **terms,  # noqa: ANN003
):  # fmt: skip
    """Gradients, dq summed atomically in dkdv_kernel: its last bits depend on the schedule.

    Arguments as those of `attention_backward`.
    """
    dq_sum = torch.zeros(problem.shape_q, dtype=torch.float32, device=q.device)
    arguments, delta, dk, dv = _backward_start(problem, q, k, v, outputs, do, dq_sum, dlse, terms)
    if hopper_backward.fits(problem, q, k, v, do, arguments):
        hopper_backward.gradients(
            problem, q, k, v, do, outputs.lse, delta, dq_sum, dk, dv, arguments
        )
    elif dk.numel():
        kernel = _dkdv_atomic_tuned(arguments, q.element_size())
        kernel[_key_blocks(problem, arguments["documents"])](
            q, k, v, do, outputs.lse, delta, dk, dv, dq_sum,
            *q.stride(), *k.stride(), *v.stride(), *do.stride(),
            heads_kv=problem.heads_kv, GQA=problem.group > 1, ATOMIC_DQ=True,
            **of_keys(problem, arguments, terms.get("block_mask")),
        )  # fmt: skip
    dq = torch.empty_like(dq_sum, dtype=q.dtype)
    torch.mul(dq_sum, arguments["softmax_scale"], out=dq)  # rounded once, in one pass
    further = _further(problem, q, k, v, outputs, do, delta, sinks, arguments, needs_dbias)
    return Grads(dq, dk, dv, **further)


def _backward_start(problem, q, k, v, outputs, do, dq, dlse, terms):
    """What both backward passes need: shared arguments, delta, and empty dk and dv."""
    delta = q.new_empty(problem.shape_lse, dtype=torch.float32)
    dk = k.new_empty(problem.shape_k)
    dv = v.new_empty(problem.shape_v)
    arguments = arguments_of(problem, q, k, v, do, dq, dk, dv, **terms)
    if delta.numel():
        delta_kernel[_rows_in_blocks(problem)](
            outputs.o, do, delta, *outputs.o.stride(), *do.stride(),
            problem.heads_q, problem.seqlen_q, problem.head_dim_v,
            None if dlse is None else dlse.contiguous(),
            **{name: arguments[name] for name in ("BLOCK_DV", "TAIL_DV", "PADDED_DV")},
            VECTOR=vector(outputs.o, do), BLOCK_M=32,
        )  # fmt: skip
    return arguments, delta, dk, dv


def _further(problem, q, k, v, outputs, do, delta, sinks, arguments, needs_dbias):
    """Gradients of bias and sinks, of a problem that has a bias and sinks."""
    further = {}
    if needs_dbias and arguments["bias"] is not None:
        further["dbias"] = bias_gradient(problem, q, k, v, do, outputs.lse, delta, arguments)
    if sinks is not None:
        further["dsinks"] = sinks_gradient(problem, sinks.contiguous(), outputs.lse, delta)
    return further


def _query_blocks(problem, documents):
    """Grid: a program for each block of queries. One axis, since the others end at 65535."""
    sequences = problem.batch * problem.heads_q
    return lambda meta: (blocks_of(documents, problem.seqlen_q, meta["BLOCK_M"]) * sequences,)


def _rows_in_blocks(problem):
    """Grid: a program for each block of queries, whichever document they are of."""
    sequences = problem.batch * problem.heads_q
    return lambda meta: (triton.cdiv(problem.seqlen_q, meta["BLOCK_M"]) * sequences,)


def _key_blocks(problem, documents):
    """Grid: a program for each block of keys."""
    sequences = problem.batch * problem.heads_kv
    return lambda meta: (blocks_of(documents, problem.seqlen_k, meta["BLOCK_N"]) * sequences,)


def _accepts(problem):
    """Blocks of a mask with gaps do not say where a document begins: its diagonal and its bits."""
    mask = problem.mask
    if mask.pattern and mask.documents and (problem.alibi or problem.dropout):
        return "ALiBi or dropout of documents under a pattern"
    return None


_CAPABILITIES = Capabilities(
    dot_precisions=("ieee", "tf32", "tf32x3"),
    head_dims_v=range(1, 257),
    window=True,
    softcap=True,
    documents=True,
    patterns=patterns.NAMES,
    bias=(
        *("b", "h", "q", "k", "bh", "bq", "bk", "hq", "hk", "qk"),
        *("bhq", "bhk", "bqk", "hqk", "bhqk"),
    ),
    alibi=True,
    sinks=True,
    dropout=True,
    wide_seeds=True,
    lse_grad=True,
    accepts=_accepts,
    deterministic=True,
    batch_invariant=True,
)

flash = Kernel(
    name="flash",
    forward=attention_forward,
    backward=attention_backward,
    dropout_keep=dropout.keep,
    capabilities=_CAPABILITIES,
    arithmetic=Arithmetic(ds_scale="after", tanh_ulps=TANH_ULPS),
)
flash_atomic = Kernel(
    name="flash_atomic",
    forward=attention_forward,
    backward=attention_backward_atomic,
    dropout_keep=dropout.keep,
    capabilities=dataclasses.replace(_CAPABILITIES, deterministic=False, batch_invariant=False),
    arithmetic=Arithmetic(ds_scale="after", dq_atomics=True, tanh_ulps=TANH_ULPS),
)
