"""What a call of attention takes the host: Python, autograd and launches.

    PYTHONPATH=. python benchmarks/host_time.py [--head-dim 64] [--profile]

One batch, 16 heads, 512 queries and keys, bfloat16, causal: the card has little to do. Time until
calls in a row have returned, before the card is waited for; medians of rounds. Four ways:

    forward    without gradients
    in turn    a forward and a backward pass, again and again
    in a row   as in a model: twelve calls, each on the result of the one before, and one backward
               pass through all, a twelfth of it
    one thread the same with autograd's own thread switched off

"ours, not replayed" does all anew that kernels/replay.py saves. The last column is the card's time
of ours: a CUDA graph of the second way, replayed.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import itertools
import pstats
import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels import replay
from kernels.attention import attention

HEADS, SEQLEN, HEAD_DIMS = 16, 512, (64, 80, 96, 128, 256)
CALLS, ROUNDS, LAYERS = 48, 7, 12


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


def microseconds(run, calls):
    """Of the host, a call."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * took / calls


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


def in_a_row(function, q, pairs, do):
    """Calls on the results of calls, each with keys and values of its own; a backward pass."""
    o = q
    for k, v in pairs:
        o = function(o, k, v)
    torch.autograd.grad(o, [q, *itertools.chain(*pairs)], do)


def ways(function, inputs, do):
    """How many calls each way makes, whether autograd has a thread of its own, and what to time."""
    q, *pair = inputs
    pairs = [[x.detach().clone().requires_grad_() for x in pair] for _ in range(LAYERS)]
    yield 1, True, functools.partial(function, *(x.detach() for x in inputs))
    yield 1, True, functools.partial(gradients, function, inputs, do)
    for threads in (True, False):
        yield LAYERS, threads, functools.partial(in_a_row, function, q, pairs, do)


def row(head_dim):
    """Print a line of the table."""
    shape = (1, HEADS, SEQLEN, head_dim)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    inputs, do = [x.requires_grad_() for x in made[:3]], made[3]
    cells = []
    for function in CONTESTANTS.values():
        found = []
        for calls, threads, run in ways(function, inputs, do):
            with torch.autograd.set_multithreading_enabled(threads):
                for _ in range(3):
                    run()
                times = [microseconds(run, CALLS // calls) / calls for _ in range(ROUNDS)]
            found.append(f"{statistics.median(times):.0f}")
        cells.append(" / ".join(found))
    graph = graph_microseconds(functools.partial(gradients, CONTESTANTS["ours"], inputs, do))
    print(f"| {head_dim} | {' | '.join(cells)} | {graph:.0f} |", flush=True)


def profile():
    """Say where the time of ours goes."""
    shape = (1, HEADS, SEQLEN, 64)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    inputs, do = [x.requires_grad_() for x in made[:3]], made[3]
    with torch.autograd.set_multithreading_enabled(False):  # the profiler sees one thread
        run = functools.partial(gradients, CONTESTANTS["ours"], inputs, do)
        microseconds(run, CALLS)
        with cProfile.Profile() as found:
            microseconds(run, CALLS)
    pstats.Stats(found).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--head-dim", type=int, action="append", help="only this one")
    parser.add_argument("--profile", action="store_true", help="say where the time of ours goes")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("forward / in turn / in a row / one thread, us")
    print(f"| head_dim | {' | '.join(CONTESTANTS)} | card |")
    print("|---|" + "---|" * (len(CONTESTANTS) + 1))
    for head_dim in options.head_dim or HEAD_DIMS:
        row(head_dim)
    if options.profile:
        profile()


if __name__ == "__main__":
    main()
