"""What fences cost: the same cases under each mode, side by side on one card.

    python benchmarks/fence_cost.py [--cases 48] [--rounds 4] [--seconds 300] [TARGET]

Draws the default distribution for TARGET (default: kernels/flash_attention.py:flash), of three
compiled forms, runs every case once under each mode so that all is compiled, and then under each
mode in turn. Prints, relative to "off": the time of a run of the kernel until the card is idle, and
of a whole checked case, each the least of the rounds; milliseconds too, and how many regions served
how many tensors.
"""

from __future__ import annotations

import argparse
import collections
import time

import torch

from fa_verify import distribution, loader
from fa_verify.backends import make
from fa_verify.backends.base import Setup
from fa_verify.backends.fences.fence import MODES, Fence
from fa_verify.inputs import materialise
from fa_verify.verify import verify

VARIANTS = {"off": "off", "poison": "poison", "page": "page", "page.start": "page.start"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", nargs="?", default="kernels/flash_attention.py:flash")
    parser.add_argument("--cases", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0, help="start no case after these")
    options = parser.parse_args()
    (kernel,) = loader.load(options.target)
    backend = make("cuda")
    spent = {stage: collections.Counter() for stage in ("kernel", "case")}
    end, cases = time.monotonic() + options.seconds, 0
    for case in distribution.draw(0, options.cases, kernel.takes, forms=range(3)):
        if time.monotonic() > end:
            break
        cases += 1
        setups = {
            name: Setup(backend="cuda", float_model="hardware", fence=Fence.parse(text))
            for name, text in VARIANTS.items()
        }
        for one in setups.values():
            record = verify(case, kernel, one, backend)
            if record.verdict not in ("pass", "unsupported"):
                print(record.verdict, one, case, record.failures, record.reason[-300:])
        took = collections.defaultdict(list)
        for turn in range(options.rounds):
            order = [*setups][turn % len(setups) :] + [*setups][: turn % len(setups)]
            for name in order:
                one = setups[name]
                inputs = materialise(case, "cuda")
                torch.cuda.synchronize()
                begin = time.perf_counter()
                backend.run(kernel, case.problem, inputs, one, backward=case.backward)
                torch.cuda.synchronize()
                took["kernel", name].append(time.perf_counter() - begin)
                begin = time.perf_counter()
                verify(case, kernel, one, backend)
                took["case", name].append(time.perf_counter() - begin)
        for (stage, name), times in took.items():
            spent[stage][name] += min(times)
    print(f"{cases} cases, {options.rounds} rounds, {torch.cuda.get_device_name()}")
    print("| fence | a run takes | ms | a checked case takes | ms | tensors | regions mapped |")
    print("|---|---|---|---|---|---|---|")
    for name, text in VARIANTS.items():
        cells = [name]
        for counter in spent.values():
            cells.append(f"{counter[name] / counter['off']:.2f} x")
            cells.append(f"{1e3 * counter[name] / cases:.2f}")
        fence = Fence.parse(text)
        slots = backend._guard.slots(fence) if fence.mode in MODES[1:] else None  # noqa: SLF001
        cells += [str(slots.taken), str(slots.mapped)] if slots else ["", ""]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
