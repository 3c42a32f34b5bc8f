"""The driver half of the Triton backend: a "device" whose launcher executes TTIR on CPU tensors."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from triton.backends.driver import DriverBase
from triton.compiler.compiler import CompiledKernel

from fa_verify.ttir.engine.program import TensorDescriptorArgument, edited, program_for
from fa_verify.ttir.launch import hopper, session
from fa_verify.ttir.launch.hopper import PROPERTIES
from fa_verify.ttir.launch.scratch import Scratch
from fa_verify.ttir.sanitizer import births, claims, wraps
from fa_verify.ttir.sanitizer.findings import Site
from fa_verify.ttir.sanitizer.orders import Orders

if TYPE_CHECKING:
    from collections.abc import Callable

    from triton.backends.compiler import GPUTarget

    from fa_verify.ttir.engine.program import Program
    from fa_verify.ttir.launch.session import Run
    from fa_verify.ttir.options import Options
    from fa_verify.ttir.sanitizer.findings import Findings

# Triton keeps one cache of compiled kernels a device index; no real GPU has this one.
DEVICE = 90_777
# Launchers divide by a kernel's number of registers; there is no allocation to count. A Hopper's
# 65536 registers fill its 2048 threads of a multiprocessor at 32 a thread.
REGISTERS, THREADS = 32, 1024


class Module(bytes):
    """What we load: the TTIR itself."""


def _keep_modules_ours() -> None:
    """Let a kernel that dies after its execution ask no other driver to unload our module."""
    unload = getattr(CompiledKernel, "__del__", None)  # Triton 3.8 has it, 3.7 does not

    def unload_others(kernel: Any) -> None:
        if unload is not None and not isinstance(getattr(kernel, "module", None), Module):
            unload(kernel)

    if unload is not None:
        CompiledKernel.__del__ = unload_others


_keep_modules_ours()


_MOST_PROGRAMS = ((1 << 31) - 1, (1 << 16) - 1)  # of axis 0, and of axes 1 and 2


class Utilities:
    """What Triton asks of a driver besides launching."""

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[Module, bytes, int, int, int]:
        """Return (module, function, registers, spills, most threads)."""
        del name, shared, device
        return Module(kernel), kernel, REGISTERS, 0, THREADS

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return a Hopper's limits under the names Triton uses."""
        del device
        return dict(PROPERTIES)

    def unload_module(self, module: Any) -> None:
        """Nothing was loaded."""


class Launcher:
    """Runs one compiled kernel; Triton makes one for each."""

    def __init__(self, src: Any, metadata: Any) -> None:
        """Remember the kernel's signature."""
        self.src, self.metadata = src, metadata
        fn = getattr(src, "fn", None)
        self.file = fn.fn.__code__.co_filename if fn is not None else ""
        self.signature = list(src.signature.items())
        self.line = fn.fn.__code__.co_firstlineno if fn is not None else 0
        self._text: tuple[bytes, str] = (b"", "")  # decoded, and so hashed, once
        self._scratch = Scratch("", metadata, None)
        arg_names = getattr(fn, "arg_names", [])
        constants = getattr(src, "constants", {})
        self.constants = {
            arg_names[path[0]]: value
            for path, value in constants.items()
            if len(path) == 1 and path[0] < len(arg_names)
        }

    def __call__(  # noqa: PLR0917 - Triton's calling convention
        self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: bytes, packed: Any,
        launch_metadata: Any, enter: Any, leave: Any, *args: Any,
    ) -> None:  # fmt: skip
        """Launch, synchronously."""
        del stream, packed
        run = session.current()
        if self._text[0] is not function:
            self._text = (function, function.decode())
            self._scratch = Scratch(self._text[1], self.metadata, self.src.language)
        text = self._text[1]
        if grid_x > _MOST_PROGRAMS[0] or max(grid_y, grid_z) > _MOST_PROGRAMS[1]:
            # What a GPU's driver answers; CUDA C++ Programming Guide, "Technical Specifications".
            msg = (
                f"Triton Error [CUDA]: invalid argument: grid=({grid_x}, {grid_y}, {grid_z}): "
                f"axis 0 ends at {_MOST_PROGRAMS[0]} programs, axes 1 and 2 at {_MOST_PROGRAMS[1]}"
            )
            raise RuntimeError(msg)
        grid = grid_x, grid_y, grid_z
        self._scratch.allocate(grid, partial(self._report_scratch, run))
        if enter is not None:
            enter(launch_metadata)
        step = partial(self._run, text, grid, args)
        if run.recorder is None:
            step()
        else:
            run.recorder.launch(step)
        if leave is not None:
            leave(launch_metadata)

    def _run(self, text: str, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        """Execute now."""
        run = session.current()
        began = time.perf_counter()
        flat: list[tuple[str, Any]] = []
        for (name, type_), value in zip(self._given(len(args)), args, strict=True):
            _flatten(str(name), type_, value, flat)
        names, values = [name for name, _ in flat], [value for _, value in flat]
        with (
            run.noting(),
            torch.utils._python_dispatch._disable_current_modes(),  # noqa: SLF001
            torch._C.DisableTorchFunction(),  # noqa: SLF001 - devices must not be redirected
        ):
            program = self._program(text, run.options)
            compiled = time.perf_counter()
            if run.options.sanitize:
                self._check_constants(program, args, run.findings)
            launch = partial(program.run, names, values, grid, memory=run.memory)
            orders = Orders(program, names, values) if run.options.sanitize else None
            program.coverage.clear()
            with run.covering(program.coverage):
                launch(options=run.options, findings=run.findings)
            if orders is not None:
                looks = [wraps.confirm, claims.confirm]
                if run.options.alteration is None:  # of a kernel that was altered, why is known
                    looks.insert(0, births.explain)
                with contextlib.redirect_stdout(None):  # what runs again has printed
                    for look in looks:
                        look(
                            program, text, self.file, names, values, grid, run.options,
                            run.memory, run.findings,
                        )  # fmt: skip
                    orders.compare(launch, run.options, grid, run.findings)
        run.record_launch(
            kernel=self.metadata.name, grid=grid, constants=self.constants,
            num_warps=self.metadata.num_warps, num_stages=self.metadata.num_stages,
            source_hash=getattr(self.metadata, "ttir_hash", ""),
            seconds_compile=compiled - began, seconds_run=time.perf_counter() - compiled,
        )  # fmt: skip

    def _program(self, text: str, options: Options) -> Program:
        edit = options.alteration.edit(self.metadata.name) if options.alteration else None
        if edit is None:
            return program_for(text, self.file, options.float_model)
        return edited(text, self.file, options.float_model, edit)

    def _given(self, count: int) -> list[tuple[Any, Any]]:
        """The parameters that `count` arguments stand for.

        Raises:
            TypeError: There are too few or too many, where CUDA's launcher refuses them too: before
                Triton 3.7 it counts, after it never looks at constants in the end.
        """
        given, rest = self.signature[:count], self.signature[count:]
        optional = session.version() >= (3, 7) and all(type_ == "constexpr" for _, type_ in rest)
        if count != len(self.signature) and not (rest and optional):
            msg = (
                f"{self.metadata.name}: {count} arguments given to a compiled kernel that takes "
                f"{len(self.signature)}, constants included"
            )
            raise TypeError(msg)
        return given

    def _report_scratch(self, run: Run, detail: str) -> None:
        if run.options.sanitize:
            site = Site(self.metadata.name, self.file, self.line, masked=False)
            run.findings.add("out-of-bounds-write", site, "scratch memory", (0, 0, 0), 0, 1, detail)

    def _check_constants(self, program: Program, args: Any, findings: Findings) -> None:
        pairs = zip(self.signature, args, strict=False)
        given = [(name, value) for (name, type_), value in pairs if type_ == "constexpr"]
        program.specialisation.constants(given, self.constants, findings)


def _flatten(name: str, type_: Any, value: Any, flat: list[tuple[str, Any]]) -> None:
    """One Python argument as the TTIR function's arguments, which are added to `flat`."""
    if type_ == "constexpr":
        return
    if isinstance(type_, tuple):
        for i, (inner, part) in enumerate(zip(type_, value, strict=True)):
            _flatten(f"{name}.{i}", inner, part, flat)
    elif isinstance(type_, str) and type_.startswith("tensordesc"):
        shape, strides = tuple(map(int, value.shape)), tuple(map(int, value.strides))
        padded = getattr(value, "padding", "zero") == "nan"
        rounded = bool(getattr(value, "round_f32_to_tf32", False))
        flat.append((name, TensorDescriptorArgument(value.base, shape, strides, padded, rounded)))
        flat += [(f"{name}.shape.{i}", x) for i, x in enumerate(shape)]
        flat += [(f"{name}.stride.{i}", x) for i, x in enumerate(strides)]
    else:
        flat.append((name, value))


class Driver(DriverBase):  # type: ignore[misc]
    """Answers as the driver of one Hopper; tensors live on the CPU."""

    launcher_cls = Launcher

    def __init__(self) -> None:
        """Load nothing: there is no device."""
        super().__init__()
        self.utils = Utilities()

    @classmethod
    def is_active(cls) -> bool:
        """Triton knows of us only while we are active."""
        return True

    def get_current_target(self) -> GPUTarget:
        """Return the target kernels are compiled for."""
        return hopper.target()

    def get_active_torch_device(self) -> torch.device:
        """Return where tensors are to be."""
        return torch.device("cpu")

    def get_current_device(self) -> int:
        """Return our index, which no GPU has."""
        return DEVICE

    def set_current_device(self, device: int) -> None:
        """There is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the default stream."""
        del device
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        """Return our chip's."""
        del device
        return hopper.capability()

    def get_device_interface(self) -> Any:
        """Return torch.cuda, which answers for us while we are active."""
        return torch.cuda

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return a C type; nothing is ever compiled from it."""
        return "void *" if ty.startswith("*") else ty

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Run once and time nothing."""

        def once(
            kernel_call: Callable[[], Any], *, quantiles: list[float], **_: Any
        ) -> list[float]:
            kernel_call()
            return [0.0] * len(quantiles)

        return once

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Nothing is timed, so there is no cache to flush."""
        return torch.zeros(1, dtype=torch.int)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """See get_empty_cache_for_benchmark."""

    def assemble_tensormap_to_arg(self, tensormaps_info: Any, args: Any) -> Any:
        """Descriptors stay as they are."""
        del tensormaps_info
        return args
