"""Who may attend to whom. `Mask.allowed` is the one definition; nothing else repeats it.

NumPy only: masks know neither torch nor Triton.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import numpy as np
import numpy.typing as npt

from fa_verify.errors import InvalidInputError

__all__ = ["FULL", "Alignment", "Mask"]

Alignment = Literal["bottom-right", "top-left"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A banded mask: query i sees key j when ``lo(i) <= j < hi(i)``.

    The diagonal of query i is key ``i + shift``: ``shift = seqlen_k - seqlen_q`` when aligned
    bottom-right (the last query sees the last key), 0 when aligned top-left.

    Attributes:
        causal: No key to the right of the diagonal.
        window_left: At most this many keys to the left of the diagonal (None: no limit).
        window_right: At most this many keys to the right of the diagonal (None: no limit).
        alignment: Where the diagonal starts.

    Raises:
        InvalidInputError: A window is negative, the alignment is unknown, or a causal mask has a
            window_right.

    >>> Mask(causal=True).allowed(2, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    >>> Mask(causal=True, alignment="top-left").allowed(2, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0]])
    >>> Mask(window_left=0, window_right=1, alignment="top-left").allowed(3, 3).astype(int)
    array([[1, 1, 0],
           [0, 1, 1],
           [0, 0, 1]])
    """

    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    alignment: Alignment = "bottom-right"

    def __post_init__(self) -> None:
        """Reject masks that have no meaning."""
        for name in ("window_left", "window_right"):
            value = getattr(self, name)
            if value is not None and value < 0:
                msg = f"{name}={value}: a window is at least 0; use None for no limit"
                raise InvalidInputError(msg)
        if self.causal and self.window_right is not None:
            msg = f"window_right={self.window_right}: causal already ends at the diagonal; use None"
            raise InvalidInputError(msg)
        if self.alignment not in ("bottom-right", "top-left"):
            msg = f"alignment={self.alignment!r}: must be 'bottom-right' or 'top-left'"
            raise InvalidInputError(msg)

    @property
    def hides_anything(self) -> bool:
        """Whether the mask can hide a key at all."""
        return self.causal or self.window_left is not None or self.window_right is not None

    def shift(self, seqlen_q: int, seqlen_k: int) -> int:
        """The key on the diagonal of query 0."""
        return seqlen_k - seqlen_q if self.alignment == "bottom-right" else 0

    def intervals(
        self, seqlen_q: int, seqlen_k: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Each query's visible keys as half-open intervals ``[lo, hi)``, shape (seqlen_q,) each.

        An empty interval (``hi == lo``) is a fully masked row. The arrays are everybody's: leave
        them as they are.
        """
        return _intervals(self, seqlen_q, seqlen_k)

    def allowed(
        self, seqlen_q: int, seqlen_k: int, rows: slice = slice(None)
    ) -> npt.NDArray[np.bool_]:
        """Rows of the mask, shape (len(rows), seqlen_k); True where query i sees key j."""
        lo, hi = self.intervals(seqlen_q, seqlen_k)
        keys = np.arange(seqlen_k, dtype=np.int64)
        return (keys >= lo[rows, None]) & (keys < hi[rows, None])


@functools.lru_cache(maxsize=16)  # judging a case asks some twenty times, for two or three problems
def _intervals(
    mask: Mask, seqlen_q: int, seqlen_k: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    diagonal = np.arange(seqlen_q, dtype=np.int64) + mask.shift(seqlen_q, seqlen_k)
    lo = np.zeros(seqlen_q, dtype=np.int64)
    hi = np.full(seqlen_q, seqlen_k, dtype=np.int64)
    if mask.window_left is not None:
        lo = diagonal - mask.window_left
    if mask.causal:
        hi = diagonal + 1
    elif mask.window_right is not None:
        hi = diagonal + 1 + mask.window_right
    lo = np.clip(lo, 0, seqlen_k)
    hi = np.clip(hi, 0, seqlen_k)
    return lo, np.maximum(lo, hi)


FULL = Mask()
