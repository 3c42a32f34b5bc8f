"""What the executor's time goes into, for each launch of benchmarks/executor.py, in per cent.

    python benchmarks/executor_shares.py [--only NAME]

Each operation is timed by itself; its median counts, so that what else the machine does does not.
What is left of a launch is Triton's own launcher, binding arguments, control flow and cutting
finished programs away.
"""

import argparse
import statistics
import time

from executor import engine, launches

from fa_verify.ttir.lowering import lower

KINDS = ("products", "arithmetic", "loads, stores", "addresses", "the rest")
TIMES = 30
MEMORY = ("tt.load", "tt.store", "tt.atomic", "tt.descriptor")
spent = []


def kind_of(op):
    if op.name == "tt.dot":
        return "products"
    if op.name.startswith(MEMORY):
        return "loads, stores"
    types = [x.type for x in (*op.results, *op.operands)]
    tiles = [t for t in types if t.is_float and t.shape]
    return "arithmetic" if tiles or op.name.startswith(("math.", "tt.reduce")) else "addresses"


def watch(original):
    def lowered(self, op):
        step = original(self, op)
        if step is None or (op.regions and op.name.startswith("scf.")):
            return step
        took = []
        spent.append((kind_of(op), took))

        def watched(env):
            start = time.thread_time()
            step(env)
            took.append(time.thread_time() - start)

        return watched

    return lowered


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    tick = statistics.median(-time.thread_time() + time.thread_time() for _ in range(1000))
    lower.Lowering._lower = watch(lower.Lowering._lower)  # noqa: SLF001
    print(f"{'launch':32}{'':>10}" + "".join(f"{kind:>15}" for kind in KINDS))
    for label, launch in launches(only):
        with engine("executor"):
            launch()
            for _, took in spent:
                took.clear()
            whole = []
            for _ in range(TIMES):
                start = time.process_time()
                launch()
                whole.append(time.process_time() - start)
        total = dict.fromkeys(KINDS, 0.0)
        watching = 0.0
        for kind, took in spent:
            if took:
                total[kind] += max(statistics.median(took) - tick, 0.0) * len(took) / TIMES
                watching += 2 * tick * len(took) / TIMES
        total["the rest"] = max(min(whole) - watching - sum(total.values()), 0.0)
        everything = sum(total.values())
        print(f"{label:32}{everything * 1e3:>7.2f} ms", end="")
        print("".join(f"{100 * x / everything:>14.0f}%" for x in total.values()))


if __name__ == "__main__":
    main()
