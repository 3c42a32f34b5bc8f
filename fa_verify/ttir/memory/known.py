"""Which memory there is and which of it nobody wrote yet, for as long as an execution lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from fa_verify.ttir.memory.reserve import zeros
from fa_verify.ttir.memory.views import legal_runs, span_of
from fa_verify.ttir.sanitizer.regions import Regions

if TYPE_CHECKING:
    from fa_verify.ttir.numbers.floats import Array


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
        self.regions = Regions()

    def find(self, tensor: torch.Tensor) -> Storage | None:
        """Return the storage under `tensor` if something about it is known."""
        key = tensor.untyped_storage().data_ptr()
        storage = self._storages.get(key)
        if storage is not None and storage.owner.data_ptr() != key:  # resized: it moved away
            del self._storages[key]
            return None
        return storage

    def adopt(self, tensor: torch.Tensor) -> Storage:
        """Return the storage under `tensor`, registering it (as written) if new."""
        storage = self.find(tensor)
        if storage is None or storage.nbytes < tensor.untyped_storage().nbytes():
            storage = Storage(tensor)
            self._storages[tensor.untyped_storage().data_ptr()] = storage
        storage.refine(tensor.element_size())
        return storage

    def moved(self, tensor: torch.Tensor, before: Storage | None, size: int) -> None:
        """Record that the storage under `tensor` grew from `size` bytes, keeping what was known."""
        storage = self.adopt(tensor)
        if before is None or before.written is None:
            return
        storage.refine(before.cell)
        storage.written = np.ones(storage.nbytes // storage.cell, np.bool_)
        known = size // storage.cell
        storage.written[:known] = np.repeat(before.written, before.cell // storage.cell)[:known]

    def set_written(self, tensor: torch.Tensor, *, written: bool | torch.Tensor) -> None:
        """Record that the elements of `tensor` were (or never were) written."""
        if tensor.numel() == 0:
            return
        if isinstance(written, torch.Tensor):
            self._set_each(tensor, written)
            return
        if written:
            storage = self.find(tensor)
            if storage is None or storage.written is None:
                return
            storage.refine(tensor.element_size())
        else:
            storage = self.adopt(tensor)
        whole = span_of(tensor) * tensor.element_size() == storage.nbytes
        if whole and legal_runs(tuple(tensor.shape), tuple(tensor.stride())) is None:
            # Zero pages cost nothing until a kernel writes there.
            storage.written = None if written else zeros(storage.nbytes // storage.cell, np.bool_)
            return
        if storage.written is None:
            storage.written = np.ones(storage.nbytes // storage.cell, np.bool_)
        cells = storage.elements(tensor)
        if cells is not None:
            cells[...] = written

    def _set_each(self, tensor: torch.Tensor, written: torch.Tensor) -> None:
        storage = self.adopt(tensor)
        if storage.written is None:
            storage.written = np.ones(storage.nbytes // storage.cell, np.bool_)
        cells = storage.elements(tensor)
        if cells is None:
            raise AssertionError
        cells[...] = np.asarray(written)[..., None]

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

    def name_at(self, address: int) -> str:
        """The name under which the memory at an address was declared, or ""."""
        return next((n for lo, hi, n in self._names if lo <= address < hi), "")

    def declare(self, tensor: torch.Tensor, name: str, *, written: bool | torch.Tensor) -> None:
        """Name a tensor's memory and state whether its elements were written."""
        self.adopt(tensor)
        span = span_of(tensor) * tensor.element_size()
        self._names.append((tensor.data_ptr(), tensor.data_ptr() + span, name))
        self.set_written(tensor, written=written)
