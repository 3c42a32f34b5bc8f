"""Reads records from disk and writes the report's files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fa_verify.errors import InvalidInputError
from fa_verify.record import read, writing
from fa_verify.report import compare as comparison
from fa_verify.report import html, markdown
from fa_verify.report.matrix import Matrix, matrix, words
from fa_verify.report.matrix import markdown as matrix_markdown
from fa_verify.report.summary import Summary, summarise

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

__all__ = ["compare", "matrix_of", "merge", "summary_of", "write", "write_matrix"]

_DIGITS = 6  # of a number in a matrix's file: more than any page shows


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
    """Write report.html and report.md into the folder; their paths.

    Raises:
        UnwritableError: The folder cannot be written.
    """
    page, text = folder / "report.html", folder / "report.md"
    with writing("report", folder):
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text(html.render(summary), encoding="utf-8")
        text.write_text(markdown.render(summary), encoding="utf-8")
    return page, text


def matrix_of(paths: Sequence[Path]) -> Matrix:
    """The matrix of records and of matrices (.json) written before, added up.

    Of a folder its newest run is taken, or the matrix in it where it holds no record.

    Raises:
        InvalidInputError: There is no such file, or it is neither.
    """
    found = Matrix()
    for path in paths:
        inside = path / "matrix.json"
        if path.suffix == ".json" or (inside.is_file() and not _newest(path)):
            found += _read_matrix(path if path.suffix == ".json" else inside)
        else:
            summary = summary_of([path])
            found += matrix(summary.facts, summary.results)
    return found


def _read_matrix(path: Path) -> Matrix:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Matrix)
    except OSError as error:
        msg = f"matrix={str(path)!r}: cannot be read ({error.strerror}); give a matrix.json"
    except msgspec.DecodeError as error:
        msg = f"matrix={str(path)!r}: not a matrix of this version ({error})"
    raise InvalidInputError(msg)


def write_matrix(found: Matrix, folder: Path) -> tuple[Path, Path, Path]:
    """Write matrix.html, matrix.md and matrix.json into the folder; their paths.

    Raises:
        UnwritableError: The folder cannot be written.
    """
    page, text, data = (folder / f"matrix.{kind}" for kind in ("html", "md", "json"))
    with writing("matrix", folder):
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text(html.render_matrix(found), encoding="utf-8")
        text.write_text(matrix_markdown.render(found), encoding="utf-8")
        data.write_bytes(msgspec.json.encode(_rounded(msgspec.to_builtins(found))) + b"\n")
    return page, text, data


def merge(records: Sequence[Path], folder: Path, console: Console) -> int:
    """Write the matrix of records and matrices, say where it is; return the exit code.

    1: a case failed; 4: the harness broke in one; 3: none passed or failed; else 0.
    """
    found = matrix_of(records)
    for path in write_matrix(found, folder):
        console.print(str(path), soft_wrap=True, markup=False)
    console.print(words.headline(found), soft_wrap=True, markup=False)
    total = found.total
    return 1 if total.failed else 4 if total.broken else 0 if total.verified else 3


def _rounded(value: object) -> object:
    """The same with floats of `_DIGITS` digits, but next to 1."""
    if isinstance(value, float):
        short = float(f"{value:.{_DIGITS}g}")
        return value if short == 1.0 else short  # 1 is the line between pass and fail
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return value


def compare(base: Path, head: Path, console: Console, *, markdown: bool) -> int:
    """Print how head compares with base; return the exit code."""
    result = comparison.compare(summary_of([base]), summary_of([head]))
    if markdown:
        console.print(comparison.markdown(result), markup=False, soft_wrap=True)
    else:
        comparison.show(console, result)
    return result.exit_code
