"""A kernel that reads back what its other threads may not have stored yet."""

import torch
import triton
import triton.language as tl

from fa_verify import Capabilities, Kernel, Outputs


@triton.jit
def _transposing_kernel(v, room, o, seqlen_k, columns: tl.constexpr, block: tl.constexpr):
    row, column = tl.arange(0, block)[:, None], tl.arange(0, columns)[None, :]
    tile = tl.load(v + row * columns + column, row < seqlen_k, other=0.0)
    tl.store(room + row * columns + column, tile)
    back = tl.load(room + tl.arange(0, block)[None, :] * columns + tl.arange(0, columns)[:, None])
    tl.store(o + tl.arange(0, columns), tl.sum(back, 1) / seqlen_k)


def mean_of_values(problem, q, k, v):
    """Attention to keys that all score 0, in one head of one query and 16 columns."""
    block = triton.next_power_of_2(problem.seqlen_k)
    room, o = torch.empty(block, 16, dtype=v.dtype, device=v.device), torch.empty_like(q)
    _transposing_kernel[(1,)](v.contiguous(), room, o, problem.seqlen_k, columns=16, block=block)
    return Outputs(o=o)


reads_back = Kernel(
    name="reads_back",
    forward=mean_of_values,
    backward=None,
    capabilities=Capabilities(dtypes=("float32",), head_dims=(16,)),
)
