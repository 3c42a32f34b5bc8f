"""How often the oracle cries wolf: many cases over right kernels, which must have no failure.

    python benchmarks/false_alarms.py run OUT --seconds 480 --seed 1
    python benchmarks/false_alarms.py totals OUT...

`run` starts several campaigns at the same time. On each GPU: the project's kernels; PyTorch's
attention, but cuDNN's apart, since what faults ends the others that share a card with it;
flex_attention; kernels in Triton, to which `--also` adds public ones that are importable
(right_implementations/public_triton.py). On the CPU: emulators of other rounding choices with
PyTorch's kernels for CPUs, and kernels on the executor, shared out among as many campaigns as they
have workers, so that their problems differ. `--workers` says how many workers each
gets, 0 for none. How many cases have ended how is printed as they do. Records are compressed into
OUT, with `totals.md` and a line for every case that is not a pass. `totals` adds up the runs in
several folders. Exits with 1 if a case failed or the harness broke.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import hashlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import fa_verify
from fa_verify import loader
from fa_verify.record import CaseRecord, read

HERE = "benchmarks/right_implementations"
ON_A_CARD = {
    "kernels": ("kernels/flash_attention.py",),
    "sdpa": (
        *(
            f"{HERE}/sdpa.py:sdpa_{name}"
            for name in (
                *("math", "math_gqa", "math_gqa_gradients", "efficient", "efficient_forward"),
                *("flash", "flash_gqa", "flash_gqa_gradients"),
            )
        ),
        f"{HERE}/eager.py",
    ),
    "cudnn": tuple(
        f"{HERE}/sdpa.py:sdpa_{name}" for name in ("cudnn", "cudnn_masks", "cudnn_gradients")
    ),
    "flex": (f"{HERE}/flex.py:flex", f"{HERE}/flex.py:flex_forward"),
    "triton": (f"{HERE}/ways_launch.py",),
}
ON_THE_CPU = {
    "emulators": (
        *(
            f"{HERE}/{name}.py"
            for name in (
                "emulated",
                "varied",
                "algorithms",
                "parts",
                "gradients",
                "halves",
                "eager",
                "fp8",
            )
        ),
        *(
            f"{HERE}/sdpa.py:sdpa_{name}"
            for name in (
                *("math", "math_gqa", "math_gqa_gradients"),
                *("flash_cpu", "flash_cpu_float32", "flash_cpu_gradients"),
            )
        ),
        f"{HERE}/flex.py:flex_uncompiled",
    ),
    "executor": ("kernels/flash_attention.py", f"{HERE}/ways_launch.py"),
}
# A worker on a card is two processes where there are cores for them, and one where it is alone.
WORKERS = {
    "kernels": 2,
    "sdpa": 2,
    "cudnn": 1,
    "flex": 1,
    "triton": 1,
    "emulators": 4,
    "executor": 1,
}
ORACLE = ("bounds", "checks", "distribution", "inputs", "values")
_PLACES = 128  # of one part, at most: its GPUs or workers
_ALSO = ("triton", "executor")  # whose targets `--also` adds to
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
    for number, (part, targets) in enumerate((*ON_A_CARD.items(), *ON_THE_CPU.items())):
        count = options.workers[part]
        every = (*targets, *(options.also if part in _ALSO else ()))
        seed = (options.seed * 16 + number) * _PLACES
        if part in ON_A_CARD:
            # Where a fault would end many processes there is poison beside tensors, else pages.
            fence = "poison" if count > 1 else "page"
            how = ("--backend", "cuda", "-n", str(count), "--fence", fence)
            for gpu in gpus if count else ():
                yield f"{part}{gpu}", every, how, seed + int(gpu), gpu
            continue
        kernels = [kernel.target for target in every for kernel in loader.load(target)]
        for place in range(count):
            # A worker's kernels have problems of their own: all of a campaign get the same.
            own = kernels[place::count]
            if own:
                yield f"{part}{place}", own, ("--backend", "cpu", "-n", "1"), seed + place, ""


def _workers(text):
    """One of the options NAME=COUNT."""
    name, _, count = text.partition("=")
    if name not in WORKERS or not count.isdecimal():
        msg = f"{text!r}: must be NAME=COUNT with one of {', '.join(WORKERS)}"
        raise argparse.ArgumentTypeError(msg)
    return name, int(count)


def run(options) -> int:
    gpus = [str(index) for index in range(torch.cuda.device_count())]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "oracle").write_text(_state())
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


def _state():
    """What draws and judges cases, in twelve digits: runs of one state may be added up."""
    home, digest = Path(fa_verify.__file__).parent, hashlib.sha256()
    files = [home / "reference.py", *(x for part in ORACLE for x in (home / part).glob("*.py"))]
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


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
    states = {path.read_text() for folder in folders for path in Path(folder).glob("oracle")}
    text = _table(counts) + f" State of the oracle: {', '.join(sorted(states))}."
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
    runs.add_argument("--workers", nargs="*", type=_workers, default=(), metavar="NAME=COUNT")
    runs.add_argument("--also", nargs="*", default=(), help="targets, of card and CPU")
    runs.set_defaults(action=run)
    adds = commands.add_parser("totals")
    adds.add_argument("folders", nargs="+")
    adds.set_defaults(action=lambda options: totals(options.folders))
    options = parser.parse_args()
    if "workers" in options:
        options.workers = {**WORKERS, **dict(options.workers)}
    sys.exit(options.action(options))


if __name__ == "__main__":
    main()
