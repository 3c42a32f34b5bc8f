"""Tensors in buffers of their own: laid out, with poison around; copied storage for storage."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.layouts import Layout

__all__ = [
    "SLACK",
    "SPARSE",
    "clone",
    "is_sparse",
    "lay_out",
    "overwrite",
    "refilled",
    "reserved",
    "storage",
]

# Linux sets no memory aside for what is mapped so (mmap(2)).
_SHARED = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)

SLACK = 64
"""Poisoned elements after the last one of each tensor."""

SPARSE = 1 << 28
"""Elements from which on a buffer is sparse: it takes memory only where elements are."""


def lay_out(
    values: Tensor, layout: Layout, dtype: torch.dtype, device: str, *, batch: int | None = None
) -> Tensor:
    """A poisoned buffer holding the values, again and again in a larger batch, in the layout.

    A tensor of fewer axes lies as if the others had one element and came last.
    """
    count = values.shape[0]
    shape = (count if batch is None else batch, *values.shape[1:])
    b, h, s, d = (*shape, 1, 1, 1)[:4]
    buffer = _buffer(layout.offset + layout.span((b, h, s, d)) + SLACK, dtype, device)
    strides = layout.strides((b, h, s, d))[: len(shape)]
    view = buffer.as_strided(shape, strides, layout.offset)
    written = _written(view)
    values = values[written]
    if buffer.device.type != "cpu":
        # Rounded on the CPU whatever the device, so that the bits do not depend on it.
        values = values.to(dtype).to(device)
    for start in range(0, shape[0], max(1, count)):
        part = view[start : start + count][written]
        part.copy_(values[: len(part)])
    return view


def _written(tensor: Tensor) -> tuple[slice, ...]:
    """Through a stride-0 head axis only head 0 can be written; all heads hold its values."""
    shared = tensor.dim() == 4 and tensor.stride(1) == 0
    return (slice(None), slice(0, 1)) if shared else (slice(None),)


def _buffer(size: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if size < SPARSE or torch.device(device).type != "cpu":
        return torch.full((size,), torch.nan, dtype=dtype, device=device)
    return reserved(size, dtype)


def reserved(size: int, dtype: torch.dtype) -> Tensor:
    """So many zeros on the CPU that take up no memory until somebody looks.

    Their pages are shared with nobody, but are mapped as if: a limit on a process's data
    (RLIMIT_DATA, setrlimit(2)) counts private ones though they be never touched.
    """
    return torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize, flags=_SHARED), dtype=dtype)


def is_sparse(tensor: Tensor) -> bool:
    """Whether its buffer takes memory only where elements are."""
    return tensor.untyped_storage().nbytes() >= SPARSE * tensor.element_size()


def storage(tensor: Tensor) -> Tensor:
    """All bytes that the tensor's storage holds, slack included; of a sparse one, its elements."""
    flat = tensor.contiguous().view(-1) if is_sparse(tensor) else _whole(tensor)
    return flat.view(torch.uint8)


def _whole(tensor: Tensor) -> Tensor:
    """All elements that the tensor's storage holds."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


def clone(tensor: Tensor, device: str | None = None) -> Tensor:
    """A copy of all its storage, or of its elements if that is sparse; on a device if given."""
    if is_sparse(tensor):  # gigabytes of slack stay where they are
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        copy = _buffer(size, tensor.dtype, device or tensor.device)
        copy = copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        copy[_written(copy)].copy_(tensor[_written(tensor)])
        return copy
    flat = _whole(tensor).to(device or tensor.device, copy=True)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def overwrite(tensor: Tensor, values: Tensor) -> Tensor:
    """A copy of the tensor, in its own layout, with other elements."""
    copy = clone(tensor)
    copy[_written(copy)].copy_(values[_written(copy)])
    return copy


def refilled(tensor: Tensor, value: float) -> Tensor:
    """A copy with another number in the slack; of a sparse one, with the same."""
    if is_sparse(tensor):
        return clone(tensor)
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = torch.full((size,), value, dtype=tensor.dtype, device=tensor.device)
    copy = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    copy[_written(copy)].copy_(tensor[_written(tensor)])
    return copy
