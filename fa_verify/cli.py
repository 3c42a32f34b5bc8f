"""The command line, a function for each command.

All work is done below.

Exit codes: 0 all pass, 1 a kernel failed, 2 misuse, 3 nothing was verified or a sanitizer that was
asked for is unavailable, 4 the harness broke.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from fa_verify.bench.points import PEERS
from fa_verify.errors import InvalidInputError, KernelLoadError
from fa_verify.options import (
    BUDGET,
    DTYPE,
    SEED,
    WORKERS,
    Seconds,
    fence,
    most,
    report_folder,
    several,
)
from fa_verify.sanitizers.tools import TOOLS
from fa_verify.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_BROKE = 4
_MISUSE = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def _cli() -> None:
    """Numerical-correctness and fuzz-testing harness for Triton attention kernels."""


@_cli.command()
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
    from fa_verify import checking  # noqa: PLC0415 - torch and Triton take seconds to load

    kept = None if no_examples else examples
    return checking.check(targets, folder, strict=strict, examples=kept, **options)


@_cli.command()
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
    from fa_verify import checking  # noqa: PLC0415

    return checking.replay(target, case, **options)


@_cli.command()
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


@_cli.command()
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
    help="Cases that mutants are tried on.",
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


@_cli.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option(
    "--arch",
    default="sm_80,sm_90,sm_100,gfx942",
    show_default=True,
    help="Chips to compile for.",
)
@click.option(
    "--cases",
    type=click.IntRange(min=1),
    default=6,
    show_default=True,
    help="Cases of each kernel whose launches are compiled.",
)
@SEED
@DTYPE
@WORKERS
@click.option(
    "--timeout", type=Seconds(), default=300.0, help="Limit of one compilation.  [default: 5m]"
)
@most("registers", "Most registers of a thread.")
@most("spills", "Most bytes that a thread stores and loads for want of registers.")
@most("stack", "Most bytes of stack of a thread.")
@most("shared", "Most bytes of shared memory of a program.")
@click.option(
    "--tensor-cores", is_flag=True, help="Products that tensor cores can compute must use them."
)
@click.option(
    "--baseline",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Fail where a build takes more than in this file (more registers or spills, shared "
    "memory that no longer fits, tensor cores no longer used).",
)
@click.option(
    "--slack",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Registers that a build may take more of than the baseline.",
)
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Write a baseline to this file.",
)
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".fa_verify/resources"),
    show_default=True,
    help="Folder of what was compiled before.",
)
@click.option("--no-cache", is_flag=True, help="Compile everything.")
@report_folder("fa-verify-resources", "Folder of the record.")
def resources(
    targets: tuple[str, ...],
    folder: Path,
    *,
    cache: Path,
    no_cache: bool,
    tensor_cores: bool,
    slack: int,
    **options: Any,
) -> int:
    """Compile what TARGET launches for chips that are not there; show what it takes of them."""
    from fa_verify.resources import resources as run  # noqa: PLC0415
    from fa_verify.resources.findings import Limits  # noqa: PLC0415

    most = {name: options.pop(f"max_{name}") for name in ("registers", "spills", "stack", "shared")}
    limits = Limits(**most, tensor_cores=tensor_cores, slack=slack)
    return run(targets, folder, limits=limits, cache=None if no_cache else cache, **options)


@_cli.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@several(
    "direction", click.Choice(["forward", "backward", "decode"]), ("forward", "backward"), "Pass."
)
@several("dtype", click.Choice(["float16", "bfloat16"]), ("float16", "bfloat16"), "Of q, k, v.")
@several("head-dim", click.IntRange(1, 256), (64, 80, 96, 128, 256), "Of q, k, v.")
@several("seqlen", click.IntRange(min=1), (512, 1024, 2048, 4096, 8192, 16384), "Of q, k, v.")
@several("mask", click.Choice(["full", "causal"]), ("full", "causal"), "Who sees whom.")
@several("batch", click.IntRange(min=1), (1, 4, 16, 64), "Sequences decoded.")
@several("key", click.IntRange(min=1), (1024, 8192, 32768, 131072), "Of a sequence decoded.")
@several("peer", click.Choice(PEERS), ("fa2", "cudnn"), "PyTorch's attention; flex compiles long.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=16384,
    show_default=True,
    help="Batch times sequence length.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Turns of each contestant; the median counts.",
)
@click.option(
    "--milliseconds",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    help="Of launches in a turn.",
)
@BUDGET
@click.option(
    "-n",
    "--workers",
    type=click.IntRange(min=1),
    default=None,
    help="Compile beforehand in so many processes.",
)
@report_folder("fa-verify-bench", "Folder of bench.jsonl and bench.md.")
def bench(targets: tuple[str, ...], folder: Path, *, masks: tuple[str, ...], **options: Any) -> int:
    """Time TARGET's kernels on a CUDA device, side by side with PyTorch's attention."""
    from fa_verify.bench import bench as run  # noqa: PLC0415

    return run(targets, folder, causal=[mask == "causal" for mask in masks], **options)


@_cli.command(name="list")
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
def list_kernels(targets: tuple[str, ...]) -> int:
    """Show the kernels that TARGET names and what they declare."""
    from fa_verify import checking  # noqa: PLC0415

    return checking.list_kernels(targets)


@_cli.command()
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


@_cli.command()
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


@_cli.command()
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("head", type=click.Path(path_type=Path))
@click.option("--markdown", is_flag=True, help="Print Markdown, for a pull request.")
def compare(base: Path, head: Path, *, markdown: bool) -> int:
    """Gate HEAD against BASE: two records (or folders of them)."""
    from fa_verify.report import files  # noqa: PLC0415

    return files.compare(base, head, Console(highlight=False), markdown=markdown)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking must not start a context
    errors = Console(stderr=True, highlight=False)
    try:
        code = _cli.main(
            list(sys.argv[1:] if arguments is None else arguments),
            prog_name="fa-verify",
            standalone_mode=False,
        )
    except click.ClickException as error:
        error.show()
        code = _MISUSE
    except (InvalidInputError, KernelLoadError) as error:
        errors.print(f"fa-verify: {error}", style="red", markup=False, soft_wrap=True)
        code = _MISUSE
    except (click.Abort, KeyboardInterrupt):
        errors.print("fa-verify: interrupted; what was recorded is kept", markup=False)
        code = 130
    except Exception:  # noqa: BLE001 - ours to report: 4 says that the harness broke
        errors.print(traceback.format_exc(), markup=False, soft_wrap=True)
        code = _BROKE
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.exit(code or 0)
