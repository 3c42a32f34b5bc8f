"""Runs what was written for device="cuda" on the CPU: `redirected`.

Owns everything outside single tensors that must be replaced for it: generators, autocast, custom
operators, timing loops. Single tensors are the business of `devices`, CUDA graphs of `graphs`,
torch.cuda's answers that of `hopper`.
"""

from __future__ import annotations

import functools
import math
import threading
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import triton.testing
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.launch import hopper, session
from fa_verify.ttir.launch.uncompiled import uncompiled
from fa_verify.ttir.scripts.autocast import autocasting
from fa_verify.ttir.scripts.devices import GPU, Devices, Inheritance, Redirection, real
from fa_verify.ttir.scripts.frontends import frontends
from fa_verify.ttir.scripts.graphs import Graph, graph_pool_handle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    _Keeper = Callable[[Callable[..., Any]], Callable[..., Any]]

_DEVICES = Devices()  # of the process: what modules made on the GPU as they loaded stays there
_TIMERS = ("do_bench", "do_bench_cudagraph")


@contextmanager
def redirected(*, benchmarks: bool = True) -> Iterator[Devices]:
    """Make tensors asked for on cuda on the CPU, and let them answer as if they were on cuda.

    Meant for a whole process: what other threads do is not redirected.

    Args:
        benchmarks: Whether triton.testing.do_bench calls its function (once) at all.

    Yields:
        Which tensors are believed to be on the GPU, so that others can be put there.
    """
    modes = (Inheritance(_DEVICES), Redirection(_DEVICES))
    with ExitStack() as stack:
        stack.enter_context(hopper.answering())
        stack.enter_context(autocasting())
        stack.enter_context(uncompiled())
        for owner, replacements in _replacements(modes[0].kernels, functools.partial(_kept, modes)):
            stack.enter_context(patch.multiple(owner, **replacements))
        for owner, replacements in frontends(_DEVICES):
            stack.enter_context(patch.multiple(owner, **replacements))
        timers: dict[str, Any] = dict.fromkeys(
            _TIMERS, functools.partial(_do_bench, run=benchmarks)
        )
        stack.enter_context(patch.multiple(triton.testing, **timers))
        for mode in modes:
            stack.enter_context(mode)
        yield _DEVICES


def _kept(modes: tuple[Inheritance, Redirection], fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with all modes on: torch switches them off while it runs its own functions."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        on = {id(mode) for mode in _get_current_dispatch_mode_stack()}
        on |= {id(mode) for mode in _get_current_function_mode_stack()}  # type: ignore[no-untyped-call]
        with torch._C._EnableTorchFunction(), ExitStack() as stack:  # noqa: SLF001
            wanted: tuple[AbstractContextManager[Any], ...]
            wanted = (modes[0], *session.watching(), modes[1])
            for mode in wanted:
                if id(mode) not in on:
                    stack.enter_context(mode)
            return fn(*args, **kwargs)

    return call


def _replacements(kernels: dict[str, Any], kept: _Keeper) -> Iterator[tuple[Any, dict[str, Any]]]:
    from fa_verify.ttir.launch.driver import Driver  # noqa: PLC0415 - needs triton's NVIDIA backend

    yield Driver, {"get_active_torch_device": lambda _: GPU}
    yield (
        torch.cuda,
        {
            "_lazy_init": _awake,
            "is_current_stream_capturing": session.capturing,
            "synchronize": lambda *_, **__: session.refuse_while_capturing(),
        },
    )
    graph = type("CUDAGraph", (Graph,), {"devices": _DEVICES})
    for owner in (torch.cuda, torch.cuda.graphs):
        yield owner, {"CUDAGraph": graph, "graph_pool_handle": graph_pool_handle}
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined] # noqa: SLF001
    yield torch.autograd, {"_engine_run_backward": kept(run_backward)}
    yield torch.library.Library, _libraries(kernels, kept)
    # Inside triton_op launches would go through an operator made for tracing, which refuses modes.
    yield torch.library, {"wrap_triton": lambda kernel: kernel}
    yield torch, {"Generator": _Generator}
    guards = torch._C._dynamo.guards  # noqa: SLF001 - what Inductor writes calls this
    yield guards, {"_empty_strided_cuda": _empty_strided}


def _awake() -> None:
    """torch.cuda._lazy_init, which torch's core calls where cuda is asked for and no mode looks.

    Raises:
        Unsupported: In a thread that is not redirected; a program that catches it shall not pass.
    """
    run = session.running()
    if run is None or threading.current_thread() is threading.main_thread():
        return
    with run.noting():
        msg = "cuda in a thread that the program started: only the main thread's is on the CPU"
        raise Unsupported(msg)


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=GPU)


class _Generator(torch.Generator):
    """A CPU generator that says it is where it was asked for."""

    def __new__(cls, device: Any = "cpu") -> Any:
        made: Any = super().__new__(cls, real(device))  # type: ignore[call-arg]
        made._asked = torch.device(device)  # noqa: SLF001 - our own attribute
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it was asked for."""
        asked: torch.device = self._asked  # type: ignore[attr-defined]
        return GPU if asked.type == "cuda" else asked


def _libraries(kernels: dict[str, Any], kept: _Keeper) -> dict[str, Any]:
    """Methods of torch.library.Library: kernels for CUDA are called for tensors believed there."""
    library: Any = torch.library.Library
    impl, destroy = library.impl, library._destroy  # noqa: SLF001
    owners: dict[str, Any] = {}

    def register(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
        if fn is torch.library.fallthrough_kernel:
            return impl(self, op_name, fn, dispatch_key, **kwargs)
        if dispatch_key != "CUDA":
            return impl(self, op_name, kept(fn), dispatch_key, **kwargs)
        name = (op_name if isinstance(op_name, str) else op_name.name()).removesuffix(".default")
        name = name if "::" in name else f"{self.ns}::{name}"
        kernels[name], owners[name] = kept(fn), self
        return None

    def forget(self: Any) -> None:
        for name in [name for name, owner in owners.items() if owner is self]:
            del kernels[name], owners[name]
        destroy(self)

    return {"impl": register, "_destroy": forget}


def _do_bench(fn: Callable[[], Any], *_: Any, run: bool, **options: Any) -> Any:
    """triton.testing.do_bench: run once and time nothing; not-a-number cannot be misread."""
    if run:
        fn()
    quantiles = options.get("quantiles")
    if quantiles is not None:
        return [math.nan] * len(quantiles) if len(quantiles) > 1 else math.nan
    return [math.nan] if options.get("return_mode") == "all" else math.nan
