"""What slots are cut from: mapped regions, and tensors over their bytes.

`Heap` takes regions from torch's own allocator, on any device; nothing around them is unmapped.
`fa_verify.backends.fences.pages` maps them.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, Protocol

import torch

__all__ = ["Heap", "Memory", "Region", "tensor_over"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """Mapped bytes.

    Attributes:
        address: Of the first byte, a multiple of 16.
        nbytes: How many, a multiple of 16.
        held: What keeps them mapped.
    """

    address: int
    nbytes: int
    held: Any


class Memory(Protocol):
    """Where regions come from."""

    granularity: int

    def map(self, nbytes: int) -> Region:
        """A region of so many bytes, a multiple of the granularity.

        Raises:
            torch.OutOfMemoryError: There are not so many.
        """
        ...

    def unmap(self, region: Region) -> None:
        """Give a region back; nobody may look at it any more."""
        ...


class Heap:
    """Regions from torch's allocator."""

    granularity = 64 << 10

    def __init__(self, device: str) -> None:
        """Take memory from a device."""
        self._device = device

    def map(self, nbytes: int) -> Region:
        """A region of so many bytes; torch's own start at multiples of 64 (CPU) or 512 (CUDA)."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return Region(address=buffer.data_ptr(), nbytes=nbytes, held=buffer)

    def unmap(self, region: Region) -> None:
        """Nothing to do: the buffer dies with the region."""


class Owner:
    """Whom a tensor over foreign memory keeps alive: when it dies nobody can reach the bytes."""

    def __init__(self, address: int, nbytes: int) -> None:
        """The bytes, as `torch.as_tensor` wants them described."""
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_over(address: int, nbytes: int, device: str) -> tuple[torch.Tensor, Any]:
    """A tensor of bytes in a storage of its own, and an object that lives as long as the storage.

    The object may be given to `weakref.finalize`. `nbytes` is above 0.
    """
    if device == "cpu":
        array = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(array, dtype=torch.uint8), array
    owner = Owner(address, nbytes)
    return torch.as_tensor(owner, device=device), owner
