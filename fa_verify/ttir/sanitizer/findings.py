"""Collects incidents: one record a kind, kernel, line and argument, the rest counted."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fa_verify.ttir.options import Incident

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.memory.argument import Argument

# What may be no mistake: told apart from incidents, and no reason to fail anything.
NOTES = frozenset({"nan-born", "order-dependence", "read-back"})


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """The place of one operation: what an incident says about where it happened."""

    kernel: str
    file: str
    line: int
    masked: bool


class Findings:
    """Incidents of one execution."""

    def __init__(self, limit: int, tell: Callable[[Incident], None] | None = None) -> None:
        """Keep at most `limit` different incidents; `tell` hears of each when it first occurs."""
        self._tell = tell
        self.incidents: list[Incident] = []
        self.notes: list[Incident] = []
        self._index: dict[tuple[str, str, str, int, str], int] = {}
        self._limit = limit
        self.noted = 0

    def add(  # noqa: PLR0917 - what an incident is made of
        self,
        kind: str,
        site: Site,
        argument: Argument | str | None,
        program_id: tuple[int, int, int],
        offset: int,
        count: int,
        detail: str,
        *,
        mask: bool | None = None,
        distance: int = 0,
        landed: str = "",
    ) -> None:
        """Record that `count` lanes did something wrong at `site`."""
        tensor = None if isinstance(argument, str) else argument
        name = argument if isinstance(argument, str) else "" if argument is None else argument.name
        found = self.notes if kind in NOTES else self.incidents
        self.noted += found is self.incidents
        key = (kind, site.kernel, site.file, site.line, name)
        seen = self._index.get(key)
        if seen is not None:
            found[seen] = replace(found[seen], count=found[seen].count + count)
            return
        if len(found) >= self._limit:
            return
        self._index[key] = len(found)
        incident = Incident(
            kind=kind,
            kernel=site.kernel,
            file=site.file,
            line=site.line,
            source=linecache.getline(site.file, site.line).strip(),
            argument=name,
            program_id=program_id,
            coordinates=None if tensor is None else tensor.coordinates(offset),
            offset=offset,
            count=count,
            detail=detail,
            mask=mask,
            distance=distance,
            landed=landed,
        )
        found.append(incident)
        if self._tell is not None and found is self.incidents:
            self._tell(incident)
