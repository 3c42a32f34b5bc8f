"""Who may attend to whom. `Mask.allowed` is the one definition; nothing else repeats it.

NumPy only: masks know neither torch nor Triton.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from fa_verify.errors import InvalidInputError
from fa_verify.patterns import Pattern, Places

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FULL", "Alignment", "Mask"]

Alignment = Literal["bottom-right", "top-left"]
_STRIP = 1 << 20  # elements of a mask that are made at a time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A banded mask: query i sees key j when ``lo(i) <= j < hi(i)``.

    The diagonal of query i is key ``i + shift``: ``shift = seqlen_k - seqlen_q`` when aligned
    bottom-right (the last query sees the last key), 0 when aligned top-left. Packed documents have
    a diagonal each, and a query sees keys of its own document only. A pattern leaves gaps in what
    is left.

    Attributes:
        causal: No key to the right of the diagonal.
        window_left: At most this many keys to the left of the diagonal (None: no limit).
        window_right: At most this many keys to the right of the diagonal (None: no limit).
        alignment: Where the diagonal starts.
        documents: (queries, keys) of each document packed into the sequence, in order; either may
            be 0. Empty: the sequence is one document.
        pattern: A named rule that hides more (`fa_verify.patterns`); "": none.

    Raises:
        InvalidInputError: A window or a document's length is negative, the alignment or the pattern
            is unknown, or a causal mask has a window_right.

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
    >>> Mask(causal=True, documents=((1, 2), (2, 1))).allowed(3, 3).astype(int)
    array([[1, 1, 0],
           [0, 0, 0],
           [0, 0, 1]])
    """

    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    alignment: Alignment = "bottom-right"
    documents: tuple[tuple[int, int], ...] = ()
    pattern: str = ""

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
        for lengths in self.documents:
            if len(lengths) != 2 or min(lengths) < 0:
                msg = f"documents: {lengths} must be (queries, keys), each at least 0"
                raise InvalidInputError(msg)
        if self.pattern:
            Pattern.parse(self.pattern)

    @property
    def banded(self) -> bool:
        """Whether it matters where the diagonal is."""
        return self.causal or self.window_left is not None or self.window_right is not None

    @property
    def hides_anything(self) -> bool:
        """Whether the mask can hide a key at all."""
        return self.banded or len(self.documents) > 1 or bool(self.pattern)

    def shift(self, seqlen_q: int, seqlen_k: int) -> int:
        """The key on the diagonal of query 0, of a document with these lengths."""
        return seqlen_k - seqlen_q if self.alignment == "bottom-right" else 0

    def diagonals(self, seqlen_q: int, seqlen_k: int) -> npt.NDArray[np.int64]:
        """The key on the diagonal of each query; there need be no such key in its document."""
        return _own(self, seqlen_q, seqlen_k)[0]

    def own_keys(
        self, seqlen_q: int, seqlen_k: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The keys of each query's document, as half-open intervals ``[first, end)``."""
        _, first, end = _own(self, seqlen_q, seqlen_k)
        return first, end

    def resized(self, seqlen_q: int, seqlen_k: int) -> Mask:
        """The mask for other lengths: documents are cut at the end, or the last one grows.

        >>> Mask(documents=((3, 3), (2, 4))).resized(4, 9).documents
        ((3, 3), (1, 6))
        """
        if not self.documents:
            return self
        left = [seqlen_q, seqlen_k]
        documents = []
        for lengths in self.documents:
            cut = min(lengths[0], left[0]), min(lengths[1], left[1])
            left = [left[0] - cut[0], left[1] - cut[1]]
            documents.append(cut)
        documents[-1] = documents[-1][0] + left[0], documents[-1][1] + left[1]
        return dataclasses.replace(self, documents=tuple(documents))

    def intervals(
        self, seqlen_q: int, seqlen_k: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """From the first key that each query sees to its last, ``[lo, hi)``, (seqlen_q,) each.

        It sees all between, unless there is a pattern. An empty interval (``hi == lo``) is a fully
        masked row. The arrays are everybody's: leave them as they are.
        """
        if self.pattern:
            return _hull(self, seqlen_q, seqlen_k)[:2]
        return _intervals(self, seqlen_q, seqlen_k)

    def seen(self, seqlen_q: int, seqlen_k: int) -> npt.NDArray[np.int64]:
        """How many keys each query sees."""
        if self.pattern:
            return _hull(self, seqlen_q, seqlen_k)[2]
        lo, hi = _intervals(self, seqlen_q, seqlen_k)
        return hi - lo

    def allowed(
        self, seqlen_q: int, seqlen_k: int, rows: slice | npt.NDArray[np.int64] = slice(None)
    ) -> npt.NDArray[np.bool_]:
        """Rows of the mask, shape (len(rows), seqlen_k); True where query i sees key j."""
        lo, hi = _intervals(self, seqlen_q, seqlen_k)
        keys = np.arange(seqlen_k, dtype=np.int64)
        band = (keys >= lo[rows, None]) & (keys < hi[rows, None])
        if not self.pattern:
            return band
        queries = np.arange(seqlen_q, dtype=np.int64)[rows, None]
        diagonals = self.diagonals(seqlen_q, seqlen_k)[rows, None]
        return band & Pattern.parse(self.pattern).sees(Places(queries, keys[None], diagonals))

    def strips(self, seqlen_q: int, seqlen_k: int) -> Iterator[tuple[slice, npt.NDArray[np.bool_]]]:
        """All rows of the mask, some at a time: which, and `allowed` of them."""
        step = max(1, _STRIP // max(1, seqlen_k))
        for start in range(0, seqlen_q, step):
            rows = slice(start, min(seqlen_q, start + step))
            yield rows, self.allowed(seqlen_q, seqlen_k, rows)


@functools.lru_cache(maxsize=16)  # judging a case asks some twenty times, for two or three problems
def _intervals(
    mask: Mask, seqlen_q: int, seqlen_k: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    diagonal, first, end = _own(mask, seqlen_q, seqlen_k)
    lo, hi = first, end
    if mask.window_left is not None:
        lo = diagonal - mask.window_left
    if mask.causal:
        hi = diagonal + 1
    elif mask.window_right is not None:
        hi = diagonal + 1 + mask.window_right
    lo = np.clip(lo, first, end)
    hi = np.clip(hi, first, end)
    return lo, np.maximum(lo, hi)


@functools.lru_cache(maxsize=16)
def _hull(
    mask: Mask, seqlen_q: int, seqlen_k: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Each query's first key, the one after its last, and how many it sees."""
    lo, hi, count = np.zeros((3, seqlen_q), dtype=np.int64)
    if seqlen_k:
        for rows, seen in mask.strips(seqlen_q, seqlen_k):
            count[rows] = seen.sum(1)
            lo[rows] = seen.argmax(1)
            hi[rows] = np.where(count[rows] > 0, seqlen_k - seen[:, ::-1].argmax(1), lo[rows])
    return lo, hi, count


def _own(
    mask: Mask, seqlen_q: int, seqlen_k: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Each query's diagonal, and its document's first key and the one after its last."""
    lengths = np.array(mask.documents or ((seqlen_q, seqlen_k),), dtype=np.int64)
    if tuple(lengths.sum(0)) != (seqlen_q, seqlen_k):
        msg = f"documents: {mask.documents} do not add up to {seqlen_q} queries, {seqlen_k} keys"
        raise InvalidInputError(msg)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    shifts = [mask.shift(int(queries), int(keys)) for queries, keys in lengths]
    # From a query's place in the sequence to its document's diagonal.
    moved = np.array(shifts, dtype=np.int64) + starts[:, 1] - starts[:, 0]
    moved, first, end = (
        np.repeat(each, lengths[:, 0]) for each in (moved, starts[:, 1], ends[:, 1])
    )
    return np.arange(seqlen_q, dtype=np.int64) + moved, first, end


FULL = Mask()
