"""`Repair`: one small edit that may undo a slip; `Repairs` lists those that a run allows.

Most of them are the edits that make slips as well. What only makes one is left out: a mask or an
atomic dropped, a value rounded. What only mends one is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from fa_verify.ttir.mutation import expressions, slips, wholes
from fa_verify.ttir.mutation.changes import Change, Facts
from fa_verify.ttir.mutation.launches import LaunchMutant, launch_mutants
from fa_verify.ttir.mutation.mutants import Mutant, changes
from fa_verify.ttir.mutation.surgery import Surgery, literal, number
from fa_verify.ttir.ops.choice import parse_number
from fa_verify.ttir.syntax.ir import Type

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fa_verify.ttir.lowering.lower import Rule
    from fa_verify.ttir.mutation.changes import Operator
    from fa_verify.ttir.options import Edit, Grid, Parameters
    from fa_verify.ttir.syntax.ir import Module, Op, Value

__all__ = ["AnyRepair", "Place", "Repair", "Repairs"]


def argument(op: Op, facts: Facts) -> Iterator[Change]:
    """An argument is another of its type whose name is like its own; a size may be any other."""
    names = facts.arguments
    for index, operand in enumerate(op.operands):
        if operand not in names:
            continue
        for wrong, name in names.items():
            if wrong is operand or wrong.type != operand.type:
                continue
            sizes = operand.type.is_int and "stride" not in name + names[operand]
            if _alike(name, names[operand]) or (sizes and op.name in _PARTS):
                yield Change(
                    operator="wrong-argument",
                    label=f"operand-{index}-{name}",
                    says=f"{name} is used in place of {names[operand]}",
                    apply=partial(_instead, index, wrong),
                )


_PARTS = frozenset({"arith.divsi", "arith.remsi"})  # that take an index apart


def _alike(a: str, b: str) -> bool:
    """Whether names differ in one letter: stride_kn and stride_vn, seqlen_q and seqlen_k."""
    return len(a) == len(b) and sum(x != y for x, y in zip(a, b, strict=True)) == 1


def _instead(index: int, value: Value, op: Op, surgery: Surgery) -> None:
    surgery.replace(op, index, value)


def less(op: Op, facts: Facts) -> Iterator[Change]:
    """A whole constant is one less."""
    del facts
    if not op.name.startswith("arith."):
        return
    for index, operand in enumerate(op.operands):
        text = number(operand)
        if text is None or not operand.type.is_int or operand.type.scalar == "i1":
            continue
        old = int(parse_number(text, Type(operand.type.scalar)))
        yield Change(
            operator="change-constant",
            label=f"less-{index}",
            says=f"the constant {old} is {old - 1}",
            apply=partial(_constant, index, old - 1),
        )


def _constant(index: int, new: int, op: Op, surgery: Surgery) -> None:
    type_ = op.operands[index].type
    surgery.replace(op, index, surgery.constant(op, type_, literal(type_, new)))


_OTHER = {
    "arith.divsi": ("arith.remsi", "a / b is a % b"),
    "arith.remsi": ("arith.divsi", "a % b is a / b"),
    "arith.addi": ("arith.subi", "a + b is a - b"),
    "arith.subi": ("arith.addi", "a - b is a + b"),
    "arith.addf": ("arith.subf", "a + b is a - b"),
    "arith.subf": ("arith.addf", "a - b is a + b"),
    "arith.mulf": ("arith.divf", "a * b is a / b"),
    "arith.divf": ("arith.mulf", "a / b is a * b"),
    "arith.maxsi": ("arith.minsi", "max(a, b) is min(a, b)"),
    "arith.minsi": ("arith.maxsi", "min(a, b) is max(a, b)"),
    "arith.maxnumf": ("arith.minnumf", "max(a, b) is min(a, b)"),
    "arith.minnumf": ("arith.maxnumf", "min(a, b) is max(a, b)"),
    "arith.andi": ("arith.ori", "a & b is a | b"),
    "arith.ori": ("arith.andi", "a | b is a & b"),
}


def operation(op: Op, facts: Facts) -> Iterator[Change]:
    """A quotient is a remainder, a sum a difference, a maximum a minimum; and the other ways."""
    del facts
    if op.name in _OTHER:
        name, says = _OTHER[op.name]
        yield Change(
            operator="other-operation", label=name, says=says, apply=partial(_renamed, name)
        )


def _renamed(name: str, op: Op, surgery: Surgery) -> None:
    new = surgery.before(op, name, op.operands, op.results[0].type)
    surgery.forward(op.results[0], new)


def unrounded(op: Op, facts: Facts) -> Iterator[Change]:
    """A float32 number that is rounded to a narrower format and widened again is not rounded."""
    del facts
    if op.name == "arith.extf" and op.operands[0].producer is not None:
        inner = op.operands[0].producer
        if inner.name == "arith.truncf" and inner.operands[0].type == op.results[0].type:
            yield Change(
                operator="drop-cast",
                label="unrounded",
                says=f"a float32 number is not rounded to {op.operands[0].type.scalar}",
                apply=partial(_forward, inner.operands[0]),
            )


def _forward(value: Value, op: Op, surgery: Surgery) -> None:
    surgery.forward(op.results[0], value)


def other(op: Op, facts: Facts) -> Iterator[Change]:
    """What a mask hides from a load is 0."""
    hidden = op.operands[2:3] if op.name == "tt.load" and len(op.operands) > 1 else None
    type_ = op.results[0].type if op.results else None
    if hidden is None or type_ is None or type_.scalar == "ptr":
        return
    if hidden and number(hidden[0]) in _NOTHING:
        return
    yield Change(
        operator="masked-other",
        label="zero",
        says=f"the load of {facts.argument(op.operands[0])} gives 0 where its mask hides",
        apply=_zero,
    )


_NOTHING = ("0", "0.0", "0.000000e+00", "false")


def _zero(op: Op, surgery: Surgery) -> None:
    type_ = op.results[0].type
    nothing = surgery.constant(op, type_, literal(type_, 0.0 if type_.is_float else 0))
    if len(op.operands) > 2:
        surgery.replace(op, 2, nothing)
    else:
        op.operands.append(nothing)
        nothing.users.append(op)


_OPERATORS: tuple[Operator, ...] = (
    argument,
    other,
    expressions.comparison,
    wholes.loop,
    expressions.constant,
    less,
    operation,
    expressions.swapped_operands,
    unrounded,
    expressions.dropped_operand,
    expressions.select,
    wholes.reduction,
    wholes.scale_and_mask,
    *slips.OPERATORS,
)


_WRITE = frozenset({"tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_store"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair(Mutant):
    """One edit at one place that may mend a kernel."""

    operators: ClassVar[tuple[Operator, ...]] = _OPERATORS


AnyRepair = Repair | LaunchMutant


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a repair is made.

    Attributes:
        says: What is other then, as the beginning of a sentence.
        file: "" for a launch; line: in it.
        writes: Names of the kernel's arguments that it stores to; empty for a launch.
    """

    says: str
    file: str = ""
    line: int = 0
    writes: frozenset[str] = frozenset()


class _Look:
    """An edit that edits nothing, and notes what could be edited."""

    rules: ClassVar[Mapping[str, Rule]] = {}

    def __init__(self, found: dict[AnyRepair, Place]) -> None:
        self._found = found

    def __call__(self, module: Module) -> None:
        surgery, facts = Surgery(module), Facts(module)
        stores = [op for op in surgery.ops() if op.name in _WRITE]
        writes = frozenset(facts.argument(op.operands[0]) for op in stores)
        for repair, op, change in changes(module, surgery, kind=Repair):
            if isinstance(repair, Repair) and not change.proof:
                at = op.location
                place = Place(says=change.says, file=at.file, line=at.line, writes=writes)
                self._found.setdefault(repair, place)


class Repairs:
    """An `Alteration` that changes nothing, and notes which repairs a run allows.

    Attributes:
        found: The repairs of the kernels and launches it has met, and where each is made.
    """

    def __init__(self) -> None:
        """Note nothing yet."""
        self.found: dict[AnyRepair, Place] = {}
        self._look = _Look(self.found)

    def edit(self, kernel: str) -> Edit | None:
        """Look at each module."""
        del kernel
        return self._look

    def launch(
        self, kernel: str, grid: Grid, given: dict[str, Any], parameters: Parameters
    ) -> tuple[Grid, dict[str, Any]]:
        """Look at each launch."""
        for mutant in launch_mutants(kernel, grid, given, parameters):
            self.found.setdefault(mutant, Place(says=mutant.says))
        return grid, given
