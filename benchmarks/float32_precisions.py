"""float32 attention with dots in ieee, tf32 and tf32x3: errors and speed side by side.

    PYTHONPATH=. python benchmarks/float32_precisions.py [--seqlen 4096]

A batch of 1, 16 heads, causal, normal values. Errors are the largest and the root of the mean
square, relative to the root of the mean square of the exact result (float64). Speed is the median
of forward, and of forward and backward. PyTorch's float32 attention (its memory-efficient backend,
with TF32 off and on) stands beside.
"""

from __future__ import annotations

import argparse
import functools

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import attention

HEADS = 16
NAMES = ("o", "dq", "dk", "dv")


def efficient(precision, q, k, v):
    torch.set_float32_matmul_precision(precision)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


IMPLEMENTATIONS = {
    "ieee": functools.partial(attention, causal=True, dot_precision="ieee"),
    "tf32x3": functools.partial(attention, causal=True, dot_precision="tf32x3"),
    "tf32": functools.partial(attention, causal=True, dot_precision="tf32"),
    "PyTorch, TF32 off": functools.partial(efficient, "highest"),
    "PyTorch, TF32 on": functools.partial(efficient, "high"),
}


def formula(q, k, v):
    """Attention in the inputs' own dtype."""
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu_(1)
    return ((q @ k.mT) * q.shape[3] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def results(function, inputs, do):
    o = function(*inputs)
    return (o.detach(), *torch.autograd.grad(o, inputs, do))


def exact(inputs, do):
    """Head by head: the matrix of float64 is large."""
    heads = []
    for head in range(inputs[0].shape[1]):
        one = [x[:, head : head + 1].detach().double().requires_grad_() for x in inputs]
        heads.append(results(formula, one, do[:, head : head + 1].double()))
    return [torch.cat(parts, 1) for parts in zip(*heads, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seqlen", type=int, default=4096)
    seqlen = parser.parse_args().seqlen
    print(torch.cuda.get_device_name(), torch.__version__)
    errors = " | ".join(f"{name} largest | rms" for name in NAMES)
    print(f"| head_dim | dots | {errors} | forward, ms | forward and backward, ms |")
    print("|---|---|" + "---|" * (2 * len(NAMES) + 2))
    for head_dim in (64, 128):
        torch.manual_seed(0)
        shape = (1, HEADS, seqlen, head_dim)
        inputs = [torch.randn(shape, device="cuda", requires_grad=True) for _ in range(3)]
        do = torch.randn(shape, device="cuda")
        due = exact(inputs, do)
        for name, function in IMPLEMENTATIONS.items():
            cells = []
            for got, want in zip(results(function, inputs, do), due, strict=True):
                unit = want.square().mean().sqrt()
                off = (got.double() - want).abs()
                cells += [f"{off.max() / unit:.1e}", f"{off.square().mean().sqrt() / unit:.1e}"]
            plain = [x.detach() for x in inputs]
            for run in (
                functools.partial(function, *plain),
                functools.partial(results, function, inputs, do),
            ):
                took = triton.testing.do_bench(run, warmup=50, rep=200, return_mode="median")
                cells.append(f"{took:.2f}")
            print(f"| {head_dim} | {name} | {' | '.join(cells)} |", flush=True)
        del due
    torch.set_float32_matmul_precision("highest")


if __name__ == "__main__":
    main()
