"""The outcomes of a selftest as Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fa_verify.zoo.outcomes import totals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fa_verify.zoo.outcomes import Outcome, Totals

__all__ = ["TAGS", "render"]

TAGS = ("ttir", "launcher", "operator", "gpu-only")
_REPORT = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")
_HEAD = (
    "defect",
    "tag",
    "caught by",
    "cases",
    "s",
    "smallest case",
    "likely cause",
    "cause",
    "line",
)


def render(outcomes: Sequence[Outcome], headline: str) -> str:
    """The whole report: totals by tag, defects, what is not planted, other oracles."""
    planted = [o for o in outcomes if o.kernel and o.tag != "right"]
    blocks = [f"### fa-verify selftest: {headline}", _totals(planted)]
    right = [o for o in outcomes if o.tag == "right"]
    if right:
        blocks.append(
            "Right kernels: "
            + ", ".join(
                f"{o.name} {'ALARMED on ' + _code(o.case) if o.caught else 'passed'} "
                f"({o.cases} cases)"
                for o in right
            )
            + "."
        )
    escaped = [o for o in planted if o.bad]
    if escaped:
        blocks.append(
            "Escaped:\n\n"
            + "\n".join(f"* {o.name}: {o.defect}{' ' + o.why if o.why else ''}" for o in escaped)
        )
    blocks.append(_grid(_HEAD, (_row(o) for o in planted)))
    names = [name for o in planted for name in o.others]
    if names:
        blocks.append(_others(planted, right, tuple(dict.fromkeys(names))))
    gaps = [o for o in outcomes if not o.kernel]
    if gaps:
        rows = (
            (_cell(o.name), _linked(o.source), o.tag, _cell(o.defect), _cell(o.why)) for o in gaps
        )
        blocks.append(
            "Rows that are not planted:\n\n"
            + _grid(("row", "source", "tag", "defect", "why, or the test that covers it"), rows)
        )
    return "\n\n".join(blocks) + "\n"


def _totals(planted: Sequence[Outcome]) -> str:
    groups = {"all": planted, "public reports": [o for o in planted if o.source]}
    groups |= {tag: [o for o in planted if o.tag == tag] for tag in TAGS}
    head = (
        "tag",
        "defects",
        "caught",
        "median cases",
        "median s",
        "cause named",
        "wrong",
        "unknown",
        "line named",
        "wrong line",
        "where it shows",
    )
    return _grid(head, (_total(name, totals(group)) for name, group in groups.items() if group))


def _total(name: str, t: Totals) -> tuple[str, ...]:
    of = f" ({100 * t.caught / t.defects:.1f}%)"
    asked = t.right + t.wrong + t.unknown
    share = f" ({100 * t.right / asked:.0f}%)" if asked else ""
    return (
        name,
        str(t.defects),
        f"{t.caught}{of}",
        f"{t.cases:g}",
        f"{t.seconds:.1f}",
        f"{t.right}{share}",
        str(t.wrong),
        str(t.unknown),
        str(t.placed),
        str(t.misplaced),
        str(t.shown),
    )


def _row(o: Outcome) -> tuple[str, ...]:
    name = f"{_cell(o.name)}" + (f" ({_linked(o.source)})" if o.source else "")
    if not o.caught:
        return name, o.tag, "**not caught**", str(o.cases), f"{o.seconds:.1f}", "", "", "", ""
    return (
        name,
        o.tag,
        ", ".join(o.checks),
        str(o.cases),
        f"{o.seconds:.1f}",
        _code(o.small or o.case),
        _cell(o.diagnosis),
        o.cause,
        f"{_code(o.line)} {o.place}".strip() if o.line else "",
    )


def _others(planted: Sequence[Outcome], right: Sequence[Outcome], names: tuple[str, ...]) -> str:
    """Who catches what, and who flags right kernels, on the same cases."""
    asked = [o for o in planted if o.others]
    rows = [("fa_verify", *_caught(asked, right, lambda o: o.caught))]
    rows += [
        (name, *_caught(asked, right, lambda o, n=name: o.others.get(n, False))) for name in names
    ]
    return "Other oracles on the same cases:\n\n" + _grid(
        ("oracle", "defects caught", "right kernels flagged"), rows
    )


def _caught(asked: Sequence[Outcome], right: Sequence[Outcome], flags: object) -> tuple[str, str]:
    assert callable(flags)  # noqa: S101 - for mypy
    return (
        f"{sum(map(flags, asked))} of {len(asked)}",
        f"{sum(map(flags, right))} of {len(right)}",
    )


def _grid(head: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("\n", " ")


def _linked(source: str) -> str:
    """Where it was reported, each issue as a link; GitHub takes issues/N to a pull request too.

    >>> _linked("a/b#7; a talk")
    '[a/b#7](https://github.com/a/b/issues/7); a talk'
    """
    return _REPORT.sub(r"[\1#\2](https://github.com/\1/issues/\2)", _cell(source))


def _code(text: str) -> str:
    return f"`{text}`"
