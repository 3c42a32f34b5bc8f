"""Where in a mapped region a tensor lies: byte arithmetic only.

A region is surrounded by unmapped pages. Of its bytes a `Placement` uses a tensor's, and poisoned
ones on both sides.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_verify.backends.fences.fence import Fence

__all__ = ["ALIGNED", "SLACK", "Placement", "place", "room"]

ALIGNED = 16
"""Bytes: what Triton specialises on and what TMA and vector accesses need of a base."""

SLACK = 128 << 10
"""Most poisoned bytes on a side: 128 rows of 256 float32, the largest tile in common use."""

_WORD = 8  # poison is filled in and compared in words of so many bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Bytes from a region's first one: low <= first <= last <= high.

    Attributes:
        low: First poisoned byte; a multiple of 8, as high is.
        first: First byte of the tensor.
        last: The byte after its last one.
        high: The byte after the last poisoned one.
    """

    low: int
    first: int
    last: int
    high: int


def room(nbytes: int, fence: Fence, *, fenced: bool) -> int:
    """Bytes that a region needs for a tensor, its slack and its gap."""
    if fence.mode == "page" and fenced:
        return nbytes + fence.gap + 2 * ALIGNED
    return nbytes + 2 * SLACK


def place(region: int, nbytes: int, fence: Fence, *, phase: int, fenced: bool) -> Placement:
    """Put a tensor into a region.

    Args:
        region: Bytes of the region, a multiple of 16; its address is one too.
        nbytes: Of the tensor.
        fence: Which side is fenced, and how closely.
        phase: The address modulo 16 that the tensor's first byte must have; where the fence is
            flush it has any.
        fenced: The tensor lies at an unmapped page; else there is slack on both sides.
    """
    if not (fence.mode == "page" and fenced):
        first = SLACK + phase
    elif fence.start:
        first = fence.gap if fence.flush else _up(fence.gap, phase)
    else:
        first = region - fence.gap - nbytes
        if not fence.flush:
            first = _down(first, phase)
    last = first + nbytes
    low, high = max(0, first - SLACK), min(region, last + SLACK)
    return Placement(low=low - low % -_WORD, first=first, last=last, high=high - high % _WORD)


def _up(number: int, phase: int) -> int:
    """The next number at or above that is `phase` modulo 16."""
    return number + (phase - number) % ALIGNED


def _down(number: int, phase: int) -> int:
    """The next number at or below that is `phase` modulo 16."""
    return number - (number - phase) % ALIGNED
