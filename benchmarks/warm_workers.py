"""What a warm worker's time goes into, alone and beside others that share its card.

    python benchmarks/warm_workers.py [--backend cuda] [--cases 24] [--workers 1 8 16] [TARGET]

Each process verifies cases of its own, of the default distribution as a campaign on a card draws it
for TARGET (default: kernels/flash_attention.py:flash): once to compile, then again and again as
the processes of a campaign do, so many at a time as asked. Prints cases a second, and milliseconds
of a case by stage, alone and beside the others, under some variations; of one process operations
of torch by stage and, with --profile, where Python's time goes.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import functools
import itertools
import multiprocessing
import os
import pstats
import sys
import tempfile
import time
import traceback
from pathlib import Path


class Clock:
    """Exclusive wall time of nested stages of one thread."""

    def __init__(self) -> None:
        self.spent: collections.Counter[str] = collections.Counter()
        self._running: list[list] = []

    @property
    def stage(self) -> str:
        """What runs now."""
        return self._running[-1][0] if self._running else "rest"

    def timed(self, stage, function):
        """The function, its time booked under a stage and nowhere else."""

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            begin = time.perf_counter()
            if self._running:
                name, since = self._running[-1]
                self.spent[name] += begin - since
            self._running.append([stage, begin])
            try:
                return function(*args, **kwargs)
            finally:
                end = time.perf_counter()
                name, since = self._running.pop()
                self.spent[name] += end - since
                if self._running:
                    self._running[-1][1] = end

        return wrapper


def instrument(clock, backend):
    """Book the stages of a case."""
    from fa_verify import bounds, checks, trial, worker
    from fa_verify.checks import observed

    def patch(where, name, stage):
        setattr(where, name, clock.timed(stage, getattr(where, name)))

    patch(backend, "run", "kernel")
    patch(trial, "materialise", "inputs")
    patch(trial, "duplicate", "duplicate")
    patch(bounds, "bound_forward", "bounds forward")
    patch(bounds, "bound_backward", "bounds backward")
    patch(observed, "_compute", "compare")
    patch(checks, "statistics", "statistics")
    patch(worker, "verify", "rest")
    for group in ("WHOLE", "WITHIN", "FURTHER"):
        every = getattr(checks, group)
        names = [f"{c.__module__.rpartition('.')[2]}.{c.__name__}" for c in every]
        timed = (clock.timed(n, _whole(c)) for n, c in zip(names, every, strict=True))
        setattr(checks, group, tuple(timed))


def _whole(check):
    """A check that has looked at all when it returns."""
    return lambda trial: tuple(check(trial))


def items_of(options, worker, kernel):
    """The cases of one process: every so many of a campaign's."""
    from fa_verify import campaign
    from fa_verify.campaign import cases

    plan = campaign.Plan(backend=options.backend, cases=None, seconds=1.0, seed=options.seed)
    count = max(options.workers)
    some = itertools.islice(cases.drawn(kernel, plan), worker, options.cases * count, count)
    return [(str(case), str(setup)) for case, setup in some]


def child(index, options, pipes, barrier, phase, results):
    try:
        Worker(index, options, pipes).serve(barrier, phase, results)
    except BaseException:
        traceback.print_exc()
        barrier.abort()
        raise


class Worker:
    """A process, warm once it is made."""

    def __init__(self, index, options, pipes):
        """Verify its cases twice, so that all is compiled and loaded."""
        from fa_verify import loader, worker

        card = options.backend == "cuda"
        worker.start(
            60.0,
            8 << 30,
            cap=False,
            on_card=max(options.workers) if card else 0,
            pipes=pipes,
            spool=Path(tempfile.mkdtemp()),
        )
        self.index, self.options, self.clock = index, options, Clock()
        (kernel,) = loader.load(options.target)
        self.target = kernel.target
        self.items = items_of(options, index, kernel)
        for case, setup in self.items * 2:
            record = worker.run(self.target, case, setup)
            if record.verdict not in ("pass", "unsupported", "inconclusive"):
                print(record.verdict, record.replay, record.reason, record.failures)
        instrument(self.clock, worker._backend(options.backend))  # noqa: SLF001

    def serve(self, barrier, phase, results):
        """Do what is asked, together with others, until nobody is to work."""
        from fa_verify import trial

        threshold = trial._ON_THE_CPU  # noqa: SLF001
        while True:
            barrier.wait()
            count, variation = phase[0], phase[1]
            if count == 0:
                break
            trial._ON_THE_CPU = int(variation.get("on_the_cpu", threshold))  # noqa: SLF001
            work = self.ready(variation)
            self.clock.spent.clear()
            barrier.wait()
            if self.index < count:
                begin, cpu = time.perf_counter(), time.process_time()
                work()
                wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
                spent = dict(self.clock.spent)
                results.put((self.index, len(self.items), wall, cpu, spent))
            barrier.wait()
        if self.index == 0:
            count_operations(self.clock, self.target, self.items)
            if self.options.profile:
                profile(self.target, self.items, card=self.options.backend == "cuda")

    def ready(self, variation):
        """What will be timed."""
        from fa_verify import worker

        items, target = self.items, self.target
        if "launches" in variation:
            return functools.partial(launches, variation["launches"], self.options.backend)
        return lambda: worker.run_together(target, items)


def launches(size, device):
    """As many operations as two cases take, and a read after each eighty."""
    import torch

    x = torch.ones(size, dtype=torch.float64, device=device)
    with torch.inference_mode():
        for turn in range(3200):
            x.mul_(1.0)
            if turn % 80 == 79:
                x[0].item()


def count_operations(clock, target, items):
    from torch.utils._python_dispatch import TorchDispatchMode

    from fa_verify import worker

    counts = collections.Counter()
    names = collections.Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[clock.stage] += 1
            names[str(func)] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        for case, setup in items:
            worker.run(target, case, setup)
    total = sum(counts.values()) / len(items)
    print(f"\noperations a case: {total:.0f} (views are operations too)")
    for stage, n in counts.most_common():
        print(f"  {stage:24}{n / len(items):8.1f}")
    print("  " + ", ".join(f"{n} {c / len(items):.0f}" for n, c in names.most_common(30)))


def profile(target, items, *, card):
    import torch

    from fa_verify import worker

    profiler = cProfile.Profile()
    begin = time.perf_counter()
    for case, setup in items:
        worker.run(target, case, setup)
    print(f"alone: {1e3 * (time.perf_counter() - begin) / len(items):.1f} ms a case")
    with profiler:
        for case, setup in items:
            worker.run(target, case, setup)
    for order in ("tottime", "cumtime"):
        pstats.Stats(profiler).sort_stats(order).print_stats(45)
    if not card:
        return
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        for case, setup in items[:12]:
            worker.run(target, case, setup)
    averages = seen.key_averages()
    for event in sorted(averages, key=lambda e: -e.count):
        if event.key.startswith("cu") or event.key.startswith("Memcpy"):
            print(
                f"{event.key:40}{event.count / 12:8.1f} a case "
                f"{event.self_cpu_time_total / 12e3:8.2f} ms"
            )
    on_card = sum(e.self_device_time_total for e in averages if e.self_cpu_time_total == 0)
    print(f"busy on the card, ms a case: {on_card / 12e3:.2f}")


def show(title, rows):
    cases = sum(n for _, n, _, _, _ in rows)
    slowest = max(wall for _, _, wall, _, _ in rows)
    wall = sum(wall for _, _, wall, _, _ in rows)
    cpu = sum(cpu for _, _, _, cpu, _ in rows)
    spent = collections.Counter()
    for *_, own in rows:
        spent.update(own)
    rate = sum(n / wall for _, n, wall, _, _ in rows)
    print(
        f"\n{title}: {rate:.0f} cases a second ({cases} in {slowest:.2f} s); "
        f"a case: {1e3 * wall / cases:.1f} ms, of CPU {1e3 * cpu / cases:.1f}"
    )
    spent["waiting"] = wall - sum(spent.values())
    parts = [f"{stage} {1e3 * s / cases:.2f}" for stage, s in spent.most_common()]
    print("  " + ", ".join(parts), flush=True)


VARIATIONS = (
    ("as a campaign does", {}),
    ("judged on the card", {"on_the_cpu": -1}),
    *(
        (f"judged on the CPU up to 2^{power}", {"on_the_cpu": 1 << power})
        for power in (10, 12, 14, 16)
    ),
    ("3,200 operations in the time of all, 2^10 elements", {"launches": 1 << 10}),
    ("3,200 operations in the time of all, 2^18 elements", {"launches": 1 << 18}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="?", default="kernels/flash_attention.py:flash")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--cases", type=int, default=24, help="for each process")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--vary", type=int, help="so many also work in other ways")
    options = parser.parse_args()
    from fa_verify.backends.sharing import Sharing

    card = options.backend == "cuda"
    context = multiprocessing.get_context("spawn")
    sharing = Sharing.start() if card else Sharing(None)
    count = max(options.workers)
    barrier = context.Barrier(count + 1)
    phase = context.Manager().list([0, {}])
    results = context.Queue()
    begin = time.monotonic()
    processes = [
        context.Process(
            target=child, args=(i, options, sharing.folder, barrier, phase, results), daemon=True
        )
        for i in range(count)
    ]
    for process in processes:
        process.start()
    try:
        first = True
        for workers, (title, variation) in itertools.product(options.workers, VARIATIONS):
            if variation and workers != options.vary and "launches" not in variation:
                continue
            phase[0], phase[1] = workers, variation
            barrier.wait(500)
            if first:
                print(f"started, compiled and warm after {time.monotonic() - begin:.0f} s")
                first = False
            barrier.wait(100)
            rows = [results.get(timeout=200) for _ in range(workers)]
            barrier.wait(100)
            show(f"{workers} processes, {title}", rows)
        phase[0] = 0
        barrier.wait(100)
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
        sharing.stop()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
