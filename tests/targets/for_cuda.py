"""A launcher written for a GPU only: on anything else it refuses, or takes another way."""

import torch
import triton
import triton.language as tl

from fa_verify import Capabilities, Kernel, Outputs

BIAS = torch.zeros(1, device="cuda")


@triton.jit
def _mean_kernel(v, o, bias, seqlen_k, columns: tl.constexpr, block: tl.constexpr):
    at = tl.arange(0, block)[:, None] * columns + tl.arange(0, columns)[None, :]
    tile = tl.load(v + at, at < seqlen_k * columns, other=0.0).to(tl.float32)
    mean = tl.sum(tile, 0) / seqlen_k + tl.load(bias)
    tl.store(o + tl.arange(0, columns), mean.to(o.dtype.element_ty))


def mean_of_values(problem, q, k, v):
    """Attention to keys that all score 0, in one head of one query and 16 columns."""
    assert q.is_cuda
    assert BIAS.device == v.device
    workspace = torch.empty(q.shape, dtype=q.dtype, device="cuda")
    size = triton.next_power_of_2(problem.seqlen_k)
    _mean_kernel[(1,)](v.contiguous(), workspace, BIAS, problem.seqlen_k, columns=16, block=size)
    return Outputs(o=workspace)


for_cuda = Kernel(
    name="for_cuda",
    forward=mean_of_values,
    backward=None,
    capabilities=Capabilities(dtypes=("float32",), head_dims=(16,)),
)
