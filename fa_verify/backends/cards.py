"""Which card a process works on, and how much of its memory: the lease of one of a card's slots.

A slot is a lock on a file: all runs on a machine share its cards, and a process that dies gives its
slot back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Card", "Lease", "lease", "room", "take", "visible", "workers"]

# What judging a tile of 2^24 logits takes at most (`fa_verify.reference`): 128 MiB for each float64
# intermediate, of which the bounds of the backward pass hold some twenty at a time, and twice that
# for what torch keeps and a context has.
_NEED = 6 << 30
_USABLE = 0.9  # of a card's memory: the rest is the driver's
_PAUSE = 0.2  # seconds between looks for a free slot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A CUDA device that this process may see.

    Attributes:
        index: torch's number of it, among the visible ones.
        name: What distinguishes it on this machine.
        memory: Its bytes.
    """

    index: int
    name: str
    memory: int

    @property
    def slots(self) -> int:
        """How many processes its memory has room for."""
        return max(1, int(_USABLE * self.memory // _NEED))


def visible() -> tuple[Card, ...]:
    """The cards that CUDA_VISIBLE_DEVICES leaves."""
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        name = str(getattr(facts, "uuid", index))
        found.append(Card(index=index, name=name, memory=facts.total_memory))
    return tuple(found)


def room(cards: Sequence[Card]) -> int:
    """How many processes all cards together have room for."""
    return sum(card.slots for card in cards)


def workers(asked: int | None, cores: int, places: int) -> tuple[int, int]:
    """How many workers, and how many processes each is: two where there are cores for them.

    Args:
        asked: How many were asked for; None: as many as there are cores.
        cores: Of the machine.
        places: What `room` says.

    >>> workers(8, 16, 21), workers(None, 16, 21), workers(8, 8, 21), workers(1, 16, 21)
    ((8, 2), (16, 1), (8, 1), (1, 1))
    """
    count = min(asked or cores, places)
    return count, 2 if 1 < count <= min(cores, places) // 2 else 1


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a card, for as long as the process lives or until it is given back."""

    card: Card
    slot: int
    _file: int

    def give_back(self) -> None:
        """Let another process have the slot."""
        os.close(self._file)

    def share(self, processes: int, free: int) -> float:
        """The part of the card's memory that its holder may use.

        Args:
            processes: How many of its kind work on the card.
            free: Bytes that nobody uses now.
        """
        return _USABLE * min(1 / processes, free / self.card.memory)


def lease(
    cards: Sequence[Card], folder: Path | None = None, *, seconds: float | None = None
) -> Lease | None:
    """A slot of the card of which fewest are taken; wait for one if none is free.

    Args:
        cards: Which cards will do.
        folder: Where the locks are; None: the machine's folder for temporary files.
        seconds: How long to wait; None: as long as it takes.

    Returns:
        The lease; None if none became free in time.
    """
    where = folder or Path(tempfile.gettempdir()) / "fa-verify-cards"
    where.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user made it, for all
        where.chmod(0o777)
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        for slot in range(max(card.slots for card in cards)):
            for card in cards:
                file = _locked(where / f"{card.name}.{slot}") if slot < card.slots else None
                if file is not None:
                    return Lease(card, slot, file)
        if end is not None and time.monotonic() > end:
            return None
        time.sleep(_PAUSE)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the file's lock; None if another process does."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    with contextlib.suppress(PermissionError):
        os.fchmod(file, 0o666)
    return file


def take(processes: int) -> Lease | None:
    """Lease a card for this process, make it the current one and cap its memory.

    Args:
        processes: How many of the run do so.
    """
    cards = visible()
    held = lease(cards)
    if held is not None:
        torch.cuda.set_device(held.card.index)
        free, _ = torch.cuda.mem_get_info(held.card.index)
        share = held.share(-(-min(processes, room(cards)) // len(cards)), free)
        torch.cuda.set_per_process_memory_fraction(share, held.card.index)
    return held
