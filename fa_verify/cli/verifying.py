"""Commands that verify kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fa_verify import processes
from fa_verify.options import BUDGET, DTYPE, SEED, WORKERS, Seconds, fence, report_folder
from fa_verify.sanitizers.tools import TOOLS

__all__ = ["check", "list_kernels", "replay"]


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option(
    "--backend",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where kernels run; auto takes cuda where there is a device.",
)
@click.option(
    "--cases",
    type=click.IntRange(min=1),
    default=None,
    help="Cases for each kernel.  [default: 200, or what the budget allows]",
)
@BUDGET
@SEED
@WORKERS
@DTYPE
@click.option("--timeout", type=Seconds(), default=60.0, help="Limit of one case.  [default: 60s]")
@fence("poison", "What surrounds tensors on a card: nothing, poison, or poison and unmapped pages.")
@click.option(
    "--stress",
    is_flag=True,
    help="One case in 16 also runs many times under stress, and under every configuration.",
)
@click.option(
    "--long",
    is_flag=True,
    help="Cases of 131,072 keys and of tensors past 2^31 elements instead; one worker, on a card.",
)
@click.option(
    "--sanitizer",
    multiple=True,
    type=click.Choice(list(TOOLS)),
    help="Also run some cases under this tool on the card; repeatable.",
)
@click.option(
    "--sanitizer-cases",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Cases of each kernel under each of them.",
)
@report_folder("fa-verify-report", "Folder of record and report.")
@click.option(
    "--strict", is_flag=True, help="Unsupported cases and inconclusive elements fail too."
)
@click.option(
    "--examples",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".fa_verify/examples"),
    show_default=True,
    help="Folder of cases that failed before; they are run first.",
)
@click.option("--no-examples", is_flag=True, help="Neither run nor keep failed cases.")
def check(
    targets: tuple[str, ...],
    folder: Path,
    *,
    strict: bool,
    examples: Path,
    no_examples: bool,
    **options: Any,
) -> int:
    """Fuzz the kernels that TARGET names: a folder, a file, file.py:NAME or module:NAME."""
    processes.start()
    from fa_verify import checking  # noqa: PLC0415 - torch and Triton take seconds to load

    kept = None if no_examples else examples
    return checking.check(targets, folder, strict=strict, examples=kept, **options)


@click.command()
@click.argument("target")
@click.argument("case")
@click.option("--setup", default="", help="The setup of the replay line.")
@click.option("--source", default="", help="Source hash; a kernel that has changed is pointed out.")
@click.option(
    "--drawn", is_flag=True, help="Drawn at random, not found by a search: all bounds count."
)
@fence(None, "Other fences than the setup's.")
@click.option("--timeout", type=Seconds(), default=60.0, help="Limit of the case.  [default: 60s]")
def replay(target: str, case: str, **options: Any) -> int:
    """Run one CASE again on TARGET, as a replay line says."""
    processes.start()
    from fa_verify import checking  # noqa: PLC0415

    return checking.replay(target, case, **options)


@click.command(name="list")
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
def list_kernels(targets: tuple[str, ...]) -> int:
    """Show the kernels that TARGET names and what they declare."""
    from fa_verify import checking  # noqa: PLC0415

    return checking.list_kernels(targets)
