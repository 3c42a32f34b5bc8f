"""`Prover`: an alteration that alters nothing, and asks of some mutants why they change no result.

What it asks takes seconds a mutant, too long for all of them: `proofs` are what is told at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.ttir.mutation.changes import Facts
from fa_verify.ttir.mutation.modules import OfModules
from fa_verify.ttir.mutation.mutants import changes
from fa_verify.ttir.mutation.probes import paired
from fa_verify.ttir.mutation.reach import comes_to_nothing
from fa_verify.ttir.mutation.surgery import Surgery

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fa_verify.ttir.mutation.mutants import Mutant
    from fa_verify.ttir.options import Edit
    from fa_verify.ttir.syntax.ir import Module

__all__ = ["Prover"]


class Prover(OfModules):
    """Asks of each module that a run compiles.

    Attributes:
        proofs: What was found of each mutant, in each place that it changes; "": nothing.
    """

    def __init__(self, wanted: Iterable[Mutant]) -> None:
        """Ask nothing yet."""
        self._wanted = set(wanted)
        self.proofs: dict[Mutant, set[str]] = {mutant: set() for mutant in self._wanted}

    def edit(self, kernel: str) -> Edit | None:
        """Look at the modules of functions that a mutant is of."""
        return self if any(mutant.kernel == kernel for mutant in self._wanted) else None

    def __call__(self, module: Module) -> None:
        """Ask; the module stays as it is."""
        surgery, facts = Surgery(module), Facts(module)
        asked = [x for x in changes(module, surgery) if x[0] in self._wanted]
        for mutant, op, change in asked:
            proof = change.proof
            if not proof and len(op.results) == 1 and op.results[0].type.is_int:
                pair = paired(op, change, surgery)
                if pair is not None:
                    proof = comes_to_nothing(pair[1], pair[2], facts)
            self.proofs[mutant].add(proof)
        surgery.sweep()
