"""Commands that say what kernels take of a chip, and how fast they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fa_verify.bench.points import PEERS
from fa_verify.options import BUDGET, DTYPE, SEED, WORKERS, Seconds, most, report_folder, several

__all__ = ["bench", "resources"]


@click.command()
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


@click.command()
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
    from fa_verify.bench.running import bench as run  # noqa: PLC0415

    return run(targets, folder, causal=[mask == "causal" for mask in masks], **options)
