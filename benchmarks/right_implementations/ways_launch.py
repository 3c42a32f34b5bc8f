"""The forward passes of `ways` as kernels: MHA to MQA, causal or not, any lengths and strides."""

from __future__ import annotations

import functools

import torch
import triton

from fa_verify import Arithmetic, Capabilities, Kernel, Outputs

from .ways import WAYS, attend, merge_tree, transposed

_PARTS = 4  # that `merge_tree` knows
_PROGRAMS = 3  # of the persistent way
_BLOCK_M, _BLOCK_N = 32, 32


def _forward(problem, q, k, v, *, way):
    batch, heads, queries, dv = problem.shape_o
    keys, tiles = problem.seqlen_k, batch * heads * triton.cdiv(queries, _BLOCK_M)
    o = q.new_empty(problem.shape_o)
    lse = torch.empty(problem.shape_lse, device=q.device, dtype=torch.float32)
    if not tiles:
        return Outputs(o, lse)
    shift = keys  # every key is seen
    if problem.mask.causal:
        shift = keys - queries if problem.mask.alignment == "bottom-right" else 0
    given = (*q.stride(), *k.stride(), *v.stride(), problem.scale, queries, keys, shift, heads)
    sizes = {
        "D": problem.head_dim,
        "PAD": max(16, triton.next_power_of_2(problem.head_dim)),
        "DV": dv,
        "PADV": max(16, triton.next_power_of_2(dv)),
        "BLOCK_M": _BLOCK_M,
        "BLOCK_N": _BLOCK_N,
        "PRECISION": problem.dot_precision,
    }
    if way == "transposed":
        grid = (batch * heads, triton.cdiv(queries, _BLOCK_M))
        transposed[grid](q, k, v, o, lse, *given, problem.group, **sizes)
    elif way == "split":
        acc = torch.empty((_PARTS, *problem.shape_o), device=q.device, dtype=torch.float32)
        sums = torch.empty((_PARTS, *problem.shape_lse, 2), device=q.device, dtype=torch.float32)
        rest = (problem.group, tiles, _PARTS)
        attend[tiles, _PARTS](q, k, v, acc, sums, *given, *rest, WAY=way, **sizes)
        grid, own = (batch * heads, triton.cdiv(queries, _BLOCK_M)), ("DV", "PADV", "BLOCK_M")
        chosen = {name: sizes[name] for name in own}
        rows = batch * heads * queries
        merge_tree[grid](acc, sums, o, lse, queries, rows, **chosen)
    else:
        programs = min(tiles, _PROGRAMS) if way == "persistent" else tiles
        rest = (problem.group, tiles, 1)
        attend[programs, 1](q, k, v, o, lse, *given, *rest, WAY=way, **sizes)
    return Outputs(o, lse)


def _kernel(way):
    return Kernel(
        name=way.replace(" ", "_"),
        forward=functools.partial(_forward, way=way),
        arithmetic=Arithmetic(exp2_ulps=4096) if way == "cubic" else Arithmetic(),
        capabilities=Capabilities(
            dot_precisions=("ieee", "tf32", "tf32x3"),
            head_dims_v=range(1, 257),
            backward=False,
            deterministic=True,
        ),
    )


two_passes, lazy, first_block, two_accumulators, ragged, persistent, split, cubic = map(
    _kernel, WAYS
)
keys_as_rows = _kernel("transposed")
