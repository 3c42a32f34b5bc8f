"""The backward pass on Hopper, of 16-bit tensors and of masks that are bands.

Chosen by flash_attention.py where it fits; what does not fit takes the general kernels, whose
formulas and roundings are the same.
"""

import torch
import triton

from .descriptors import alignable, columns, describable, hopper, vector
from .hopper_configs import backward_tiles
from .hopper_dkdv import hopper_dkdv_kernel
from .hopper_dq import hopper_dq_kernel

__all__ = ["fits", "gradients", "key_pass", "query_pass"]

_DTYPES = (torch.float16, torch.bfloat16)
_ELEMENTS = 8  # in the 16 bytes that rows are multiples of
_ELSEWHERE = ("SOFTCAP", "BIAS", "ALIBI", "DROPOUT", "VARLEN", "SPARSE")  # general kernels
_ARGUMENTS = ("heads_q", "group", "seqlen_q", "seqlen_k", "band_lo", "band_hi", "softmax_scale",
              "BLOCK_D", "TAIL_D", "BLOCK_DV", "TAIL_DV", "HAS_LO", "HAS_HI")  # fmt: skip


def fits(problem, q, k, v, do, arguments):
    """Whether the kernels of this module take the problem and these tensors.

    Sinks and a gradient of lse are fine: the first is in lse, the second in delta.
    """
    return (
        not any(arguments[flag] for flag in _ELSEWHERE)
        and q.dtype in _DTYPES
        and hopper()
        and problem.head_dim % _ELEMENTS == 0
        and problem.head_dim_v % _ELEMENTS == 0
        and describable(q, k, v, do)
    )


def gradients(problem, q, k, v, do, lse, delta, dq, dk, dv, arguments):
    """Write dk and dv, and dq; or add dQ / softmax_scale to dq, if that is float32.

    Args:
        problem: The problem.
        q: (batch, heads_q, seqlen_q, head_dim); k, v, do likewise.
        k: See q.
        v: See q.
        do: See q.
        lse: (batch, heads_q, seqlen_q) float32, contiguous; delta likewise.
        delta: See lse.
        dq: Shaped as q; contiguous. dk and dv likewise.
        dk: See dq.
        dv: See dq.
        arguments: Of `arguments.arguments`.
    """
    tiles = backward_tiles(max(_width(arguments, ""), _width(arguments, "V")))
    tensors = (q, k, v, do, alignable(lse), alignable(delta))
    if "dv" in tiles:
        key_pass(problem, tiles["dv"], tensors, None, dv, None, arguments)
        dv = None
    if dq.dtype == torch.float32:
        key_pass(problem, tiles["atomic"], tensors, dk, dv, dq, arguments)
        return
    key_pass(problem, tiles["dk" if dv is None else "dkdv"], tensors, dk, dv, None, arguments)
    query_pass(problem, tiles["dq"], tensors, dq, arguments)


def key_pass(problem, cut, tensors, dk, dv, dq_sum, arguments):
    """A pass of programs over keys, for those of dk, dv and dq_sum that are not None."""
    n = cut.block_n
    hopper_dkdv_kernel[(triton.cdiv(problem.seqlen_k, n) * problem.batch * problem.heads_kv,)](
        *_described(tensors, cut, arguments),
        *_columns(dk, n, arguments, ""),
        *_columns(dv, n, arguments, "V"),
        *_columns(dq_sum, cut.block_m, arguments, ""),
        heads_kv=problem.heads_kv,
        GQA=problem.group > 1,
        DK=dk is not None,
        DV=dv is not None,
        ATOMIC_DQ=dq_sum is not None,
        DP_FIRST=cut.dp_first,
        **{name: arguments[name] for name in _ARGUMENTS},
        **cut.options,
    )


def query_pass(problem, cut, tensors, dq, arguments):
    """The pass of programs over queries."""
    m = cut.block_m
    hopper_dq_kernel[(triton.cdiv(problem.seqlen_q, m) * problem.batch * problem.heads_q,)](
        *_described(tensors, cut, arguments),
        *_columns(dq, m, arguments, ""),
        IN_REGISTERS=cut.in_registers,
        **{name: arguments[name] for name in _ARGUMENTS},
        **cut.options,
    )


def _described(tensors, cut, arguments):
    """Descriptions of what every kernel reads."""
    q, k, v, do, lse, delta = tensors
    m, n = cut.block_m, cut.block_n
    return (
        *_columns(q, m, arguments, ""),
        *_columns(k, n, arguments, ""),
        *_columns(v, n, arguments, "V"),
        *_columns(do, m, arguments, "V"),
        vector(lse, m),
        vector(delta, m),
    )


def _columns(x, block, arguments, of):
    """The (tile, tail) of columns of a tensor, as wide as q (of="") or v (of="V")."""
    if x is None:
        return None, None
    return columns(x, block, arguments[f"BLOCK_D{of}"], arguments[f"TAIL_D{of}"])


def _width(arguments, of):
    """Columns of a (tile, tail)."""
    return arguments[f"BLOCK_D{of}"] + arguments[f"TAIL_D{of}"]
