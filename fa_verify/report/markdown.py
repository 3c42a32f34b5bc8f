"""The report as Markdown, short enough for a pull request's comment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fa_verify.report import text
from fa_verify.report.coverage import reached
from fa_verify.report.faults import families
from fa_verify.report.headline import beside, caveats, headline, remark, where, word
from fa_verify.report.marks import escape, fence, table
from fa_verify.report.sanitized import sentences
from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.report.facts import Facts
    from fa_verify.report.faults import Family
    from fa_verify.report.summary import Summary

__all__ = ["environment", "render"]

_SHOWN: Final = 20  # faults, and reasons: a comment holds 65,536 characters


def render(summary: Summary) -> str:
    """The verdict, the table, every fault with its replay line, and the environment in one line."""
    blocks: list[str] = [f"### fa-verify: {word(summary)}", f"{escape(headline(summary))}."]
    if notes := caveats(summary):
        blocks.append("\n".join(f"- {escape(note)}" for note in notes))
    found = families(summary.faults)
    blocks.extend(block for family in found[:_SHOWN] for block in _family(family))
    if len(found) > _SHOWN:
        blocks.append(f"... and {text.plural(len(found) - _SHOWN, 'more kind')} of fault.")
    if summary.rows:
        blocks.append(_rows(summary))
    if summary.coverage:
        lines = [f"- {escape(reached(one))}" for one in summary.coverage[:_SHOWN]]
        blocks.append("Reached:\n\n" + "\n".join(lines))
    if watched := [f"- {escape(line)}" for line in sentences(summary.sanitized)]:
        blocks.append("Watched by sanitizers:\n\n" + "\n".join(watched))
    if summary.notes:
        blocks.append(_notes(summary))
    facts = [environment(summary.facts), *([summary.facts.unseen] if summary.facts.unseen else [])]
    blocks.append(f"<sub>{escape('; '.join(facts))}</sub>")
    return "\n\n".join(blocks) + "\n"


def _rows(summary: Summary) -> str:
    with_rule = any(row.rule_2x is not None for row in summary.rows)
    head = [
        "kernel",
        "precision",
        "cases",
        *summary.tensors,
        *(["2x rule"] if with_rule else []),
        "verdict",
    ]
    body = []
    for row in summary.rows:
        ratios = [
            row.tensors[name].ratio if name in row.tensors else None for name in summary.tensors
        ]
        body.append(
            [
                escape(row.kernel),
                row.precision,
                text.count(row.cases),
                *(
                    f"**{text.number(r)}**" if r is not None and r > 1 else text.number(r)
                    for r in ratios
                ),
                *([text.number(row.rule_2x)] if with_rule else []),
                remark(row),
            ]
        )
    title = "Worst error, in units of its bound (above 1 fails):"
    return title + "\n\n" + table(head, body, left=2)


def _family(family: Family) -> Iterator[str]:
    fault = family.first
    yield f"**{escape(fault.kernel)}: {escape(fault.title)}**, {escape(where(fault))}."
    place = [f"{fault.location}    {fault.source.strip()}"] if fault.location else []
    detail = [*place, *text.lines(fault.message)]
    if detail:
        yield fence([text.clean(line) for line in detail])
    if fault.diagnosis:
        yield f"Likely: {escape(fault.diagnosis)}"
    if lines := [f"- {label}: {escape(line)}" for label, line in beside(family)]:
        yield "\n".join(lines)
    if fault.replay:
        yield fence([text.clean(fault.replay)], language="sh")


def _notes(summary: Summary) -> str:
    found = []
    for note in summary.notes[:_SHOWN]:
        first, *rest = note.lines
        cases = text.plural(note.cases, "case")
        found.append(f"- {note.verdict}, {escape(note.kernel)}: {escape(first)} ({cases})")
        if note.verdict is Verdict.ERROR:
            found.append(fence([*rest, *([text.clean(note.replay)] if note.replay else [])]))
    if len(summary.notes) > _SHOWN:
        found.append(f"- and {text.plural(len(summary.notes) - _SHOWN, 'more reason')}")
    return "Not verified:\n\n" + "\n".join(found)


def environment(facts: Facts) -> str:
    """What ran where, in one line."""
    parts = [f"{name} {version}" for name, version in facts.versions if version]
    parts += [part for part in (facts.backend, facts.device, facts.platform) if part]
    parts += [f"seed {facts.seed}"] if facts.seed else []
    if facts.seconds is not None and facts.rate is not None:
        parts.append(f"{text.duration(facts.seconds)}, {facts.rate:.1f} cases/s")
    return "; ".join(parts) or "no run recorded"
