"""Says in text what an execution found."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.ttir.options import Incident

# What usually mends each kind; the detail says what happened.
REMEDIES = {
    "assertion-failed": "the condition given to tl.device_assert is false for these values",
    "descriptor-rule": "align the base and the strides, or give the tile a wider last dimension",
    "false-hint": "drop the hint or the assumption, or make it true of every launch",
    "integer-overflow": "widen a factor before the product, as in tl.program_id(0).to(tl.int64)",
    "nan-born": "guard the operation where its operands are infinite or outside its domain",
    "neighbour-read": "mask each dimension by its own length, not the flat offset",
    "order-dependence": "do not let an atomic's result decide what is stored, or accept the order",
    "out-of-bounds-read": "mask the load by the tensor's own length (and check its strides)",
    "out-of-bounds-write": "mask the store by the tensor's own length (and check its strides)",
    "race": "give each element one writer, use an atomic, or split the work into two launches",
    "read-back": "keep the tile in a variable, or put tl.debug_barrier() between store and load",
    "uninitialised-read": "fill the tensor first (torch.zeros), or mask what has not been written",
}


def incident_text(incident: Incident) -> str:
    """One incident: the kernel's line first, as editors and terminals link it."""
    where = f"program {incident.program_id}"
    if incident.argument:
        where = f"{incident.argument}, {where}"
        if incident.coordinates is not None:
            where += f", element {incident.coordinates}"
        where += f", offset {incident.offset}"
    text = f"{incident.file}:{incident.line}: {incident.kind} in {incident.kernel}: {where}"
    text += f", {counted(incident.count, 'lane')}"
    if incident.detail:
        text += f": {incident.detail}"
    return f"{text}\n    {incident.source}" if incident.source else text


def with_remedy(incident: Incident, others: Sequence[Incident] = ()) -> str:
    """One incident and what to do; what went outside for an overflow is mended with that."""
    kind = incident.kind
    if kind.startswith("out-of-bounds") and any(
        o.kind == "integer-overflow" and o.kernel == incident.kernel for o in others
    ):
        kind = "integer-overflow"
    return f"{incident_text(incident)}\n    usual remedy: {REMEDIES[kind]}"


def incidents_text(incidents: Sequence[Incident], noun: str = "incident") -> str:
    """All of them, headed by their number."""
    told = (with_remedy(incident, incidents) for incident in incidents)
    return "\n".join((f"{counted(len(incidents), noun)}:", *told))


def headline(incidents: Sequence[Incident]) -> str:
    """The first one in so few words that pytest's one-line summary shows them."""
    first, more = incidents[0], len(incidents) - 1
    text = f"{first.kind} in {first.kernel}, line {first.line}"
    return f"{text}, and {more} more" if more else text


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def watched_text(launches: int, kernels: int) -> str:
    """How much ran."""
    return f"{counted(launches, 'launch', 'launches')} of {counted(kernels, 'kernel')}"
