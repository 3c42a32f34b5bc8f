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
_BLOCK = r"(?:\b|_)(?:B|BLK|BLOCK|TILE)(?:_?SIZE)?_?"  # BLOCK_SIZE_M, BM, TILE_Q, BLOCK_N1, ...
_ROWS = re.compile(rf"{_BLOCK}(?:M|Q)\d?=(\d+)\b", re.IGNORECASE)
_KEYS = re.compile(rf"{_BLOCK}(?:N|KV)(?:\d|_\w*)?=(\d+)\b", re.IGNORECASE)
_NO_TILES = re.compile(r"^D|DIM|DMODEL|_D[A-Z]?$|^G|HEADS?$|^H", re.IGNORECASE)


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
    """Rows and keys a block of each launch that names both, in their order; else what may be them.

    >>> blocks("fwd(BLOCK_M=64, BLOCK_N=32); bwd(BN=64, BM=16); merge(BLOCK_M=8)")
    [(64, 32), (16, 64)]
    >>> blocks("fwd(ROWS=16, COLUMNS=64, D=128)")
    [(16, 64), (64, 16), (16, 16), (64, 64)]
    """
    found, guessed = [], []
    for launch in re.findall(r"\(([^)]*)\)", config):
        rows, keys = _ROWS.search(launch), _KEYS.search(launch)
        if rows and keys:
            found.append((int(rows[1]), int(keys[1])))
        sizes = _tiles(launch)
        guessed += [*itertools.permutations(sizes, 2), *((size, size) for size in sizes)]
    return list(dict.fromkeys(found or guessed[:_MOST]))


def _tiles(config: str) -> list[int]:
    """Whole constants that a block may be as long as, and that are no head_dim."""
    named = re.findall(r"\b(\w+)=(\d+)\b", config)
    numbers = [int(n) for name, n in named if not _NO_TILES.search(name)]
    return list(dict.fromkeys(n for n in numbers if n in _USUAL))


def sizes(config: str, keys: int) -> list[int]:
    """Keys a block to try: those that the launches name, or else the usual ones.

    >>> sizes("fwd(BLOCK_N=32); merge(BLOCK_M=8)", keys=500)
    [32]
    >>> sizes("fwd(D=128, COLUMNS=64)", keys=1)  # of few keys, only those that a launch may mean
    [16, 64]
    """
    named = [int(n) for n in _KEYS.findall(config) if int(n) > 0]
    usual = [n for n in _USUAL if n < 2 * keys or n == 16 or n in _tiles(config)]
    return list(dict.fromkeys(named)) or usual
