"""Reads records from disk and writes the report's files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.errors import InvalidInputError
from fa_verify.record import read
from fa_verify.report import compare as comparison
from fa_verify.report import html, markdown
from fa_verify.report.summary import Summary, summarise

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

__all__ = ["compare", "summary_of", "write"]


def summary_of(paths: Sequence[Path]) -> Summary:
    """The summary of records: .jsonl files, or folders, of which the newest run is taken.

    A run's files are called ``TIME-PROCESS[-WORKER].jsonl``; those of one run are merged.

    Raises:
        InvalidInputError: There is no such file, or it is no record.
    """
    found: list[Path] = []
    for path in paths:
        inside = _newest(path) if path.is_dir() else [path]
        if not inside:
            msg = f"record={str(path)!r}: the folder holds no .jsonl file; give a run's record"
            raise InvalidInputError(msg)
        found += inside
    return summarise(line for path in found for line in read(path))


def _newest(folder: Path) -> list[Path]:
    """The files of the newest run in a folder."""
    files = sorted(folder.glob("*.jsonl"))
    run = files[-1].stem.split("-")[:2] if files else []
    return [path for path in files if path.stem.split("-")[:2] == run]


def write(summary: Summary, folder: Path) -> tuple[Path, Path]:
    """Write report.html and report.md into the folder; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    page, text = folder / "report.html", folder / "report.md"
    page.write_text(html.render(summary), encoding="utf-8")
    text.write_text(markdown.render(summary), encoding="utf-8")
    return page, text


def compare(base: Path, head: Path, console: Console, *, markdown: bool) -> int:
    """Print how head compares with base; return the exit code."""
    result = comparison.compare(summary_of([base]), summary_of([head]))
    if markdown:
        console.print(comparison.markdown(result), markup=False, soft_wrap=True)
    else:
        comparison.show(console, result)
    return result.exit_code
