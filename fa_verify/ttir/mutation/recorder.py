"""`Recorder`: an `Alteration` that changes nothing, and notes which mutants a run allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fa_verify.ttir.mutation.launches import LaunchMutant, launch_mutants
from fa_verify.ttir.mutation.mutants import Mutant
from fa_verify.ttir.mutation.probes import Probes

if TYPE_CHECKING:
    from fa_verify.ttir.mutation.changes import Change
    from fa_verify.ttir.options import Edit, Grid, Parameters
    from fa_verify.ttir.syntax.ir import Op

__all__ = ["AnyMutant", "Found", "Recorder"]

AnyMutant = Mutant | LaunchMutant


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is known of a mutant beforehand.

    Attributes:
        says: What is wrong, as the beginning of a sentence.
        file: Where, "" for a launch; line: in it.
        proofs: Why each of its changes, in each module, changes no result; "" where nothing says.
    """

    says: str
    file: str = ""
    line: int = 0
    proofs: frozenset[str] = frozenset({""})

    def joined(self, other: Found) -> Found:
        """What is known after another module was looked at."""
        return Found(
            says=self.says, file=self.file, line=self.line, proofs=self.proofs | other.proofs
        )


class Recorder:
    """Notes mutants.

    Attributes:
        found: Mutants of the modules and launches that it has met.
    """

    def __init__(self) -> None:
        """Note nothing yet."""
        self.found: dict[AnyMutant, Found] = {}
        self._probes = Probes(self._meet)
        self._launches: set[LaunchMutant] = set()

    @property
    def differ(self) -> set[AnyMutant]:
        """Those that would have computed anything else in this run at their own place."""
        return {*self._probes.differ, *self._launches}

    def edit(self, kernel: str) -> Edit | None:
        """Look at each module, and at what its operations compute."""
        del kernel
        return self._probes

    def _meet(self, mutant: Mutant, change: Change, op: Op) -> None:
        at, proofs = op.location, frozenset({change.proof})
        self._note(mutant, Found(says=change.says, file=at.file, line=at.line, proofs=proofs))

    def launch(
        self, kernel: str, grid: Grid, given: dict[str, Any], parameters: Parameters
    ) -> tuple[Grid, dict[str, Any]]:
        """Look at each launch."""
        for mutant in launch_mutants(kernel, grid, given, parameters):
            self._note(mutant, Found(says=mutant.says))
            other_grid, other = mutant.launch(kernel, grid, given, parameters)
            if other_grid != grid or any(other[name] != given[name] for name in mutant.names):
                self._launches.add(mutant)
        return grid, given

    def _note(self, mutant: AnyMutant, found: Found) -> None:
        known = self.found.get(mutant)
        self.found[mutant] = found if known is None else known.joined(found)
