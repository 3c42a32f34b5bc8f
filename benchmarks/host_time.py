"""What a call of attention takes the host: Python, autograd and launches; the card has little to do.

    PYTHONPATH=. python benchmarks/host_time.py [--profile]

One batch, 16 heads, 512 queries and keys, bfloat16, causal. Time until calls in a row have returned,
before the card is waited for; the median of rounds in which the contestants take turns. "ours, not
replayed" does all anew that kernels/replay.py saves. The last column is the card's time of ours: a
CUDA graph of the same calls, replayed.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels import replay
from kernels.attention import attention

HEADS, SEQLEN, HEAD_DIMS = 16, 512, (64, 80, 96, 128, 256)
CALLS, ROUNDS = 50, 7


def not_replayed(*tensors):
    """Ours, with all of the host's work done anew."""
    pinned, replay.pinned = replay.pinned, lambda: True
    try:
        return attention(*tensors, causal=True)
    finally:
        replay.pinned = pinned


def backend(which, *tensors):
    """PyTorch's attention by one of its backends."""
    with sdpa_kernel(which):
        return scaled_dot_product_attention(*tensors, is_causal=True)


CONTESTANTS = {
    "ours": functools.partial(attention, causal=True),
    "ours, not replayed": not_replayed,
    "FlashAttention-2": functools.partial(backend, SDPBackend.FLASH_ATTENTION),
    "cuDNN": functools.partial(backend, SDPBackend.CUDNN_ATTENTION),
}


def gradients(function, inputs, do):
    """A forward and a backward pass."""
    return torch.autograd.grad(function(*inputs), inputs, do)


def microseconds(run):
    """Of the host, a call."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        run()
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * took / CALLS


def graph_microseconds(run):
    """Of the card, a call: a graph of some, replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            run()
    took = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        took.append(1e6 * (time.perf_counter() - begin) / CALLS)
    return statistics.median(took)


def row(head_dim):
    """Print a line of the table."""
    shape = (1, HEADS, SEQLEN, head_dim)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    inputs, do = [x.requires_grad_() for x in made[:3]], made[3]
    plain = [x.detach() for x in inputs]
    cells = []
    for name, function in CONTESTANTS.items():
        ways = (
            functools.partial(function, *plain),
            functools.partial(gradients, function, inputs, do),
        )
        try:
            for run in ways * 3:
                run()
        except RuntimeError as error:  # a backend that does not take the head_dim
            cells.append(f"{type(error).__name__}: {name}")
            continue
        found = [statistics.median(microseconds(run) for _ in range(ROUNDS)) for run in ways]
        cells.append(f"{found[0]:.0f} / {found[1]:.0f}")
    graph = graph_microseconds(functools.partial(gradients, CONTESTANTS["ours"], inputs, do))
    print(f"| {head_dim} | {' | '.join(cells)} | {graph:.0f} |", flush=True)


def profile():
    """Say where the time of ours goes."""
    shape = (1, HEADS, SEQLEN, 64)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    inputs, do = [x.requires_grad_() for x in made[:3]], made[3]
    with torch.autograd.set_multithreading_enabled(False):  # the profiler sees one thread
        run = functools.partial(gradients, CONTESTANTS["ours"], inputs, do)
        microseconds(run)
        with cProfile.Profile() as found:
            microseconds(run)
    pstats.Stats(found).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profile", action="store_true", help="say where the time of ours goes")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    names = " | ".join(f"{name}: forward / both, us" for name in CONTESTANTS)
    print(f"| head_dim | {names} | card, both, us |")
    print("|---|" + "---|" * (len(CONTESTANTS) + 1))
    for head_dim in HEAD_DIMS:
        row(head_dim)
    if options.profile:
        profile()


if __name__ == "__main__":
    main()
