"""flash-attn's own tests of its Python interface, run against this repository's kernels.

    python benchmarks/flash_attn_tests.py FLASH_ATTENTION/tests/test_flash_attn.py \
        [--count 60] [--seed 0] [--seconds 120] [-n 12]

The file is that of the repository Dao-AILab/flash-attention (2.8); it needs einops. What it imports
as flash_attn is benchmarks/flash_attn_shim, and it stays where it is. Of each test `--count`
combinations of its parameters are drawn, and run in a drawn order until `--seconds` are over.
Prints a table, and each failed test with its last line.
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUTCOMES = ("passed", "failed", "skipped", "not run")


def outcome(case):
    """What became of a test case, and why."""
    for tag in ("failure", "error"):
        found = case.find(tag)
        if found is not None:
            lines = [line for line in (found.text or "").splitlines() if line.startswith("E  ")]
            return "failed", lines[0][1:].strip() if lines else found.get("message", "")
    found = case.find("skipped")
    if found is None:
        return "passed", ""
    reason = found.get("message", "")
    return ("not run" if "out of time" in reason else "skipped"), reason


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=1 << 30, help="sequences to be drawn")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("-n", default="12")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results, totals = Path(folder) / "results.xml", Path(folder) / "totals"
        settings = Path(folder) / "pytest.ini"
        settings.write_text("[pytest]\n")  # and none of this repository's
        paths = [str(HERE.parent), str(HERE / "flash_attn_shim"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "SAMPLE_COUNT": str(options.count),
            "SAMPLE_LONGEST": str(options.longest),
            "SAMPLE_SEED": str(options.seed),
            "SAMPLE_END": str(time.time() + options.seconds),
            "SAMPLE_TOTALS": str(totals),
        }
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "sampling", "-p", "no:cacheprovider"),
            *(
                "-n",
                options.n,
                "-p",
                "no:benchmark",
                f"--junitxml={results}",
                f"--rootdir={folder}",
                "--tb=short",
            ),
            *("-c", str(settings), str(options.file.resolve())),
        ]
        done = subprocess.run(
            command, env=environment, cwd=folder, check=False, capture_output=True, text=True
        )
        if not results.exists() or not totals.exists():
            print(done.stdout[-3000:], done.stderr[-3000:])
            sys.exit(2)
        cases = ET.parse(results).getroot().iter("testcase")  # noqa: S314
        counted = dict(line.split() for line in totals.read_text().splitlines())
        found = collections.defaultdict(collections.Counter)
        failures = collections.defaultdict(list)
        for case in cases:
            name, _, parameters = case.get("name").partition("[")
            what, why = outcome(case)
            found[name][what] += 1
            if what == "failed":
                failures[name, why[:160]].append(parameters.rstrip("]"))
    print(f"| test | combinations | drawn | {' | '.join(OUTCOMES)} |")
    print("|---|---|---|" + "---|" * len(OUTCOMES))
    for name, counts in found.items():
        cells = [counted.get(name, "1"), counts.total(), *(counts[x] for x in OUTCOMES)]
        print(f"| {name} | {' | '.join(map(str, cells))} |")
    totals_of = [sum(counts[x] for counts in found.values()) for x in OUTCOMES]
    print(f"| all | | {sum(totals_of)} | {' | '.join(map(str, totals_of))} |")
    for (name, why), which in sorted(failures.items(), key=lambda item: -len(item[1])):
        print(f"{len(which)} x {name}: {why}")
        for parameters in which[:4]:
            print(f"      [{parameters}]")


if __name__ == "__main__":
    main()
