"""Global memory that a launch needs beside its arguments, asked of the program's own allocator.

On a GPU a tensor descriptor that a kernel makes lies there. Nothing is kept in it here, but whoever
forgets `triton.set_allocator` is told so as CUDA's launcher tells it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime import _allocation

from fa_verify.ttir.launch import hopper

if TYPE_CHECKING:
    from collections.abc import Callable

_MAKES = "tt.make_tensor_descriptor"
# Of one descriptor: TMA_SIZE_BYTES and TMA_ALIGN in Triton's TMAUtilities.h.
_BYTES, _ALIGNMENT = 128, 128
_FIRST = 9  # compute capability: older chips have no descriptors, Triton makes pointers of them


def descriptor_bytes(text: str) -> int:
    """The least that a program of this TTIR needs; descriptors in pipelined loops take more."""
    return _BYTES * text.count(_MAKES)


def allocate(
    size: int, grid: tuple[int, int, int], ctas: int, short: Callable[[str], None]
) -> None:
    """Ask for `size` bytes a program, as Triton's launcher does before each launch.

    Args:
        size: See `descriptor_bytes`.
        grid: Programs along each axis.
        ctas: Of a program.
        short: Is told of a buffer that is too small.

    Raises:
        RuntimeError: No allocator was set.
        TypeError: The buffer is no buffer.
    """
    if size == 0 or hopper.capability()[0] < _FIRST:
        return
    asked = math.prod(grid) * ctas * size
    buffer: Any = _allocation._allocator.get()(asked, _ALIGNMENT, 0)  # noqa: SLF001 - as CUDA's does
    if not isinstance(buffer, int | None) and not hasattr(buffer, "data_ptr"):
        msg = "Pointer argument must be either uint64 or have data_ptr method"
        raise TypeError(msg)
    room = buffer.numel() * buffer.element_size() if isinstance(buffer, torch.Tensor) else asked
    if room < asked:
        short(f"triton.set_allocator's function was asked for {asked} bytes and gave {room}")
