"""Watches torch: poisons what is allocated uninitialised and notes what is written.

Results of `empty` and its kin are filled with NaN (or a large odd integer) and count as never
written; whatever torch operations write in place counts as written; all other results are written
by nature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from fa_verify.ttir.memory.views import span_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fa_verify.ttir.memory.known import Memory

EMPTY = frozenset({
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
    "aten::new_empty_strided", "aten::empty_permuted",
})  # fmt: skip
_RESIZES = frozenset({torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default})
_numpy = torch.Tensor.numpy
_ODD = 0x5A5A5A5A5A5A5A5B
# Filling memory makes it resident: beyond this many bytes only the note that nobody wrote is kept.
_FILLED = 1 << 28


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The torch dispatch mode of an execution."""

    supports_higher_order_operators = True  # their parts are operations like others

    def __init__(self, memory: Memory) -> None:
        """Report to `memory`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self._kinds: dict[Any, tuple[tuple[int, str], ...] | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that torch.compile needs no shield: making one loads a second's worth of modules."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and note its effect."""
        del types
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        if func in _RESIZES:
            return self._resize(func, args, kwargs)
        result = func(*args, **kwargs)
        if func not in self._kinds:
            self._kinds[func] = _written_arguments(func)
        written = self._kinds[func]
        if written is None:
            if isinstance(result, torch.Tensor) and _has_memory(result):
                self.poison(result)
        else:
            for position, name in written:
                value = args[position] if position < len(args) else kwargs.get(name)
                for tensor in filter(_has_memory, _tensors(value)):
                    self.memory.set_written(tensor, written=True)
        return result

    @property
    def seen_by_numpy(self) -> Callable[..., Any]:
        """Tensor.numpy during the execution: whoever asks for an array may write to it, unseen."""

        def numpy(tensor: torch.Tensor, **options: Any) -> Any:
            self.memory.set_written(tensor, written=True)
            return _numpy(tensor, **options)

        return numpy

    def _resize(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a resize in place: what is new of the storage was written by nobody."""
        tensor = args[0]
        before, size = self.memory.find(tensor), tensor.untyped_storage().nbytes()
        result = func(*args, **kwargs)
        added = tensor.untyped_storage().nbytes() - size
        if added > 0 and tensor.device.type == "cpu":
            self.memory.moved(tensor, before, size)
            step = tensor.element_size()
            with torch._C.DisableTorchFunction():  # noqa: SLF001 - devices must not be redirected
                added_part = tensor.as_strided((added // step,), (1,), size // step)
            self.poison(added_part)
        return result

    def poison(self, tensor: torch.Tensor) -> None:
        """Let `tensor` hold what nobody wrote."""
        # Neither are devices redirected nor operators called that the script replaced by its own.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # noqa: SLF001
            self._fill(tensor)

    def _fill(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
            return
        self.memory.set_written(tensor, written=False)
        if span_of(tensor) * tensor.element_size() > _FILLED:
            return
        flat = tensor.as_strided((span_of(tensor),), (1,), tensor.storage_offset())
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            flat.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            flat.fill_(True)
        elif not tensor.dtype.is_signed:
            flat.view(torch.uint8).fill_(0x5B)
        else:
            flat.fill_(_ODD & torch.iinfo(tensor.dtype).max)


def _written_arguments(func: Any) -> tuple[tuple[int, str], ...] | None:
    """(position, name) of arguments that are written; None for an uninitialised allocation."""
    schema = func._schema  # noqa: SLF001 - torch offers no other way
    if schema.name in EMPTY:
        return None
    return tuple(
        (i, arg.name)
        for i, arg in enumerate(schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    """Fake tensors, which are traced, say that they are on a CPU, and have none."""
    return type(tensor) is torch.Tensor or tensor.untyped_storage().device.type != "meta"


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [x for x in value if isinstance(x, torch.Tensor)]
    return ()
