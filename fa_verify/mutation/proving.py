"""`prove`: asks why mutants make no difference, of those alone that made none.

That takes seconds each: first in the modules of the case that runs fastest, and of what is proven
there, in those of others.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

import pebble

from fa_verify.ttir.mutation.mutants import Mutant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fa_verify.mutation.quarry import Prey, Quarry

__all__ = ["Proofs", "prove"]

Proofs = dict[Mutant, set[str]]

_ASKED = 6  # mutants that a process is asked about at a time: each takes about a second
_ASKING = 6  # cases in whose modules a proof is looked for: the first of those it meets
_PATIENCE = 1.0  # seconds after which it is asked again whether the time is over


def prove(
    quarries: Sequence[Quarry],
    cases: Sequence[Prey],
    ask: Callable[[Prey, Sequence[Mutant]], Future[Proofs]],
    late: Callable[[], bool],
    tell: Callable[[], None],
) -> None:
    """Note proofs of mutants that have one in every module of the first cases that they meet.

    Args:
        quarries: The mutants.
        cases: All cases, in the order in which they were chosen.
        ask: Has a process look at mutants on a case.
        late: Whether the time is over: then nothing more is proven.
        tell: Told now and then that time has passed.
    """
    asked = [q for q in quarries if isinstance(q.mutant, Mutant)]
    proofs: dict[str, set[str]] = {}
    for first, last in ((0, 1), (1, _ASKING)):
        met: dict[int, list[Mutant]] = collections.defaultdict(list)
        for quarry in asked:
            own = [prey for prey in cases if prey.number in quarry.cases][:_ASKING]
            for prey in sorted(own, key=lambda prey: prey.late)[first:last]:
                if isinstance(quarry.mutant, Mutant):
                    met[prey.number].append(quarry.mutant)
        chunks = [
            (prey, met[prey.number][at : at + _ASKED])
            for prey in cases
            for at in range(0, len(met[prey.number]), _ASKED)
        ]
        started = [(chunk, ask(prey, chunk)) for prey, chunk in chunks]
        for mutant, said in _answers(started, late, tell):
            proofs.setdefault(mutant.id, set()).update(said)
        asked = [q for q in asked if "" not in proofs.get(q.mutant.id, {""})]
    for quarry in asked:
        known = frozenset(proofs[quarry.mutant.id])
        quarry.found = dataclasses.replace(quarry.found, proofs=known)


def _answers(
    started: Sequence[tuple[Sequence[Mutant], Future[Proofs]]],
    late: Callable[[], bool],
    tell: Callable[[], None],
) -> Iterator[tuple[Mutant, set[str]]]:
    """What is proven of each mutant; nothing where the time or the process ends."""
    for chunk, future in started:
        while not future.done() and not late():
            wait([future], timeout=_PATIENCE)
        tell()
        found: Proofs = {mutant: {""} for mutant in chunk}
        if future.done():
            with contextlib.suppress(TimeoutError, pebble.ProcessExpired):
                found = future.result()
        else:
            future.cancel()
        yield from found.items()
