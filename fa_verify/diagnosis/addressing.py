"""What a tensor holds when a kernel addresses it by another tensor's strides."""

from __future__ import annotations

import torch

__all__ = ["added_by", "read_by", "written_by"]

Strides = tuple[int, ...]


def _offsets(shape: tuple[int, ...], strides: Strides) -> torch.Tensor:
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(shape, strides, strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    return offsets


def written_by(
    values: torch.Tensor, wrong: Strides, right: Strides
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Store values by the wrong strides, read them by the right ones.

    Returns:
        What is read; where nothing is known: nobody wrote, or several wrote; where nobody wrote.
    """
    stored, loaded = _offsets(values.shape, wrong), _offsets(values.shape, right)
    size = 1 + int(max(stored.max(), loaded.max()))
    memory = torch.full((size,), torch.nan, dtype=torch.float64)
    writers = torch.zeros(size, dtype=torch.int64)
    memory[stored.flatten()] = values.flatten()
    writers.index_add_(0, stored.flatten(), torch.ones(stored.numel(), dtype=torch.int64))
    return memory[loaded], (writers != 1)[loaded], (writers == 0)[loaded]


def added_by(values: torch.Tensor, wrong: Strides) -> torch.Tensor:
    """Add values up in zeroed memory by the wrong strides, read them as if it were contiguous."""
    memory = torch.zeros(values.numel(), dtype=torch.float64)
    places = _offsets(values.shape, wrong).flatten()
    inside = places < len(memory)
    memory.index_add_(0, places[inside], values.flatten()[inside])
    return memory.view(values.shape)


def read_by(
    tensor: torch.Tensor,
    wrong: Strides,
    heads: int | None = None,
    moved: torch.Tensor | None = None,
) -> torch.Tensor:
    """Load a tensor's elements by the wrong strides; what lies outside its storage is NaN.

    Args:
        tensor: The tensor.
        wrong: The strides.
        heads: How many heads are loaded, if not as many as there are.
        moved: Elements by which each row lies further on than these strides say.
    """
    batch, there, *rest = tensor.shape
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    offsets = _offsets((batch, heads or there, *rest), wrong) + int(tensor.storage_offset())
    offsets = offsets if moved is None else offsets + moved[:, None]
    inside = (offsets >= 0) & (offsets < flat.numel())
    values = flat[offsets.clamp(0, flat.numel() - 1)].to(torch.float64)
    return torch.where(inside, values, torch.nan)
