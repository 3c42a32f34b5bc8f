"""FlashAttention for training: o = softmax(softcap(scale q k^T) + mask) v, its lse and gradients.

Two kernels under test share one forward pass. ``flash`` computes its gradients without atomics and
gives the same bits on every run; ``flash_atomic`` adds dQ atomically into a float32 buffer.
Everything accumulates in float32; P and dS are rounded to the input dtype before their products.
"""

import dataclasses

import torch
import triton

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs, cu_seqlens

from . import configs
from .backward_dkdv import dkdv_kernel
from .backward_dq import delta_kernel, dq_kernel
from .forward import forward_kernel

__all__ = ["attention_forward", "flash"]

_LARGEST_SCALE = 2.3e38  # float32 holds log2(e) times it
_BYTES_A_VECTOR = 16
_SMALLEST_DOT = 16  # tl.dot takes no smaller extent


_forward_tuned = configs.autotuned(forward_kernel, configs.FORWARD)
_dkdv_tuned = configs.autotuned(dkdv_kernel, configs.DKDV)
_dkdv_atomic_tuned = configs.autotuned(dkdv_kernel, configs.DKDV, reset_to_zero=["dq_sum"])
_dq_tuned = configs.autotuned(dq_kernel, configs.DQ)


def split_columns(head_dim):
    """How a head_dim is tiled: (BLOCK, TAIL, PADDED), powers of two with BLOCK + TAIL >= head_dim.

    >>> split_columns(80), split_columns(96), split_columns(128), split_columns(5)
    ((64, 16, False), (64, 32, False), (128, 0, False), (16, 0, True))
    """
    whole = max(triton.next_power_of_2(head_dim), _SMALLEST_DOT)
    block = max(whole // 2, _SMALLEST_DOT)
    tail = max(triton.next_power_of_2(max(head_dim - block, 0)), _SMALLEST_DOT)
    if block + tail >= whole:
        return whole, 0, whole > head_dim
    return block, tail, block + tail > head_dim


def _scale(x):
    """Clamp a scale to where its float32 arithmetic is finite: inf times 0 is NaN."""
    return min(max(x, -_LARGEST_SCALE), _LARGEST_SCALE)


def _vector(problem, *tensors):  # noqa: ANN002
    """Elements in 16 bytes if all tensors can be read 16 bytes at a time, else 1 (see tiles.py)."""
    elements = _BYTES_A_VECTOR // tensors[0].element_size()
    fits = problem.head_dim % elements == 0 and problem.head_dim_v % elements == 0
    aligned = all(
        t.stride(3) == 1
        and not any(stride % elements for stride in t.stride()[:3])
        and t.data_ptr() % _BYTES_A_VECTOR == 0
        for t in tensors
    )
    return elements if fits and aligned else 1


def _band(problem):
    """(band_lo, band_hi, HAS_LO, HAS_HI): query i sees key j when band_lo <= j - i <= band_hi.

    Each document has a diagonal of its own: with several, limits of j - the diagonal of i.
    """
    seqlen_q, seqlen_k, mask = problem.seqlen_q, problem.seqlen_k, problem.mask
    right = 0 if mask.causal else mask.window_right
    if mask.documents:
        furthest = seqlen_q + seqlen_k  # hides nothing
        left = furthest if mask.window_left is None else min(mask.window_left, furthest)
        band_hi = furthest if right is None else min(right, furthest)
        has_lo = mask.window_left is not None
        return -left, band_hi, has_lo, has_lo or right is not None
    shift = mask.shift(seqlen_q, seqlen_k)
    band_lo = -seqlen_q if mask.window_left is None else shift - mask.window_left
    band_hi = seqlen_k if right is None else shift + right
    has_lo = band_lo > 1 - seqlen_q  # limits that hide nothing are dropped
    has_hi = has_lo or band_hi < seqlen_k - 1  # a variant less to compile
    least, most = -seqlen_q, seqlen_k
    return min(max(band_lo, least), most), min(max(band_hi, least), most), has_lo, has_hi


def _arguments(problem, *tensors):  # noqa: ANN002
    """Arguments that all kernels of this problem share, by name."""
    seqlen_q, seqlen_k, mask = problem.seqlen_q, problem.seqlen_k, problem.mask
    band_lo, band_hi, has_lo, has_hi = _band(problem)
    starts_q, starts_k = None, None
    if mask.documents:
        starts_q, starts_k, _, _ = cu_seqlens(problem, tensors[0].device)
    block_d, tail_d, padded_d = split_columns(problem.head_dim)
    block_dv, tail_dv, padded_dv = split_columns(problem.head_dim_v)
    return {
        "heads_q": problem.heads_q,
        "group": problem.group,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "band_lo": band_lo,
        "band_hi": band_hi,
        "softmax_scale": _scale(problem.scale),
        # Below 1e-30 every logit is 0 to float32; nor may scale / softcap overflow.
        "softcap": max(_scale(problem.softcap), 1e-38 * abs(_scale(problem.scale)), 1e-30),
        "seqlen_bucket": triton.next_power_of_2(max(seqlen_q, seqlen_k, 1)),
        "BLOCK_D": block_d,
        "TAIL_D": tail_d,
        "PADDED_D": padded_d,
        "BLOCK_DV": block_dv,
        "TAIL_DV": tail_dv,
        "PADDED_DV": padded_dv,
        "HAS_LO": has_lo,
        "HAS_HI": has_hi,
        "starts_q": starts_q,
        "starts_k": starts_k,
        "documents": len(mask.documents) or None,
        "VARLEN": bool(mask.documents),
        "BOTTOM_RIGHT": bool(mask.documents) and mask.alignment == "bottom-right",
        "SOFTCAP": problem.softcap > 0,
        "DOT_PRECISION": problem.dot_precision if problem.dtype == "float32" else "tf32",
        "VECTOR": _vector(problem, *tensors),
    }


def attention_forward(problem, q, k, v):
    """Return o and lse.

    Args:
        problem: Shapes, mask, scale and softcap.
        q: (batch, heads_q, seqlen_q, head_dim), any strides.
        k: (batch, heads_kv, seqlen_k, head_dim), any strides.
        v: (batch, heads_kv, seqlen_k, head_dim_v), any strides.

    Returns:
        o in q's dtype and lse in float32 (natural logarithm); rows that see no key get 0 and -inf.
    """
    o = torch.empty(problem.shape_o, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    if o.numel():
        arguments = _arguments(problem, q, k, v, o)
        kernel = _forward_tuned(arguments, q.element_size())
        kernel[_query_blocks(problem)](
            q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), *o.stride()[:3], **arguments
        )
    return Outputs(o, lse)


def attention_backward(problem, q, k, v, outputs, do):
    """dq, dk, dv without atomics: the same bits on every run.

    Args:
        problem: As given to the forward pass.
        q: As given to the forward pass.
        k: As given to the forward pass.
        v: As given to the forward pass.
        outputs: What `attention_forward` returned; o and lse are read.
        do: (batch, heads_q, seqlen_q, head_dim_v), any strides, the dtype of o.
    """
    dq = torch.empty(problem.shape_q, dtype=q.dtype, device=q.device)
    arguments, delta, dk, dv = _backward_start(problem, q, k, v, outputs, do, dq)
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
    if dk.numel():
        kernel = _dkdv_tuned(arguments, q.element_size())
        kernel[_key_blocks(problem)](
            q, k, v, do, outputs.lse, delta, dk, dv, None, *strides,
            heads_kv=problem.heads_kv, GQA=problem.group > 1, ATOMIC_DQ=False, **arguments,
        )  # fmt: skip
    if dq.numel():
        kernel = _dq_tuned(arguments, q.element_size())
        kernel[_query_blocks(problem)](q, k, v, do, outputs.lse, delta, dq, *strides, **arguments)
    return Grads(dq, dk, dv)


def attention_backward_atomic(problem, q, k, v, outputs, do):
    """dq, dk, dv in one kernel; dq is summed atomically, so its last bits depend on the schedule.

    Arguments as those of `attention_backward`.
    """
    dq_sum = torch.zeros(problem.shape_q, dtype=torch.float32, device=q.device)
    arguments, delta, dk, dv = _backward_start(problem, q, k, v, outputs, do, dq_sum)
    if dk.numel():
        kernel = _dkdv_atomic_tuned(arguments, q.element_size())
        kernel[_key_blocks(problem)](
            q, k, v, do, outputs.lse, delta, dk, dv, dq_sum,
            *q.stride(), *k.stride(), *v.stride(), *do.stride(),
            heads_kv=problem.heads_kv, GQA=problem.group > 1, ATOMIC_DQ=True, **arguments,
        )  # fmt: skip
    dq = dq_sum.mul_(arguments["softmax_scale"]).to(q.dtype)
    return Grads(dq, dk, dv)


def _backward_start(problem, q, k, v, outputs, do, dq):
    """What both backward passes need: shared arguments, delta, and empty dk and dv."""
    delta = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    dk = torch.empty(problem.shape_k, dtype=k.dtype, device=k.device)
    dv = torch.empty(problem.shape_v, dtype=v.dtype, device=v.device)
    arguments = _arguments(problem, q, k, v, do, dq, dk, dv)
    if delta.numel():
        delta_kernel[_rows_in_blocks(problem)](
            outputs.o, do, delta, *outputs.o.stride(), *do.stride(),
            problem.heads_q, problem.seqlen_q, problem.head_dim_v,
            **{name: arguments[name] for name in ("BLOCK_DV", "TAIL_DV", "PADDED_DV")},
            VECTOR=_vector(problem, outputs.o, do), BLOCK_M=32,
        )  # fmt: skip
    return arguments, delta, dk, dv


def _query_blocks(problem):
    """Grid: a program for each block of queries. One axis, since the others end at 65535."""
    sequences = problem.batch * problem.heads_q
    return lambda meta: (_blocks(problem, problem.seqlen_q, meta["BLOCK_M"]) * sequences,)


def _rows_in_blocks(problem):
    """Grid: a program for each block of queries, whichever document they are of."""
    sequences = problem.batch * problem.heads_q
    return lambda meta: (triton.cdiv(problem.seqlen_q, meta["BLOCK_M"]) * sequences,)


def _key_blocks(problem):
    """Grid: a program for each block of keys."""
    sequences = problem.batch * problem.heads_kv
    return lambda meta: (_blocks(problem, problem.seqlen_k, meta["BLOCK_N"]) * sequences,)


def _blocks(problem, rows, block):
    documents = len(problem.mask.documents)
    return rows // block + documents if documents else triton.cdiv(rows, block)


_CAPABILITIES = Capabilities(
    dot_precisions=("ieee", "tf32", "tf32x3"),
    head_dims_v=range(1, 257),
    window=True,
    softcap=True,
    documents=True,
    deterministic=True,
    batch_invariant=True,
)

flash = Kernel(
    name="flash",
    forward=attention_forward,
    backward=attention_backward,
    capabilities=_CAPABILITIES,
    arithmetic=Arithmetic(ds_scale="after"),
)
flash_atomic = Kernel(
    name="flash_atomic",
    forward=attention_forward,
    backward=attention_backward_atomic,
    capabilities=dataclasses.replace(_CAPABILITIES, deterministic=False, batch_invariant=False),
    arithmetic=Arithmetic(ds_scale="after", dq_atomics=True),
)
