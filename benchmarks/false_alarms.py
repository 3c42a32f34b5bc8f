"""How often the oracle cries wolf: many cases over right kernels, which must have no failure.

    python benchmarks/false_alarms.py run OUT --seconds 480 --seed 1
    python benchmarks/false_alarms.py totals OUT...

`run` gives each GPU the project's kernels and PyTorch's attention on all its backends, and the CPU
the project's kernels on the executor, emulators of other rounding choices and PyTorch's CPU
kernels, all at the same time; `--also` adds targets, e.g. public Triton kernels that are importable
(right_implementations/public_triton.py). Records are compressed into OUT, with `totals.md` and a
line for every case that is not a pass. `totals` adds up the runs in several folders. Exits with 1
if a case failed or the harness broke.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from fa_verify.record import CaseRecord, read

HERE = "benchmarks/right_implementations"
SDPA = (
    *("math", "math_gqa", "efficient", "efficient_gqa", "flash", "flash_gqa"),
    *("cudnn", "cudnn_masks", "cudnn_gradients"),
)
ON_A_CARD = ("kernels/flash_attention.py", *(f"{HERE}/sdpa.py:sdpa_{name}" for name in SDPA))
COMPILED = tuple(f"{HERE}/flex.py:{name}" for name in ("flex", "flex_forward"))
ON_THE_CPU = (
    "kernels/flash_attention.py",
    f"{HERE}/emulated.py",
    f"{HERE}/varied.py",
    f"{HERE}/algorithms.py",
    f"{HERE}/gradients.py",
    f"{HERE}/flex.py:flex_uncompiled",
    *(
        f"{HERE}/sdpa.py:sdpa_{name}"
        for name in ("math", "math_gqa", "flash_cpu", "flash_cpu_float32")
    ),
)
_GRACE = 45.0  # seconds for the last cases and the report; what is recorded by then counts
_CASES_A_FILE = 60_000  # some 11 MB compressed
_CODE = "from fa_verify.cli import main; main()"


def _start(folder, targets, options, seconds, seed, gpu):
    """One campaign in a process of its own, its output in a log beside its records."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": gpu}
    # The last fifth of a budget is for shrinking, of which there should be none.
    budget = f"{seconds / 0.8:.0f}s"
    command = [sys.executable, "-c", _CODE, "check", *targets, *options]
    command += ["--budget", budget, "--seed", str(seed), "--report", str(folder)]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run(options) -> int:
    gpus = [str(index) for index in range(torch.cuda.device_count())] if options.card else []
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        parts = {}
        for index, gpu in enumerate(gpus):
            for name, targets, workers in (
                ("card", (*ON_A_CARD, *options.also), options.card_workers),
                ("compiled", COMPILED, options.compiling_workers),
            ):
                how = ("--backend", "cuda", "-n", str(workers))
                folder = Path(work) / f"{name}{gpu}"
                seed = options.seed * 8 + index
                if workers:
                    parts[folder] = _start(folder, targets, how, options.seconds, seed, gpu)
        if options.cpu_workers:
            how = ("--backend", "cpu", "-n", str(options.cpu_workers))
            folder = Path(work) / "cpu"
            targets = (*ON_THE_CPU, *options.also)
            parts[folder] = _start(folder, targets, how, options.seconds, options.seed * 8, "")
        end = time.monotonic() + options.seconds + _GRACE
        for folder, process in parts.items():
            try:
                code = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = "cut off"
            log = (folder / "log").read_text()
            (out / f"{folder.name}-{options.seed}.log").write_text(log)
            print(f"{folder.name}: exit code {code}\n{log[-3000:]}", flush=True)
            for number, lines in enumerate(_pieces(folder)):
                with gzip.open(out / f"{folder.name}-{options.seed}-{number}.jsonl.gz", "wb") as to:
                    to.writelines(lines)
    return totals([out])


def _pieces(folder):
    """The lines of a campaign's record, some thousands at a time."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as lines:
            while piece := list(itertools.islice(lines, _CASES_A_FILE)):
                yield piece


def totals(folders) -> int:
    """Print and write how many cases of each target ended how; 1 if one is a failure or error."""
    counts = collections.defaultdict(collections.Counter)
    others = []
    for path in sorted(path for folder in folders for path in Path(folder).glob("*.jsonl.gz")):
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as plain:
            Path(plain.name).write_bytes(gzip.decompress(path.read_bytes()))
            for line in read(Path(plain.name)):
                if not isinstance(line, CaseRecord):
                    continue
                backend = line.setup.partition(" ")[0].partition("=")[2]
                counts[line.kernel, backend][line.verdict] += 1
                if line.verdict in ("fail", "error"):
                    others.append(line)
    text = _table(counts)
    for record in others:
        what = "; ".join(f"{f.title}: {f.message}" for f in record.failures) or record.reason
        text += f"\n- {record.verdict}: `{record.replay}`: {what}"
    print(text)
    (Path(folders[0]) / "totals.md").write_text(text + "\n")
    return int(bool(others) or not counts)


def _table(counts) -> str:
    verdicts = ("pass", "fail", "error", "inconclusive", "unsupported")
    lines = ["| kernel | on | " + " | ".join(verdicts) + " |", "|" + " :-- |" * 2 + " --: |" * 5]
    sums = collections.Counter()
    for (kernel, backend), own in sorted(counts.items()):
        sums.update(own)
        lines.append(f"| {kernel} | {backend} | " + _cells(own, verdicts))
    lines.append("| **all** | | " + _cells(sums, verdicts))
    checked = sums["pass"] + sums["fail"]
    return "\n".join([*lines, "", f"{checked:,} cases checked, {sums['fail']} failed."])


def _cells(own, verdicts) -> str:
    return " | ".join(f"{own[verdict]:,}" for verdict in verdicts) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("out")
    runs.add_argument("--seconds", type=float, default=480.0)
    runs.add_argument("--seed", type=int, default=1)
    runs.add_argument("--card-workers", type=int, default=12, help="for each GPU")
    runs.add_argument("--compiling-workers", type=int, default=4, help="flex_attention's, likewise")
    runs.add_argument("--cpu-workers", type=int, default=4)
    runs.add_argument("--also", nargs="*", default=(), help="targets, of card and CPU")
    runs.add_argument("--no-card", dest="card", action="store_false")
    runs.set_defaults(action=run)
    adds = commands.add_parser("totals")
    adds.add_argument("folders", nargs="+")
    adds.set_defaults(action=lambda options: totals(options.folders))
    options = parser.parse_args()
    sys.exit(options.action(options))


if __name__ == "__main__":
    main()
