"""The CPU backend: Triton's own IR, executed by `fa_verify.ttir`, which watches every access."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa_verify import ttir
from fa_verify.backends import footprint
from fa_verify.backends.base import Execution, Incident, Setup
from fa_verify.backends.call import call
from fa_verify.errors import InvalidInputError
from fa_verify.ran import SourceRan

if TYPE_CHECKING:
    import torch

    from fa_verify.inputs import Inputs
    from fa_verify.kernel import Kernel
    from fa_verify.problem import Problem

__all__ = ["CpuBackend"]


class CpuBackend:
    """Runs kernels on CPU tensors, all program instances in lockstep.

    Attributes:
        device: "cpu".
    """

    device = "cpu"

    def __init__(
        self,
        *,
        seconds: float | None = None,
        memory_limit: int = 4 << 30,
        alteration: ttir.Alteration | None = None,
    ) -> None:
        """Set the limits.

        Args:
            seconds: CPU-time limit of one run; past it the execution is a timeout.
            memory_limit: Bytes of live intermediates.
            alteration: Changes the kernels that run.
        """
        self._alteration = alteration
        self._seconds = seconds
        self._memory_limit = memory_limit

    def run(
        self, kernel: Kernel, problem: Problem, inputs: Inputs, setup: Setup, *, backward: bool
    ) -> Execution:
        """Run forward and, if asked, backward; report incidents and unwritten elements."""
        start = time.perf_counter()
        with ttir.redirected() as gpu, ttir.execute(self._options(kernel, setup)) as run:
            given = dict(inputs.named())
            for name, tensor in given.items():
                gpu.put(tensor)
                run.declare(tensor, name, written=True)
            footprint.label(run, problem, given)
            called = call(
                kernel,
                problem,
                inputs,
                backward=backward,
                unsupported=(ttir.Unsupported,),
                timeout=(ttir.TimeLimit,),
                forwarded=lambda x: footprint.label(run, problem, {"o": x.o, "lse": x.lse}),
            )
        seconds = time.perf_counter() - start
        tensors: dict[str, torch.Tensor | None] = {}
        if called.outputs is not None:
            tensors |= {"o": called.outputs.o, "lse": called.outputs.lse}
        if called.grads is not None:
            tensors |= called.grads.named()
        run.judge(footprint.footprints(problem, tensors))
        unwritten = {
            name: mask
            for name, tensor in tensors.items()
            if tensor is not None and (mask := run.unwritten(tensor)).any()
        }
        return Execution(
            outputs=called.outputs,
            grads=called.grads,
            incidents=tuple(_incident(incident) for incident in run.incidents),
            notes=tuple(_incident(note) for note in run.notes),
            unwritten=unwritten,
            error=called.error,
            error_kind=called.error_kind,
            error_at=called.error_at,
            stage=called.stage,
            config="; ".join(_launch_text(launch) for launch in run.launches),
            configs=max(run.configs.values(), default=1),
            seconds=seconds,
            ran=_ran(run.ran),
        )

    def _options(self, kernel: Kernel, setup: Setup) -> ttir.Options:
        if setup.float_model not in ttir.FLOAT_MODELS:
            msg = f"float={setup.float_model!r}: must be one of {', '.join(ttir.FLOAT_MODELS)}"
            raise InvalidInputError(msg)
        schedule, _, seed = setup.schedule.partition(":")
        return ttir.Options(
            schedule=schedule,  # type: ignore[arg-type]  # Setup.parse validated it
            schedule_seed=int(seed or 0),
            float_model=ttir.FLOAT_MODELS[setup.float_model],
            config=setup.config,
            memory_limit=self._memory_limit,
            origin=str(Path(kernel.target.rpartition(":")[0]).resolve()),
            alteration=self._alteration,
            deadline=None if self._seconds is None else time.thread_time() + self._seconds,
        )


def _incident(seen: ttir.Incident) -> Incident:
    fields: dict[str, Any] = {f.name: getattr(seen, f.name) for f in dataclasses.fields(Incident)}
    return Incident(**fields)


def _ran(found: ttir.Ran) -> dict[str, SourceRan]:
    """By file."""
    files = sorted({file for file, _ in found.compiled if file})
    return {
        file: SourceRan(
            ran=frozenset(line for at, line in found.ran if at == file),
            idle=frozenset(line for at, line in found.compiled - found.ran if at == file),
            ways=tuple(
                (line, way, met) for ((at, line), way), met in found.ways.items() if at == file
            ),
        )
        for file in files
    }


def _launch_text(launch: ttir.Launch) -> str:
    numbers = {name: x for name, x in launch.constants.items() if type(x) is int}
    constants = ", ".join(f"{name}={x}" for name, x in numbers.items())
    return f"{launch.kernel}({constants})"
