"""`Cause`: a known defect as a sentence for the kernel's author, and the model's knobs for it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_verify.diagnosis.knobs import Knobs

__all__ = ["Cause", "blocks", "sizes"]

_USUAL = (16, 32, 64, 128, 256)
_MOST = 8  # pairs of sizes, where a launch does not say which is which


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """One known defect on one case.

    Attributes:
        sentence: For the kernel's author, in the words of this case.
        knobs: What the model must do.
        name: The same for this defect on every case; "" stands for the sentence.
    """

    sentence: str
    knobs: Knobs
    name: str = ""


def blocks(config: str) -> list[tuple[int, int]]:
    """(BLOCK_M, BLOCK_N) of each launch that names both, in their order; else what may be them.

    >>> blocks("fwd(BLOCK_M=64, BLOCK_N=32); bwd(BLOCK_N=64, BLOCK_M=16); merge(BLOCK_M=8)")
    [(64, 32), (16, 64)]
    >>> blocks("fwd(ROWS=16, D=64, CAUSAL=True)")
    [(16, 64), (64, 16), (16, 16), (64, 64)]
    """
    found, guessed = [], []
    for launch in re.findall(r"\(([^)]*)\)", config):
        named = dict(re.findall(r"\b(BLOCK_[MN])=(\d+)", launch))
        if len(named) == 2:
            found.append((int(named["BLOCK_M"]), int(named["BLOCK_N"])))
        sizes = _tiles(launch)
        guessed += [*itertools.permutations(sizes, 2), *((size, size) for size in sizes)]
    return list(dict.fromkeys(found or guessed[:_MOST]))


def _tiles(config: str) -> list[int]:
    """Whole constants that a block may be as long as."""
    numbers = [int(n) for n in re.findall(r"\b\w+=(\d+)\b", config)]
    return list(dict.fromkeys(n for n in numbers if n in _USUAL))


def sizes(config: str, keys: int) -> list[int]:
    """Keys a block to try: those that the launches name, or else the usual ones.

    >>> sizes("fwd(D=128, KEYS=64)", keys=1)  # of few keys, only those that a launch may mean
    [16, 64, 128]
    """
    named = [int(n) for n in re.findall(r"BLOCK_N\w*=(\d+)", config) if int(n) > 0]
    usual = [n for n in _USUAL if n < 2 * keys or n == 16 or n in _tiles(config)]
    return list(dict.fromkeys(named)) or usual
