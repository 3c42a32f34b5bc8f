"""`Mutant`: one change at one place of a kernel's source, in whatever it is compiled to.

A place is the line and column of an operation and of each call that it was inlined through. Loops
that are unrolled, and functions specialised for several constants, have copies of it: a mutant
changes all of them, as a slip of whoever wrote that line would.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fa_verify.ttir.mutation import accesses, expressions, wholes
from fa_verify.ttir.mutation.changes import Facts
from fa_verify.ttir.mutation.modules import OfModules
from fa_verify.ttir.mutation.surgery import Surgery

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.ttir.mutation.changes import Change, Operator
    from fa_verify.ttir.options import Edit
    from fa_verify.ttir.syntax.ir import Module, Op

__all__ = ["OPERATORS", "Mutant", "changes"]

OPERATORS: tuple[Operator, ...] = (
    *accesses.OPERATORS,
    *expressions.OPERATORS,
    *wholes.OPERATORS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant(OfModules):
    """One change at one place.

    Attributes:
        kernel: The Triton function that is launched.
        place: Line and column of the operation and of the calls around it.
        op: The operation's name.
        operator: The kind of change; label: which of its kind.
        operators: What makes all changes of this kind.
    """

    kernel: str
    place: tuple[tuple[str, int, int], ...]
    op: str
    operator: str
    label: str
    operators: ClassVar[tuple[Operator, ...]] = OPERATORS

    @property
    def id(self) -> str:
        """A short name, the same for the same source wherever it lies."""
        place = [(Path(file).name, line, column) for file, line, column in self.place]
        text = repr((self.kernel, place, self.op, self.label))
        return f"{self.operator}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"

    def edit(self, kernel: str) -> Edit | None:
        """As an `Alteration`: this mutant, for its own kernel."""
        return self if kernel == self.kernel else None

    def __call__(self, module: Module) -> None:
        """Change a module."""
        surgery = Surgery(module)
        mine = [x for x in changes(module, surgery, self.place, type(self)) if x[0] == self]
        for _, op, change in mine:
            change.apply(op, surgery)
        surgery.sweep()


def changes(
    module: Module,
    surgery: Surgery,
    place: tuple[tuple[str, int, int], ...] = (),
    kind: type[Mutant] = Mutant,
) -> Iterator[tuple[Mutant, Op, Change]]:
    """All changes of a kind that a module allows, or one place of it.

    Yields:
        The mutant, its operation and the change.
    """
    facts = Facts(module)
    for op in surgery.ops():
        if not op.location.calls or (place and op.location.calls != place):
            continue
        for operator in kind.operators:
            for change in operator(op, facts):
                mutant = kind(
                    kernel=module.entry.name,
                    place=op.location.calls,
                    op=op.name,
                    operator=change.operator,
                    label=change.label,
                )
                yield mutant, op, change
