"""What got worse between two runs, judged so that chance and a longer run are not taken for it.

Two runs of one seed share cases, and a case that both ran is compared with itself. Where two runs
share too few, only what chance would hardly do is called a change.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

from fa_verify.report import text
from fa_verify.report.result import Result, compared, features
from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from fa_verify.report.faults import Fault

__all__ = ["Change", "Limits", "Side", "failures", "fewer", "gone", "lost", "worse"]

_SHARED_ENOUGH: Final = 0.5  # of the smaller run: then only the common cases count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From where on a difference is a regression.

    Attributes:
        growth: A worst err/bound may grow by this part of itself. A tenth is a stated default, not
            a derived number: on common cases a deterministic kernel repeats its ratios to the last
            bit, so that it guards against no noise, only against calling a harmless change of
            rounding a regression. Measured on 60 cases of the flash kernel with 128 x 128 tiles
            against 16 x 32: of the worst ratios of 25 precisions and tensors, 24 moved by less than
            2 per cent, and one of 0.024 by 12.
        floor: And by this part of the bound at least: 0.024 to 0.027 concerns nobody.
        fewer: A kernel may lose this part of its verified cases (budgets are in seconds).
        chance: Without common cases: what is called a change (for one kernel, precision and tensor,
            or one capability) has at most this probability when nothing changed.
    """

    growth: float = 0.1
    floor: float = 0.01
    fewer: float = 0.1
    chance: float = 1e-4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that got worse.

    Attributes:
        kind: "new failure", "worse", "lost" or "fewer cases".
        kernel: Its name in head.
        what: A few words: the failure's title, or precision and tensor.
        detail: With the numbers of both runs.
        location: "file:line", or "".
        replay: The command that shows it, or "".
    """

    kind: str
    kernel: str
    what: str
    detail: str
    location: str = ""
    replay: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One kernel in one run.

    Attributes:
        kernel: Its name there.
        results: Its cases; one with several setups is there once, at its worst.
        faults: Its faults.
    """

    kernel: str
    results: Mapping[str, Result]
    faults: Sequence[Fault]

    @property
    def verified(self) -> int:
        """Cases that reached pass or fail."""
        return sum(result.verified for result in self.results.values())

    def common(self, other: Side) -> list[str]:
        """Case lines that both ran, sorted."""
        return sorted(self.results.keys() & other.results.keys())

    def shares_enough(self, other: Side) -> bool:
        """Whether the common cases are enough to compare nothing else."""
        smaller = min(len(self.results), len(other.results))
        return len(self.common(other)) >= max(1, _SHARED_ENOUGH * smaller)


def failures(base: Side, head: Side) -> Iterator[Change]:
    """Faults that base has not, and cases that passed in base and fail with a fault it has."""
    passed = {
        case
        for case in base.common(head)
        if base.results[case].verdict is Verdict.PASS and head.results[case].verdict is Verdict.FAIL
    }
    told: set[str] = set()
    for fault in head.faults:
        if any(_same(fault, known) for known in base.faults):
            continue
        cases = {case for case in passed if _has(head.results[case], fault)}
        told |= cases
        none = "none of these cases: it may be older than this change"
        ran = (
            f"base passed {text.plural(len(cases), 'of these cases')}"
            if cases
            else f"base ran {none if base.results else 'no such kernel'}"
        )
        yield Change(
            kind="new failure",
            kernel=head.kernel,
            what=fault.title,
            detail=f"{text.plural(fault.cases, 'case')}; {ran}. {fault.message}".strip(),
            location=fault.location,
            replay=fault.replay,
        )
    if rest := sorted(passed - told):
        result = head.results[rest[0]]
        yield Change(
            kind="new failure",
            kernel=head.kernel,
            what="cases that passed in base fail",
            detail=f"{text.plural(len(rest), 'case')}, with a fault that base has on other cases",
            replay=result.record.replay,
        )


def worse(base: Side, head: Side, limits: Limits) -> Iterator[Change]:
    """Worst err/bound of a tensor that grew, a change for each precision."""
    for precision in sorted({result.precision for result in head.results.values()}):
        grown = [
            (tensor, growth)
            for tensor in _tensors(head.results.values())
            if (growth := _growth(base, head, precision, tensor, limits)) is not None
        ]
        if grown:
            _, most = max(grown, key=lambda pair: (pair[1].after - pair[1].before, pair[1].case))
            yield Change(
                kind="worse",
                kernel=head.kernel,
                what=precision,
                detail=f"worst err/bound {', '.join(f'{name} {one}' for name, one in grown)}",
                replay=head.results[most.case].record.replay,
            )


def _tensors(results: Iterable[Result]) -> tuple[str, ...]:
    return compared({name for result in results for name in result.record.tensors})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Growth:
    before: float
    after: float
    case: str
    cases: str

    def __str__(self) -> str:
        return f"{text.number(self.before)} -> {text.number(self.after)}{self.cases}"


def _growth(base: Side, head: Side, precision: str, tensor: str, limits: Limits) -> _Growth | None:
    """How much a worst err/bound grew, None when it did not, or when chance may have done it.

    With enough common cases the worst of these is compared in both runs. Without, the k largest
    ratios of both runs together must all be head's, by the margin, and chance would do that with
    probability C(m, k) / C(n + m, k) for n and m cases: a longer run is given its due.
    """
    paired = base.shares_enough(head)
    common = base.common(head)
    old = _ratios(base, precision, tensor, common if paired else sorted(base.results))
    new = _ratios(head, precision, tensor, common if paired else sorted(head.results))
    if paired:
        both = old.keys() & new.keys()
        old = {case: old[case] for case in both}
        new = {case: new[case] for case in both}
    if not old or not new:
        return None
    before = max(old.values())
    after, case = max((ratio, case) for case, ratio in new.items())
    margin = max(before * (1 + limits.growth), before + limits.floor)
    above = sum(ratio > margin for ratio in new.values())
    told = before <= 1 and head.results[case].verdict is Verdict.FAIL  # as a new failure
    chance = 0.0 if paired else _all_from_head(above, len(old), len(new))
    if not above or told or chance > limits.chance:
        return None
    ran = f"{text.count(len(old))} and {text.count(len(new))} different cases"
    cases = "" if paired else f" ({ran}, {text.count(above)} beyond base, p = {chance:.0e})"
    return _Growth(before=before, after=after, case=case, cases=cases)


def lost(base: Side, head: Side, limits: Limits) -> Iterator[Change]:
    """What passed in base and was not verified in head: common cases, and whole capabilities."""
    dropped: defaultdict[tuple[Verdict, str], list[str]] = defaultdict(list)
    for case in base.common(head):
        passed = base.results[case].verdict is Verdict.PASS
        if passed and not head.results[case].verified:
            result = head.results[case]
            dropped[result.verdict, result.record.reason].append(case)
    for (verdict, reason), cases in sorted(dropped.items()):
        yield Change(
            kind="lost",
            kernel=head.kernel,
            what=f"{verdict.value}: {(text.lines(reason) or ['no reason given'])[-1]}",
            detail=f"{text.plural(len(cases), 'case')} that passed in base, {cases[0]} for one",
            replay=head.results[cases[0]].record.replay,
        )
    before = _capabilities(base, (Verdict.PASS,))
    after = _capabilities(head, (Verdict.PASS, Verdict.FAIL))
    for name, cases_before in sorted(before.items()):
        expected = cases_before * len(head.results) / len(base.results)
        if not after[name] and math.exp(-expected) <= limits.chance:
            yield Change(
                kind="lost",
                kernel=head.kernel,
                what=name,
                detail=f"{text.plural(cases_before, 'case')} passed in base, head verified none",
            )


def fewer(base: Side, head: Side, limits: Limits) -> Iterator[Change]:
    """A kernel that was verified on fewer cases."""
    if head.verified < base.verified * (1 - limits.fewer):
        yield Change(
            kind="fewer cases",
            kernel=head.kernel,
            what="verified on fewer cases",
            detail=f"{text.count(base.verified)} -> {text.count(head.verified)}",
        )


def gone(base: Side, head: Side) -> Iterator[str]:
    """Faults of base that head has not, in a sentence each."""
    for fault in base.faults:
        if not any(_same(fault, other) for other in head.faults):
            yield f"{head.kernel}: no longer seen: {fault.title}"


def _same(one: Fault, other: Fault) -> bool:
    """The same fault, though the line may have moved with an edit above it."""
    moved = one.location == other.location or (
        one.source.strip() != "" and one.source.strip() == other.source.strip()
    )
    return (one.check, one.title) == (other.check, other.title) and moved


def _has(result: Result, fault: Fault) -> bool:
    return any(
        (f.check, f.title, f.location) == (fault.check, fault.title, fault.location)
        for f in result.record.failures
    )


def _ratios(side: Side, precision: str, tensor: str, cases: Sequence[str]) -> dict[str, float]:
    found = {}
    for case in cases:
        result = side.results[case]
        stats = result.record.tensors.get(tensor)
        if stats is not None and result.verified and result.precision == precision:
            found[case] = stats.ratio
    return found


def _all_from_head(top: int, base: int, head: int) -> float:
    """Probability that the `top` largest of base + head exchangeable values are all head's.

    >>> _all_from_head(2, 2, 2) == 1 / 2 * 1 / 3
    True
    """
    return math.prod((head - i) / (base + head - i) for i in range(top))


def _capabilities(side: Side, verdicts: Sequence[Verdict]) -> Counter[str]:
    """Cases with one of these verdicts, by precision and pass, and by feature."""
    found: Counter[str] = Counter()
    for result in side.results.values():
        if result.verdict in verdicts:
            found[f"{result.precision} {result.direction}"] += 1
            found.update(features(result.case))
    return found
