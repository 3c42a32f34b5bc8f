"""How many fully checked cases a second a campaign gets through on the machine's cards.

    python benchmarks/throughput.py [--workers 8] [--cases N] [--seconds 180] [--warm 60]

Runs the campaign that `fa-verify check TARGET... --backend cuda` runs (default: the project's
kernels for training), from a cold start: an empty cache of compiled kernels. It ends with so many
cases or seconds, start of the workers included, and once more, for the seconds of --warm, with what
was compiled then. As it goes it prints cases, kernels compiled and cores busy; at the end of each
run the rate, what the processes did meanwhile, what a case took by stage, and the verdicts, which
should all be passes. A run that gets nothing done for a minute is given up, with a traceback.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import worker_time

_PARTS = 12
_STUCK = 60.0  # seconds without a case


class Clock:
    """A campaign's listener that notes when each record came, and says so now and then."""

    def __init__(self, step: float) -> None:
        self.begin = time.monotonic()
        self._cpu, self._step = _busy(), step
        self.times: list[float] = []
        self.backward = 0
        self.spent: collections.Counter[str] = collections.Counter()
        self.verdicts: collections.Counter[str] = collections.Counter()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def record(self, record) -> None:
        """Note the time."""
        self.times.append(time.monotonic() - self.begin)
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

    def stop(self) -> None:
        """Say nothing any more."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        before, moved = 0, time.monotonic()
        while not self._done.wait(self._step):
            now, count, cpu = time.monotonic(), len(self.times), _busy()
            rate, cores = (count - before) / self._step, (cpu - self._cpu) / self._step
            print(
                f"{now - self.begin:6.1f} s {count:>8,} cases, {rate:5.0f} a second, "
                f"{_compiled():>5} kernels, {cores:5.1f} cores",
                flush=True,
            )
            moved = now if count > before else moved
            before, self._cpu = count, cpu
            if now - moved > _STUCK:
                print(f"no case for {_STUCK:.0f} s: given up", flush=True)
                faulthandler.dump_traceback()
                os._exit(1)


def _busy() -> float:
    """Seconds that the machine's cores have worked."""
    user, nice, system = Path("/proc/stat").read_text(encoding="ascii").split()[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def _compiled() -> int:
    return sum(1 for _ in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))


def measure(kernels, options, title, cases, seconds) -> None:
    from fa_verify import campaign
    from fa_verify.backends import cards

    cores, places = len(os.sched_getaffinity(0)), cards.room(cards.visible())
    workers, lanes = cards.workers(options.workers, cores, places)
    plan = campaign.Plan(
        backend="cuda",
        cases=None if cases is None else -(-cases // len(kernels)),
        # The last fifth of a budget is for shrinking, of which there should be none.
        seconds=seconds / 0.8,
        seed=options.seed,
        workers=workers,
        lanes=options.lanes or lanes,
        memory=8 << 30,
    )
    print(f"\n{title}: {workers} workers, {plan.processes} processes on {cores} cores", flush=True)
    with tempfile.TemporaryDirectory() as notes:
        worker_time.follow(notes)
        clock, parent = Clock(seconds / _PARTS), time.process_time()
        try:
            campaign.run(kernels, plan, clock)
        finally:
            clock.stop()
            show(clock, plan, notes, time.process_time() - parent)


def show(clock, plan, notes, parent) -> None:
    """What came of a run, or of as much as there was of it."""
    n = len(clock.times)
    if not n:
        print("no case")
        return
    end = clock.times[-1]
    tenth = max(1, n // 10)  # without the start, and without the end, where a few are waited for
    between = clock.times[-tenth] - clock.times[tenth - 1]
    print(f"{n:,} cases in {end:.1f} s, the first after {clock.times[0]:.1f} s;", end=" ")
    print(f"{(n - 2 * tenth + 1) / max(between, 1e-9):.0f} a second between the tenths at the ends")
    for line in worker_time.table(notes, clock.begin, clock.begin + end, _PARTS, plan.processes):
        print(line)
    stages = ", ".join(f"{stage} {1e3 * s / n:.1f}" for stage, s in clock.spent.items())
    print(f"ms a case in a worker: {stages}; CPU of the parent: {1e3 * parent / n:.2f}")
    print(f"{_compiled()} compiled kernels in the cache")
    print(f"{clock.backward / n:.0%} with a backward pass; verdicts: {dict(clock.verdicts)}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", default=["kernels/flash_attention.py"])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--lanes", type=int, help="processes of a worker (default: as check does)")
    parser.add_argument("--cases", type=int, help="of all kernels, in the first run")
    parser.add_argument("--seconds", type=float, default=180.0, help="of the first run")
    parser.add_argument("--warm", type=float, default=60.0, help="seconds of the second; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", help="folder of compiled kernels (default: an empty one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = options.cache or empty  # before anything imports Triton
        from fa_verify import loader

        kernels = tuple(k for target in options.targets for k in loader.load(target))
        # A run that is ended early, as by `timeout`, shows what there was.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        first = f"{_compiled()} kernels compiled before" if options.cache else "cold start"
        measure(kernels, options, first, options.cases, options.seconds)
        if options.warm:
            measure(kernels, options, "warm cache", None, options.warm)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
