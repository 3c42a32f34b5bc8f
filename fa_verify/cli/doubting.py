"""Commands that put the harness to the test: with known defects, and with small ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fa_verify.options import BUDGET, SEED, WORKERS, report_folder

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["mutate", "selftest"]


@click.command()
@click.argument("target", required=False)
@click.option(
    "--only", multiple=True, metavar="NAME", help="Only defects whose name begins so; repeatable."
)
@click.option(
    "--cases",
    type=click.IntRange(min=1),
    default=300,
    show_default=True,
    help="Most cases for each defect.",
)
@BUDGET
@SEED
@WORKERS
@click.option("--others", is_flag=True, help="Ask the oracles of other projects as well.")
@report_folder("fa-verify-selftest", "Folder of the table.")
def selftest(target: str | None, folder: Path, **options: Any) -> int:
    """Show what the oracle catches: known defects in small kernels, or put on TARGET's kernel."""
    from fa_verify.selftest import selftest as run  # noqa: PLC0415

    return run(target, folder, **options)


@click.command()
@click.argument("target")
@click.option(
    "--only", multiple=True, metavar="ID", help="Only mutants whose id begins so; repeatable."
)
@click.option(
    "--operators", multiple=True, metavar="NAME", help="Only this kind of change; repeatable."
)
@click.option(
    "--functions", multiple=True, metavar="NAME", help="Only this Triton function; repeatable."
)
@click.option(
    "--cases",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Cases of each kernel that mutants are tried on.",
)
@BUDGET
@SEED
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    default=None,
    help="At most so many mutants, evenly from functions and operators.  [default: all]",
)
@WORKERS
@click.option(
    "--min-score",
    type=click.FloatRange(min=0, max=100),
    default=None,
    help="Percent of mutants killed below which the exit code is 1.",
)
@report_folder("fa-verify-mutation", "Folder of the table.")
def mutate(target: str, folder: Path, **options: Any) -> int:
    """Plant small defects in TARGET's kernels and show which of them the suite does not see."""
    from fa_verify.mutation import mutate as run  # noqa: PLC0415

    return run(target, folder, **options)
