"""What a checked case costs, by stage: the CPU's executor or a card, and the judging.

    python benchmarks/case_cost.py [--backend cuda] [--cases 100] [TARGET]

Draws the default distribution for TARGET (default: kernels/flash_attention.py:flash), verifies each
case in this process with one thread, and prints CPU milliseconds a case, means, by the number of
logits: running the kernel (its reruns included), making inputs, reference and bounds, the checks
and statistics. On a card every case is judged twice, there and on the CPU, which is what decides
where a case of that size is judged (`fa_verify.trial`); its kernels are compiled before by as many
processes as there are cores.
"""

from __future__ import annotations

import argparse
import collections
import functools
import multiprocessing
import os
import time
import zlib
from unittest import mock

import torch

from fa_verify import bounds, distribution, inputs, loader, trial, verify, worker
from fa_verify.backends import make
from fa_verify.backends.base import Setup

CLASSES = (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 30)  # logits up to
STAGES = ("kernel", "inputs", "bounds", "checks")


class Clock:
    """Exclusive time of nested stages: CPU time, or on a card the time until it is idle."""

    def __init__(self, *, card: bool) -> None:
        self.spent: collections.Counter[str] = collections.Counter()
        self._card = card
        self._running: list[tuple[str, float]] = []

    def _now(self) -> float:
        if not self._card:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, stage, function):
        """The function, its time booked under a stage and nowhere else."""

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            begin = self._now()
            if self._running:
                self._book(begin)
            self._running.append((stage, begin))
            try:
                return function(*args, **kwargs)
            finally:
                end = self._now()
                self._book(end)
                self._running.pop()
                if self._running:
                    self._running[-1] = (self._running[-1][0], end)

        return wrapper

    def _book(self, now: float) -> None:
        stage, since = self._running[-1]
        self.spent[stage] += now - since
        self._running[-1] = (stage, now)


def _setup(backend, index):
    if backend == "cuda":
        return Setup(backend="cuda", config=index, float_model="hardware")
    return Setup(backend=backend, config=zlib.crc32(f"{index}".encode()) % 840)


def _compile(kernel, cases):
    """Run each case once, with its reruns: what is compiled is in Triton's cache afterwards."""
    items = [(kernel.target, str(case), str(_setup("cuda", index))) for index, case in cases]
    processes = min(len(items), os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.starmap(worker.run, items, chunksize=1)


def measure(kernel, backend, cases, card):
    """Milliseconds of each case by stage, after one untimed run of it."""
    rows = []
    for index, case in cases:
        setup = _setup(backend.device, index)
        clock = Clock(card=card)
        one = functools.partial(verify.verify, case, kernel, setup, backend)
        one()
        with (
            mock.patch.object(backend, "run", clock.timed("kernel", backend.run)),
            mock.patch.object(trial, "materialise", clock.timed("inputs", inputs.materialise)),
            mock.patch.object(bounds, "bound_forward", clock.timed("bounds", bounds.bound_forward)),
            mock.patch.object(
                bounds, "bound_backward", clock.timed("bounds", bounds.bound_backward)
            ),
        ):
            record = clock.timed("checks", one)()
        p = case.problem
        logits = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k
        rows.append((logits, {stage: 1e3 * clock.spent[stage] for stage in STAGES}))
        if record.verdict not in ("pass", "unsupported", "inconclusive"):
            print(f"{record.verdict}: {record.case}")
    return rows


def show(title, rows):
    print(
        f"\n{title}\n{'logits up to':>14}{'cases':>7}" + "".join(f"{s:>10}" for s in STAGES), end=""
    )
    print(f"{'all':>10}{'judging':>10}")
    low = 0
    for high in (*CLASSES, None):
        part = [ms for logits, ms in rows if high is None or low < logits + 1 <= high + 1]
        low = low if high is None else high + 1
        if not part:
            continue
        means = [sum(ms[stage] for ms in part) / len(part) for stage in STAGES]
        total = sum(means)
        label = "all" if high is None else f"{high:,}"
        print(f"{label:>14}{len(part):>7}" + "".join(f"{m:>10.2f}" for m in means), end="")
        print(f"{total:>10.2f}{(total - means[0]) / total:>10.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="?", default="kernels/flash_attention.py:flash")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    (kernel,) = loader.load(options.target)
    backend = make(options.backend)
    card = options.backend == "cuda"
    forms = range(options.cases // 4) if card else ()
    drawn = list(
        enumerate(distribution.draw(options.seed, options.cases, kernel.takes, forms=forms))
    )
    if not card:
        show("CPU, ms of CPU time a case", measure(kernel, backend, drawn, card=False))
        return
    begin = time.monotonic()
    _compile(kernel, drawn)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    for where, most in (("the CPU", 1 << 62), ("the card", -1)):
        with mock.patch.object(trial, "_ON_THE_CPU", most):
            rows = measure(kernel, backend, drawn, card=True)
        show(f"{torch.cuda.get_device_name()}, judged on {where}, ms a case", rows)


if __name__ == "__main__":
    main()
