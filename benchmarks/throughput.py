"""How many fully checked cases a second a campaign gets through on the machine's cards.

    python benchmarks/throughput.py [--workers 8] [--seconds 180] [--runs 2] [TARGET...]

Runs the campaign that `fa-verify check TARGET... --backend cuda` runs (default: the project's
kernels), the first time from a cold start: an empty cache of compiled kernels. Prints how many
cases had been verified after each tenth of the time, from the start of the run, workers' imports
included; the rate over the last third; what a case took in its worker, by stage; and the verdicts,
which should all be passes.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
import time
from pathlib import Path

_PARTS = 10


class Clock:
    """A campaign's listener that notes when each record came."""

    def __init__(self, step: float) -> None:
        self.begin = time.monotonic()
        self._step = self._next = step
        self.times: list[float] = []
        self.backward = 0
        self.spent: collections.Counter[str] = collections.Counter()
        self.verdicts: collections.Counter[str] = collections.Counter()

    def record(self, record) -> None:
        """Note the time."""
        self.times.append(time.monotonic() - self.begin)
        if self.times[-1] >= self._next:
            self._next += self._step
            print(f"{self.times[-1]:6.1f} s {len(self.times):>8,} cases", flush=True)
        self.backward += record.case.startswith("pass=bwd")
        self.spent.update(record.seconds)
        self.verdicts[record.verdict] += 1
        if record.verdict in ("fail", "error"):
            what = "; ".join(f.message for f in record.failures) or record.reason
            print(f"{record.verdict}: {record.replay}: {what}", flush=True)

    def shrinking(self, record) -> None:
        """Nothing: no kernel here has a fault."""

    def shrunk(self, shrunk) -> None:
        """Nothing."""


def measure(kernels, options, title) -> None:
    from fa_verify import campaign
    from fa_verify.backends import cards

    cores, places = len(os.sched_getaffinity(0)), cards.room(cards.visible())
    workers, lanes = cards.workers(options.workers, cores, places)
    clock = Clock(options.seconds / _PARTS)
    plan = campaign.Plan(
        backend="cuda",
        cases=None,
        # The last fifth of a budget is for shrinking, of which there should be none.
        seconds=options.seconds / 0.8,
        seed=options.seed,
        workers=workers,
        lanes=options.lanes or lanes,
        memory=8 << 30,
    )
    parent = time.process_time()
    campaign.run(kernels, plan, clock)
    parent = time.process_time() - parent
    seconds, n = options.seconds, len(clock.times)
    marks = [seconds * (part + 1) / _PARTS for part in range(_PARTS)]
    counts = [sum(at <= mark for at in clock.times) for mark in marks]
    late = sum(2 / 3 * seconds < at <= seconds for at in clock.times)
    print(f"\n{title}: {workers} workers, {plan.processes} processes on {cores} cores")
    print("seconds  " + "".join(f"{mark:>8.0f}" for mark in marks))
    print("cases    " + "".join(f"{count:>8,}" for count in counts))
    print(f"{late / (seconds / 3):.0f} cases a second in the last third, {counts[-1]:,} in all")
    stages = ", ".join(f"{stage} {1e3 * s / n:.1f}" for stage, s in clock.spent.items())
    print(f"ms a case in a worker: {stages}; CPU of the parent: {1e3 * parent / n:.2f}")
    compiled = sum(1 for _ in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))
    print(f"{compiled} compiled kernels in the cache")
    print(f"{clock.backward / n:.0%} with a backward pass; verdicts: {dict(clock.verdicts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", default=["kernels/flash_attention.py"])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--lanes", type=int, help="processes of a worker (default: as check does)")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", help="folder of compiled kernels (default: an empty one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = options.cache or empty  # before anything imports Triton
        from fa_verify import loader

        kernels = tuple(k for target in options.targets for k in loader.load(target))
        for run in range(options.runs):
            measure(kernels, options, "cold start" if run == 0 else "warm cache")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
