"""`Fenced`: while it is entered, every tensor that torch makes on the device lies in a slot."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from fa_verify.backends.fences.placement import ALIGNED
from fa_verify.ttir.memory.views import span_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fa_verify.backends.fences.fence import Fence
    from fa_verify.backends.fences.slots import Slots

__all__ = ["Fenced"]

_EMPTY = frozenset({
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_permuted.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
})  # fmt: skip
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_RESIZES = frozenset({torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default})

# Bytes of an input from which on it stays where it is: a copy of it would not fit beside those of
# seven other processes.
_LARGEST = 1 << 30


class Fenced(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves new tensors into slots; what `empty` and its kin leave is poison there."""

    supports_higher_order_operators = True  # of what such a one makes only the results are moved

    def __init__(self, slots: Slots, fence: Fence, device: str) -> None:
        """Move what is made on a device."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots, self._fence = slots, fence
        self._here = torch.empty(0, device=device).device  # with the number of the current one
        self._count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that torch.compile needs no shield: making one loads a second's worth of modules."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have torch.compile compile as it does without a mode, and not fall back to eager code.

        What compiled code allocates passes no dispatcher, and stays where it is.
        """
        return True

    def put(self, tensor: torch.Tensor, name: str, *, unaligned: bool) -> None:
        """Move an input, from its first element to its last; slack between them goes along.

        Args:
            tensor: The input; afterwards it lies in a slot.
            name: What to call it.
            unaligned: Its first element may lie at any multiple of the element's size.
        """
        size = tensor.element_size()
        nbytes = size * span_of(tensor)
        if not 0 < nbytes <= _LARGEST:
            return
        offset = tensor.storage_offset() * size
        fence = self._fence if unaligned else _aligned(self._fence)
        new = self._slots.take(name, nbytes, fence, phase=tensor.data_ptr() % ALIGNED)
        new.copy_(_bytes(tensor)[offset : offset + nbytes])
        tensor.set_(new.untyped_storage(), 0, tensor.shape, tensor.stride())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and move what it made."""
        del types
        kwargs = kwargs or {}
        if func in _RESIZES:
            self._make_room(*args[:2])
        result = func(*args, **kwargs)
        empty = func in _EMPTY
        if not empty and _only_views(func):
            return result
        given = () if empty else self._mine((*args, *kwargs.values()))
        known = {tensor.untyped_storage()._cdata for tensor in given}  # noqa: SLF001 - no public way
        moved: dict[int, torch.UntypedStorage] = {}
        for tensor in self._mine((result,)):
            old = tensor.untyped_storage()
            if old._cdata in known or not old.nbytes():  # noqa: SLF001
                continue
            if old._cdata not in moved:  # noqa: SLF001
                moved[old._cdata] = self._moved(tensor, empty=empty)  # noqa: SLF001
            new = moved[old._cdata]  # noqa: SLF001
            tensor.set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())
        return result

    def _moved(self, tensor: torch.Tensor, *, empty: bool) -> torch.UntypedStorage:
        """The tensor's whole storage in a slot: torch promises that it is aligned."""
        self._count += 1
        nbytes = tensor.untyped_storage().nbytes()
        new = self._slots.take(str(self._count), nbytes, _aligned(self._fence))
        if not empty:
            new.copy_(_bytes(tensor))
        return new.untyped_storage()

    def _make_room(self, tensor: torch.Tensor, like: Any) -> None:
        """Let a tensor in a slot grow: its storage cannot."""
        shape = like.shape if isinstance(like, torch.Tensor) else like
        storage = tensor.untyped_storage()
        nbytes = (int(tensor.storage_offset()) + torch.Size(shape).numel()) * tensor.element_size()
        if nbytes <= storage.nbytes() or self._slots.at(storage.data_ptr()) is None:
            return
        self._count += 1
        new = self._slots.take(str(self._count), nbytes, _aligned(self._fence))
        new[: storage.nbytes()].copy_(_bytes(tensor))
        offset = tensor.storage_offset()
        tensor.set_(new.untyped_storage(), offset, tensor.shape, tensor.stride())

    def _mine(self, values: Iterable[Any]) -> Iterator[torch.Tensor]:
        """The plain tensors on the device, those in lists as well."""
        for value in values:
            if isinstance(value, (list, tuple)):
                yield from self._mine(value)
            elif type(value) in _PLAIN and value.device == self._here:
                yield value


@cache
def _only_views(func: Any) -> bool:
    """Whether all that an operation returns is an argument, or a view of one."""
    if isinstance(func, HigherOrderOperator):
        return False
    return all(made.alias_info is not None for made in func._schema.returns)  # noqa: SLF001


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _aligned(fence: Fence) -> Fence:
    """The same fence, for a tensor whose first element must lie at a multiple of 16."""
    return fence if not fence.flush else dataclasses.replace(fence, flush=False)
