"""A run whose workers are killed by faults: nothing is lost, and the report is complete.

    python benchmarks/faults_survived.py DIR [--cases 60] [--faults 20] [--workers 8] [--seconds N]

Plants a read past the end in a small kernel (`planted_faults.py`), verifies it between unmapped
pages, where most cases fault, and gives up on nothing: as many failures as there are. Then reads
the record back and checks that every case which the run drew is in it once, that at least so many
workers died, that faults say which launch they were in, that one was made small and located, and
that the report was written; prints what it found, and exits with 1 if anything is missing.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
import time
from pathlib import Path

from planted_faults import FAULTS, plant

from fa_verify import campaign, loader
from fa_verify.checking import start_line
from fa_verify.record import CaseRecord, End, Shrunk, Writer, read
from fa_verify.report import files

# Faults take the time here, not the compiler.
FEW_FORMS = 'dtypes=("float16",), head_dims=(64,), backward=False,'
PATCH = (
    (
        "launch.py",
        "_CAPABILITIES = Capabilities(\n",
        f"_CAPABILITIES = Capabilities(\n    {FEW_FORMS}\n",
    ),
    ("launch.py", "    head_dims_v=range(1, 257),\n", ""),
)


class Recorder:
    """Writes every line as it comes."""

    def __init__(self, path: Path) -> None:
        self.writer = Writer(path)
        self.shrunk = self.writer.write
        self._begin = time.monotonic()
        self._verdicts: collections.Counter[str] = collections.Counter()

    def record(self, record: CaseRecord) -> None:
        """A case was verified, or killed its worker."""
        self.writer.write(record)
        self._verdicts[record.verdict] += 1
        if self._verdicts.total() % 8 == 1:
            self._say(dict(self._verdicts))

    def shrinking(self, record: CaseRecord) -> None:
        """A fault is about to be made small."""
        self._say(f"shrinking {record.case}")

    def _say(self, what: object) -> None:
        print(f"{time.monotonic() - self._begin:6.1f} s  {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, help="for all of it (default: as it takes)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    begin = time.monotonic()
    fault = dataclasses.replace(FAULTS[0], patch=(*FAULTS[0].patch, *PATCH))
    (kernel,) = loader.load(plant(fault, options.folder / "kernel"))
    plan = campaign.Plan(
        backend="cuda",
        cases=options.cases,
        seconds=options.seconds,
        workers=options.workers,
        fence="page",
        max_failures=options.cases,
        shrinks=1,
        shrink_seconds=6.0,
        spool=options.folder / "running",
    )
    path = options.folder / "run.jsonl"
    recorder = Recorder(path)
    recorder.writer.write(start_line([kernel.target], plan.seed, plan.backend))
    campaign.run((kernel,), plan, recorder)
    recorder.writer.write(End(seconds=time.monotonic() - begin, cases=options.cases, exit_code=1))
    recorder.writer.close()
    lines = list(read(path))
    records = [line for line in lines if isinstance(line, CaseRecord)]
    small = [line for line in lines if isinstance(line, Shrunk)]
    due = collections.Counter(str(case) for case, _ in campaign.drawn(kernel, plan))
    died = [r for r in records if any(f.check == "crash" for f in r.failures)]
    reports = files.write(files.summary_of([path]), options.folder)
    checks = {
        f"{len(records)} records of {sum(due.values())} cases": (
            collections.Counter(r.case for r in records) == due
        ),
        f"{len(died)} workers died of faults": len(died) >= options.faults,
        "every fault names its launch": all(
            f.title.endswith("in forward_kernel") and f.location for r in died for f in r.failures
        ),
        f"verdicts {dict(collections.Counter(r.verdict for r in records))}": True,
        "one was made small and located": any(
            f.tensor == "k" for s in small for f in s.record.failures
        ),
        "the spool is gone": not plan.spool.exists(),
        f"reports {[p.name for p in reports]}": all(p.stat().st_size for p in reports),
    }
    for text, right in checks.items():
        print("ok     " if right else "MISSING", text)
    for one in small:
        for failure in one.record.failures:
            print(
                f"{one.record.case}\n  {failure.title} at {failure.location}\n  {failure.message}"
            )
            print(f"  {failure.source}\n  {failure.diagnosis}")
    print(f"{time.monotonic() - begin:.0f} s")
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
