"""`Pages`: regions between unmapped pages, by the driver's virtual-memory calls.

CUDA driver API, "Virtual Memory Management": reserve addresses, create physical memory, map it,
grant access. Of what is reserved the first and the last granule are never mapped.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_ulonglong, c_ushort
from typing import Any, Protocol

import torch

from fa_verify.backends.fences.memory import Region

__all__ = ["Driver", "Pages"]

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Driver(Protocol):
    """The driver's calls, each returning a CUresult."""

    def __getattr__(self, name: str) -> Any:
        """A call by its name."""
        ...


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


class Pages:
    """Mapped regions of one device; its context must be current.

    Attributes:
        granularity: Bytes that are mapped at a time: 2 MiB on an H200.
    """

    def __init__(self, device: int, driver: Driver | None = None) -> None:
        """Ask for the granularity.

        Args:
            device: Its ordinal.
            driver: Whose calls to make; by default libcuda's.
        """
        self._driver = driver or ctypes.CDLL("libcuda.so.1")
        location = _Location(type=1, id=device)  # CU_MEM_LOCATION_TYPE_DEVICE
        self._properties = _Properties(type=1, location=location)  # CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = _Access(location=location, flags=3)  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._properties), c_int(0))
        self.granularity = size.value

    def map(self, nbytes: int) -> Region:
        """A region of so many bytes, an unmapped granule before and after it."""
        handle, base = c_ulonglong(), c_uint64()
        size, whole = c_size_t(nbytes), c_size_t(nbytes + 2 * self.granularity)
        none = c_ulonglong(0)
        self._call("cuMemCreate", byref(handle), size, byref(self._properties), none)
        self._call("cuMemAddressReserve", byref(base), whole, c_size_t(0), c_uint64(0), none)
        first = c_uint64(base.value + self.granularity)
        self._call("cuMemMap", first, size, c_size_t(0), handle, none)
        self._call("cuMemSetAccess", first, size, byref(self._access), c_size_t(1))
        return Region(address=first.value, nbytes=nbytes, held=handle)

    def unmap(self, region: Region) -> None:
        """Unmap and release it."""
        first, size = c_uint64(region.address), c_size_t(region.nbytes)
        self._call("cuMemUnmap", first, size)
        self._call("cuMemRelease", region.held)
        base = c_uint64(region.address - self.granularity)
        self._call("cuMemAddressFree", base, c_size_t(region.nbytes + 2 * self.granularity))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            msg = f"CUDA out of memory: {name} for a fenced tensor"
            raise torch.OutOfMemoryError(msg)
        if status:
            msg = f"{name} returned {status}: page fences need it; use --fence poison"
            raise RuntimeError(msg)
