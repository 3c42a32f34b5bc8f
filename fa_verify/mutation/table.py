"""The outcomes of a mutation run as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.mutation.outcome import score

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fa_verify.mutation.outcome import Outcome

__all__ = ["render"]


def render(outcomes: Sequence[Outcome], headline: str, unfit: Sequence[str]) -> str:
    """The whole report: totals by function and operator, survivors, equivalents, invalid ones."""
    blocks = [f"### fa-verify mutate: {headline}"]
    kernels = sorted({o.kernel for o in outcomes})
    operators = sorted({o.operator for o in outcomes})
    groups = [("all", outcomes)]
    groups += [(name, [o for o in outcomes if o.kernel == name]) for name in kernels]
    blocks.append(_totals("function", groups))
    blocks.append(
        _totals("operator", [(x, [o for o in outcomes if o.operator == x]) for x in operators])
    )
    checks = sorted({o.check for o in outcomes if o.fate == "killed"})
    rows = [(x, str(sum(o.fate == "killed" and o.check == x for o in outcomes))) for x in checks]
    blocks.append(_grid(("check", "mutants killed"), rows))
    for fate, title in (
        ("survived", "Survivors"),
        ("equivalent", "Proven equivalent"),
        ("invalid", "Invalid: these do not run, and do not count"),
    ):
        chosen = [o for o in outcomes if o.fate == fate]
        if chosen:
            blocks.append(f"#### {title}\n\n" + "\n".join(_lines(chosen)))
    if unfit:
        listed = "\n".join(f"* {_cell(x)}" for x in unfit)
        blocks.append(f"Cases that the kernel itself does not pass, left out:\n\n{listed}")
    return "\n\n".join(blocks) + "\n"


def _totals(name: str, groups: Iterable[tuple[str, Sequence[Outcome]]]) -> str:
    rows = []
    for group, outcomes in groups:
        s = score(outcomes)
        share = f"{100 * s.share:.1f}%" if s.killed + s.survived else ""
        counts = (s.killed, s.survived, s.equivalent, s.invalid)
        rows.append((group, str(len(outcomes)), *map(str, counts), share))
    head = (name, "mutants", "killed", "survived", "equivalent", "invalid", "score")
    return _grid(head, rows)


def _lines(outcomes: Iterable[Outcome]) -> Iterable[str]:
    for o in sorted(outcomes, key=lambda o: (o.kernel, o.file, o.line, o.operator, o.id)):
        yield f"* `{o.id}` ({o.kernel}) {_cell(o.sentence)}"
        if o.source:
            yield f"  `{o.source}`"


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    lines += [f"| {' | '.join(_cell(x) for x in row)} |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("\n", " ")
