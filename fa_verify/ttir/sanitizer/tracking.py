"""Which programs touched which element of a storage during one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.memory.reserve import zeros

if TYPE_CHECKING:
    from fa_verify.ttir.numbers.floats import Array

MANY = -1  # several programs


class Tracking:
    """Which programs touched the elements of one storage during one launch.

    Each array holds program + 1, 0 for nobody, or MANY. Arrays are over the storage's elements and
    are zero pages until touched.
    """

    __slots__ = (
        "_epochs",
        "_places",
        "_size",
        "atomic",
        "checked",
        "first_reader",
        "last_reader",
        "stored",
        "writer",
    )

    def __init__(self, size: int) -> None:
        """Cover `size` elements, nobody having touched any."""
        self._size = size
        self._epochs: dict[int, Array] = {}
        self._places: tuple[Array, Array] | None = None
        self.writer = zeros(size, np.int32)
        self.stored = False  # whether anything is in `writer`
        self.first_reader: Array | None = None
        self.last_reader: Array | None = None
        self.checked: tuple[Array, Array] | None = None
        self.atomic: Array | None = None

    def readers(self) -> tuple[Array, Array]:
        """First and last reader of each element, made on first use."""
        if self.first_reader is None or self.last_reader is None:
            self.first_reader = zeros(self._size, np.int32)
            self.last_reader = zeros(self._size, np.int32)
        return self.first_reader, self.last_reader

    def checked_readers(self) -> tuple[Array, Array]:
        """First and last reader by loads that a compare-and-swap checks, made on first use."""
        if self.checked is None:
            self.checked = zeros(self._size, np.int32), zeros(self._size, np.int32)
        return self.checked

    def read_back(self) -> bool:
        """Whether an element was both read and written."""
        first = [self.first_reader] if self.first_reader is not None else []
        first += self.checked[:1] if self.checked is not None else ()
        if not first:
            return False
        written = self.writer if self.atomic is None else self.writer | self.atomic
        return any(bool(((reader != 0) & (written != 0)).any()) for reader in first)

    def atomics(self) -> Array:
        """Who accessed each element atomically, made on first use."""
        if self.atomic is None:
            self.atomic = zeros(self._size, np.int32)
        return self.atomic

    def epochs(self, array: Array) -> Array:
        """In which of its epochs (see `order`) the program in `array` touched an element."""
        found = self._epochs.get(id(array))
        if found is None:
            found = self._epochs[id(array)] = zeros(self._size, np.int32)
        return found

    def places(self) -> tuple[Array, Array]:
        """From which place of a tile an element was stored, and when (see `readback`)."""
        if self._places is None:
            self._places = zeros(self._size, np.int64), zeros(self._size, np.int64)
        return self._places
