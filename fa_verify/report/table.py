"""The terminal's report: a table, a block for each failure, and the verdict last, where a log ends.

Every text goes through `rich.text.Text`, never through markup: names and messages come from files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fa_verify.report import text
from fa_verify.report.coverage import reached
from fa_verify.report.faults import families
from fa_verify.report.headline import beside, caveats, headline, remark, where, word
from fa_verify.report.sanitized import sentences
from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from fa_verify.report.faults import Family
    from fa_verify.report.group import Group
    from fa_verify.report.summary import Summary

__all__ = ["failure_block", "notes_block", "results_table", "show", "verdict_lines"]

_STYLES: Final = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.ERROR: "bold magenta",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.UNSUPPORTED: "yellow",
}
_WORD_STYLES: Final = {"PASS": "bold green", "FAIL": "bold red", "ERROR": "bold magenta"}
_KERNEL_WIDTH: Final = 24
_FILE_WIDTH: Final = 160  # no edge cuts what goes into a file or a pipe
_NARROW: Final = 100  # below this many columns every space counts, and names are broken
_SHOWN: Final = 10  # failures, and reasons, before "and more"


def show(console: Console, summary: Summary, *, failures: int = _SHOWN) -> None:
    """Print everything; the last lines are the verdict and where the first failure is."""
    if summary.rows:
        if not console.is_terminal:
            console.width = _FILE_WIDTH
        console.print(results_table(summary, console.width))
        console.print()
    found = families(summary.faults)
    for family in found[:failures]:
        for line in failure_block(family):
            console.print(line, soft_wrap=True)
        console.print()
    if len(found) > failures:
        rest = text.plural(len(found) - failures, "more kind") + " of fault"
        console.print(Text(f"and {rest}: see the report\n"), soft_wrap=True)
    for line in (*notes_block(summary), *verdict_lines(summary)):
        console.print(line, soft_wrap=True)


def results_table(summary: Summary, width: int) -> Table:
    """Kernel, precision, cases, worst err/bound of each tensor, flash-attn's 2x rule, verdict."""
    with_rule = any(row.rule_2x is not None for row in summary.rows)
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 0 if width < _NARROW else 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        title="Worst error, in units of its bound (above 1 fails)"
        + ("; 2x: flash-attn's 2x rule" if with_rule else ""),
        title_justify="left",
        title_style="dim",
    )
    for name in ("kernel", "precision"):
        table.add_column(name, overflow="fold", min_width=len(name))
    table.add_column("cases", justify="right", no_wrap=True, min_width=len("cases"))
    for name in summary.tensors:
        table.add_column(name, justify="right", no_wrap=True, min_width=max(4, len(name)))
    if with_rule:
        table.add_column("2x", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold", min_width=len("verdict"))
    previous = ""
    for row in summary.rows:
        name = text.shorten(text.clean(row.kernel), _KERNEL_WIDTH)
        cells = [
            Text(name if row.kernel != previous else ""),
            Text(row.precision),
            Text(text.count(row.cases)),
            *(_ratio(row, tensor) for tensor in summary.tensors),
            *([Text(text.number(row.rule_2x), style="dim")] if with_rule else []),
            Text(remark(row), style=_STYLES[row.verdict]),
        ]
        table.add_row(*cells)
        previous = row.kernel
    return table


def _ratio(row: Group, name: str) -> Text:
    tensor = row.tensors.get(name)
    if tensor is None:
        return Text("-", style="dim")
    style = "bold red" if tensor.ratio > 1 else "yellow" if name in row.too_inconclusive else ""
    return Text(text.number(tensor.ratio), style=style)


def failure_block(family: Family) -> Iterator[Text]:
    """A failure line by line. Print with ``soft_wrap=True``: the replay command is one line."""
    fault = family.first
    head = Text()
    head.append("FAIL ", style="bold red")
    head.append(f"{text.clean(fault.kernel)}: {text.clean(fault.title)}", style="bold")
    yield head
    yield from _field("seen by", f"{fault.check}, {where(fault)}")
    if fault.location:
        yield from _field("line", f"{fault.location}    {fault.source.strip()}", style="bold")
    yield from _field("measured", fault.message)
    yield from _field("likely", fault.diagnosis)
    yield from _field("smallest", fault.case)
    for label, line in beside(family):
        yield from _field(label, line)
    if fault.replay:
        yield Text("  replay")
        yield Text(f"    {text.clean(fault.replay)}", style="cyan")


def _field(name: str, value: str, style: str = "") -> Iterator[Text]:
    for index, line in enumerate(text.lines(value)):
        label = Text(f"  {name if index == 0 else '':<9} ", style="dim")
        label.append(line, style=style or "default not dim")
        yield label


def notes_block(summary: Summary) -> Iterator[Text]:
    """Why cases were not verified, a line for each reason."""
    for note in summary.notes[:_SHOWN]:
        line = Text()
        name = note.verdict.upper() if note.verdict is Verdict.ERROR else note.verdict.value
        line.append(f"{name:<12}")
        line.stylize(_STYLES[note.verdict])
        cases = text.plural(note.cases, "case")
        first, *rest = note.lines
        line.append(f" {text.clean(note.kernel)}: {first} ({cases})")
        yield line
        for other in rest:
            yield Text(f"    {other}", style="dim")
        if note.verdict is Verdict.ERROR and note.replay:
            yield Text(f"    {text.clean(note.replay)}", style="cyan")
    if len(summary.notes) > _SHOWN:
        more = text.plural(len(summary.notes) - _SHOWN, "more reason")
        yield Text(f"and {more}: see the report", style="dim")
    if summary.notes:
        yield Text()


def verdict_lines(summary: Summary) -> Sequence[Text]:
    """The log's end: caveats, coverage, speed, the verdict, each failing kernel's first line."""
    facts = summary.facts
    found = [Text(text.clean(line), style="yellow") for line in caveats(summary)]
    found += [
        Text(text.clean(f"reached  {reached(one)}"), style="dim")
        for one in summary.coverage[:_SHOWN]
    ]
    found += [
        Text(text.clean(f"watched  {line}"), style="dim") for line in sentences(summary.sanitized)
    ]
    parts = [f"seed {facts.seed}"] if facts.seed else []
    parts += [part for part in (facts.backend, facts.device) if part]
    if facts.seconds is not None and facts.rate is not None:
        parts.append(f"{text.duration(facts.seconds)}, {facts.rate:.1f} cases/s")
    if facts.false_alarm:
        parts.append(f"odds of a false alarm: {facts.false_alarm:.0e}")
    parts += [f"{stage} {text.duration(seconds)}" for stage, seconds in facts.stages]
    if parts:
        found.append(Text(text.clean(" | ".join(parts)), style="dim"))
    if facts.unseen:
        found.append(Text(facts.unseen, style="dim"))
    verdict = word(summary)
    line = Text(f"{verdict}", style=_WORD_STYLES.get(verdict, "bold yellow"))
    line.append(f"  {text.clean(headline(summary))}", style="default not bold")
    found.append(line)
    for kernel in summary.failed:
        fault = next(fault for fault in summary.faults if fault.kernel == kernel)
        place = f"{fault.location}: " if fault.location else ""
        found.append(Text(f"  {text.clean(f'{kernel}: {place}{fault.title}')}"))
    return found
