"""Makes the table of the forward pass's fastest configurations on this card.

    python benchmarks/tune_forward.py kernels/tables/NVIDIA_H200.json

Every configuration of kernels/hopper_forward.py at 16,384 tokens of 2048 columns, by head_dim, mask
and length: CUDA graphs in turns, two sets of inputs, the median of five rounds.
"""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import triton

from fa_verify import loader
from fa_verify.bench import contestants
from fa_verify.bench.points import grid
from fa_verify.bench.timing import Stopwatch

HEAD_DIMS = (64, 80, 96, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
ROUNDS, MILLISECONDS = 5, 5.0
MOST = 8  # configurations of a head_dim
TARGET = str(Path(__file__).parents[1] / "kernels/flash_attention.py")


def forward():
    """The forward pass, its autotuner by head_dim, and how that writes a configuration."""
    (flash,) = (kernel for kernel in loader.load(TARGET) if kernel.name == "flash")
    module = flash.forward.__globals__["hopper_forward"]
    return flash.forward, module._tuned, module.Tuned.__init__.__globals__["_text"]  # noqa: SLF001


def pinned(tuned, config):
    """Have the kernel launched with one configuration, whatever is known."""
    tuned._known = lambda _: config  # noqa: SLF001


def offered(tuned):
    """All configurations."""
    return list(tuned._configs)  # noqa: SLF001


def compiled(head_dim, causal, index):
    """Compile in a process of its own: Triton's cache has it then."""
    run, tuner, _ = forward()
    tuned = tuner(head_dim)
    configs = offered(tuned)
    if index < len(configs):
        pinned(tuned, configs[index])
        (point,) = grid(
            ["forward"], ["float16"], [head_dim], causal=[causal], seqlens=[512], tokens=512
        )
        given = contestants.inputs(point, "cuda", 0)
        run(point.problem, given.q, given.k, given.v)


def timed(point, run, tuned, configs):
    """Milliseconds of each configuration."""
    sets = [contestants.inputs(point, "cuda", seed) for seed in range(2)]
    watches = []
    for config in configs:
        pinned(tuned, config)
        functions = [
            lambda given=given: run(point.problem, given.q, given.k, given.v) for given in sets
        ]
        watches.append(Stopwatch.of(functions, MILLISECONDS))
    for _ in range(ROUNDS):
        for watch in watches:
            watch.turn()
    return [round(watch.median, 5) for watch in watches]


def main():
    """Compile, time, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--workers", type=int, default=16, help="Processes that compile.")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        jobs = [
            pool.submit(compiled, head_dim, causal, index)
            for head_dim in HEAD_DIMS
            for causal in (False, True)
            for index in range(MOST)
        ]
        for job in jobs:
            job.result()
    run, tuner, text = forward()
    table = {}
    with torch.cuda.stream(torch.cuda.Stream()):
        for head_dim in HEAD_DIMS:
            tuned = tuner(head_dim)
            configs = offered(tuned)
            points = grid(
                ["forward"], ["float16"], [head_dim],
                causal=[False, True], seqlens=SEQLENS, tokens=TOKENS,
            )  # fmt: skip
            for point in points:
                times = timed(point, run, tuned, configs)
                milliseconds = dict(zip(map(text, configs), times, strict=True))
                best = min(milliseconds, key=milliseconds.get)
                key = f"head_dim={head_dim},HAS_HI={point.causal},seqlen_bucket={point.seqlen}"
                table[key] = {"best": best, "milliseconds": milliseconds}
                print(
                    key, best, f"{point.flops / milliseconds[best] / 1e9:.0f} TFLOP/s", flush=True
                )
    run_of = {"device": torch.cuda.get_device_name(), "torch": str(torch.__version__),
              "triton": triton.__version__, "script": "benchmarks/tune_forward.py"}  # fmt: skip
    tables = {"run": run_of, "hopper_forward_kernel": table}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(tables, indent=1, sort_keys=True) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
