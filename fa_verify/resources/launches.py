"""What a kernel under test launches on a case: its forward and backward run, nothing else does."""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import triton

from fa_verify import ttir
from fa_verify.backends.call import call
from fa_verify.inputs import materialise
from fa_verify.resources.compiled import words
from fa_verify.ttir.launch.captured import captured

if TYPE_CHECKING:
    from fa_verify.backends.call import Called
    from fa_verify.case import Case
    from fa_verify.kernel import Kernel
    from fa_verify.ttir.launch.captured import Captured

__all__ = ["Launched", "launched"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What one run launched.

    Attributes:
        kernels: In order, those that are the same more than once.
        configs: Configurations that the functions offer at most.
        error: Why it ended early, "" if it did not.
        compiling: Whether that is Triton's compiler's word, for the chip at hand. Anything else
            that a launcher raises is for `fa-verify check` to judge.
    """

    kernels: tuple[Captured, ...]
    configs: int
    error: str
    compiling: bool


def launched(kernel: Kernel, case: Case, config: int) -> Launched:
    """Run the launchers with one autotune configuration pinned.

    Launches are noted and not carried out. A launcher that raises, maybe for want of what a kernel
    would have written, runs once more with launches carried out.
    """
    found, configs, called = _run(kernel, case, config, run=False)
    if called.error_kind == "raised":
        found, configs, called = _run(kernel, case, config, run=True)
    return Launched(
        kernels=tuple(found),
        configs=configs,
        error=words(called.exception) if called.exception else called.error.partition("\n")[0],
        compiling=called.exception is not None and _compiling(called.exception),
    )


def _compiling(error: BaseException) -> bool:
    """Whether it was raised while Triton compiled, or read the options to compile with."""
    root = Path(triton.__file__).parent
    files = {Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)}
    parts = (root / "compiler", root / "backends")
    return any(file.is_relative_to(part) for file in files for part in parts)


def _run(
    kernel: Kernel, case: Case, config: int, *, run: bool
) -> tuple[list[Captured], int, Called]:
    inputs = materialise(case)
    options = ttir.Options(
        config=config,
        sanitize=False,
        origin=str(Path(kernel.target.rpartition(":")[0]).resolve()),
    )
    with (
        ttir.redirected() as gpu,
        ttir.execute(options) as execution,
        captured(config, execution.configs, run=run) as found,
    ):
        for name, tensor in inputs.named():
            gpu.put(tensor)
            execution.declare(tensor, name, written=True)
        called = call(
            kernel,
            case.problem,
            inputs,
            backward=case.backward,
            unsupported=(ttir.Unsupported,),
        )
    return found, max(execution.configs.values(), default=1), called
