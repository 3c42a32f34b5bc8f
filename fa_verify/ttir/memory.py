"""Which memory there is, who wrote it, and which elements an argument's accesses may touch.

`Memory` lives as long as an execution and knows for each storage which elements nobody wrote yet.
`Argument` is one tensor handed to one launch: a flat view over its own span and the rule for what
is legal inside it. `Tracking` lives for one launch and remembers which program touched which
element. Nothing here knows about operations or program lanes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.floats import RAW, Array

MANY = -1  # several programs


class Storage:
    """One torch storage: a reference that keeps it alive, and which cells were written.

    A cell is `cell` bytes; `written` is None once everything has been written.
    """

    __slots__ = ("cell", "nbytes", "owner", "written")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Take hold of the storage of `tensor`, believing all of it written."""
        self.owner = tensor.untyped_storage()
        self.nbytes = self.owner.nbytes()
        self.cell = tensor.element_size()
        self.written: Array | None = None

    def refine(self, itemsize: int) -> None:
        """Make cells no larger than `itemsize` bytes."""
        if itemsize < self.cell:
            if self.written is not None:
                self.written = np.repeat(self.written, self.cell // itemsize)
            self.cell = itemsize

    def elements(self, tensor: torch.Tensor) -> Array | None:
        """View of the cells of `tensor`'s elements, shape tensor.shape + (cells an element,)."""
        if self.written is None:
            return None
        ratio = tensor.element_size() // self.cell
        origin = tensor.storage_offset() * ratio
        return as_strided(
            self.written[origin:],
            (*tensor.shape, ratio),
            (*(s * ratio for s in tensor.stride()), 1),
        )


class Memory:
    """Written-ness of every storage an execution has heard of; the rest counts as written."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._storages: dict[int, Storage] = {}
        self._names: list[tuple[int, int, str]] = []

    def find(self, tensor: torch.Tensor) -> Storage | None:
        """Return the storage under `tensor` if something about it is known."""
        return self._storages.get(tensor.untyped_storage().data_ptr())

    def adopt(self, tensor: torch.Tensor) -> Storage:
        """Return the storage under `tensor`, registering it (as written) if new."""
        key = tensor.untyped_storage().data_ptr()
        storage = self._storages.get(key)
        if storage is None or storage.nbytes < tensor.untyped_storage().nbytes():
            storage = self._storages[key] = Storage(tensor)
        storage.refine(tensor.element_size())
        return storage

    def set_written(self, tensor: torch.Tensor, *, written: bool) -> None:
        """Record that the elements of `tensor` were (or never were) written."""
        if tensor.numel() == 0:
            return
        if written:
            storage = self.find(tensor)
            if storage is None or storage.written is None:
                return
            storage.refine(tensor.element_size())
        else:
            storage = self.adopt(tensor)
            if storage.written is None:
                storage.written = np.ones(storage.nbytes // storage.cell, np.bool_)
        cells = storage.elements(tensor)
        if cells is not None:
            if written and tensor.numel() * tensor.element_size() == storage.nbytes:
                storage.written = None
            else:
                cells[...] = written

    def unwritten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bool tensor of `tensor`'s shape: True where nobody wrote."""
        storage = self.find(tensor)
        if storage is None or storage.written is None or tensor.numel() == 0:
            return torch.zeros(tensor.shape, dtype=torch.bool)
        storage.refine(tensor.element_size())
        cells = storage.elements(tensor)
        if cells is None:
            raise AssertionError
        return torch.from_numpy(~cells.all(axis=-1))

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name under which a tensor's memory was declared, or ""."""
        address = tensor.data_ptr()
        return next((n for lo, hi, n in self._names if lo <= address < hi), "")

    def declare(self, tensor: torch.Tensor, name: str, *, written: bool) -> None:
        """Name a tensor's memory and state whether its elements were written."""
        self.adopt(tensor)
        span = span_of(tensor) * tensor.element_size()
        self._names.append((tensor.data_ptr(), tensor.data_ptr() + span, name))
        self.set_written(tensor, written=written)


def span_of(tensor: torch.Tensor) -> int:
    """Elements from the first to the last element of `tensor`, both counted."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


@lru_cache(maxsize=256)
def legal_runs(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Array | None:
    """Length of the run of legal elements that starts at each offset of a view's span.

    Returns None when every offset inside the span is an element (the common, dense case).
    """
    dims = sorted((st, sz) for sz, st in zip(sizes, strides, strict=True) if sz > 1 and st > 0)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            break
        expected *= size
    else:
        return None
    span = 1 + sum((size - 1) * stride for stride, size in dims)
    legal = np.zeros(span, np.bool_)
    as_strided(legal, tuple(s for _, s in dims), tuple(s for s, _ in dims))[...] = True
    ends = np.flatnonzero(np.diff(legal.astype(np.int8), append=0) == -1) + 1
    where = np.arange(span, dtype=np.int64)
    following = ends[np.searchsorted(ends, where, side="right")]
    runs = np.where(legal, following - where, 0).astype(np.int32)
    return None if (runs > 0).all() else runs


class Tracking:
    """Which programs touched the elements of one storage during one launch.

    Each array holds program + 1, 0 for nobody, or MANY. Arrays are over the storage's elements and
    are zero pages until touched.
    """

    __slots__ = ("_size", "atomic", "first_reader", "last_reader", "writer")

    def __init__(self, size: int) -> None:
        """Cover `size` elements, nobody having touched any."""
        self._size = size
        self.writer = np.zeros(size, np.int32)
        self.first_reader: Array | None = None
        self.last_reader: Array | None = None
        self.atomic: Array | None = None

    def readers(self) -> tuple[Array, Array]:
        """First and last reader of each element, made on first use."""
        if self.first_reader is None or self.last_reader is None:
            self.first_reader = np.zeros(self._size, np.int32)
            self.last_reader = np.zeros(self._size, np.int32)
        return self.first_reader, self.last_reader

    def atomics(self) -> Array:
        """Who accessed each element atomically, made on first use."""
        if self.atomic is None:
            self.atomic = np.zeros(self._size, np.int32)
        return self.atomic


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
        origin: Offset of `flat` inside the storage, in elements.
    """

    __slots__ = (
        "_cells", "_tracked", "_windows", "address", "flat", "key", "name", "origin", "runs",
        "scalar",
        "shadow",
        "size", "sizes", "storage_elements", "strides", "tracking",
    )  # fmt: skip

    def __init__(self, name: str, tensor: torch.Tensor, scalar: str, memory: Memory) -> None:
        """Prepare a flat view of the tensor's span."""
        self.name, self.scalar = name, scalar
        self.sizes, self.strides = tuple(tensor.shape), tuple(tensor.stride())
        self.size = span_of(tensor)
        self.origin = tensor.storage_offset()
        storage = tensor.untyped_storage()
        self.key = storage.data_ptr()
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
            self.flat: Array = spanning.view(_VIEWED[raw]).numpy()
        else:
            self.flat = np.empty(0, raw)
        self.runs = legal_runs(self.sizes, self.strides) if self.size else None
        self.tracking: Tracking | None = None
        self.shadow: Array | None = None
        self._cells: Array | None = None
        known = memory.find(tensor)
        if known is not None and known.written is not None and self.size:
            known.refine(tensor.element_size())
            cells = known.elements(detached)
            if cells is not None and not cells.all():
                self.shadow = self._shadow(known, tensor.element_size() // known.cell)
        # Keyed by identity; the values keep the keys' arrays alive.
        self._windows: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._tracked: dict[int, tuple[Array, Array]] = {}

    def _shadow(self, known: Storage, ratio: int) -> Array:
        """Written-ness of the span, element by element."""
        if known.written is None:
            raise AssertionError(self.name)
        cells = known.written[self.origin * ratio : (self.origin + self.size) * ratio]
        if ratio == 1:
            return cells
        self._cells = cells.reshape(-1, ratio)  # the same memory is also seen as smaller elements
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
            window = as_strided(flat, shape, (flat.itemsize, flat.itemsize))
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

    def coordinates(self, offset: int) -> tuple[int, ...] | None:
        """Index of the element at `offset`; indices may exceed extents when it lies outside."""
        if offset < 0 or not self.sizes:
            return None
        index = [0] * len(self.sizes)
        rest = offset
        for dim in sorted(range(len(self.sizes)), key=lambda d: -self.strides[d]):
            if self.strides[dim] > 0 and self.sizes[dim] > 1:
                index[dim], rest = divmod(rest, self.strides[dim])
        return tuple(index) if rest == 0 else None


_VIEWED: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int8): torch.int8,
    np.dtype(np.int16): torch.int16,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
