"""How often the oracle cries wolf: many cases over right kernels, which must have no failure.

    python benchmarks/false_alarms.py run OUT --seconds 480 --seed 1
    python benchmarks/false_alarms.py totals OUT...

`run` gives each GPU the project's kernels, and beside them each of PyTorch's attention backends, as
a run of its own: one that faults (docs/false_alarms.md) disturbs no other. The CPU gets the
project's kernels on the executor, and emulators of other rounding choices and PyTorch's kernels,
all at the same time; `--also` adds targets, e.g. public Triton kernels that are importable
(right_implementations/public_triton.py). How many cases have ended how is printed as they do.
Records are compressed into OUT, with `totals.md` and a line for every case that is not a pass.
`totals` adds up the runs in several folders. Exits with 1 if a case failed or the harness broke.
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
# PyTorch's kernels, and how many processes each gets: a case of cuDNN's is mostly its planning.
ON_A_CARD = {
    **{f"{HERE}/sdpa.py:sdpa_{name}": 1 for name in ("math", "efficient", "cudnn", "cudnn_masks")},
    **{f"{HERE}/sdpa.py:sdpa_{name}": 2 for name in ("math_gqa", "efficient_forward")},
    **{f"{HERE}/sdpa.py:sdpa_{name}": 2 for name in ("flash", "flash_gqa")},
    f"{HERE}/sdpa.py:sdpa_cudnn_gradients": 1,
    **{f"{HERE}/flex.py:{name}": 1 for name in ("flex", "flex_forward")},
    f"{HERE}/ways_launch.py": 1,
}
ON_THE_CPU = (
    f"{HERE}/emulated.py",
    f"{HERE}/varied.py",
    f"{HERE}/algorithms.py",
    f"{HERE}/gradients.py",
    f"{HERE}/fp8.py",
    f"{HERE}/flex.py:flex_uncompiled",
    *(
        f"{HERE}/sdpa.py:sdpa_{name}"
        for name in ("math", "math_gqa", "flash_cpu", "flash_cpu_float32")
    ),
)
_GRACE = 45.0  # seconds for the last cases and the report; what is recorded by then counts
_PAUSE = 15.0  # seconds between lines that say how far it is
_CASES_A_FILE = 60_000  # some 11 MB compressed
_VERDICTS = ("pass", "fail", "error", "inconclusive", "unsupported")
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


def _campaigns(options, gpus):
    """Name, targets, options, seed and GPU of each."""
    base = options.seed * 64
    for index, gpu in enumerate(gpus):
        if options.card_workers:
            how = ("--backend", "cuda", "-n", str(options.card_workers))
            yield f"card{gpu}", ("kernels/flash_attention.py",), how, base + index, gpu
        public = {**ON_A_CARD, **dict.fromkeys(options.also, 1)} if options.public else {}
        for target, processes in public.items():
            for copy in range(processes * options.public):
                name = f"{target.partition(':')[2] or Path(target).stem}-{gpu}-{copy}"
                how = ("--backend", "cuda", "-n", "1", "--fence", ("poison", "page")[copy % 2])
                yield name, (target,), how, base + 8 * (1 + copy) + index, gpu
    if options.cpu_workers:
        how = ("--backend", "cpu", "-n", str(options.cpu_workers))
        yield "cpu", ON_THE_CPU, how, base, ""
    if options.executor_workers:
        how = ("--backend", "cpu", "-n", str(options.executor_workers))
        targets = ("kernels/flash_attention.py", f"{HERE}/ways_launch.py", *options.also)
        yield "executor", targets, how, base, ""


def run(options) -> int:
    gpus = [str(index) for index in range(torch.cuda.device_count())] if options.card else []
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        parts = {}
        for name, targets, how, seed, gpu in _campaigns(options, gpus):
            folder = Path(work) / name
            parts[folder] = _start(folder, targets, how, options.seconds, seed, gpu)
        _watch(parts, time.monotonic() + options.seconds + _GRACE)
        for folder, process in parts.items():
            code = process.poll()
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)
                code = "cut off"
            log = (folder / "log").read_text()
            (out / f"{folder.name}-{options.seed}.log").write_text(log)
            said = log.strip().splitlines()[-4:]
            print(f"{folder.name}: exit code {code}; " + " | ".join(said), flush=True)
            for number, lines in enumerate(_pieces(folder)):
                with gzip.open(out / f"{folder.name}-{options.seed}-{number}.jsonl.gz", "wb") as to:
                    to.writelines(lines)
    return totals([out])


def _watch(parts, end):
    """Wait for campaigns, and say how far they are."""
    start, shown = time.monotonic(), 0.0
    while time.monotonic() < end and any(process.poll() is None for process in parts.values()):
        time.sleep(0.5)
        if time.monotonic() - shown > _PAUSE:
            shown, counts = time.monotonic(), collections.Counter()
            for path in (path for folder in parts for path in folder.glob("*.jsonl")):
                text = path.read_bytes()
                counts.update({v: text.count(f'"verdict":"{v}"'.encode()) for v in _VERDICTS})
            so_far = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in _VERDICTS)
            print(f"{shown - start:4.0f} s  {so_far}", flush=True)


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
    lines = ["| kernel | on | " + " | ".join(_VERDICTS) + " |", "|" + " :-- |" * 2 + " --: |" * 5]
    sums = collections.Counter()
    for (kernel, backend), own in sorted(counts.items()):
        sums.update(own)
        lines.append(f"| {kernel} | {backend} | " + _cells(own))
    lines.append("| **all** | | " + _cells(sums))
    checked = sums["pass"] + sums["fail"]
    return "\n".join([*lines, "", f"{checked:,} cases checked, {sums['fail']} failed."])


def _cells(own) -> str:
    return " | ".join(f"{own[verdict]:,}" for verdict in _VERDICTS) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("out")
    runs.add_argument("--seconds", type=float, default=480.0)
    runs.add_argument("--seed", type=int, default=1)
    runs.add_argument("--card-workers", type=int, default=4, help="of kernels/, for each GPU")
    runs.add_argument("--public", type=int, default=1, help="times the processes of ON_A_CARD")
    runs.add_argument("--cpu-workers", type=int, default=4)
    runs.add_argument("--executor-workers", type=int, default=2)
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
