"""What shows a planted race, and how fast.

    python benchmarks/races.py [--backend cuda] [--cases 4] [--runs 12] [--only NAME]

Plants races in copies of the zoo's kernels and runs them on the same cases: judged once, by the
bounds and (on the CPU) the sanitizer; many times under stress, alone, beside a load and beside a
twin (on the CPU: in other orders); once under other numbers of warps and stages. Prints in how many
of the cases a race was seen once, in how many of the stressed runs anything moved, by what they ran
beside, and milliseconds a case, compiled before. The first two rows are right kernels.
"""

import argparse
import dataclasses
import re
import tempfile
import time
from pathlib import Path

from fa_verify import checks, loader
from fa_verify.backends import make
from fa_verify.backends.base import Setup
from fa_verify.case import Case
from fa_verify.checks import stress
from fa_verify.trial import Trial
from fa_verify.zoo.defects import Defect, planted, rows

CASES = (
    "pass=bwd b=2 h=4 s=256x512 d=64 dtype=float16",
    "pass=bwd b=1 h=8/2 s=512x1024 d=64 dtype=float16",
    "pass=bwd b=3 h=2 s=100x300 d=64 dtype=float16",
    "pass=bwd b=8 h=8 s=128x256 d=64 dtype=float16",
)
OPTIONS = ((4, 1), (8, 3))
MOVED = re.compile(r"(\d+) of (\d+) ((?:run|beside|programs)[^,;]*)")
NEW_DELTA = "torch.empty(problem.shape_lse, dtype=torch.float32, device=q.device)"
DELTA = """
        delta_kernel[(blocks * problem.batch * problem.heads_q,)](
            o, do, delta, *o.stride(), *do.stride(),
            problem.heads_q, problem.seqlen_q, problem.head_dim_v,
            BLOCK_M=DELTA_ROWS, BLOCK_DV=block(problem.head_dim_v),
        )  # fmt: skip
"""
GRID = """
    blocks = tl.cdiv(seqlen_k, BLOCK_N)
    first_key = tl.program_id(0) % blocks * BLOCK_N
    sequence = tl.program_id(0) // blocks
"""
ZEROING = """    if ATOMIC_DQ and first_key == 0:
        group_q = heads_q // heads_kv
        size = tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M * head_dim * group_q
        for at in range(0, size, 1024):
            there = at + tl.arange(0, 1024)
            mine = dq_sum + sequence.to(tl.int64) * size + there
            tl.store(mine, tl.zeros((1024,), tl.float32), mask=there < size)
"""
TURNED = """
            ds = ds.to(q_tile.dtype)
            dk_acc = tl.dot(tl.trans(ds), q_tile, dk_acc, input_precision=PRECISION)
"""
THROUGH_MEMORY = """
            ds = ds.to(q_tile.dtype)
            room = scratch + tl.program_id(0).to(tl.int64) * BLOCK_M * BLOCK_N
            across, down = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
            tl.store(room + down[:, None] * BLOCK_N + across[None, :], ds)
            turned = tl.load(room + down[None, :] * BLOCK_N + across[:, None])
            dk_acc = tl.dot(turned, q_tile, dk_acc, input_precision=PRECISION)
"""
LAUNCH = "            q, k, v, do, outputs.lse, delta, dk, dv, None, *strides, *dk.stride(),\n"


def indented(text):
    return "".join(f"    {line}\n" if line else "\n" for line in text.split("\n")[:-1])


def races():
    """Defects, two right kernels first."""
    known = {row.name: row for row in rows()}
    same = ("launch.py", "DELTA_ROWS = MERGE_ROWS = 16", "DELTA_ROWS = MERGE_ROWS = 16")
    for name in ("flash", "atomic"):
        yield Defect(name=f"none: {name}", defect="", tag="launcher", kernel=name, patch=(same,))
    yield known["dq-nonatomic"]
    yield known["deterministic-flag-dropped"]
    yield Defect(
        name="dq zeroed by one of the programs that add to it",
        defect="Others may add before it is zeroed.",
        tag="ttir",
        kernel="atomic",
        patch=(
            ("dkdv.py", GRID, GRID + ZEROING),
            ("launch.py", "dq_sum = torch.zeros(shape", "dq_sum = torch.empty(shape"),
        ),
    )
    yield Defect(
        name="a tile read back through memory, no barrier",
        defect="Other warps may not have stored yet.",
        tag="ttir",
        patch=(
            ("dkdv.py", "    q, k, v, do, lse, delta, dk, dv, dq_sum,\n",
             "    q, k, v, do, lse, delta, dk, dv, dq_sum, scratch,\n"),
            ("dkdv.py", TURNED, THROUGH_MEMORY),
            ("launch.py", LAUNCH, LAUNCH.replace(" *strides", " q.new_empty(1 << 22), *strides")),
        ),
    )  # fmt: skip
    yield Defect(
        name="a workspace kept between calls",
        defect="Two streams share delta.",
        tag="launcher",
        patch=(
            ("launch.py", "def start_backward(", "KEPT = {}\n\n\ndef start_backward("),
            ("launch.py", f"    delta = {NEW_DELTA}\n",
             f"    delta = KEPT.setdefault(problem.shape_lse, {NEW_DELTA})\n"),
        ),
    )  # fmt: skip
    yield Defect(
        name="a stream of its own, not waited for",
        defect="Nothing orders the kernel that writes delta and those that read it.",
        tag="launcher",
        patch=(
            ("launch.py", "def start_backward(",
             "SIDE = [torch.cuda.Stream()]\n\n\ndef start_backward("),
            ("launch.py", DELTA,
             "\n        SIDE[0].wait_stream(torch.cuda.current_stream())"
             "\n        with torch.cuda.stream(SIDE[0]):" + indented(DELTA)),
        ),
    )  # fmt: skip


def once(trial):
    """Failures by the bounds, and by what the backend saw; None: the kernel does not fit."""
    if trial.execution.error_kind == "unsupported":
        return None
    return [f for check in (*checks.WHOLE, *checks.WITHIN) for f in check(trial)]


def timed(function):
    function()  # compiles
    begin = time.perf_counter()
    return function(), 1000 * (time.perf_counter() - begin)


def row(kernel, backend, cases, runs):
    """The cells of a kernel."""
    name = backend.device
    setup = Setup(backend=name, float_model="hardware" if name == "cuda" else "hopper")

    def trial(**changes):
        return Trial(kernel, case, dataclasses.replace(setup, **changes), backend)

    seen = {"once": [], "stress": []}
    seen |= {f"warps={w} stages={s}": [] for w, s in (OPTIONS if name == "cuda" else ())}
    moved = {}
    for number in range(cases):
        case = Case.parse(f"{CASES[number % len(CASES)]} seed={number}")
        seen["once"].append(timed(lambda: once(trial())))
        if not seen["once"][-1][0]:
            found, spent = timed(lambda: list(stress.check(trial(stress=runs))))
            seen["stress"].append((found, spent))
            for failure in found[:1]:
                for hits, of, beside in MOVED.findall(failure.message):
                    how = "other orders" if beside.startswith("programs") else beside
                    a, b = moved.get(how, (0, 0))
                    moved[how] = a + int(hits), b + int(of)
        for text in list(seen)[2:]:
            warps, stages = (int(word.partition("=")[2]) for word in text.split())
            seen[text].append(timed(lambda w=warps, s=stages: once(trial(warps=w, stages=s))))
    for found in seen.values():
        usable = [(failures, spent) for failures, spent in found if failures is not None]
        if not usable:
            yield "-"
            continue
        caught = sum(bool(failures) for failures, _ in usable)
        mean = sum(spent for _, spent in usable) / len(usable)
        yield f"{caught} of {len(usable)}, {mean:.0f} ms"
    yield ", ".join(f"{a} of {b} {how}" for how, (a, b) in moved.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    backend = make(options.backend)
    columns = ["once", "stress"]
    columns += [f"warps={w} stages={s}" for w, s in OPTIONS] if options.backend == "cuda" else []
    print("| race | " + " | ".join([*columns, "what moved"]) + " |")
    print("|" + " --- |" * (len(columns) + 2))
    with tempfile.TemporaryDirectory() as folder:
        targets = planted(list(races()), Path(folder))
        for defect, target in targets.items():
            if options.only in defect.name:
                (kernel,) = loader.load(target)
                cells = row(kernel, backend, options.cases, options.runs)
                print(f"| {defect.name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
