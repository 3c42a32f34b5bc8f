"""Gates a run against an earlier one: what regressed, and how that is shown."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Final

from rich.text import Text

from fa_verify.report import text
from fa_verify.report.changes import Change, Limits, Side, failures, fewer, gone, lost, worse
from fa_verify.report.markdown import environment
from fa_verify.report.marks import escape, fence
from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from fa_verify.report.result import Result
    from fa_verify.report.summary import Summary

__all__ = ["Comparison", "compare", "markdown", "show"]

_DEFAULT: Final = Limits()
_NOTHING: Final = 3
_SHOWN: Final = 20
_BADNESS: Final = [
    *(Verdict.UNSUPPORTED, Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.FAIL),
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Head against base.

    Attributes:
        regressions: What got worse, new failures first.
        notes: How it was compared, and what else a reader should know.
        base_verified: Cases that base brought to pass or fail; likewise head_verified.
        base_environment: Versions and device, in a line; likewise head_environment.
    """

    regressions: tuple[Change, ...]
    notes: tuple[str, ...]
    base_verified: int
    head_verified: int
    base_environment: str
    head_environment: str

    @property
    def exit_code(self) -> int:
        """3 when base or head verified nothing, else 1 on any regression, else 0."""
        if not (self.base_verified and self.head_verified):
            return _NOTHING
        return 1 if self.regressions else 0

    @property
    def verdict(self) -> str:
        """The outcome in a few words."""
        if self.exit_code == _NOTHING:
            return "NOTHING TO COMPARE"
        return "REGRESSION" if self.regressions else "NO REGRESSION"

    @property
    def because(self) -> str:
        """What the verdict rests on."""
        if self.exit_code == _NOTHING:
            empty = [
                name
                for name, verified in (("base", self.base_verified), ("head", self.head_verified))
                if not verified
            ]
            return f"no case reached pass or fail in {' and '.join(empty)}"
        verified = text.plural(self.base_verified, "case")
        ran = f"{verified} verified in base, {text.count(self.head_verified)} in head"
        kinds = Counter(change.kind for change in self.regressions)
        counted = ", ".join(f"{kind} ({number})" for kind, number in kinds.items())
        return f"{counted}; {ran}" if counted else ran


def compare(base: Summary, head: Summary, *, limits: Limits = _DEFAULT) -> Comparison:
    """What regressed from base to head.

    A kernel is compared with its namesake; when each run has one kernel, these two are compared
    whatever they are called, so that a variant can be gated against what it replaces.

    Args:
        base: The run to hold against.
        head: The run to judge.
        limits: From where on a difference is a regression.
    """
    pairs = _pairs(base, head)
    notes = list(_notes(base, head, pairs))
    found: list[Change] = []
    for old, new in pairs:
        before, after = _side(base, old), _side(head, new)
        if not after.results:
            detail = f"base verified {text.plural(before.verified, 'case')}, head ran none"
            if before.verified:
                found.append(Change(kind="lost", kernel=old, what="kernel absent", detail=detail))
            continue
        found += failures(before, after)
        if not before.results:
            notes.append(f"{new}: not in base")
            continue
        found += [*worse(before, after, limits), *lost(before, after, limits)]
        found += fewer(before, after, limits)
        notes += gone(before, after)
        notes.append(_method(before, after))
    order = ("new failure", "lost", "worse", "fewer cases")
    return Comparison(
        regressions=tuple(sorted(found, key=lambda change: order.index(change.kind))),
        notes=tuple(notes),
        base_verified=base.verified,
        head_verified=head.verified,
        base_environment=environment(base.facts),
        head_environment=environment(head.facts),
    )


def show(console: Console, comparison: Comparison) -> None:
    """Print it; the verdict comes last, where a log ends."""
    for line in _lines(comparison):
        console.print(line, soft_wrap=True)


def markdown(comparison: Comparison) -> str:
    """It for a pull request: the verdict, each regression with its replay line, the notes."""
    blocks = [f"### fa-verify compare: {comparison.verdict}", f"{escape(comparison.because)}."]
    for change, with_replay in _told(comparison)[:_SHOWN]:
        place = f" at {escape(change.location)}" if change.location else ""
        title = f"**{change.kind}, {escape(change.kernel)}: {escape(change.what)}**{place}"
        blocks.append(f"{title}: {escape(change.detail)}")
        if with_replay:
            blocks.append(fence([text.clean(change.replay)], language="sh"))
    if len(comparison.regressions) > _SHOWN:
        blocks.append(f"... and {len(comparison.regressions) - _SHOWN} more.")
    if comparison.notes:
        blocks.append("\n".join(f"- {escape(note)}" for note in comparison.notes))
    old, new = escape(comparison.base_environment), escape(comparison.head_environment)
    blocks.append(f"<sub>base: {old}<br>head: {new}</sub>")
    return "\n\n".join(blocks) + "\n"


def _lines(comparison: Comparison) -> Iterator[Text]:
    for change, with_replay in _told(comparison):
        title = Text(f"{change.kind.upper()} ", style="bold red")
        title.append(f"{text.clean(change.kernel)}: {text.clean(change.what)}", style="bold")
        detail = text.lines(change.detail)
        if len(detail) == 1 and not change.location:
            title.append(f"  {detail.pop()}", style="default not bold")
        yield title
        if change.location:
            yield Text(f"  {text.clean(change.location)}", style="bold")
        for line in detail:
            yield Text(f"  {line}")
        if with_replay:
            yield Text(f"    {text.clean(change.replay)}", style="cyan")
            yield Text()
    for note in comparison.notes:
        yield Text(text.clean(note), style="dim")
    style = {0: "bold green", 1: "bold red"}.get(comparison.exit_code, "bold yellow")
    verdict = Text(comparison.verdict, style=style)
    verdict.append(f"  {text.clean(comparison.because)}", style="default not bold")
    yield verdict


def _told(comparison: Comparison) -> list[tuple[Change, bool]]:
    """Each regression, and whether its replay line is shown: one is enough for what grew."""
    seen: set[str] = set()
    found = []
    for change in comparison.regressions:
        repeated = change.kind == "worse" and change.kernel in seen
        if change.kind == "worse":
            seen.add(change.kernel)
        found.append((change, bool(change.replay) and not repeated))
    return found


def _pairs(base: Summary, head: Summary) -> list[tuple[str, str]]:
    if len(base.kernels) == len(head.kernels) == 1:
        return [(base.kernels[0], head.kernels[0])]
    return [(name, name) for name in sorted({*base.kernels, *head.kernels})]


def _side(summary: Summary, kernel: str) -> Side:
    results: dict[str, Result] = {}
    for result in summary.results:
        if result.kernel == kernel:
            known = results.get(result.record.case)
            if known is None or _badness(result) > _badness(known):
                results[result.record.case] = result
    faults = [fault for fault in summary.faults if fault.kernel == kernel]
    return Side(kernel=kernel, results=results, faults=faults)


def _badness(result: Result) -> tuple[int, float]:
    worst = max((stats.ratio for stats in result.record.tensors.values()), default=0.0)
    return _BADNESS.index(result.verdict), worst


def _method(base: Side, head: Side) -> str:
    common = len(base.common(head))
    ran = f"base ran {text.count(len(base.results))}, head {text.count(len(head.results))}"
    if base.shares_enough(head):
        return f"{head.kernel}: err/bound compared on {text.plural(common, 'common case')} ({ran})"
    return (
        f"{head.kernel}: only {text.plural(common, 'common case')} ({ran}): err/bound compared as "
        "two samples, which sees large changes only; give both runs one seed"
    )


def _notes(base: Summary, head: Summary, pairs: list[tuple[str, str]]) -> Iterator[str]:
    for name, summary in (("base", base), ("head", head)):
        if summary.facts.files and not summary.facts.complete:
            yield f"{name}: the run was killed or is still going"
        for kernel in summary.mixed:
            yield f"{name}: results of several versions of {kernel} are mixed"
        if summary.total[Verdict.ERROR]:
            cases = text.plural(summary.total[Verdict.ERROR], "case")
            yield f"{name}: the harness broke on {cases}"
    for old, new in pairs:
        if old != new:
            yield f"{new} is compared with {old}, the only kernel of base"
    if base.facts.backend != head.facts.backend:
        yield f"base ran on {base.facts.backend}, head on {head.facts.backend}"
