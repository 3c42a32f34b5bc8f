"""Tokens of a case's line: numbers, flags, pairs, and masks, written and read."""

from __future__ import annotations

import itertools

from fa_verify.errors import InvalidInputError
from fa_verify.masks import Mask

__all__ = ["flag", "integer", "mask_text", "number", "pair", "parse_mask"]


def flag(key: str, text: str) -> bool:
    """What 0 or 1 says."""
    if text not in ("0", "1"):
        msg = f"{key}={text!r}: must be 1, or left out"
        raise InvalidInputError(msg)
    return text == "1"


def integer(key: str, text: str) -> int:
    """An integer."""
    try:
        return int(text)
    except ValueError:
        msg = f"{key}={text!r}: must be an integer"
        raise InvalidInputError(msg) from None


def number(key: str, text: str) -> float:
    """A float."""
    try:
        return float(text)
    except ValueError:
        msg = f"{key}={text!r}: must be a number"
        raise InvalidInputError(msg) from None


def pair(key: str, text: str, separator: str) -> tuple[int, int]:
    """Two integers; one alone is both."""
    first, found, second = text.partition(separator)
    try:
        return int(first), int(second if found else first)
    except ValueError:
        msg = f"{key}={text!r}: must be an integer, or two with {separator!r} between"
        raise InvalidInputError(msg) from None


def mask_text(mask: Mask) -> str:
    """A mask as a token; '' hides nothing."""
    parts = ["causal"] if mask.causal else []
    parts += [f"l{mask.window_left}"] if mask.window_left is not None else []
    parts += [f"r{mask.window_right}"] if mask.window_right is not None else []
    parts += ["topleft"] if mask.alignment == "top-left" else []
    parts += [f"docs{_documents_text(mask)}"] if mask.documents else []
    parts += [f"pattern:{mask.pattern}"] if mask.pattern else []
    return ".".join(parts)


def _documents_text(mask: Mask) -> str:
    """Lengths in order, QxK, those that come several times in a row once: 3x5-0x4*2."""
    runs = [(lengths, len(list(run))) for lengths, run in itertools.groupby(mask.documents)]
    return "-".join(f"{q}x{k}" + (f"*{count}" if count > 1 else "") for (q, k), count in runs)


def _parse_documents(text: str) -> tuple[tuple[int, int], ...]:
    runs = (part.partition("*") for part in text.split("-"))
    return tuple(
        lengths
        for lengths_text, _, count in runs
        for lengths in [pair("docs", lengths_text, "x")] * integer("docs", count or "1")
    )


def _side(text: str) -> int:
    """Most keys to one side."""
    try:
        return int(text[1:])
    except ValueError:
        msg = f"mask={text!r}: a window's side is lN or rN, N an integer"
        raise InvalidInputError(msg) from None


def parse_mask(text: str) -> Mask:
    """Read a mask from what `mask_text` wrote."""
    causal, left, right, top_left = False, None, None, False
    documents: tuple[tuple[int, int], ...] = ()
    pattern = ""
    for part in text.split("."):
        if part == "causal":
            causal = True
        elif part == "topleft":
            top_left = True
        elif part[:8] == "pattern:":
            pattern = part[8:]
        elif part[:4] == "docs":
            documents = _parse_documents(part[4:])
        elif part[:1] == "l":
            left = _side(part)
        elif part[:1] == "r":
            right = _side(part)
        else:
            parts = "causal, lN, rN, topleft, docsQxK-..., pattern:NAME:..."
            msg = f"mask={text!r}: parts are {parts}, joined by '.'"
            raise InvalidInputError(msg)
    return Mask(
        causal=causal,
        window_left=left,
        window_right=right,
        alignment="top-left" if top_left else "bottom-right",
        documents=documents,
        pattern=pattern,
    )
