"""The CUDA backend: the kernel runs on the card, between fences, one configuration pinned.

A fault on the card cannot be undone inside a process: the process ends with `FAULT`, and whoever
started it records the case and starts another.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import warnings
from typing import TYPE_CHECKING

import torch

from fa_verify.backends.base import FAULT, Execution
from fa_verify.backends.call import call
from fa_verify.backends.company import launched
from fa_verify.backends.fences import poison
from fa_verify.backends.fences.guard import Guard
from fa_verify.backends.fences.pages import Pages
from fa_verify.spool import Spool
from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.launch.autotune import pinned
from fa_verify.ttir.launch.forced import forced

if TYPE_CHECKING:
    from fa_verify.backends.base import Setup
    from fa_verify.backends.fences.fence import Fence
    from fa_verify.inputs import Inputs
    from fa_verify.kernel import Kernel
    from fa_verify.problem import Problem
    from fa_verify.spool import Launch

__all__ = ["CudaBackend"]


class CudaBackend:
    """Runs kernels on the current CUDA device.

    Attributes:
        device: "cuda".
    """

    device = "cuda"

    def __init__(self, spool: Spool | None = None) -> None:
        """Say in a spool what is about to be launched."""
        self._spool = spool or Spool(None)
        self._guard = Guard("cuda", lambda: Pages(torch.cuda.current_device()))
        # Autograd's thread has no context before its first cuBLAS call; torch then sets it.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")

    def run(
        self, kernel: Kernel, problem: Problem, inputs: Inputs, setup: Setup, *, backward: bool
    ) -> Execution:
        """Run forward and, if asked, backward, and wait for the card."""
        fence = setup.fence
        start = time.perf_counter()
        configs: dict[str, int] = {}
        chosen: dict[str, str] = {}
        options = {"num_warps": setup.warps, "num_stages": setup.stages}
        by_itself = fence.mode == "page" and setup.beside == "nothing"

        def begins(launch: Launch) -> None:
            self._spool.launch(launch, str(fence), alone=by_itself)

        with (
            self._guard.around(
                inputs,
                fence,
                unaligned=_unaligned(kernel, problem, fence),
                begins=begins,
                ended=self._wait if by_itself else lambda: None,
            ),
            pinned(setup.config, configs, chosen),
            forced(**{name: value for name, value in options.items() if value}),
        ):
            called = launched(
                setup.beside,
                lambda given: call(
                    kernel, problem, given, backward=backward, unsupported=(Unsupported,)
                ),
                inputs,
            )
        self._wait()
        tensors: dict[str, torch.Tensor | None] = {}
        if called.outputs is not None:
            tensors |= {"o": called.outputs.o, "lse": called.outputs.lse}
        if called.grads is not None:
            tensors |= called.grads.named()
        return Execution(
            outputs=called.outputs,
            grads=called.grads,
            incidents=self._guard.incidents(fence),
            unwritten={} if fence.mode == "off" or fence.finite else _unwritten(tensors),
            error=called.error,
            error_kind=called.error_kind,
            error_at=called.error_at,
            stage=called.stage,
            config="; ".join(f"{name}({config})" for name, config in chosen.items()),
            configs=max(configs.values(), default=1),
            seconds=time.perf_counter() - start,
        )

    def _wait(self) -> None:
        """Wait for the card; a fault ends the process, for its context is lost."""
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
            self._spool.fault(said)
            sys.stderr.write(f"{said}\n")
            sys.stderr.flush()
            os._exit(FAULT)


def _unwritten(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Where poison is still there, of those tensors in which it is."""
    left = {name: poison.left(x) for name, x in tensors.items() if x is not None}
    some = torch.stack([mask.any() for mask in left.values()]).tolist() if left else []
    return {name: left[name] for name, any_left in zip(left, some, strict=True) if any_left}


def _unaligned(kernel: Kernel, problem: Problem, fence: Fence) -> set[str]:
    """The inputs that the kernel takes at any offset, asked where the fence is flush."""
    if not fence.flush or kernel.takes is None:
        return set()
    moved = {
        name: dataclasses.replace(getattr(problem, f"layout_{name}"), offset=1)
        for name in ("q", "k", "v", "do", *(("bias",) if problem.bias else ()))
    }
    return {
        name
        for name, layout in moved.items()
        if not kernel.takes.reason_against(
            dataclasses.replace(problem, **{f"layout_{name}": layout})
        )
    }
