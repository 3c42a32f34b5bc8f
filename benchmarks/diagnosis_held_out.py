"""How well the diagnosis explains the defects of `tests/held_out/defects.toml`, unseen before.

python benchmarks/diagnosis_held_out.py [NAME...]
"""

import collections
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from fa_verify import distribution, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.strategies import shrink
from fa_verify.verify import verify
from fa_verify.zoo.outcomes import named, place

ROOT = Path(__file__).parents[1]
DEFECTS = ROOT / "tests" / "held_out" / "defects.toml"
SEED, CASES, SECONDS = 5, 300, 2.0


def planted(folder, patch):
    """The target of a copy of kernels/ with one patch, and the lines that it changed."""
    file, old, new = patch
    package = folder / "kernels"
    shutil.copytree(ROOT / "kernels", package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / file).read_text(encoding="utf-8")
    if text.count(old) != 1:
        msg = f"{old!r} occurs {text.count(old)} times in {file}"
        raise SystemExit(msg)
    first = text[: text.index(old)].count("\n") + 1
    (package / file).write_text(text.replace(old, new), encoding="utf-8")
    lines = range(first, first + max(1, new.rstrip("\n").count("\n") + 1))
    return f"{package / 'flash_attention.py'}:flash", {f"{file}:{line}" for line in lines}


def explained(kernel):
    """The failures of the smallest case found, explained; None where all cases pass."""
    setup, backend = Setup(), CpuBackend(seconds=120.0)
    failing = None
    for case in distribution.draw(SEED, CASES, kernel.takes):
        if verify(case, kernel, setup, backend).verdict == "fail":
            failing = case
            break
    if failing is None:
        return None

    def fails(case: Case) -> bool:
        return verify(case, kernel, setup, backend, independent=False).verdict == "fail"

    small = shrink(failing, fails, capabilities=kernel.takes, max_seconds=SECONDS)
    others = () if small == failing else (failing,)
    return verify(small, kernel, setup, backend, independent=False, explain=True, others=others)


def main() -> None:
    total, places = collections.Counter(), collections.Counter()
    for name, row in tomllib.loads(DEFECTS.read_text(encoding="utf-8")).items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            target, lines = planted(Path(folder), row["patch"])
            (kernel,) = loader.load(target)
            record = explained(kernel)
        if record is None:
            print(f"{name}: not caught", flush=True)
            continue
        said = [failure.diagnosis for failure in record.failures]
        text, cause = named(said, row["causes"], lines)
        line, where = place(said, [failure.location for failure in record.failures], lines)
        total[cause] += 1
        places[where] += 1
        print(f"{name}: {cause}; line {line} {where} [{record.case}]\n    {text}", flush=True)
    print(f"causes {dict(total)}; lines {dict(places)}")


if __name__ == "__main__":
    main()
