"""From which length on the drop-in's kernels are faster than PyTorch's own attention.

    PYTHONPATH=. python benchmarks/short_sequences.py

Time until the card is idle of calls in a row, launching included: short sequences cost the launch.
A cell is the multiplications and additions of the forward pass as a power of two, PyTorch's time
over ours (above 1: ours is faster), and ours in us: forward without gradients / forward and
backward. Medians of rounds in which both take turns.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import attention

LENGTHS = (512, 1024, 2048, 4096)
BATCHES, HEADS = (1, 8), 16
FORMS = [  # dtype, head_dim, causal
    (torch.bfloat16, 64, True),
    (torch.bfloat16, 128, False),
]
CALLS, ROUNDS = 20, 5


def seconds(run):
    """A call, of some in a row."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / CALLS


def gradients(function, inputs):
    return torch.autograd.grad(function(*inputs), inputs, inputs[0].detach())


def ratios(ours, torchs, shape, dtype):
    """PyTorch's time over ours, of forward, and of forward and backward; and ours in us."""
    inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    found = []
    for run in (lambda f: f(*(x.detach() for x in inputs)), lambda f: gradients(f, inputs)):
        both = [functools.partial(run, function) for function in (ours, torchs)]
        for _ in range(2):  # compiled and tuned, and noted
            both[0](), both[1]()
        rounds = [[seconds(one) for one in both] for _ in range(ROUNDS)]
        mine, theirs = map(statistics.median, zip(*rounds, strict=True))
        found.append((theirs / mine, 1e6 * mine))
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    print(f"| dtype | head_dim | causal | batch x heads | {' | '.join(map(str, LENGTHS))} |")
    print("|---|---|---|---|" + "---|" * len(LENGTHS))
    for dtype, head_dim, causal in FORMS:
        ours = functools.partial(attention, causal=causal, alignment="top-left")
        torchs = functools.partial(scaled_dot_product_attention, is_causal=causal)
        for batch in BATCHES:
            cells = []
            for seqlen in LENGTHS:
                forward, both = ratios(ours, torchs, (batch, HEADS, seqlen, head_dim), dtype)
                work = math.log2(4 * batch * HEADS * seqlen**2 * head_dim)
                ratio, took = zip(forward, both, strict=True)
                cells.append(
                    f"2^{work:.0f}: {ratio[0]:.2f} / {ratio[1]:.2f} "
                    f"({took[0]:.0f} / {took[1]:.0f} us)"
                )
            form = f"{str(dtype).removeprefix('torch.')} | {head_dim} | {causal}"
            print(f"| {form} | {batch} x {HEADS} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
