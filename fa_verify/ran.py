"""`SourceRan`: what of one source file's kernels ran, and the short text that a record keeps of it.

No torch, no Triton.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from fa_verify.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["WAYS", "SourceRan", "merged"]

WAYS = ("then", "else", "loop", "no loop", "shown", "hidden")
"""Of an `if`; of a loop that turned, or for some program not once; of a mask."""
_LETTERS = "telnsh"
_TOKEN = re.compile(
    r"(?P<idle>!?)(?P<first>\d+)(?:-(?P<last>\d+))?|(?P<line>\d+):(?P<ways>[a-zA-Z]+)"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourceRan:
    """Lines by number.

    Attributes:
        ran: With an operation that ran.
        idle: With operations, none of which ran.
        ways: (line, one of `WAYS`): whether it was met. All that the IR has.

    >>> text = "3-5 8 !9 5:Te"
    >>> str(SourceRan.parse(text)) == text
    True
    """

    ran: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    ways: tuple[tuple[int, str, bool], ...] = ()

    def __str__(self) -> str:
        """Ranges of lines, idle ones after "!", then LINE:WAYS, upper case where met."""
        tokens = [*_ranges(self.ran, ""), *_ranges(self.idle, "!")]
        letters: dict[int, str] = {}
        for line, way, met in sorted(self.ways, key=lambda way: (way[0], WAYS.index(way[1]))):
            letter = _LETTERS[WAYS.index(way)]
            letters[line] = letters.get(line, "") + (letter.upper() if met else letter)
        return " ".join(tokens + [f"{line}:{ways}" for line, ways in letters.items()])

    @classmethod
    def parse(cls, text: str) -> SourceRan:
        """Read the text.

        Raises:
            InvalidInputError: It is no such text.
        """
        lines: dict[str, set[int]] = {"": set(), "!": set()}
        ways = []
        for token in text.split():
            match = _TOKEN.fullmatch(token)
            if match is None or set((match["ways"] or "").lower()) - set(_LETTERS):
                msg = f"ran={token!r}: expected 12, 12-20, !12 or 12:Te; the record is damaged"
                raise InvalidInputError(msg)
            if match["line"]:
                ways += [
                    (int(match["line"]), WAYS[_LETTERS.index(c.lower())], c.isupper())
                    for c in match["ways"]
                ]
            else:
                first = int(match["first"])
                lines[match["idle"]].update(range(first, int(match["last"] or first) + 1))
        return cls(ran=frozenset(lines[""]), idle=frozenset(lines["!"]), ways=tuple(ways))


def _ranges(lines: Iterable[int], mark: str) -> list[str]:
    found: list[list[int]] = []
    for line in sorted(lines):
        if found and line == found[-1][-1] + 1:
            found[-1].append(line)
        else:
            found.append([line])
    return [f"{mark}{run[0]}" + (f"-{run[-1]}" if len(run) > 1 else "") for run in found]


def merged(several: Iterable[SourceRan]) -> SourceRan:
    """What ran in any of them."""
    found = list(several)
    ran = frozenset().union(*(one.ran for one in found))
    met: dict[tuple[int, str], bool] = {}
    for one in found:
        for line, way, there in one.ways:
            met[line, way] = met.get((line, way), False) or there
    return SourceRan(
        ran=ran,
        idle=frozenset().union(*(one.idle for one in found)) - ran,
        ways=tuple((line, way, there) for (line, way), there in met.items()),
    )
