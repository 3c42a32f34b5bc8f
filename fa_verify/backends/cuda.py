"""The CUDA backend: the kernel runs on the card, on poisoned allocations, one configuration pinned.

A fault on the card cannot be undone inside a process: the process ends with `FAULT`, and whoever
started it records the case and starts another.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fa_verify.backends.base import FAULT, Execution
from fa_verify.backends.call import call
from fa_verify.backends.company import launched
from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.launch.autotune import pinned
from fa_verify.ttir.launch.forced import forced

if TYPE_CHECKING:
    from fa_verify.backends.base import Setup
    from fa_verify.inputs import Inputs
    from fa_verify.kernel import Kernel
    from fa_verify.problem import Problem

__all__ = ["CudaBackend"]

# Bit patterns that no right kernel writes from finite inputs: quiet NaNs with a payload, and for
# integers a large odd number that is out of range as an index.
_POISON = {
    torch.float16: (torch.int16, 0x7E5B),
    torch.bfloat16: (torch.int16, 0x7FDB),
    torch.float32: (torch.int32, 0x7FC5A5A5),
    torch.float64: (torch.int64, 0x7FF8A5A5A5A5A5A5),
    torch.int32: (torch.int32, 0x3FA5A5A5),
    torch.int64: (torch.int64, 0x3FA5A5A5A5A5A5A5),
}
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class CudaBackend:
    """Runs kernels on the current CUDA device.

    Attributes:
        device: "cuda".
    """

    device = "cuda"

    def __init__(self) -> None:
        # Autograd's thread has no context before its first cuBLAS call; torch then sets it.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")

    def run(
        self, kernel: Kernel, problem: Problem, inputs: Inputs, setup: Setup, *, backward: bool
    ) -> Execution:
        """Run forward and, if asked, backward, and wait for the card."""
        start = time.perf_counter()
        configs: dict[str, int] = {}
        chosen: dict[str, str] = {}
        options = {"num_warps": setup.warps, "num_stages": setup.stages}
        with (
            _Poisoned(),  # type: ignore[no-untyped-call]
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
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            sys.stderr.write(f"{kernel.name}: {error}\n")
            sys.stderr.flush()
            os._exit(FAULT)
        tensors: dict[str, torch.Tensor | None] = {}
        if called.outputs is not None:
            tensors |= {"o": called.outputs.o, "lse": called.outputs.lse}
        if called.grads is not None:
            tensors |= {name: getattr(called.grads, name) for name in ("dq", "dk", "dv")}
        left = {name: _poison_left(x) for name, x in tensors.items() if x is not None}
        some = torch.stack([mask.any() for mask in left.values()]).tolist() if left else []
        unwritten = {
            name: left[name] for name, any_left in zip(left, some, strict=True) if any_left
        }
        return Execution(
            outputs=called.outputs,
            grads=called.grads,
            unwritten=unwritten,
            error=called.error,
            error_kind=called.error_kind,
            stage=called.stage,
            config="; ".join(f"{name}({config})" for name, config in chosen.items()),
            configs=max(configs.values(), default=1),
            seconds=time.perf_counter() - start,
        )


class _Poisoned(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills whatever torch leaves uninitialised."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and result.dtype in _POISON and result.numel():
            integer, pattern = _POISON[result.dtype]
            result.view(integer).fill_(pattern)
        return result


def _poison_left(tensor: torch.Tensor) -> torch.Tensor:
    """Where the poison is still there: nobody wrote."""
    if tensor.dtype not in _POISON:
        return torch.zeros_like(tensor, dtype=torch.bool)
    integer, pattern = _POISON[tensor.dtype]
    return tensor.view(integer) == pattern
