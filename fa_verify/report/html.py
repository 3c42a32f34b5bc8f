"""The report as one HTML file: no script, no request, light and dark.

The page forbids scripts and requests to itself (Content-Security-Policy), and jinja2 escapes every
text: messages and case lines come from files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import jinja2

from fa_verify.report import text
from fa_verify.report.charts import charts
from fa_verify.report.coverage import place
from fa_verify.report.headline import caveats, headline, remark, where, word
from fa_verify.report.matrix import matrix, words
from fa_verify.report.sanitized import sentences
from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from fa_verify.report.matrix import Matrix
    from fa_verify.report.summary import Summary

__all__ = ["render", "render_matrix"]

_FAULTS: Final = 100  # shown in full
_NOTES: Final = 100


def environment() -> jinja2.Environment:
    """Templates, and the words and numbers that they write."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("fa_verify.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        clean=text.clean,
        count=text.count,
        duration=text.duration,
        heat=_heat,
        lines=text.lines,
        number=text.number,
        plural=text.plural,
        share=text.share,
    )
    found.globals.update(bias=words.bias, missing=words.missing, ulps=words.ulps)
    return found


def render(summary: Summary) -> str:
    """The whole page."""
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            summary=summary,
            word=word(summary),
            headline=headline(summary),
            caveats=caveats(summary),
            remark=remark,
            where=where,
            tensors=summary.tensors,
            verdicts=Verdict,
            charts=charts(summary),
            place=place,
            faults=summary.faults[:_FAULTS],
            notes=summary.notes[:_NOTES],
            watched=list(sentences(summary.sanitized)),
            matrix=matrix(summary.facts, summary.results),
            how=words.HOW,
        )
    )


def render_matrix(found: Matrix) -> str:
    """A page of a matrix alone."""
    return (
        environment()
        .get_template("matrix_page.html.j2")
        .render(matrix=found, headline=words.headline(found), how=words.HOW)
    )


def _heat(ratio: float) -> str:
    """Class of a cell: how much of its bound an error uses.

    >>> [_heat(ratio) for ratio in (0.0, 0.2, 0.5, 0.9, 1.1)]
    ['heat-0', 'heat-1', 'heat-2', 'heat-3', 'heat-over']
    """
    if ratio > 1:
        return "heat-over"
    return f"heat-{sum(ratio > edge for edge in (0.1, 0.3, 0.7))}"
