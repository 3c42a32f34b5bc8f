"""`Change`: one small wrong edit at one operation; `Facts`: what operators ask about a module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa_verify.ttir.mutation.numbering import Numbering
from fa_verify.ttir.syntax.ir import Op, Type

if TYPE_CHECKING:
    from fa_verify.ttir.mutation.surgery import Surgery
    from fa_verify.ttir.syntax.ir import Module, Value

__all__ = ["Change", "Facts", "Operator"]

_NARROW = ("f8E4M3FN", "f8E5M2", "f16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One edit of one operation.

    Attributes:
        operator: The kind of edit.
        label: Which of its kind; one operation has no two alike.
        says: What is wrong then, as the beginning of a sentence.
        apply: Makes the edit at this operation or at a copy of it.
        proof: Why it changes no result of any launch of this module; "" if nothing proves it.
    """

    operator: str
    label: str
    says: str
    apply: Callable[[Op, Surgery], None]
    proof: str = ""


class Facts:
    """A module, for operators that must look beyond their operation.

    Attributes:
        module: The module.
        arguments: Arguments of its functions, and their names.
        owners: The operation whose region an operation stands in, if any.
        numbering: Which values are equal.
        counters: Counters of loops, and the loops.
    """

    def __init__(self, module: Module) -> None:
        """Look at a module before any edit."""
        self.module = module
        self.numbering = Numbering()
        self.arguments = {
            value: value.name.removeprefix("%")
            for function in module.functions.values()
            for value in function.args
        }
        self.owners: dict[Op, Op] = {}
        self.counters: dict[Value, Op] = {}
        self._initial: dict[Value, Value] = {}
        for function in module.functions.values():
            for op in function.walk():
                for region in op.regions:
                    for block in region.blocks:
                        self.owners |= dict.fromkeys(block.ops, op)
                if op.name == "scf.for":
                    counter, *args = op.regions[0].blocks[0].args
                    self.counters[counter] = op
                    self._initial |= dict(zip(args, op.operands[3:], strict=True))

    def inside(self, loop: Op) -> set[Value]:
        """Values that exist anew in each iteration."""
        found = [arg for region in loop.regions for block in region.blocks for arg in block.args]
        for op in loop.walk():
            if op is not loop:
                found += op.results
        return set(found)

    @functools.cached_property
    def narrow(self) -> Type:
        """The narrowest format that a pointer argument has; float16 where all are wider."""
        pointees = [arg.type.pointee for arg in self.module.entry.args if arg.type.pointee]
        found = [p.scalar for p in pointees if p.scalar in _NARROW]
        return Type(found[0] if found else "f16")

    @functools.cached_property
    def integers(self) -> tuple[Value, ...]:
        """Integer arguments of the kernel, in order."""
        return tuple(arg for arg in self.module.entry.args if arg.type.is_int)

    def argument(self, pointer: Value) -> str:
        """Name of the argument that a pointer points into, "memory" where it is unclear."""
        value: Value | None = pointer
        while value is not None and value not in self.arguments:
            if value.producer is not None:
                operands = value.producer.operands
                value = operands[0] if operands and not value.producer.regions else None
            else:
                value = self._initial.get(value)
        return self.arguments[value] if value is not None else "memory"


Operator = Callable[[Op, Facts], Iterator[Change]]
