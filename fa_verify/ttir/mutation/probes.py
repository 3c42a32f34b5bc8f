"""`Probes`: an edit that changes no result, and sees in one run which mutants would.

Beside each operation that a mutant changes stands a copy with the change; the two results are
compared wherever they are computed. A mutant whose copies never differ changes no bit of that run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.lowering.hoist import is_pure
from fa_verify.ttir.lowering.lower import MASK_OPERAND
from fa_verify.ttir.mutation.mutants import changes
from fa_verify.ttir.mutation.surgery import Surgery, literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.mutation.changes import Change
    from fa_verify.ttir.mutation.mutants import Mutant
    from fa_verify.ttir.syntax.ir import Module, Op, Value

__all__ = ["Probes", "paired"]

_NAME = "mutation.probe"


class Probes:
    """Compares what operations compute with what mutants would.

    Attributes:
        differ: Mutants that would compute something else, as far as has run; those that nothing
            can be told of are in it from the start.
    """

    def __init__(self, meet: Callable[[Mutant, Change, Op], None]) -> None:
        """Compare nothing yet.

        Args:
            meet: Told of each change of each module.
        """
        self.differ: set[Mutant] = set()
        self._meet = meet
        self._mutants: list[Mutant] = []

    @property
    def rules(self) -> Mapping[str, Rule]:
        """How a comparison runs."""
        return {_NAME: self._compare}

    def __call__(self, module: Module) -> None:
        """Put in all comparisons."""
        surgery = Surgery(module)
        for mutant, op, change in list(changes(module, surgery)):
            self._meet(mutant, change, op)
            pair = paired(op, change, surgery)
            if pair is None:
                self.differ.add(mutant)
                continue
            place, mine, other = pair
            surgery.before(place, _NAME, (mine, other), None, attrs={"n": str(len(self._mutants))})
            self._mutants.append(mutant)
        surgery.sweep()

    def _compare(self, op: Op, low: Lowering) -> Step:
        mutant = self._mutants[int(op.attrs["n"])]
        mine, other = (low.slot(x) for x in op.operands)
        differ = self.differ

        def step(env: Env) -> None:
            if mutant not in differ and _unlike(env[mine], env[other]):
                differ.add(mutant)

        return step


def _unlike(a: Any, b: Any) -> bool:
    """Whether any bits differ."""
    if a.dtype.kind == "f":
        kind = f"i{a.dtype.itemsize}"
        a, b = np.ascontiguousarray(a).view(kind), np.ascontiguousarray(b).view(kind)
    return bool((a != b).any())


def paired(op: Op, change: Change, surgery: Surgery) -> tuple[Op, Value, Value] | None:
    """What is computed, what a mutant would compute, and before which operation both are known."""
    if any(x.type.scalar not in ("ptr", "desc") for x in op.results) and (
        is_pure(op) or op.name in ("tt.dot", "tt.reduce")
    ):
        copy = surgery.copied(op)
        place = surgery.following(copy)
        probe = surgery.before(place, _NAME, (op.results[0], copy.results[0]), None).producer
        assert probe is not None  # noqa: S101 - for mypy: it was just made
        change.apply(copy, surgery)
        mine, other = probe.operands
        surgery.remove(probe)
        if not any(x.users for x in copy.results) and other is not copy.results[0]:
            surgery.remove(copy)
        return place, mine, other
    position = MASK_OPERAND.get(op.name)
    hides = change.operator in ("drop-mask", "drop-other") or (
        op.name == "tt.load" and change.label == "operand-2"
    )
    if hides and position is not None:
        mask = op.operands[position]
        return op, mask, surgery.constant(op, mask.type, literal(mask.type, True))
    if op.name == "scf.for" and change.label in ("end-1", "end+1"):
        lower, upper, step = op.operands[:3]
        by = surgery.constant(op, upper.type, literal(upper.type, int(change.label[3:])))
        moved = surgery.before(op, "arith.addi", (upper, by), upper.type)
        return op, _steps(op, lower, upper, step, surgery), _steps(op, lower, moved, step, surgery)
    return None


def _steps(op: Op, lower: Value, upper: Value, step: Value, surgery: Surgery) -> Value:
    """How often a loop runs: ceil((upper - lower) / step) where that is positive."""
    type_ = upper.type
    one, zero = (surgery.constant(op, type_, literal(type_, n)) for n in (1, 0))
    length = surgery.before(op, "arith.subi", (upper, lower), type_)
    more = surgery.before(op, "arith.subi", (step, one), type_)
    length = surgery.before(op, "arith.addi", (length, more), type_)
    length = surgery.before(op, "arith.maxsi", (length, zero), type_)
    return surgery.before(op, "arith.divsi", (length, step), type_)
