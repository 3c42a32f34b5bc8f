"""How well the diagnosis explains defects unseen before: those of `tests/held_out`.

python benchmarks/diagnosis_held_out.py [--set NAME] [--half a|b] [--workers N] [DEFECT...]

Each defect gets what `fa-verify check` does, with a small budget: cases until some fail, the first
fault made small and explained together with the others.
"""

import argparse
import collections
import os
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console

from fa_verify import campaign
from fa_verify.selftest import judged, of_rows
from fa_verify.zoo import defects
from fa_verify.zoo.outcomes import totals

ROOT = Path(__file__).parents[1]
HELD_OUT = ROOT / "tests" / "held_out"
SETS = {  # and what each is planted in
    "own": ROOT / "kernels",
    "unlike": HELD_OUT / "kernels",
    "later": HELD_OUT / "kernels",
    "others": HELD_OUT / "kernels",
    "apart": HELD_OUT / "kernels",
    "blind": HELD_OUT / "kernels",
}
SEED, CASES, FAILURES, SECONDS = 5, 96, 3, 5.0


def subjects(tables, half, names, place):
    """The defects asked for, planted. A half takes every other one of each set."""
    for table in tables:
        rows, kernels = defects.rows([HELD_OUT / f"{table}.toml"]), SETS[table]
        if half:
            rows = rows["ab".index(half) :: 2]
        wanted = [row for row in rows if not names or row.name in names]
        yield from of_rows(wanted, place / table, kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", choices=SETS, action="append")
    parser.add_argument("--half", choices=("a", "b"))
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, help="of all: what is left then is not explained")
    parser.add_argument("--json", type=Path)
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args()
    plan = campaign.Plan(
        cases=CASES, seed=SEED, workers=chosen.workers, max_failures=FAILURES, shrinks=1,
        shrink_seconds=SECONDS, timeout=300.0, turn=1, seconds=chosen.seconds,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        planted = subjects(chosen.set or SETS, chosen.half, chosen.names, Path(place))
        found = {subject.kernel.target: subject for subject in planted}
        outcomes = judged(found, plan, Console(highlight=False))
    for outcome in outcomes:
        said = (
            f"{outcome.cause}; line {outcome.line} {outcome.place}" if outcome.caught else "ESCAPED"
        )
        print(f"{outcome.name} ({outcome.cases} cases): {said} [{outcome.small or outcome.case}]")
        print(f"    is: {outcome.defect}\n    said: {outcome.diagnosis}")
    if chosen.json:
        chosen.json.write_bytes(msgspec.json.encode(outcomes))
    causes = collections.Counter(outcome.cause for outcome in outcomes)
    lines = collections.Counter(outcome.place for outcome in outcomes)
    t = totals(outcomes)
    print(f"{t.caught} of {t.defects} caught; causes {dict(causes)}; lines {dict(lines)}")


if __name__ == "__main__":
    main()
