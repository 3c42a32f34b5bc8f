"""Peak extra memory of attention against its length: linear, and nothing but what must be kept.

    PYTHONPATH=. python benchmarks/attention_memory.py [--lengths 1024,4096,16384,65536,131072]

One forward and backward pass of a batch of 1, 8 heads of 64, bfloat16, causal. Extra is the peak of
allocated memory beyond q, k, v, do and the results o, dq, dk, dv. It should be lse and delta (4
bytes a query and head each), and with atomics a float32 dq. Both ways of computing dq, and
PyTorch's FlashAttention-2 side by side. Exits with 1 where ours is off by more than 1%.
"""

from __future__ import annotations

import argparse
import functools
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import attention

HEADS, HEAD_DIM = 8, 64
MOST_OFF = 0.01


def extra(function, seqlen):
    """Bytes that a forward and backward pass needs beyond its inputs and results."""
    shape = (1, HEADS, seqlen, HEAD_DIM)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def run():
        o = function(*inputs)
        return (o, *torch.autograd.grad(o, inputs, do))

    run()  # compiling and tuning allocate, too
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in results)


def flash_attention_2(q, k, v):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="1024,4096,16384,65536,131072")
    lengths = [int(x) for x in parser.parse_args().lengths.split(",")]
    functions = {
        "deterministic": functools.partial(attention, causal=True),
        "atomics": functools.partial(attention, causal=True, deterministic=False),
        "FlashAttention-2": flash_attention_2,
    }
    print(torch.cuda.get_device_name(), torch.__version__)
    print(f"| N | {' | '.join(f'{name}, MB | of what is due' for name in functions)} |")
    print("|---|" + "---|" * (2 * len(functions)))
    worst = 0.0
    for seqlen in lengths:
        rows = HEADS * seqlen
        due = {"deterministic": 2 * 4 * rows, "atomics": (2 + HEAD_DIM) * 4 * rows}
        cells = []
        for name, function in functions.items():
            needed = extra(function, seqlen)
            share = needed / due.get(name, due["deterministic"])
            cells += [f"{needed / 1e6:.3f}", f"{share:.4f}"]
            if name in due:
                worst = max(worst, abs(share - 1))
        print(f"| {seqlen} | {' | '.join(cells)} |", flush=True)
    print(f"farthest from what is due: {worst:.2%}")
    sys.exit(worst > MOST_OFF)


if __name__ == "__main__":
    main()
