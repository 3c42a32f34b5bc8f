"""Kernels that take too much of a chip, one each; what they compute means nothing."""

import torch
import triton
import triton.language as tl

from fa_verify import Capabilities, Kernel, Outputs

_HALF = Capabilities(dtypes=("float16",), head_dims=(64,), backward=False)
_FLOAT = Capabilities(dtypes=("float32",), head_dims=(64,), backward=False)


@triton.jit
def product(x, y, z, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):  # noqa: N803
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for i in tl.range(0, 8):
        a = tl.load(x + i * K + m[:, None] * K + k)
        b = tl.load(y + i * K + k[:, None] * N + n)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(z + m[:, None] * N + n, total)


@triton.jit
def eighths(x, z, B: tl.constexpr):  # noqa: N803
    i = tl.arange(0, B)
    tl.store(z + i, tl.load(x + i).to(tl.float8e4nv).to(tl.float32))


_MAJOR = torch.cuda.get_device_capability()[0]  # as this file is imported


def _asks(problem, q, k, v):
    """Rows by what the chip is said to be, in three ways."""
    amd = triton.runtime.driver.active.get_current_target().backend == "hip"
    rows = 16 if amd and torch.version.hip else {8: 32, 9: 64}[_MAJOR]
    product[(1,)](q, k, torch.empty_like(q, dtype=torch.float32), rows, 64, 64, "ieee")
    return Outputs(torch.empty(problem.shape_o, dtype=q.dtype))


tuned = triton.autotune(
    [triton.Config({}, num_warps=8, num_stages=stages) for stages in (2, 7)], key=["M"]
)(product)


def _kernel(name, function, m=64, n=64, k=64, precision="ieee", takes=_HALF, **options):
    def forward(problem, q, k_, v):
        function[(1,)](
            q, k_, torch.empty_like(q, dtype=torch.float32), m, n, k, precision, **options
        )
        return Outputs(torch.empty(problem.shape_o, dtype=q.dtype))

    return Kernel(name=name, forward=forward, capabilities=takes)


def _eighths(problem, q, k, v):
    eighths[(1,)](q, torch.empty_like(q), 64)
    return Outputs(torch.empty(problem.shape_o, dtype=q.dtype))


def _peeks(problem, q, k, v):
    seen = torch.full((64,), -1.0)
    eighths[(1,)](q, seen, 64)
    if (seen < 0).all():
        msg = "the kernel has not run"
        raise RuntimeError(msg)
    return Outputs(torch.empty(problem.shape_o, dtype=q.dtype))


modest = _kernel("modest", product)
spills = _kernel("spills", product, m=128, n=128, num_warps=1)
roomy = _kernel("roomy", product, m=128, n=128, num_warps=8, num_stages=7)
roomy_tuned = _kernel("roomy_tuned", tuned, m=128, n=128)
ieee = _kernel("ieee", product, takes=_FLOAT)
tf32 = _kernel("tf32", product, precision="tf32", takes=_FLOAT)
tiny = _kernel("tiny", product, m=2, n=2, k=16)


def _stubborn(problem, q, k, v):
    msg = "no such library on this machine"
    raise RuntimeError(msg)


stubborn = Kernel(name="stubborn", forward=_stubborn, capabilities=_HALF)
asks = Kernel(name="asks", forward=_asks, capabilities=_HALF)
fp8 = Kernel(name="fp8", forward=_eighths, capabilities=_FLOAT)
peeks = Kernel(name="peeks", forward=_peeks, capabilities=_FLOAT)
