"""Launcher: `fp8`, the forward pass of fp8 operands with scales."""

import torch
import triton

from fa_verify import Arithmetic, Capabilities, Kernel, Outputs

from .fp8 import fp8_kernel
from .launch import options

BLOCKS = {"BLOCK_M": 64, "BLOCK_N": 32}


def forward(problem, q, k, v, q_scale, k_scale, v_scale):
    """Return o and lse of fp8 operands with scales."""
    o = torch.empty(problem.shape_o, dtype=getattr(torch, problem.dtype), device=q.device)
    lse = torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)
    further = options(problem)
    del further["PRECISION"]
    further |= {name: max(32, further[name]) for name in ("BLOCK_D", "BLOCK_DV")}  # fp8's least
    if o.numel():
        blocks = triton.cdiv(problem.seqlen_q, BLOCKS["BLOCK_M"])
        fp8_kernel[(blocks * problem.batch * problem.heads_q,)](
            q, k, v, o, lse, q_scale, k_scale, v_scale,
            *q.stride(), *k.stride(), *v.stride(), *o.stride(),
            *along(q_scale), *along(k_scale), *along(v_scale),
            scaled_rows=problem.scaled_rows or max(problem.seqlen_q, problem.seqlen_k),
            **further, **BLOCKS,
        )  # fmt: skip
    return Outputs(o, lse)


def along(scale):
    """Strides of a scale, 0 where all share it."""
    return [
        0 if size == 1 else step for size, step in zip(scale.shape, scale.stride(), strict=True)
    ]


fp8 = Kernel(
    name="fp8",
    forward=forward,
    capabilities=Capabilities(
        dtypes=("bfloat16", "float16"),
        fp8=("tensor", "head", "block64", "block128", "block256"),
        head_dims_v=range(1, 257),
        window=True,
        softcap=True,
        backward=False,
        deterministic=True,
        batch_invariant=True,
    ),
    arithmetic=Arithmetic(p_scale=256.0, promoted=32),
)
