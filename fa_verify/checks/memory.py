"""What the backend saw: accesses outside a tensor, reads of unwritten memory, races, holes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.checks.where import describe
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.backends.base import Execution, Incident
    from fa_verify.trial import Trial

__all__ = ["check", "incidents", "unwritten"]


def check(trial: Trial) -> Iterator[Failure]:
    """Every incident of the run is a failure."""
    yield from incidents(trial.execution)


def incidents(execution: Execution) -> Iterator[Failure]:
    """One failure a kind, line and argument; first an overflow, of which other faults follow."""
    seen: dict[tuple[str, str, int, str], Incident] = {}
    lanes: dict[tuple[str, str, int, str], int] = {}
    for incident in sorted(execution.incidents, key=lambda x: x.kind != "integer-overflow"):
        key = (incident.kind, incident.file, incident.line, incident.argument)
        seen.setdefault(key, incident)
        lanes[key] = lanes.get(key, 0) + incident.count
    for key, incident in seen.items():
        through = f" through {incident.argument}" if incident.argument else ""
        yield Failure(
            check="memory",
            title=f"{incident.kind}{through}",
            message=(
                f"{_who(incident)}: {_place(incident)}{lanes[key]} lanes in all: {incident.detail}"
            ),
            tensor=incident.argument,
            location=f"{incident.file}:{incident.line}",
            source=incident.source.strip(),
        )


def _who(incident: Incident) -> str:
    """The kernel and, where it is known, the program."""
    program = "" if incident.program_id is None else f", program {incident.program_id}"
    return f"{incident.kernel}{program}"


def _place(incident: Incident) -> str:
    """The element, where there is one: a hint or an overflow has none."""
    if incident.coordinates is not None:
        where = f"element ({', '.join(str(i) for i in incident.coordinates)})"
    elif incident.argument and incident.offset:
        where = f"offset {incident.offset}"
    else:
        return ""
    return f"{incident.argument} {where}, "


def unwritten(trial: Trial) -> Iterator[Failure]:
    """Every element of an output that nobody wrote."""
    for name, holes in trial.execution.unwritten.items():
        count = int(holes.sum())
        if not count:
            continue
        first = ", ".join(str(i) for i in holes.nonzero()[0].tolist())
        yield Failure(
            check="unwritten",
            title=f"{name} left unwritten",
            message=(
                f"{name}[{first}]: nobody wrote it; {count} of {holes.numel()} elements: "
                f"{describe(name, holes)}"
            ),
            tensor=name,
        )
