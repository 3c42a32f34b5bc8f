"""Kernels wrong in one condition only: how many cases until the default suite notices?

    python benchmarks/missed_defects.py [--seeds 1 2 3] [NAME...]

Each is an emulator of tests/emulator.py with one defect of a kind that nothing here was made for
(wrong_implementations/). A case is checked where the defect changes a bit of the result: all others
pass.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from right_implementations.emulation import Emulator, emulated
from wrong_implementations import masks, operands, results  # noqa: F401 - they enter their defects
from wrong_implementations.wrong import DEFECTS

from fa_verify import distribution
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.inputs import materialise
from fa_verify.verify import verify

CASES = 200  # of `fa-verify check`, by default
WORK = 2e7  # multiply-adds of a product


def _same(one, other):
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in pairs)


def _results(kernel, case, x):
    out = kernel.forward(case.problem, x.q, x.k, x.v, **x.terms(backward=False))
    if not case.backward:
        return [out.o, out.lse]
    grads = kernel.backward(case.problem, x.q, x.k, x.v, out, x.do, **x.terms(backward=True))
    return [out.o, out.lse, *grads.named().values()]


def hunt(name, seed, right):
    """Cases until the first failure, and it; how many cases the defect changed."""
    kernel = emulated(name, lambda _p: DEFECTS[name](), work=WORK)
    backend, touched = CpuBackend(seconds=120.0), 0
    for index, case in enumerate(distribution.draw(seed, CASES, kernel.takes)):
        x = materialise(case)
        if _same(_results(kernel, case, x), _results(right, case, x)):
            continue
        touched += 1
        record = verify(case, kernel, Setup(), backend)
        if record.verdict == "fail":
            return index + 1, touched, record
    return None, touched, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    right = emulated("right", lambda _p: Emulator(), work=WORK)
    print("| defect | cases to the first failure | cases that it changed before | caught by |")
    print("| :-- | --: | --: | :-- |")
    for name in options.names or DEFECTS:
        found = [hunt(name, seed, right) for seed in options.seeds]
        cases = ", ".join(str(at or "missed") for at, _, _ in found)
        before = ", ".join(str(touched) for _, touched, _ in found)
        titles = {record.failures[0].title for *_, record in found if record}
        print(f"| {DEFECTS[name].__doc__} | {cases} | {before} | {'; '.join(titles)} |", flush=True)


if __name__ == "__main__":
    main()
