"""Commands that read records."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

__all__ = ["compare", "matrix", "report"]


@click.command()
@click.argument(
    "records", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RECORD..."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("fa-verify-report"),
    show_default=True,
    help="Folder to write to.",
)
def report(records: tuple[Path, ...], output: Path) -> int:
    """Write report.html and report.md from records (.jsonl files, or folders of them)."""
    from fa_verify.report import files  # noqa: PLC0415

    console = Console(highlight=False)
    for path in files.write(files.summary_of(records), output):
        console.print(str(path), soft_wrap=True)
    return 0


@click.command()
@click.argument(
    "records", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RECORD..."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("fa-verify-matrix"),
    show_default=True,
    help="Folder to write to.",
)
def matrix(records: tuple[Path, ...], output: Path) -> int:
    """Write matrix.html, .md and .json: each kernel's errors by variant, precision and device.

    RECORD is a record (.jsonl) or a matrix.json, or a folder that holds such; all are added.
    """
    from fa_verify.report import files  # noqa: PLC0415

    return files.merge(records, output, Console(highlight=False))


@click.command()
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("head", type=click.Path(path_type=Path))
@click.option("--markdown", is_flag=True, help="Print Markdown, for a pull request.")
def compare(base: Path, head: Path, *, markdown: bool) -> int:
    """Gate HEAD against BASE: two records (or folders of them)."""
    from fa_verify.report import files  # noqa: PLC0415

    return files.compare(base, head, Console(highlight=False), markdown=markdown)
