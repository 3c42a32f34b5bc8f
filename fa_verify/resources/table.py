"""The terminal's table of builds, and a line for each finding."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fa_verify.report import text
from fa_verify.resources.chips import CHIPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from fa_verify.resources.build import Build, Refusal

__all__ = ["show"]

_SHOWN = 20  # findings before "and more"
_WIDTH = 40  # of a configuration


def show(console: Console, builds: Sequence[Build], refusals: Sequence[Refusal]) -> None:
    """Print a row for each configuration of a function, worst of its cases, and what was found."""
    tables: defaultdict[tuple[str, str, str, str], list[Build]] = defaultdict(list)
    for build in builds:
        tables[build.kernel, build.function, build.location, build.chip].append(build)
    for kernel, function, location, chip in sorted(tables, key=_order):
        head = Text(text.clean(f"{kernel}: {function} on {chip}"), style="bold")
        head.append(text.clean(f"  {location}"), style="dim not bold")
        console.print(head, soft_wrap=True)
        console.print(_table(tables[kernel, function, location, chip]))
        console.print()
    for line in (*_lines(builds), *_refused(refusals)):
        console.print(line, soft_wrap=True)


def _order(key: tuple[str, str, str, str]) -> tuple[object, ...]:
    kernel, function, location, chip = key
    return kernel, location, function, list(CHIPS).index(chip)


def _table(builds: Sequence[Build]) -> Table:
    """Configurations of one function on one chip."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("configuration", no_wrap=True, min_width=26)
    table.add_column("types", no_wrap=True, min_width=5)
    for name, width in (("regs", 4), ("spilled", 9), ("stack", 5), ("shared", 6), ("", 4)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    table.add_column("cores", no_wrap=True)
    rows: defaultdict[tuple[str, str], list[Build]] = defaultdict(list)
    for build in builds:
        rows[_types(build), build.config.replace("BLOCK_", "")].append(build)
    for types, config in sorted(rows):
        shown = text.shorten(text.clean(config), _WIDTH)
        table.add_row(Text(shown), Text(types), *_cells(rows[types, config]))
    return table


def _cells(builds: Sequence[Build]) -> Iterator[Text]:
    """Numbers of a row; red where a finding fails, yellow where there is one."""
    findings = [finding for build in builds for finding in build.findings]
    style = "bold red" if any(f.fails for f in findings) else "yellow" if findings else ""
    made = [build.usage for build in builds if not build.usage.error]
    if not made:
        for _ in range(5):
            yield Text("-", style="dim")
        yield Text("does not compile", style=style)
        return

    def most(name: str) -> int:
        return max(int(getattr(usage, name)) for usage in made)

    yield Text(str(most("registers")), style=style)
    stores, loads = most("spill_stores"), most("spill_loads")
    yield Text(f"{stores}/{loads}" if stores or loads else "0")
    yield Text(str(most("stack")))
    shared, limit = most("shared"), CHIPS[builds[0].chip].shared
    yield Text(str(shared))
    yield Text(f"{100 * shared / limit:.0f}%", style="bold red" if shared > limit else "")
    kinds = sorted({kind for usage in made for kind in usage.matrix})
    kinds += ["tf32"] if most("tf32") else []
    kinds += ["none"] if any(usage.dots and not usage.matrix for usage in made) else []
    yield Text(" ".join(kinds) or "-")


def _types(build: Build) -> str:
    """Of its products' operands."""
    kinds = sorted(name.partition(" ")[0] for name in build.usage.dots)
    return " ".join(dict.fromkeys(kinds)) or "-"


def _lines(builds: Sequence[Build]) -> Iterator[Text]:
    """What was found, each once with the number of builds, failures first."""
    seen: defaultdict[tuple[str, ...], list[Build]] = defaultdict(list)
    for build in builds:
        for finding in build.findings:
            about = f"{build.kernel}: {build.function} on {build.chip}"
            word = "FAIL" if finding.fails else "note"
            said = f"{finding.kind}: {finding.text}"
            seen[word, about, said, build.location, build.config].append(build)
    for word, about, said, location, config in sorted(seen)[:_SHOWN]:
        same = seen[word, about, said, location, config]
        line = Text(f"{word} ", style="bold red" if word == "FAIL" else "yellow")
        line.append(text.clean(f"{about}: {said}"), style="default not bold")
        yield line
        where = f"     {location}  {config}  ({text.plural(len(same), 'build')}) [{same[0].case}]"
        yield Text(text.clean(where), style="dim")
    if len(seen) > _SHOWN:
        yield Text(f"and {text.plural(len(seen) - _SHOWN, 'more finding')}: see the record")


def _refused(refusals: Sequence[Refusal]) -> Iterator[Text]:
    """Launchers that raised."""
    for refusal in refusals[:_SHOWN]:
        word, style = ("FAIL", "bold red") if refusal.fails else ("note", "yellow")
        line = Text(f"{word} ", style=style)
        said = f"{refusal.kernel} on {refusal.chip}: {refusal.error}"
        line.append(text.clean(said), style="default not bold")
        yield line
        yield Text(text.clean(f"     [{refusal.case}]"), style="dim")
