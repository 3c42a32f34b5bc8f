"""Whether kernels compile to the same IR as before: a variant must cost plain attention nothing.

    git stash  # or any other tree
    python benchmarks/same_ir.py record before.json
    git stash pop
    python benchmarks/same_ir.py compare before.json

Every launch of flash and flash_atomic on the cases below, in every configuration, as TTIR without
its locations and names. Differences are named, and the exit status is 1.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from triton.compiler import compile as compile_
from triton.runtime import driver

from fa_verify import loader, ttir
from fa_verify.case import Case
from fa_verify.resources.launches import launched

TARGETS = ("kernels/flash_attention.py:flash", "kernels/flash_attention.py:flash_atomic")
CASES = (
    "pass=bwd s=40x50 d=64 dtype=float16 seed=0",
    "pass=bwd h=4/2 s=40x50 d=80 dtype=bfloat16 mask=causal seed=0",
    "pass=bwd s=40x50 d=20/33 dtype=float32 mask=l3.r5 cap=2.0 q=bhds seed=0",
    "pass=bwd s=40x50 d=32 dtype=float16 mask=causal.docs10x20-0x5-30x25 seed=0",
    "pass=bwd s=40x50 d=192/96 dtype=float16 mask=causal.topleft seed=0",
)
_LOCATION = re.compile(r"\s*loc\([^()]*(\([^()]*\)[^()]*)*\)|^#loc.*$", re.MULTILINE)
_NAME = re.compile(r"%\w+")


def plain(text):
    """TTIR without locations, its values numbered in order."""
    names = {}
    text = _LOCATION.sub("", text)
    text = _NAME.sub(lambda found: names.setdefault(found[0], f"%{len(names)}"), text)
    return "\n".join(line for line in text.splitlines() if line)


def texts():
    """Plain TTIR by kernel, case, configuration and place in the order of launches."""
    found = {}
    for target in TARGETS:
        (kernel,) = loader.load(target)
        for line in CASES:
            index, count = 0, 1
            while index < count:
                run = launched(kernel, Case.parse(line), index)
                if run.error:
                    raise RuntimeError(run.error)
                count = max(count, run.configs)
                with ttir.execute():
                    where = driver.active.get_current_target()
                    for place, kernel_ in enumerate(run.kernels):
                        text = compile_(kernel_.source, where, kernel_.options).asm["ttir"]
                        key = f"{kernel.name} | {line} | {index} | {place} {kernel_.name}"
                        found[key] = plain(text)
                index += 1
    return found


def main():
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    now = texts()
    if options.action == "record":
        options.file.write_text(json.dumps(now))
        print(f"{len(now)} launches written to {options.file}")
        return 0
    before = json.loads(options.file.read_text())
    unlike = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
    for key in sorted(unlike):
        print(f"not the same: {key}")
    print(f"{len(now) - len(unlike)} of {len(now)} launches compile to the same IR")
    return 1 if unlike else 0


if __name__ == "__main__":
    sys.exit(main())
