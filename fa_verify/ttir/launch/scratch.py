"""Global memory that a launch needs beside its arguments, asked of the program's own allocator.

On a GPU a tensor descriptor that a kernel makes lies there. Nothing is kept in it here, but whoever
forgets `triton.set_allocator` is told so as CUDA's launcher tells it.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime import _allocation

from fa_verify.ttir.launch import hopper
from fa_verify.ttir.launch.artefacts import scratch_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

_MAKES = "tt.make_tensor_descriptor"
# Of one descriptor: TMA_SIZE_BYTES and TMA_ALIGN in Triton's TMAUtilities.h.
_BYTES, _ALIGNMENT = 128, 128
_FIRST = 9  # compute capability: older chips have no descriptors, Triton makes pointers of them


class Scratch:
    """What a kernel needs for itself."""

    def __init__(self, text: str, metadata: Any, language: Any) -> None:
        """Look at its TTIR."""
        self._needed = _MAKES in text
        self._ctas = getattr(metadata, "num_ctas", 1)
        self._least = _BYTES * text.count(_MAKES)
        self._exact = functools.cache(functools.partial(scratch_bytes, text, metadata, language))

    def allocate(self, grid: tuple[int, int, int], short: Callable[[str], None]) -> None:
        """Ask for it, as Triton's launcher does before each launch.

        Args:
            grid: Programs along each axis.
            short: Is told of a buffer that is too small.

        Raises:
            RuntimeError: No allocator was set.
            TypeError: The buffer is no buffer.
        """
        if not self._needed or hopper.capability()[0] < _FIRST:
            return
        allocator: Any = _allocation._allocator.get()  # noqa: SLF001 - as CUDA's launcher does
        unset = isinstance(allocator, _allocation.NullAllocator)
        asked = math.prod(grid) * self._ctas * ((not unset and self._exact()) or self._least)
        buffer: Any = allocator(asked, _ALIGNMENT, 0)
        if not isinstance(buffer, int | None) and not hasattr(buffer, "data_ptr"):
            msg = "Pointer argument must be either uint64 or have data_ptr method"
            raise TypeError(msg)
        room = buffer.numel() * buffer.element_size() if isinstance(buffer, torch.Tensor) else asked
        if room < asked:
            short(f"triton.set_allocator's function was asked for {asked} bytes and gave {room}")
