"""The driver's calls, against a driver that keeps books; tests/fences/test_card.py has a card's."""

import pytest
import torch

from fa_verify.backends.fences.pages import Pages

GRANULE = 2 << 20


class Books:
    """What is reserved, created and mapped; refuses what the driver refuses."""

    def __init__(self, memory=1 << 40):
        self.reserved, self.created, self.mapped, self.accessible = {}, {}, {}, set()
        self.memory = memory
        self._next = 1 << 40

    def cuMemGetAllocationGranularity(self, size, properties, option):  # noqa: N802
        assert (properties._obj.type, properties._obj.location.type) == (1, 1)
        size._obj.value = GRANULE
        return 0

    def cuMemAddressReserve(self, base, size, alignment, address, flags):  # noqa: N802
        self._next += 1 << 36
        base._obj.value = self._next
        self.reserved[self._next] = size.value
        return 0

    def cuMemCreate(self, handle, size, properties, flags):  # noqa: N802
        if sum(self.created.values()) + size.value > self.memory:
            return 2
        handle._obj.value = len(self.created) + 1
        self.created[handle._obj.value] = size.value
        return 0

    def cuMemMap(self, first, size, offset, handle, flags):  # noqa: N802
        assert self.created[handle.value] == size.value
        assert any(b < first.value and first.value + size.value < b + n
                   for b, n in self.reserved.items())  # fmt: skip
        self.mapped[first.value] = size.value
        return 0

    def cuMemSetAccess(self, first, size, access, count):  # noqa: N802
        assert access._obj.flags == 3
        self.accessible.add(first.value)
        return 0

    def cuMemUnmap(self, first, size):  # noqa: N802
        assert self.mapped.pop(first.value) == size.value
        return 0

    def cuMemRelease(self, handle):  # noqa: N802
        del self.created[handle.value]
        return 0

    def cuMemAddressFree(self, base, size):  # noqa: N802
        assert self.reserved.pop(base.value) == size.value
        return 0


def test_a_region_lies_between_granules_that_are_never_mapped():
    books = Books()
    region = Pages(0, books).map(3 * GRANULE)
    ((base, size),) = books.reserved.items()
    assert books.mapped == {region.address: 3 * GRANULE}
    assert (region.address - base, base + size - region.address - region.nbytes) == (GRANULE,) * 2
    assert books.accessible == {region.address}


def test_what_is_unmapped_leaves_nothing_behind():
    books = Books()
    pages = Pages(0, books)
    pages.unmap(pages.map(GRANULE))
    assert (books.reserved, books.created, books.mapped) == ({}, {}, {})


def test_memory_that_runs_out_reserves_nothing():
    books = Books(memory=GRANULE)
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate"):
        Pages(0, books).map(2 * GRANULE)
    assert books.reserved == {}


def test_a_driver_that_cannot_says_what_to_do():
    class Old:
        def cuMemGetAllocationGranularity(self, *_):  # noqa: N802
            return 801

    with pytest.raises(RuntimeError, match="801: page fences need it; use --fence poison"):
        Pages(0, Old())
