"""The watched process: runs a planted fault, or a kernel on a case, and judges nothing.

``python -m fa_verify.sanitizers.child REPORT probe NAME``, or ``REPORT case TARGET CASE CONFIG``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import torch
import triton
from triton.runtime.jit import JITFunction

from fa_verify import loader
from fa_verify.backends.call import call
from fa_verify.case import Case
from fa_verify.inputs import materialise
from fa_verify.sanitizers.probes import PROBES
from fa_verify.ttir.launch.autotune import pinned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Report", "moved"]

_BYTES = 16  # the alignment that Triton specialises on


class Report(msgspec.Struct):
    """What the process did; written before the card is waited for, and again after.

    Attributes:
        device: What torch calls the card; "": it sees none.
        kernels: Triton functions that were launched, with their files.
        tensors: Address and bytes of each input by name.
        configs: Autotune configurations offered.
        error: What the kernel raised, its kind and words.
        done: The card has finished, and without a fault.
    """

    device: str = ""
    kernels: dict[str, str] = {}
    tensors: dict[str, tuple[int, int]] = {}
    configs: int = 1
    error_kind: str = ""
    error: str = ""
    done: bool = False


def main(path: str, kind: str, *arguments: str) -> None:
    """Run, and keep `path` up to date: a fault may end the process at any time."""
    report = Report()
    keep = functools.partial(_write, Path(path), report)
    keep()
    if not torch.cuda.is_available():
        return
    report.device = torch.cuda.get_device_name()
    keep()
    if os.environ.get("TRITON_INSTRUMENTATION_MODE"):
        triton.set_allocator(_bytes)  # consan keeps its books in memory of the launch
    with _pool(), _noted(report, keep):
        if kind == "probe":
            PROBES[arguments[0]]()
        else:
            _run(report, keep, *arguments)
        keep()
        torch.cuda.synchronize()
    report.done = True
    keep()


def _bytes(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    del alignment, stream
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _run(report: Report, keep: Callable[[], None], target: str, text: str, config: str) -> None:
    (kernel,) = loader.load(target)
    case = Case.parse(text)
    given = materialise(case)
    inputs = given.having({name: moved(tensor, "cuda") for name, tensor in given.named()})
    storages = {name: tensor.untyped_storage() for name, tensor in inputs.named()}
    report.tensors = {name: (x.data_ptr(), x.nbytes()) for name, x in storages.items()}
    keep()
    configs: dict[str, int] = {}
    with pinned(int(config), configs):
        called = call(kernel, case.problem, inputs, backward=case.backward)
    report.configs = max(configs.values(), default=1)
    report.error_kind, report.error = called.error_kind, called.error.partition("\n")[0]


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on a device, in an allocation that ends with its last element.

    What is before its first element is kept as far as it decides the address modulo 16 bytes.
    """
    before = tensor.storage_offset() % (_BYTES // tensor.element_size())
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = tensor.as_strided((before + span,), (1,), tensor.storage_offset() - before)
    return memory.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), before)


@contextlib.contextmanager
def _noted(report: Report, keep: Callable[[], None]) -> Iterator[None]:
    """Remember what is launched, before and after: a name may be chosen as it is compiled."""
    run = JITFunction.run

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        file = self.fn.__code__.co_filename
        report.kernels[self.__name__] = file
        keep()
        compiled = run(self, *args, **kwargs)
        report.kernels[getattr(compiled, "name", None) or self.__name__] = file
        return compiled

    with patch.object(JITFunction, "run", launch):
        yield


def _pool() -> contextlib.AbstractContextManager[Any]:
    """Triton's global-memory sanitizer wants tensors from its own allocator."""
    if os.environ.get("TRITON_INSTRUMENTATION_MODE") != "gsan":
        return contextlib.nullcontext()
    from triton.experimental.gsan._allocator import create_mem_pool  # noqa: PLC0415 - Triton 3.8 on

    return torch.cuda.use_mem_pool(create_mem_pool())


def _write(path: Path, report: Report) -> None:
    path.write_bytes(msgspec.json.encode(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
