"""Switches the executor on and off: `execute` for running kernels, `activated` for importing them.

Owns all global state that changes meanwhile (Triton's driver and backends, the autotuner,
torch.cuda's answers, torch's dispatch) and puts it back.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import triton
import triton.backends
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import cache
from triton.runtime.driver import driver as active_driver

from fa_verify.ttir.engine.coverage import Coverage, Ran, merged
from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.launch import hopper
from fa_verify.ttir.launch.allocations import Allocations
from fa_verify.ttir.launch.altered import altered
from fa_verify.ttir.launch.autotune import pinned
from fa_verify.ttir.launch.heap import keep_freed_memory
from fa_verify.ttir.launch.uncompiled import uncompiled
from fa_verify.ttir.memory.known import Memory
from fa_verify.ttir.options import Incident, Launch, Options
from fa_verify.ttir.sanitizer.findings import Findings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fa_verify.ttir.sanitizer.regions import Footprint

OLDEST, NEWEST = (3, 6), (3, 9)
_REFUSED = "CUDA error: operation not permitted when stream is capturing"  # cudaGetErrorString(900)
_running: list[Run] = []
_DEFAULT = Options()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations, and launches, for later."""

    def launch(self, step: Callable[[], object]) -> None:
        """Note a launch (called by the driver)."""
        raise NotImplementedError


class Run:
    """What an execution has seen so far.

    Attributes:
        options: As given to `execute`.
        launches: Kernels launched, in order.
        configs: Kernel name to the number of autotune configurations it offers, as far as seen.
        unsupported: What could not be run, also where somebody caught the exception.
        recorder: Notes launches for later instead of having them run, if there is one.
    """

    def __init__(self, options: Options, tell: Callable[[Incident], None] | None = None) -> None:
        """Start empty."""
        self.options = options
        self.launches: list[Launch] = []
        self.configs: dict[str, int] = {}
        self.unsupported: list[Unsupported] = []
        self.recorder: Recorder | None = None
        self._covered: dict[tuple[Coverage, bytes], None] = {}
        self.memory = Memory()
        self.findings = Findings(options.max_incidents, tell)
        self.allocations = Allocations(self.memory)

    @property
    def incidents(self) -> list[Incident]:
        """Incidents found, in order of first occurrence."""
        return self.findings.incidents

    @property
    def notes(self) -> list[Incident]:
        """What may be a mistake and may be none (docs/executor.md), in order of occurrence."""
        return self.findings.notes

    def declare(self, tensor: torch.Tensor, name: str, *, written: bool | torch.Tensor) -> None:
        """Register the elements of `tensor` (not its whole storage) under a name.

        Args:
            tensor: Any strided CPU tensor.
            name: For messages.
            written: False if reading them before somebody writes them is a mistake; a bool tensor,
                broadcast over the tensor's shape, says it of each.
        """
        self.memory.declare(tensor, name, written=written)

    def label(self, tensor: torch.Tensor, name: str, labels: torch.Tensor) -> None:
        """Divide a tensor into regions, so that `judge` can tell who read which.

        Args:
            tensor: Any strided CPU tensor.
            name: For `Footprint.reads` and messages.
            labels: Region of each element, integers from 0, broadcast over the tensor's shape.
        """
        self.memory.regions.label(tensor, name, labels)

    def judge(self, footprints: Sequence[Footprint]) -> None:
        """Report what programs read that has no part in what they wrote ("neighbour-read").

        A program may read what any footprint allows it for any region that it wrote; one that wrote
        to none of the tensors is not judged.
        """
        self.memory.regions.judge(footprints, self.findings)

    def unwritten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bool tensor of `tensor`'s shape: elements that nobody wrote."""
        return self.memory.unwritten(tensor)

    @property
    def ran(self) -> Ran:
        """Which lines and ways of the kernels' sources ran in any launch."""
        return merged(coverage.ran(flags) for coverage, flags in self._covered)

    @contextmanager
    def covering(self, coverage: Coverage) -> Iterator[None]:
        """Remember what of a kernel ran (called by the driver)."""
        try:
            yield
        finally:
            self._covered[coverage, bytes(coverage.flags)] = None

    def record_launch(self, **fields: Any) -> None:
        """Note a launch (called by the driver)."""
        self.launches.append(Launch(**fields))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Remember what cannot be run."""
        try:
            yield
        except Unsupported as error:
            self.unsupported.append(error)
            raise


def current() -> Run:
    """The execution under way.

    Raises:
        RuntimeError: A kernel was launched outside `execute`.
    """
    if not _running:
        msg = "a kernel was launched outside `with ttir.execute(...)`"
        raise RuntimeError(msg)
    return _running[-1]


def running() -> Run | None:
    """The execution under way, if there is one."""
    return _running[-1] if _running else None


def capturing() -> bool:
    """Whether launches are noted for later."""
    return bool(_running) and _running[-1].recorder is not None


def refuse_while_capturing() -> None:
    """Stand for what waits for the GPU.

    Raises:
        RuntimeError: Launches are noted for later.
    """
    if capturing():
        raise RuntimeError(_REFUSED)


def watching() -> tuple[TorchDispatchMode, ...]:
    """The torch dispatch modes of the execution under way, the last to come first."""
    modes = ((run.allocations, run.recorder) for run in _running)
    return tuple(mode for pair in modes for mode in pair if mode is not None)


def version() -> tuple[int, int]:
    """Triton's (major, minor)."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def available() -> bool:
    """Whether this Triton is one of those the executor is tested on (3.6 to 3.9)."""
    return OLDEST <= version() <= NEWEST


@contextmanager
def activated() -> Iterator[None]:
    """Let kernel modules be imported without a GPU: driver, backends, torch.cuda's answers."""
    # These import Triton's backends and this module.
    from fa_verify.ttir.launch.artefacts import on_demand  # noqa: PLC0415
    from fa_verify.ttir.launch.compiler import Compiler, installation  # noqa: PLC0415
    from fa_verify.ttir.launch.driver import Driver  # noqa: PLC0415
    from fa_verify.ttir.launch.rocm import RocmCompiler  # noqa: PLC0415

    backends = triton.backends.backends
    saved, saved_driver = dict(backends), active_driver._active  # noqa: SLF001
    try:
        # Their targets are ours now.
        if hopper.target().backend == "cuda":
            del backends["nvidia"]
            compiler: Any = Compiler
        else:
            del backends["amd"]
            compiler = RocmCompiler
        backends["fa_verify"] = triton.backends.Backend(compiler=compiler, driver=Driver)
        active_driver.set_active(Driver())
        keyed = patch.object(cache, "triton_key", installation)
        with hopper.answering(), keyed, on_demand():
            yield
    finally:
        backends.clear()
        backends.update(saved)
        active_driver._active = saved_driver  # noqa: SLF001


@contextmanager
def execute(
    options: Options = _DEFAULT, *, tell: Callable[[Incident], None] | None = None
) -> Iterator[Run]:
    """Run Triton kernels on CPU tensors until the context ends.

    Args:
        options: How to execute.
        tell: Hears of each incident when it first occurs.

    Yields:
        The run: incidents and launches appear in it as they happen.

    Raises:
        RuntimeError: Executions are nested.
    """
    if _running:
        msg = "ttir.execute(...) is already active: executions cannot be nested"
        raise RuntimeError(msg)
    from fa_verify.ttir.launch.compiler import origin  # noqa: PLC0415 - needs triton's NVIDIA backend

    keep_freed_memory()
    run = Run(options, tell)
    with ExitStack() as stack:
        stack.enter_context(activated())
        stack.callback(origin.reset, origin.set(options.origin or str(Path.cwd())))
        stack.enter_context(pinned(options.config, run.configs))
        stack.enter_context(uncompiled())
        if options.alteration is not None:
            stack.enter_context(altered(options.alteration))
        _running.append(run)
        stack.callback(_running.clear)
        stack.enter_context(run.allocations)
        stack.enter_context(patch.object(torch.Tensor, "numpy", run.allocations.seen_by_numpy))
        yield run
