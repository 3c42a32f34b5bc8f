"""`Coverage`: which aspects of a problem a kernel met together, and which of its branches ran.

Pairs are counted among the values that the kernel met at all: what it does not take is no gap.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from fa_verify.aspects import ORDER, Aspect, Pair, aspects, pairs
from fa_verify.ran import SourceRan
from fa_verify.report.branches import Branch, branches
from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fa_verify.report.result import Result

__all__ = ["Coverage", "coverage", "place", "reached"]

_SHOWN = 3  # gaps named in a line


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What the cases of one kernel reached.

    Attributes:
        kernel: Its name.
        cases: Cases that ran.
        met: Pairs that came together in a case; due: pairs of values that each were met.
        missing: The pairs that did not, those first that the most cases came near to.
        branches: Of its sources.
    """

    kernel: str
    cases: int
    met: int
    due: int
    missing: tuple[str, ...]
    branches: tuple[Branch, ...]

    @property
    def ways(self) -> tuple[int, int]:
        """Ways of branches seen, of how many."""
        return sum(b.seen for b in self.branches), sum(b.due for b in self.branches)

    @property
    def gaps(self) -> tuple[Branch, ...]:
        """Branches with a way that no case went."""
        return tuple(branch for branch in self.branches if branch.seen < branch.due)


def coverage(results: Iterable[Result]) -> tuple[Coverage, ...]:
    """The coverage of each kernel, sorted by name; only cases that ran count."""
    groups: defaultdict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.verdict not in (Verdict.UNSUPPORTED, Verdict.ERROR):
            groups[result.kernel].append(result)
    return tuple(_of_kernel(kernel, group) for kernel, group in sorted(groups.items()))


def reached(found: Coverage) -> str:
    """What was reached, in one line."""
    seen, due = found.ways
    text = f"{found.kernel}: {_percent(found.met, found.due)} of pairs of aspects"
    if due:
        text += f", {seen} of {due} ways of its branches"
    gaps = [f"{place(gap)} {gap.said}" for gap in found.gaps[:_SHOWN]]
    more = len(found.gaps) - len(gaps)
    return text + (f"; {', '.join(gaps)}" if gaps else "") + (f" and {more} more" if more else "")


def place(branch: Branch) -> str:
    """Where a branch is and what stands there."""
    here = os.path.relpath(branch.file)
    file = branch.file if here.startswith("..") else here
    return f"{file}:{branch.line} `{branch.source}`" if branch.source else f"{file}:{branch.line}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part // whole}%" if whole else "0%"


def _of_kernel(kernel: str, results: Sequence[Result]) -> Coverage:
    cases = [result.case for result in results]
    values = Counter(aspect for case in cases for aspect in aspects(case))
    met = frozenset().union(*(pairs(case) for case in cases))
    missing = sorted(_possible(values) - met, key=lambda pair: _rarity(pair, values))
    runs: defaultdict[str, list[SourceRan]] = defaultdict(list)
    for result in results:
        for file, text in result.record.ran.items():
            runs[file].append(SourceRan.parse(text))
    return Coverage(
        kernel=kernel,
        cases=len(cases),
        met=len(met),
        due=len(met) + len(missing),
        missing=tuple(f"{a[0]} {a[1]} with {b[0]} {b[1]}" for a, b in missing),
        branches=tuple(b for file in sorted(runs) for b in branches(file, runs[file])),
    )


def _possible(values: Counter[Aspect]) -> set[Pair]:
    order = {name: index for index, name in enumerate(ORDER)}
    return {(a, b) for a in values for b in values if order[a[0]] < order[b[0]]}


def _rarity(pair: Pair, values: Counter[Aspect]) -> tuple[int, Pair]:
    return -values[pair[0]] * values[pair[1]], pair
