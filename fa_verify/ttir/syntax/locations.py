"""Resolves `loc` attributes to the line of user code they stand for."""

from __future__ import annotations

import re

from fa_verify.ttir.syntax.ir import Location

_DEEPEST = 200
_LOC_DEF = re.compile(r"^(#loc\d*) = loc\((.*)\)\s*$", re.MULTILINE)
_FILE_LOC = re.compile(r'^"((?:[^"\\]|\\.)*)":(\d+):(\d+)')
_NAME_LOC = re.compile(r'^"(?:[^"\\]|\\.)*"\((.*)\)$')


class Locations:
    """Resolves `loc` attributes to the innermost location that lies in user code."""

    def __init__(self, text: str, library: str) -> None:
        """Index the definitions in `text`; files under `library` are Triton's own."""
        self._table = dict(_LOC_DEF.findall(text))
        self._library = library
        self._memo: dict[str, Location] = {}
        self._chains: dict[str, list[Location]] = {}

    def resolve(self, raw: str) -> Location:
        """Return the location that `raw`, the text inside loc(...), stands for."""
        found = self._memo.get(raw)
        if found is None:
            chain = self._chain(raw.strip(), 0)
            user = [x for x in chain if self._library not in x.file]
            found = user[0] if user else (chain[0] if chain else Location())
            calls = tuple([(x.file, x.line, x.column) for x in chain])
            found = Location(found.file, found.line, found.column, calls)
            self._memo[raw] = found
        return found

    def _chain(self, raw: str, depth: int) -> list[Location]:  # noqa: PLR0911 - one a form of loc
        """Locations from the innermost to the outermost call."""
        if depth > _DEEPEST:
            return []
        if raw.startswith("#"):
            chain = self._chains.get(raw)
            if chain is None:
                chain = self._chain(self._table.get(raw, "unknown"), depth + 1)
                self._chains[raw] = chain
            return chain
        if match := _FILE_LOC.match(raw):
            return [Location(match[1], int(match[2]), int(match[3]))]
        if match := _NAME_LOC.match(raw):
            return self._chain(match[1], depth + 1)
        if raw.startswith("callsite("):
            inner = raw[len("callsite(") : -1]
            callee, _, caller = inner.rpartition(" at ")
            return self._chain(callee, depth + 1) + self._chain(caller, depth + 1)
        if raw.startswith("fused"):
            inner = raw[raw.index("[") + 1 : -1]
            for part in re.findall(r"#loc\d*", inner):
                if chain := self._chain(part, depth + 1):
                    return chain
        return []
