"""`Slots`: one tensor each, between poison, in regions that are mapped once and used again.

A slot is used again when no tensor can reach it any more and the device is known to be idle.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import TYPE_CHECKING

import torch

from fa_verify.backends.fences import poison
from fa_verify.backends.fences.memory import Region, tensor_over
from fa_verify.backends.fences.placement import SLACK, Placement, place, room

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.backends.fences.fence import Fence
    from fa_verify.backends.fences.memory import Memory

__all__ = ["Damage", "Slot", "Slots"]

_KEPT = 1 << 30  # bytes of unused regions that are kept: 500 slots of small cases
_LARGE = 64 << 20  # bytes of a slot that is given back as soon as nobody can reach it
_CROWDED = 4 << 30  # bytes in use from which on dead slots of the same run are used again


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """A region in use.

    Attributes:
        label: The tensor's name, or the number of its allocation.
        region: The bytes; at: which of them.
        poisoned: Those from `at.low` to `at.high`.
        live: Whether a tensor can still reach it.
        given_back: Whether the region is free again.
    """

    label: str
    region: Region
    at: Placement
    poisoned: torch.Tensor
    live: bool = True
    given_back: bool = False

    @property
    def address(self) -> int:
        """Of the tensor's first byte."""
        return self.region.address + self.at.first

    def canaries(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The poisoned bytes before and after the tensor, each with its distance from `low`."""
        before, after = self.at.first - self.at.low, self.at.last - self.at.low
        for begin, end in ((0, before), (after, len(self.poisoned))):
            if end > begin:
                yield begin, self.poisoned[begin:end]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Canaries that somebody wrote over.

    Attributes:
        slot: Whose.
        first: Byte written, from the tensor's first one; last: the last such byte.
        count: Bytes in all.
    """

    slot: Slot
    first: int
    last: int
    count: int


class Slots:
    """The slots of a process, on one device.

    Attributes:
        mapped: How many regions were mapped so far; taken: how many slots were taken.
    """

    def __init__(self, memory: Memory, device: str) -> None:
        """None yet."""
        self._memory = memory
        self._device = device
        self._free: dict[int, list[Region]] = collections.defaultdict(list)
        self._kept = self._used = 0
        self._current: list[Slot] = []
        self._past: list[Slot] = []
        self._early: list[Damage] = []
        self._patterns: dict[int, torch.Tensor] = {}
        self._word = poison.NAN
        self._running = False
        self.mapped = self.taken = 0

    def begin(self, *, finite: bool) -> None:
        """A run begins, and the device is idle: what nobody can reach any more is free."""
        self._running = True
        self._word = poison.FINITE if finite else poison.NAN
        self._past += self._current
        self._current, self._early = [], []
        self._past = self._freed(self._past)

    def take(self, label: str, nbytes: int, fence: Fence, phase: int = 0) -> torch.Tensor:
        """Poisoned bytes of a slot of their own, as a tensor with its own storage.

        Args:
            label: What to call it.
            nbytes: How many, above 0.
            fence: What lies around.
            phase: The address modulo 16 that is due unless the fence is flush.
        """
        fenced = fence.only in ("", label)
        region = self._region(room(nbytes, fence, fenced=fenced))
        at = place(region.nbytes, nbytes, fence, phase=phase, fenced=fenced)
        poisoned, _ = tensor_over(region.address + at.low, at.high - at.low, self._device)
        slot = Slot(label=label, region=region, at=at, poisoned=poisoned)
        poison.fill(poisoned, self._word)
        tensor, owner = tensor_over(slot.address, nbytes, self._device)
        weakref.finalize(owner, self._dies, slot).atexit = False
        self._current.append(slot)
        self.taken += 1
        return tensor

    def at(self, address: int) -> Slot | None:
        """The slot whose tensor begins at an address."""
        for slots in (self._current, self._past):
            for slot in reversed(slots):
                if slot.live and slot.address == address:
                    return slot
        return None

    def damage(self) -> list[Damage]:
        """The run is over: its slots whose canaries somebody wrote over; waits for the device."""
        found = self._early + self._damaged(self._current)
        self._running = False
        self._current = self._freed(self._current)
        return found

    def _damaged(self, slots: list[Slot]) -> list[Damage]:
        parts = [part for slot in slots for part in slot.canaries()]
        if not parts:
            return []
        due = [self._pattern(begin, len(bytes_)) for begin, bytes_ in parts]
        if torch.equal(torch.cat([bytes_ for _, bytes_ in parts]), torch.cat(due)):
            return []
        return [found for slot in slots for found in self._inspect(slot)]

    def _inspect(self, slot: Slot) -> Iterator[Damage]:
        """What was written over in one slot."""
        offset = slot.at.low - slot.at.first
        places: list[int] = []
        for begin, seen in slot.canaries():
            wrong = (seen != self._pattern(begin, len(seen))).nonzero().flatten()
            places += (wrong + begin + offset).tolist()
        if places:
            yield Damage(slot=slot, first=places[0], last=places[-1], count=len(places))

    def _pattern(self, begin: int, count: int) -> torch.Tensor:
        """Poisoned bytes as they are `begin` bytes after an even address."""
        if self._word not in self._patterns:
            pattern = torch.empty(SLACK + 16, dtype=torch.uint8, device=self._device)
            poison.fill(pattern, self._word)
            self._patterns[self._word] = pattern
        return self._patterns[self._word][begin % 2 : begin % 2 + count]

    def _region(self, nbytes: int) -> Region:
        size = _size_class(nbytes, self._memory.granularity)
        if self._used + size > _CROWDED:
            self._reclaim()
        if self._free[size]:
            self._kept -= size
            region = self._free[size].pop()
        else:
            region = self._mapped(size)
        self._used += size
        return region

    def _mapped(self, size: int) -> Region:
        self.mapped += 1
        try:
            return self._memory.map(size)
        except torch.OutOfMemoryError:
            self._reclaim()
            self._unmap_free()
            return self._memory.map(size)

    def _reclaim(self) -> None:
        """Use again what died in this very run, once its canaries have been looked at."""
        self._synchronize()
        self._early += self._damaged([slot for slot in self._current if not slot.live])
        self._current = self._freed(self._current)

    def _dies(self, slot: Slot) -> None:
        """Called by whichever thread drops the last tensor.

        During a run the canaries are still to be looked at, and after it small slots can wait.
        """
        slot.live = False
        if not self._running and slot.region.nbytes > _LARGE:
            self._past = self._freed(self._past)
            self._current = self._freed(self._current)

    def _synchronize(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()

    def _freed(self, slots: list[Slot]) -> list[Slot]:
        """Give the regions of dead slots back; the live slots."""
        for slot in slots:
            if not (slot.live or slot.given_back):  # a collection may come here in between
                slot.given_back = True
                self._used -= slot.region.nbytes
                self._keep(slot.region)
        return [slot for slot in slots if slot.live]

    def _keep(self, region: Region) -> None:
        if self._kept + region.nbytes > _KEPT:
            self._synchronize()
            self._memory.unmap(region)
            return
        self._kept += region.nbytes
        self._free[region.nbytes].append(region)

    def _unmap_free(self) -> None:
        for regions in self._free.values():
            for region in regions:
                self._memory.unmap(region)
            regions.clear()
        self._kept = 0


def _size_class(nbytes: int, granularity: int) -> int:
    """Whole granules, and of their number the four leading bits only: sizes meet again.

    >>> [_size_class(n, 1) for n in (1, 15, 17, 33, 100)]
    [1, 15, 18, 36, 104]
    """
    granules = -(-nbytes // granularity)
    step = 1 << max(0, granules.bit_length() - 4)
    return -(-granules // step) * step * granularity
