"""The tensors of one launch, and which of all tensors an address lies in.

A pointer made from an integer belongs to the argument that the address lies in; failing that, to
the tensor alive in this process whose first element it is (of several, the one that spans most), or
inside of which it lies. No tensor's elements lie at any other address: using it is out of bounds.
"""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.memory.argument import Argument
from fa_verify.ttir.memory.values import Pointer
from fa_verify.ttir.memory.views import span_of
from fa_verify.ttir.numbers.floats import RAW, Array
from fa_verify.ttir.sanitizer.tracking import Tracking

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fa_verify.ttir.memory.known import Memory

_BY_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


class Addresses:
    """The tensors of one launch.

    Attributes:
        arguments: Every tensor that the launch has got hold of so far.
        tracking: Who touched what, by storage and element size.
        stores_anywhere: Whether the kernel may store through addresses.
    """

    def __init__(self, memory: Memory) -> None:
        """Know no tensor yet."""
        self.arguments: list[Argument] = []
        self.tracking: dict[tuple[int, int], Tracking] = {}
        self.stores_anywhere = False
        self._memory = memory
        self._given: list[Argument] = []
        self._stored: set[int] = set()  # identities of arguments
        self._tensors: dict[int, torch.Tensor] = {}  # by the argument's identity
        self._alive: list[torch.Tensor] | None = None
        self._seen: dict[tuple[int, str], Argument] = {}

    def argument(self, name: str, tensor: torch.Tensor, scalar: str) -> Argument:
        """A tensor that the launch is given, as elements of a type of the same size."""
        argument = self._adopt(name, tensor, scalar)
        self._given.append(argument)
        return argument

    def _adopt(self, name: str, tensor: torch.Tensor, scalar: str) -> Argument:
        argument = Argument(name, tensor, scalar, self._memory)
        self.arguments.append(argument)
        self._tensors[id(argument)] = tensor
        return argument

    def track(self, argument: Argument, *, stored: bool) -> None:
        """Attach race tracking if the kernel stores to the argument or to what it shares."""
        key = (argument.key, argument.flat.itemsize)
        if stored:
            self._stored.add(id(argument))
        if stored and argument.size and key not in self.tracking:
            self.tracking[key] = Tracking(argument.storage_elements)
        argument.tracking = self.tracking.get(key)

    def shared(self) -> bool:
        """Whether a storage that the kernel stores to is also under an argument it only loads."""
        tracked = (arg for arg in self.arguments if arg.tracking is not None)
        return any(id(arg) not in self._stored for arg in tracked)

    def seen_as(self, argument: Argument, scalar: str) -> Argument:
        """The same tensor as elements of another type."""
        if RAW[scalar].itemsize == argument.flat.itemsize:
            return argument
        key = (id(argument), scalar)
        found = self._seen.get(key)
        if found is None:
            tensor = _resized(self._tensors[id(argument)], RAW[scalar].itemsize)
            found = self._seen[key] = self._adopt(argument.name, tensor, scalar)
            self.track(found, stored=argument.tracking is not None or self.stores_anywhere)
        return found

    def cast(self, pointer: Pointer, size: int, scalar: str) -> Pointer:
        """A pointer to elements of `size` bytes as one to elements of another type."""
        wanted = RAW[scalar].itemsize
        if wanted == size:
            return pointer
        offsets, which = pointer.select_arrays(pointer.args)
        offsets, rest = np.divmod(offsets * size, wanted)
        if rest.any():
            msg = f"a pointer to elements of {wanted} bytes at an address that is no multiple"
            raise Unsupported(msg)
        seen = tuple(self.seen_as(arg, scalar) for arg in pointer.args)
        return Pointer(seen, (offsets,), None if pointer.which is None else which)

    def pointer(self, addresses: Array, scalar: str) -> Pointer:
        """Pointers to elements of a type at byte addresses (int64)."""
        flat, size = addresses.reshape(-1), RAW[scalar].itemsize
        which, offsets = np.zeros(flat.size, np.int32), np.zeros(flat.size, np.int64)
        args: list[Argument] = []
        left: Array = np.arange(flat.size)
        while left.size:
            arg, start, end = self._owner(int(flat[left[0]]), scalar)
            mine = (flat[left] >= start) & (flat[left] < end)
            at, left = left[mine], left[~mine]
            if arg not in args:
                args.append(arg)
            which[at] = args.index(arg)
            offsets[at], rest = np.divmod(flat[at] - arg.address, size)
            for astray in np.unique(flat[at[rest != 0]] % size):  # inside an element
                these = at[(rest != 0) & (flat[at] % size == astray)]
                nowhere = self._nowhere(scalar, int(astray))
                if nowhere not in args:
                    args.append(nowhere)
                which[these], offsets[these] = args.index(nowhere), flat[these] // size
        several = which.reshape(addresses.shape) if len(args) > 1 else None
        return Pointer(tuple(args), (offsets.reshape(addresses.shape),), several)

    def _owner(self, address: int, scalar: str) -> tuple[Argument, int, int]:
        """What an address lies in, and the addresses from and up to which that is so."""
        given = [
            (arg, self._tensors[id(arg)]) for arg in self.arguments if id(arg) in self._tensors
        ]
        best = _widest(address, (tensor for _, tensor in given))
        if best is not None:
            known = next(arg for arg, tensor in given if tensor is best)
            return (self.seen_as(known, scalar), *_interval(best))
        if self._alive is None:
            self._alive = _alive()
        best = _widest(address, self._alive)
        edges = [edge for tensor in self._alive for edge in _interval(tensor)]
        start = max((edge for edge in edges if edge <= address), default=_LOWEST)
        end = min((edge for edge in edges if edge > address), default=_HIGHEST)
        if best is None:
            return self._nowhere(scalar), start, end
        key = (id(best), scalar)
        if key not in self._seen:
            name = self._memory.name_at(best.data_ptr()) or "a tensor given by its address"
            found = self._adopt(name, _resized(best, RAW[scalar].itemsize), scalar)
            self.track(found, stored=self.stores_anywhere)
            self._seen[key] = found
        return self._seen[key], start, end

    def _nowhere(self, scalar: str, start: int = 0) -> Argument:
        """What no tensor owns: empty, and at an address less than an element from 0."""
        found = self._seen.get((start, scalar))
        if found is None:
            empty = torch.empty(0, dtype=_BY_SIZE[RAW[scalar].itemsize])
            found = Argument("an address of no tensor's element", empty, scalar, self._memory)
            found.address = start
            self._seen[start, scalar] = found
        return found


def _interval(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + span_of(tensor) * tensor.element_size()


def _widest(address: int, tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Of the tensors that hold the address, one that begins there before others, the widest."""
    best, best_rank = None, (False, 0)
    for tensor in tensors:
        start, end = _interval(tensor)
        rank = (start == address, end - start)
        if start <= address < end and rank > best_rank:
            best, best_rank = tensor, rank
    return best


def _alive() -> list[torch.Tensor]:
    """Every dense CPU tensor that Python knows of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fake tensors warn, or raise, when asked where they lie
        return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and _is_dense(x)]


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _resized(tensor: torch.Tensor, itemsize: int) -> torch.Tensor:
    """The same memory as elements of another size; its whole span where gaps cannot be kept."""
    tensor = tensor.detach()
    if tensor.element_size() == itemsize:
        return tensor
    try:
        return tensor.view(_BY_SIZE[itemsize])
    except RuntimeError:  # its last dimension is not contiguous, or of an odd extent
        span, storage = span_of(tensor) * tensor.element_size(), tensor.untyped_storage()
        offset = tensor.storage_offset() * tensor.element_size()
        raw = torch.empty(0, dtype=torch.int8).set_(storage, offset, (span,), (1,))
        whole: torch.Tensor = raw[: span // itemsize * itemsize].view(_BY_SIZE[itemsize])
        return whole
