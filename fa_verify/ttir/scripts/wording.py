"""Says in text what an execution found."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.ttir.options import Incident


def incident_text(incident: Incident) -> str:
    """One incident: the kernel's line first, as editors and terminals link it."""
    where = f"program {incident.program_id}"
    if incident.argument:
        where = f"{incident.argument}, {where}"
        if incident.coordinates is not None:
            where += f", element {incident.coordinates}"
        where += f", offset {incident.offset}"
    lanes = "1 lane" if incident.count == 1 else f"{incident.count} lanes"
    text = (
        f"{incident.file}:{incident.line}: {incident.kind} in {incident.kernel}: {where}, {lanes}"
    )
    if incident.detail:
        text += f": {incident.detail}"
    return f"{text}\n    {incident.source}" if incident.source else text


def incidents_text(incidents: Sequence[Incident], noun: str = "incident") -> str:
    """All of them, headed by their number."""
    count = f"1 {noun}" if len(incidents) == 1 else f"{len(incidents)} {noun}s"
    return "\n".join((f"{count}:", *map(incident_text, incidents)))
