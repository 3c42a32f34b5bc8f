"""One flash forward on the CPU: `fa_verify.ttir`, checks on, against Triton's interpreter.

Both in processes of their own, one thread each, in turns; the ratio of the best times counts.

    python benchmarks/executor_vs_interpreter.py [--seqlen 1024] [--heads 2] [--rounds 2]
"""

import argparse
import os
import subprocess
import sys

CHILD = """
import sys, time
import torch
torch.set_num_threads(1)
from fa_verify import loader, ttir
from fa_verify.case import Case
from fa_verify.inputs import materialise
from fa_verify.ttir.autotune import pinned

interpret, seqlen, heads = sys.argv[1] == "interpreter", sys.argv[2], sys.argv[3]
case = Case.parse(f"pass=fwd h={heads}/{heads} s={seqlen}x{seqlen} d=128 dtype=float16 seed=1")
with ttir.activated():
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
x = materialise(case)

def once():
    start = time.perf_counter()
    if interpret:
        with ttir.activated(), pinned(0, {}):
            kernel.forward(case.problem, x.q, x.k, x.v)
    else:
        with ttir.execute() as run:
            kernel.forward(case.problem, x.q, x.k, x.v)
        assert not run.incidents
    return time.perf_counter() - start

once() if not interpret else None  # compile
print(once())
"""


def seconds(which, arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if which == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-c", CHILD, which, str(arguments.seqlen), str(arguments.heads)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(result.stderr)
    return float(result.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    pairs = [
        (seconds("interpreter", arguments), seconds("ttir", arguments))
        for _ in range(arguments.rounds)
    ]
    slow, fast = (min(column) for column in zip(*pairs, strict=True))
    print(f"1x{arguments.heads}x{arguments.seqlen}x{arguments.seqlen}x128 float16 forward")
    print(f"Triton's interpreter takes {slow / fast:.1f} times as long as the executor")


if __name__ == "__main__":
    main()
