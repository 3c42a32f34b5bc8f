"""An attention kernel for the sanitizers' tests: `right`, and one that stores past its output."""

import torch
import triton
import triton.language as tl

from fa_verify import Capabilities, Kernel, Outputs, reference

_TAKES = Capabilities(dtypes=("float16",), head_dims=(64,), backward=False)


@triton.jit
def copy(x, y, n, PAST: tl.constexpr, B: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n + PAST)


@triton.jit
def unused(x, y, n, B: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


def _kernel(name, function, *extra):
    def forward(problem, q, k, v):
        exact = reference.forward(problem, q, k, v)
        o = exact.o.to(q.dtype).contiguous()
        source = torch.empty_like(o) if function is unused else o
        result = torch.empty_like(o)
        programs = triton.cdiv(o.numel() + 5, 256)
        function[(programs,)](source, result, o.numel(), *extra, 256)
        return Outputs(o if function is unused else result, exact.lse.float())

    return Kernel(name=name, forward=forward, capabilities=_TAKES)


right = _kernel("right", copy, 0)
past = _kernel("past", copy, 5)
reads_unwritten = _kernel("reads_unwritten", unused)
