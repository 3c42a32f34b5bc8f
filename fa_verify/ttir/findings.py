"""Collects incidents: one record a kind, kernel, line and argument, the rest counted."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fa_verify.ttir.options import Incident

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.argument import Argument


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
        self._index: dict[tuple[str, str, str, int, str], int] = {}
        self._limit = limit
        self.noted = 0

    def add(  # noqa: PLR0917 - what an incident is made of
        self,
        kind: str,
        site: Site,
        argument: Argument | None,
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
        self.noted += 1
        name = argument.name if argument is not None else ""
        key = (kind, site.kernel, site.file, site.line, name)
        seen = self._index.get(key)
        if seen is not None:
            old = self.incidents[seen]
            self.incidents[seen] = replace(old, count=old.count + count)
            return
        if len(self.incidents) >= self._limit:
            return
        self._index[key] = len(self.incidents)
        self.incidents.append(
            Incident(
                kind=kind,
                kernel=site.kernel,
                file=site.file,
                line=site.line,
                source=linecache.getline(site.file, site.line).strip(),
                argument=name,
                program_id=program_id,
                coordinates=argument.coordinates(offset) if argument is not None else None,
                offset=offset,
                count=count,
                detail=detail,
                mask=mask,
                distance=distance,
                landed=landed,
            )
        )
        if self._tell is not None:
            self._tell(self.incidents[-1])
