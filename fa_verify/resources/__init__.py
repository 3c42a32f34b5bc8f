"""`resources`: what each autotune configuration takes of chips that are not there.

Launchers run on the CPU, and what they launch is compiled by Triton for each chip, machine code and
all. No GPU is needed, and none is used.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from fa_verify import distribution, loader
from fa_verify.report import text
from fa_verify.resources import chips, findings, table
from fa_verify.resources.build import read, write
from fa_verify.resources.farm import Farm

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fa_verify.resources.findings import Limits

__all__ = ["resources"]

_NOTHING = 3
_LOG = 100  # columns where there is no terminal
_WORDS = {0: "PASS", 1: "FAIL", _NOTHING: "NOTHING"}


def resources(
    targets: Sequence[str],
    folder: Path,
    *,
    arch: str,
    cases: int,
    seed: int,
    dtype: str | None,
    workers: int | None,
    timeout: float,
    limits: Limits,
    baseline: Path | None,
    save: Path | None,
    cache: Path | None,
) -> int:
    """Compile what targets launch, print and write what it takes, return the exit code.

    Args:
        targets: Kernels, as `loader.load` reads them.
        folder: Where resources.jsonl is written.
        arch: Names of chips, commas between them.
        cases: Cases of each kernel whose launches are compiled.
        seed: Of the distribution that they are chosen from.
        dtype: Only this one.
        workers: Processes; None: one a core.
        timeout: Seconds that one compilation may take.
        limits: What is allowed.
        baseline: A file of builds to compare with.
        save: Where to write the builds for later runs to compare with.
        cache: Folder of what was compiled before; None: compile all.

    Returns:
        0; 1 where a build fails; 3 where nothing was compiled, or nothing compared.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _LOG)
    begin = time.monotonic()
    known = read(baseline) if baseline is not None else ()
    kernels = {kernel.target: kernel for target in targets for kernel in loader.load(target)}
    farm = Farm(workers or len(os.sched_getaffinity(0)), timeout, cache)
    wanted = chips.parse(arch)
    pairs = [
        (kernel, case)
        for kernel in kernels.values()
        for case in distribution.few(
            kernel.takes,
            cases,
            seed,
            dtype=dtype,
            backward=None if kernel.backward is not None else False,
        )
    ]
    for chip in wanted:
        farm.run(chip, pairs)
    builds = findings.judge(farm.builds, limits, known)
    write(folder / "resources.jsonl", builds, farm.refusals)
    if save is not None:
        write(save, builds)
    table.show(console, builds, farm.refusals)
    compared = len({b.identity for b in builds} & {b.identity for b in known})
    failing = sum(b.fails for b in builds) + sum(r.fails for r in farm.refusals)
    code = 1 if failing else _NOTHING if not builds or (known and not compared) else 0
    said = [
        f"{text.plural(len(builds), 'build')} of {text.plural(len(kernels), 'kernel')}",
        f"{failing} failing",
        *([f"{compared} in the baseline"] if baseline is not None else []),
        f"{farm.cached} compiled before",
        text.duration(time.monotonic() - begin),
    ]
    line = Text(_WORDS[code], style="bold red" if code else "bold green")
    line.append(f"  {', '.join(said)}", style="default not bold")
    console.print(line, soft_wrap=True)
    console.print(Text(str(folder / "resources.jsonl"), style="dim"), soft_wrap=True)
    return code
