"""The same launches on Triton's interpreter, on ttsem and on fa_verify's executor, side by side.

Every engine runs in processes of its own, in turns, with one thread; what counts is the least CPU
time of each launch, compiled before. The executor's sanitizer is on.

    python benchmarks/executor.py [--rounds 3] [--python-ttsem PYTHON] [--only NAME] [--any-chip]

--python-ttsem names a Python >= 3.12 with ttsem, Triton 3.8, torch and this package. ttsem 0.1.0
cannot read the IR of the kernels for Hopper: under --any-chip all engines run the general ones.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

ATTENTION = {
    "forward fp16 37x64": "pass=fwd h=2/2 s=37x37 d=64 dtype=float16",
    "forward bf16 128x80 causal": "pass=fwd h=2/2 s=128x128 d=80 dtype=bfloat16 mask=causal",
    "forward fp32 256x64": "pass=fwd h=2/2 s=256x256 d=64 dtype=float32 dot=ieee",
    "forward fp16 512x128": "pass=fwd h=2/2 s=512x512 d=128 dtype=float16",
    "forward bf16 1024x128 causal": "pass=fwd h=2/2 s=1024x1024 d=128 dtype=bfloat16 mask=causal",
    "forward fp16 1024x64": "pass=fwd h=2/2 s=1024x1024 d=64 dtype=float16",
    "backward fp16 37x64": "pass=bwd h=2/2 s=37x37 d=64 dtype=float16",
    "backward bf16 128x64 causal": "pass=bwd h=2/2 s=128x128 d=64 dtype=bfloat16 mask=causal",
    "backward fp32 200x96": "pass=bwd h=2/2 s=200x200 d=96 dtype=float32 dot=ieee",
    "backward fp16 512x128": "pass=bwd h=2/2 s=512x512 d=128 dtype=float16",
    "backward bf16 1024x64 causal": "pass=bwd h=1/1 s=1024x1024 d=64 dtype=bfloat16 mask=causal",
}
SHORTEST = 0.3  # seconds a launch is repeated for
BARS = {"interpreter": (60, 15), "ttsem": (8, 0)}  # geometric mean and least ratio to be reached


def attention(line, any_chip):
    from fa_verify import loader, ttir
    from fa_verify.case import Case
    from fa_verify.inputs import materialise

    case = Case.parse(line + " seed=1")
    with ttir.activated():
        (kernel,) = loader.load("kernels/flash_attention.py:flash")
    if any_chip:
        for name in ("hopper_forward", "hopper_backward"):
            kernel.forward.__globals__[name].hopper = lambda: False
    x = materialise(case)
    if "pass=fwd" in line:
        return lambda: kernel.forward(case.problem, x.q, x.k, x.v)
    return lambda outputs=[]: backward(kernel, case, x, outputs)


def backward(kernel, case, x, outputs):
    """Only the first call runs the forward pass, which no timing counts."""
    if not outputs:
        outputs.append(kernel.forward(case.problem, x.q, x.k, x.v))
    kernel.backward(case.problem, x.q, x.k, x.v, outputs[0], x.do)


def engine(name):
    """Context in which a kernel launched on CPU tensors runs on the engine."""
    from fa_verify import ttir
    from fa_verify.ttir.launch.autotune import pinned

    if name == "executor":
        return ttir.execute()
    stack = contextlib.ExitStack()
    if name == "interpreter":
        stack.enter_context(ttir.activated())
    stack.enter_context(pinned(0, {}))
    return stack


def launches(only="", *, any_chip=False):
    """Each launch as (label, a function without arguments)."""
    import torch
    from tutorial_kernels import LAUNCHES

    torch.set_num_threads(1)
    made = {k: lambda f=f: f("cpu") for k, f in LAUNCHES.items()}
    made |= {k: lambda line=line: attention(line, any_chip) for k, line in ATTENTION.items()}
    for label, make in made.items():
        if only in label:
            torch.manual_seed(0)
            yield label, make()


def measure(name, only, any_chip):
    for label, launch in launches(only, any_chip=any_chip):
        with engine(name) as run:
            launch()
            best, began = math.inf, time.perf_counter()
            while time.perf_counter() - began < SHORTEST:
                start = time.process_time()
                launch()
                best = min(best, time.process_time() - start)
            if name == "executor" and run.incidents:
                sys.exit(f"{label}: {run.incidents}")
        print(json.dumps([label, best]), flush=True)


def seconds(name, arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parent.parent
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (root, Path(__file__).parent)))
    child = [__file__, "--measure", name, *(["--only", arguments.only] if arguments.only else [])]
    child += ["--any-chip"] * arguments.any_chip
    command = [sys.executable, *child]
    if name == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    if name == "ttsem":
        command = [arguments.python_ttsem, "-m", "ttsem.sanitize", __file__, "--", *child[1:]]
    result = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    if result.returncode:
        print(f"{name}: {result.stderr[-2000:]}{result.stdout[-300:]}", file=sys.stderr)
    lines = [line for line in result.stdout.splitlines() if line.startswith("[")]
    return dict(json.loads(line) for line in lines)


def mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python-ttsem")
    parser.add_argument("--only", default="")
    parser.add_argument("--any-chip", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments, _ = parser.parse_known_args()  # ttsem adds arguments of its own
    if arguments.measure:
        measure(arguments.measure, arguments.only, arguments.any_chip)
        return
    engines = ["executor", "interpreter"] + ["ttsem"] * bool(arguments.python_ttsem)
    best = {}
    for _ in range(arguments.rounds):
        for name in engines:
            for label, value in seconds(name, arguments).items():
                best[label, name] = min(value, best.get((label, name), math.inf))
    labels = list(dict.fromkeys(label for label, _ in best))
    others = engines[1:]
    print(f"{'launch':32}{'executor':>12}" + "".join(f"{x:>16}" for x in others))
    for label in labels:
        mine = best[label, "executor"]
        print(f"{label:32}{mine * 1e3:>9.2f} ms", end="")
        ratios = (best.get((label, x), math.nan) / mine for x in others)
        print("".join(f"{'fails':>16}" if math.isnan(x) else f"{x:>15.1f}x" for x in ratios))
    missed = False
    for x in others:
        ratios = [best[k, x] / best[k, "executor"] for k in labels if (k, x) in best]
        if ratios:
            bar, least = BARS[x]
            missed |= mean(ratios) < bar or min(ratios) < least
            print(f"{x}: geometric mean {mean(ratios):.1f}x (bar {bar}x), ", end="")
            print(f"least {min(ratios):.1f}x (bar {least}x), of {len(ratios)} launches")
    sys.exit(missed)


if __name__ == "__main__":
    main()
