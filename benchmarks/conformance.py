"""A sample of Triton's own language tests on the executor, counted file by file.

    python benchmarks/conformance.py TRITON [--per-function 4] [--only test_core] [-n 2]

TRITON is a checkout of Triton's repository of the version that is installed. Its tests have tens of
thousands of parametrisations; run are a few of each test function, chosen by a hash of their names,
so that every function is run and every machine runs the same. Prints a table in Markdown, and the
last line of every failure. docs/conformance.md has a run, with what the failures are.
"""

# ruff: noqa: S314 - the XML is pytest's, written a moment before

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree as ET

LEFT_OUT = "typeconvert_downcast"  # tries all 2^32 patterns


def pytest_addoption(parser):
    """Take the number of tests a function; this file is given to pytest as a plugin."""
    parser.addoption("--per-function", type=int, default=4)


def pytest_collection_modifyitems(config, items):
    """Keep a few parametrisations of each function."""
    functions = defaultdict(list)
    for item in items:
        functions[item.path, getattr(item, "originalname", item.name)].append(item)
    for same in functions.values():
        same.sort(key=lambda item: hashlib.sha256(item.name.encode()).digest())
    few = config.getoption("per_function")
    kept = {item for same in functions.values() for item in same[:few]}
    items[:] = [item for item in items if item in kept]


def results(directory, file, few, workers):
    """Outcome and message of every test of a file that was run."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        subprocess.run(
            [sys.executable, "-m", "fa_verify.ttir", "-m", "pytest", f"unit/language/{file}.py",
             "-p", "conformance", "--per-function", str(few), "-k", f"not {LEFT_OUT}",
             "-n", str(workers), "-q", "--tb=line", f"--junitxml={report}"],
            cwd=directory, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))},
        )  # fmt: skip
        if not report.exists():
            return [("failed", file, "pytest wrote no report")]
        found = []
        for case in ET.parse(report).iter("testcase"):
            bad = [x for x in case if x.tag in ("failure", "error", "skipped")]
            outcome = "passed" if not bad else "skipped" if bad[0].tag == "skipped" else "failed"
            found.append((outcome, case.get("name"), bad[0].get("message", "") if bad else ""))
        return found


def main():
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("triton", type=Path)
    parser.add_argument("--per-function", type=int, default=4)
    parser.add_argument("--only", default="")
    parser.add_argument("-n", type=int, default=2)
    arguments = parser.parse_args()
    directory = arguments.triton / "python" / "test"
    files = sorted(x.stem for x in (directory / "unit" / "language").glob("test_*.py"))
    if not files:
        parser.error(f"triton={str(arguments.triton)!r}: has no python/test/unit/language")
    total, failures = Counter(), []
    print("| file | passed | failed | skipped |\n|---|---|---|---|")
    for file in files:
        if arguments.only not in file:
            continue
        found = results(directory, file, arguments.per_function, arguments.n)
        count = Counter(outcome for outcome, _, _ in found)
        total += count
        failures += [(file, name, why) for outcome, name, why in found if outcome == "failed"]
        print(
            f"| `{file}` | {count['passed']} | {count['failed']} | {count['skipped']} |", flush=True
        )
    print(f"| | **{total['passed']}** | **{total['failed']}** | **{total['skipped']}** |\n")
    for file, name, why in failures:
        print(f"* `{file}::{name}`: {' '.join(why.split())[:200]}")


if __name__ == "__main__":
    main()
