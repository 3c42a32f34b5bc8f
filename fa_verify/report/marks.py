"""Markdown's marks: tables, code blocks, and text that is shown as it is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from fa_verify.report import text

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["escape", "fence", "table"]

_FENCE: Final = "```"


def table(head: Sequence[str], body: Sequence[Sequence[str]], *, left: int) -> str:
    """A table whose first `left` columns and last one are aligned left, the others right."""
    last = len(head) - 1
    rule = [":--" if index < left or index == last else "--:" for index in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *body))


def fence(content: Sequence[str], language: str = "") -> str:
    """A code block whose fence is longer than any run of backticks inside it."""
    mark = _FENCE
    while any(mark in line for line in content):
        mark += "`"
    return "\n".join((mark + language, *content, mark))


def escape(content: str) -> str:
    r"""Text that Markdown shows as it is, in a table too.

    >>> escape("a|b <img> *c* @someone")
    'a\\|b &lt;img> \\*c\\* @\u200bsomeone'
    """
    found = text.clean(content).replace("\\", "\\\\").replace("&", "&amp;")
    found = re.sub(r"(?<!\w)_|_(?!\w)", r"\_", found)
    for char in "|*[]`~#":
        found = found.replace(char, "\\" + char)
    found = re.sub("^>", "&gt;", found.replace("<", "&lt;"))
    return found.replace("@", "@\u200b")  # a zero-width space: nobody is notified
