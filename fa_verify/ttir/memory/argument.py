"""One tensor handed to one launch: a flat view over its span, and what is legal inside it.

Knows neither operations nor program lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.memory.views import coordinates, legal_runs, span_of
from fa_verify.ttir.numbers.floats import RAW, Array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.ttir.memory.known import Memory
    from fa_verify.ttir.sanitizer.regions import Map
    from fa_verify.ttir.sanitizer.tracking import Tracking


_numpy = torch.Tensor.numpy  # the original: an execution takes its use for a write


class Argument:
    """One tensor argument of one launch.

    Attributes:
        name: The kernel parameter's name.
        scalar: Element type as MLIR writes it.
        flat: Raw elements over the tensor's span; nothing outside can be reached through it.
        size: Length of `flat`.
        runs: See `legal_runs`.
        shadow: Which elements of `flat` were written; None when all the tensor's own were at
        launch. tracking: Set when this launch stores to the storage and somebody wants to know.
        regions: Labelled tensors that lie in the span.
        origin: Offset of `flat` inside the storage, in elements.
    """

    __slots__ = (
        "_cells", "_tracked", "_windows", "address", "flat", "key", "name", "origin",
        "regions", "runs",
        "scalar",
        "shadow",
        "size", "sizes", "storage", "storage_elements", "strides", "tracking",
    )  # fmt: skip

    def __init__(self, name: str, tensor: torch.Tensor, scalar: str, memory: Memory) -> None:
        """Prepare a flat view of the tensor's span."""
        self.name, self.scalar = name, scalar
        self.sizes, self.strides = tuple(tensor.shape), tuple(tensor.stride())
        self.size = span_of(tensor)
        self.origin: int = int(tensor.storage_offset())
        storage = tensor.untyped_storage()
        self.storage, self.key = storage, storage.data_ptr()
        self.storage_elements = storage.nbytes() // tensor.element_size()
        self.address = tensor.data_ptr()
        raw = RAW[scalar]
        if raw.itemsize != tensor.element_size():
            msg = f"{tensor.dtype} passed as {name}, a pointer to {scalar}"
            raise Unsupported(msg)
        detached = tensor.detach()
        if self.size:
            spanning = detached.as_strided((self.size,), (1,), self.origin)
            if spanning.is_conj() or spanning.is_neg():
                spanning = spanning.resolve_conj().resolve_neg()
            self.flat: Array = _numpy(spanning.view(_VIEWED[raw]))
        else:
            self.flat = np.empty(0, raw)
        self.runs = legal_runs(self.sizes, self.strides) if self.size else None
        self.tracking: Tracking | None = None
        self.regions: Sequence[Map] = ()
        self.shadow: Array | None = None
        self._cells: Array | None = None
        known = memory.find(tensor)
        if known is not None and known.written is not None and self.size:
            known.refine(tensor.element_size())
            ratio = tensor.element_size() // known.cell
            span = known.written[self.origin * ratio : (self.origin + self.size) * ratio]
            own = span if self.runs is None else known.elements(detached)
            if own is not None and not own.all():
                self.shadow = self._shadow(span, ratio)
        # Keyed by identity; the values keep the keys' arrays alive.
        self._windows: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._tracked: dict[int, tuple[Array, Array]] = {}

    def _shadow(self, span: Array, ratio: int) -> Array:
        """Written-ness of the span, element by element, from that of `ratio` cells of each."""
        if ratio == 1:
            return span
        self._cells = span.reshape(-1, ratio)  # the same memory is also seen as smaller elements
        whole: Array = np.logical_and.reduce(self._cells, axis=1)
        return whole

    def finish(self) -> None:
        """Pass on what was written, after the launch."""
        if self._cells is not None and self.shadow is not None:
            self._cells |= self.shadow[:, None]

    def window(self, flat: Array, length: int) -> Array:
        """All runs of `length` consecutive elements of `flat`, as a writable overlapping view."""
        key = (id(flat), length)
        found = self._windows.get(key)
        if found is None:
            shape = (flat.size - length + 1, length)
            step = (flat.itemsize, flat.itemsize)
            window: Array = np.ndarray(shape, flat.dtype, flat.data, 0, step)
            found = self._windows[key] = (flat, window)
        return found[1]

    def forget_windows(self) -> None:
        """Start over with windows, after `flat` was replaced."""
        self._windows = {}

    def track(self, array: Array) -> Array:
        """The part of a tracking array that covers this argument's span."""
        found = self._tracked.get(id(array))
        if found is None:
            part = array[self.origin : self.origin + self.size]
            found = self._tracked[id(array)] = (array, part)
        return found[1]

    def holds(self, offset: int) -> bool:
        """Whether an offset inside the span is an element."""
        return self.runs is None or bool(self.runs.take(np.array([offset]), mode="clip")[0])

    def distance(self, offset: int) -> int:
        """Elements from `offset`, in a gap of the span, to the nearest element."""
        near = 1
        while not (self.holds(offset - near) or self.holds(offset + near)):
            near += 1
        return near

    def coordinates(self, offset: int) -> tuple[int, ...] | None:
        """Index of the element at `offset`; indices may exceed extents when it lies outside."""
        return coordinates(self.sizes, self.strides, offset)


_VIEWED: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int8): torch.int8,
    np.dtype(np.int16): torch.int16,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
