"""`Fence`: how tensors lie in memory while a kernel runs on a card. No torch."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, get_args

from fa_verify.errors import InvalidInputError

__all__ = ["MODES", "OFF", "POISON", "Fence", "Mode", "in_turn"]

Mode = Literal["off", "poison", "page"]
MODES: tuple[Mode, ...] = get_args(Mode)

_TEXT = re.compile(
    r"(?P<mode>off|poison|page)(?P<start>\.start)?(?P<flush>\.flush)?(?P<finite>\.finite)?"
    r"(?P<only>\.only-\w+)?(?P<gap>\.gap\d+)?"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """What surrounds each tensor that a kernel can reach.

    Attributes:
        mode: "off": nothing is done. "poison": what nobody wrote is poisoned, and so is slack on
            both sides of each tensor. "page": beyond one end of each tensor no memory is mapped.
        start: The unmapped page is the one before the first element, not the one after the last.
        flush: Tensors lie at the page to the byte, wherever that puts their first element; else
            they keep its address modulo 16, up to 15 bytes off.
        finite: Poison is a large finite number, not a NaN.
        only: The one tensor at an unmapped page ("q", "k", ..., or the number of an allocation);
            "": all of them.
        gap: Poisoned bytes between tensors and the page.

    >>> Fence.parse("page.start.gap64") == Fence(mode="page", start=True, gap=64)
    True
    """

    mode: Mode = "off"
    start: bool = False
    flush: bool = False
    finite: bool = False
    only: str = ""
    gap: int = 0

    def __str__(self) -> str:
        """The text that `parse` reads."""
        words = [name for name in ("start", "flush", "finite") if getattr(self, name)]
        words += [f"only-{self.only}"] if self.only else []
        words += [f"gap{self.gap}"] if self.gap else []
        return ".".join([self.mode, *words])

    @classmethod
    def parse(cls, text: str) -> Fence:
        """Read the text form.

        Raises:
            InvalidInputError: The text is no fence.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            msg = (
                f"fence={text!r}: must be off, poison or page, then any of .start .flush .finite "
                ".only-NAME .gapBYTES in this order"
            )
            raise InvalidInputError(msg)
        return cls(
            mode=next(mode for mode in MODES if mode == match["mode"]),
            start=match["start"] is not None,
            flush=match["flush"] is not None,
            finite=match["finite"] is not None,
            only=(match["only"] or "").removeprefix(".only-"),
            gap=int((match["gap"] or "").removeprefix(".gap") or 0),
        )


OFF = Fence()
POISON = Fence(mode="poison")


def in_turn(mode: Mode, form: int, turn: int) -> Fence:
    """The fence of a case: each compiled form meets a page at both ends, in turn.

    The sixth of every eight forms is flush, and always so: a base that is no multiple of 16 is
    compiled apart.
    """
    if mode != "page":
        return Fence(mode=mode)
    return Fence(mode=mode, start=(form + turn) % 2 == 1, flush=form % 8 == 5)
