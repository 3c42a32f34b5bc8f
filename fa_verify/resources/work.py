"""What runs inside a worker process, which takes itself for one chip: look at launches, compile."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fa_verify import loader, worker
from fa_verify.case import Case
from fa_verify.resources.chips import CHIPS
from fa_verify.resources.compiled import compiled, key
from fa_verify.resources.launches import launched
from fa_verify.ttir.launch import hopper

if TYPE_CHECKING:
    from fa_verify.kernel import Kernel
    from fa_verify.resources.build import Usage
    from fa_verify.resources.launches import Launched
    from fa_verify.ttir.launch.captured import Captured

__all__ = ["Looked", "Part", "build", "look", "start"]

_KEPT = 32  # launches of a case with a configuration, for the compilations that follow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A kernel to compile, as text: what `build` finds again."""

    key: str
    function: str
    location: str
    config: str
    index: int
    form: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What a case launches with every configuration; what a launcher raised, or the compiler."""

    parts: tuple[Part, ...]
    error: str
    compiling: bool


def start(chip: str) -> None:
    """Prepare the process: launchers find the chip that they are to choose for, and no other."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    worker.start(0.0, 0, cap=False)
    hopper.become(CHIPS[chip].target, CHIPS[chip].shared)


def look(target: str, case: str, chip: str) -> Looked:
    """Run the launchers on a case, once with each autotune configuration."""
    parts: dict[tuple[int, str], Part] = {}
    count, index, error, compiling = 1, 0, "", False
    while index < count:
        run = _launched(target, case, index)
        count = max(count, run.configs)
        if run.error and not compiling:
            error, compiling = run.error, run.compiling
        for kernel in run.kernels:
            part = _part(kernel, chip, index)
            parts[index, part.key] = part
        index += 1
    return Looked(parts=tuple(parts.values()), error=error, compiling=compiling)


def build(target: str, case: str, chip: str, part: Part) -> Usage:
    """Compile one of the kernels that `look` found."""
    for kernel in _launched(target, case, part.index).kernels:
        if key(kernel, CHIPS[chip]) == part.key:
            return compiled(kernel, CHIPS[chip])
    msg = f"{part.function}: launched on {case} when looked at, and not again"
    raise RuntimeError(msg)


@functools.cache
def _kernel(target: str) -> Kernel:
    (kernel,) = loader.load(target)
    return kernel


@functools.lru_cache(maxsize=_KEPT)
def _launched(target: str, case: str, index: int) -> Launched:
    return launched(_kernel(target), Case.parse(case), index)


def _part(kernel: Captured, chip: str, index: int) -> Part:
    file, line = kernel.location
    path, here = Path(file), Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return Part(
        key=key(kernel, CHIPS[chip]),
        function=kernel.name,
        location=f"{shown}:{line}",
        config=_config(kernel),
        index=index,
        form="; ".join(
            " ".join(f"{name}={_text(value)}" for name, value in sorted(part.items()))
            for part in (kernel.arguments, kernel.constants, kernel.options)
        ),
    )


def _config(kernel: Captured) -> str:
    """What an autotuner chose; or what is called a block, or else all sizes; warps and stages."""
    if kernel.config:
        pairs = [pair.partition(": ")[::2] for pair in kernel.config.split(", ")]
        usual = {"num_ctas": "1"}  # and whatever is None
        tuned = {k: v for k, v in pairs if v not in ("None", usual.get(k))}
    else:
        sizes = {k: str(v) for k, v in kernel.constants.items() if type(v) is int and v > 1}
        tuned = {k: v for k, v in sizes.items() if "BLOCK" in k.upper()} or sizes
        tuned |= {k: str(v) for k, v in kernel.options.items() if k in ("num_warps", "num_stages")}
    return " ".join(f"{name.removeprefix('num_')}={value}" for name, value in tuned.items())


def _text(value: object) -> str:
    return str(getattr(value, "__name__", None) or value)
