"""Words and numbers as every report format writes them. Knows no record and no summary.

Messages, case lines and sources come from files that somebody else may have written, so `clean` is
what stands between them and a terminal.
"""

from __future__ import annotations

from typing import Final

__all__ = ["clean", "count", "duration", "lines", "number", "plural", "share", "shorten"]

_HUGE: Final = 1e300  # a record writes inf and NaN as the largest float
_PLAIN: Final = (0.01, 10_000.0)  # outside this range a ratio needs an exponent
_NEAR_ONE: Final = 1.095  # below it, two decimals
_MINUTE: Final = 60.0
_THOUSAND: Final = 1000


def clean(text: str) -> str:
    r"""The text on one line, with everything that a terminal would obey written out.

    >>> clean("a\nb\x1b[31m")
    'a b\\x1b[31m'
    """
    words = " ".join(text.split("\n")).replace("\t", " ").replace("\r", "")
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in words
    )


def lines(text: str) -> list[str]:
    """The lines of a text, each cleaned, empty ones left out."""
    return [clean(line).rstrip() for line in text.splitlines() if line.strip()]


def shorten(text: str, width: int) -> str:
    """The text in at most `width` characters, its tail kept: names and paths differ at the end.

    >>> shorten("kernels/flash.py:flash", 12)
    '....py:flash'
    """
    return text if len(text) <= width else "..." + text[len(text) - width + 3 :]


def number(value: float | None) -> str:
    """A ratio or an error in ulps, in at most six characters; only 1 itself is written as 1.

    >>> [number(x) for x in (None, 0.0, 0.00031, 0.4149, 9.87, 542.3, 2.2e6, 1.7e308)]
    ['-', '0', '3e-4', '0.41', '9.9', '542', '2e6', 'inf']
    >>> [number(x) for x in (0.9984, 1.0, 1.0004)]
    ['0.99', '1', '1.01']
    """
    if value is None:
        return "-"
    if value in (0, 1):
        return f"{value:.0f}"
    if value >= _HUGE:
        return "inf"
    if not _PLAIN[0] <= value < _PLAIN[1]:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    if value < _NEAR_ONE:  # rounded away from 1, the line between pass and fail
        return f"{min(value, 0.99) if value < 1 else max(value, 1.01):.2f}"
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def count(value: int) -> str:
    """A count with its thousands set apart.

    >>> count(20413)
    '20,413'
    """
    return f"{value:,}"


def plural(value: int, noun: str) -> str:
    """A count and its noun.

    >>> plural(1, "case"), plural(2413, "case")
    ('1 case', '2,413 cases')
    """
    return f"{count(value)} {noun}" + ("" if value == 1 else "s")


def share(part: int, whole: int) -> str:
    """A part of a whole in per cent; a part that is not 0 is never written as 0.

    >>> share(0, 10), share(1, 1_000_000), share(23, 1000)
    ('0%', '<0.1%', '2.3%')
    """
    if not part or not whole:
        return "0%"
    percent = 100.0 * part / whole
    return "<0.1%" if percent < 0.1 else f"{percent:.1f}%"  # one decimal


def duration(seconds: float) -> str:
    """Wall time.

    >>> duration(0.25), duration(42.4), duration(605)
    ('250 ms', '42 s', '10 min 5 s')
    """
    if seconds < 1:
        return f"{seconds * _THOUSAND:.0f} ms"
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), int(_MINUTE))
    return f"{minutes} min {rest} s"
