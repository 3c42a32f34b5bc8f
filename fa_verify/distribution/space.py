"""`Space`: the tables that remain once a kernel's capabilities and a caller's wishes are known."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from fa_verify.distribution.tables import (
    BACKWARD,
    DOT_PRECISIONS,
    DTYPES,
    FP8,
    HEADS,
    MASKS,
    T,
    Table,
)
from fa_verify.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fa_verify.capabilities import Capabilities

__all__ = ["FP8_DTYPE", "Space"]

FP8_DTYPE: Final = "float8_e4m3fn"
"""As a wish: q, k and v in it, whatever the problem's dtype."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The tables that remain once a kernel's capabilities and the caller's wishes are known.

    Attributes:
        capabilities: What the kernel takes; None: everything.
        dtypes: Those drawn from; likewise dot_precisions, masks, heads.
        head_dims: All allowed, ascending.
        head_dims_v: All allowed, ascending; empty: always head_dim.
        backward: Share of cases with a backward pass.
        max_elements: Most batch * heads_q * seqlen_q * seqlen_k, or None.
    """

    capabilities: Capabilities | None
    dtypes: Table[Any]
    dot_precisions: Table[Any]
    masks: Table[tuple[bool, bool, bool, Any]]
    heads: Table[tuple[int, int, int]]
    head_dims: tuple[int, ...]
    head_dims_v: tuple[int, ...]
    backward: float
    max_elements: int | None

    @classmethod
    def of(
        cls,
        capabilities: Capabilities | None = None,
        *,
        dtype: str | None = None,
        backward: bool | None = None,
        max_elements: int | None = None,
    ) -> Space:
        """Cut the tables down.

        Raises:
            InvalidInputError: Nothing is left of one of them.
        """
        c = capabilities
        if dtype == FP8_DTYPE:
            c, dtype = _scaled(c), None
        every = tuple(range(1, 257))
        gradients = c is None or (c.backward and "" in c.fp8)  # of fp8 there are none
        if backward and not gradients:
            msg = "backward=True: the capabilities declare no backward; use backward=None or False"
            raise InvalidInputError(msg)
        if max_elements is not None and max_elements < 1:
            msg = f"max_elements={max_elements}: must be at least 1, or None"
            raise InvalidInputError(msg)
        dots = DOT_PRECISIONS if c is None else _only(DOT_PRECISIONS, c.dot_precisions)
        usable = tuple(name for name, _ in DTYPES if name != "float32" or dots)
        return cls(
            capabilities=c,
            dtypes=_only(
                _only(DTYPES, usable if c is None else set(usable) & set(c.dtypes)),
                (dtype,) if dtype is not None else usable,
                name="dtype",
            ),
            dot_precisions=dots,
            masks=tuple(entry for entry in MASKS if c is None or _takes_mask(c, entry[0])),
            heads=tuple(e for e in HEADS if c is None or c.gqa or e[0][1] == e[0][2]),
            head_dims=_not_empty("head_dims", (d for d in every if c is None or d in c.head_dims)),
            head_dims_v=every
            if c is None
            else tuple(d for d in every if d in (c.head_dims_v or ())),
            backward=BACKWARD if backward is None and gradients else float(bool(backward)),
            max_elements=max_elements,
        )

    @property
    def simplest_fp8(self) -> str:
        """What of `Problem.fp8` is allowed and asks least."""
        c = self.capabilities
        every = ("", *(name for name, _ in FP8))
        return next(fp8 for fp8 in every if c is None or c.takes_scales(fp8))

    def fit_head_dim(self, wanted: int, *, of_v: bool = False) -> int:
        """The largest allowed head_dim up to the one wanted, or else the smallest."""
        allowed = self.head_dims_v if of_v else self.head_dims
        return max((d for d in allowed if d <= wanted), default=allowed[0])


def _scaled(c: Capabilities | None) -> Capabilities:
    """What is left where q, k and v are to be fp8."""
    scales = tuple(fp8 for fp8 in c.fp8 if fp8) if c is not None else ()
    if c is None or not scales:
        msg = (
            f"dtype='{FP8_DTYPE}': the capabilities declare no fp8; declare it, or leave dtype out"
        )
        raise InvalidInputError(msg)
    return dataclasses.replace(c, fp8=scales)


def _takes_mask(c: Capabilities, entry: tuple[bool, bool, bool, Any]) -> bool:
    causal, left, right, alignment = entry
    if not (causal or left or right):
        return True
    return alignment in c.alignments and (c.window or not (left or right))


def _only(table: Table[T], allowed: Iterable[Any], name: str = "") -> Table[T]:
    kept = set(allowed)
    left = tuple(entry for entry in table if entry[0] in kept)
    return _not_empty(name, left) if name else left


def _not_empty(name: str, values: Iterable[T]) -> tuple[T, ...]:
    left = tuple(values)
    if not left:
        msg = f"{name}: none is left that both the capabilities and the caller allow"
        raise InvalidInputError(msg)
    return left
