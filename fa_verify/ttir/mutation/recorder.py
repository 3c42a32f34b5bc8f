"""`Recorder`: an `Alteration` that changes nothing and notes which mutants a run allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fa_verify.ttir.mutation.launches import LaunchMutant, launch_mutants
from fa_verify.ttir.mutation.mutants import Mutant, mutants

if TYPE_CHECKING:
    from fa_verify.ttir.options import Edit, Grid
    from fa_verify.ttir.syntax.ir import Module

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

    def edit(self, kernel: str) -> Edit | None:
        """Look at each module."""
        del kernel
        return self._look

    def _look(self, module: Module) -> None:
        for mutant, changes in mutants(module).items():
            (first, location), *_ = changes
            proofs = frozenset(change.proof for change, _ in changes)
            self._note(
                mutant,
                Found(says=first.says, file=location.file, line=location.line, proofs=proofs),
            )

    def launch(
        self, kernel: str, grid: Grid, given: dict[str, Any], constants: frozenset[str]
    ) -> tuple[Grid, dict[str, Any]]:
        """Look at each launch."""
        for mutant in launch_mutants(kernel, grid, given, constants):
            self._note(mutant, Found(says=mutant.says))
        return grid, given

    def _note(self, mutant: AnyMutant, found: Found) -> None:
        known = self.found.get(mutant)
        self.found[mutant] = found if known is None else known.joined(found)
