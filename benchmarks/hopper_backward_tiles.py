"""What tiles suit each pass of the Hopper backward kernels: candidates timed side by side.

    python benchmarks/hopper_backward_tiles.py OUT [HEAD_DIM ...]

Writes OUT, a JSON line for each candidate, and prints the fastest. kernels/hopper_configs.py holds
what a run on an H200 chose; compilations run in parallel beforehand.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import sys
from pathlib import Path

import torch

from fa_verify import Mask, Problem, loader
from fa_verify.bench.timing import Stopwatch

SEQLEN, BATCH, WIDTH = 4096, 4, 2048
ROUNDS, MILLISECONDS = 3, 6.0
FIELDS = ("block_m", "block_n", "warps", "stages", "registers", "dp_first", "in_registers")
FREE, DP_FIRST, IN_REGISTERS = None, True, (False, True)
CANDIDATES = {
    "dkdv": [
        (64, 64, 4, 2, FREE), (64, 64, 4, 2, 168), (64, 64, 4, 3, FREE), (64, 64, 4, 3, 168),
        (64, 64, 4, 3, FREE, DP_FIRST), (64, 128, 8, 3, FREE), (32, 64, 4, 3, FREE),
    ],
    "dv": [(64, 128, 8, 2, FREE), (32, 128, 8, 3, FREE), (64, 64, 4, 2, FREE)],
    "dk": [(32, 128, 8, 2, FREE), (32, 128, 8, 3, FREE), (32, 64, 4, 3, FREE)],
    "dq": [
        (64, 64, 4, 2, FREE), (64, 64, 4, 3, FREE), (64, 128, 4, 2, FREE), (128, 64, 8, 3, FREE),
        (64, 32, 4, 3, FREE), (128, 32, 8, 3, FREE),
        (64, 64, 4, 2, FREE, *IN_REGISTERS), (64, 64, 4, 3, FREE, *IN_REGISTERS),
    ],
    "atomic": [
        (64, 64, 4, 2, 168), (64, 64, 4, 2, FREE, DP_FIRST), (64, 128, 8, 2, FREE),
        (32, 64, 4, 3, FREE), (32, 64, 8, 2, FREE),
    ],
}  # fmt: skip


def modules():
    """The launchers, the arguments that all kernels share, and the table's module."""
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    found = kernel.backward.__globals__
    launchers = found["hopper_backward"]
    return launchers, found["arguments_of"], sys.modules[launchers.backward_tiles.__module__]


def launch(part, candidate, problem):
    """A function that runs one pass with one candidate; what it reads is random."""
    launchers, arguments_of, table = modules()
    dtype = getattr(torch, problem.dtype)
    q, k, v, do = (torch.randn(problem.shape_q, dtype=dtype, device="cuda") for _ in range(4))
    lse = torch.full(problem.shape_lse, 9.0, device="cuda")  # about what random rows have
    tensors = q, k, v, do, lse, torch.zeros_like(lse)
    arguments = arguments_of(problem, q, k, v, do)
    cut = table.Tiles(
        **dict(zip(FIELDS, candidate, strict=False))  # the last two may be left out
    )
    out = torch.empty_like(q)
    if part == "dq":
        return lambda: launchers.query_pass(problem, cut, tensors, out, arguments)
    alone = "dv" in table.backward_tiles(problem.head_dim)  # dv has a pass of its own
    dk = None if part == "dv" else out
    dv = None if part == "dk" or (part == "atomic" and alone) else torch.empty_like(q)
    dq_sum = torch.zeros(problem.shape_q, device="cuda") if part == "atomic" else None
    return lambda: launchers.key_pass(problem, cut, tensors, dk, dv, dq_sum, arguments)


def problem_of(head_dim, causal, *, seqlen=SEQLEN, batch=BATCH):
    """A square problem of as many heads as make the usual width."""
    heads = -(-WIDTH // head_dim)
    return Problem(
        batch=batch, heads_q=heads, heads_kv=heads, seqlen_q=seqlen, seqlen_k=seqlen,
        head_dim=head_dim, head_dim_v=head_dim, dtype="bfloat16", mask=Mask(causal=causal),
    )  # fmt: skip


def compile_one(job):
    """Compile on a small problem, for Triton's cache. What does not fit says so; the rest is ""."""
    head_dim, causal, part, candidate = job
    try:
        launch(part, candidate, problem_of(head_dim, causal, seqlen=256, batch=1))()
    except Exception as error:  # noqa: BLE001 - whatever a compiler or the card refuses
        return " ".join(f"{type(error).__name__}: {error}".split())[:120]
    return ""


def main():
    """Compile all, time all, print the fastest of each pass."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="Gets a JSON line for each candidate.")
    parser.add_argument("head_dims", type=int, nargs="*", default=[64, 80, 96, 128, 256])
    options = parser.parse_args()
    _, _, table = modules()
    jobs = [
        (head_dim, causal, part, candidate)
        for head_dim in options.head_dims
        for causal in (True, False)
        for part in ("dkdv", "dv", "dk", "dq", "atomic")
        if part in table.backward_tiles(head_dim)
        for candidate in CANDIDATES[part]
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(mp_context=context) as pool:
        errors = list(pool.map(compile_one, jobs))
    lines = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for (head_dim, causal, part, candidate), error in zip(jobs, errors, strict=True):
            line = {"head_dim": head_dim, "causal": causal, "pass": part, "tiles": candidate}
            if error:
                line["error"] = error
            else:
                problem = problem_of(head_dim, causal)
                watch = Stopwatch.of(
                    [launch(part, candidate, problem) for _ in range(2)], MILLISECONDS
                )
                for _ in range(ROUNDS):
                    watch.turn()
                line["milliseconds"] = round(watch.median, 4)
            lines.append(line)
            options.out.write_text("".join(json.dumps(one) + "\n" for one in lines))
    timed = [line for line in lines if "milliseconds" in line]
    for key in dict.fromkeys((line["head_dim"], line["causal"], line["pass"]) for line in timed):
        same = [x for x in timed if (x["head_dim"], x["causal"], x["pass"]) == key]
        best = min(same, key=lambda x: x["milliseconds"])
        print(*key, best["tiles"], f"{best['milliseconds']:.3f} ms", sep="  ")


if __name__ == "__main__":
    main()
