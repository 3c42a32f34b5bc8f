"""Whether two loops' bodies compute the same, where some of their conditions hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.ttir.lowering.lower import MASK_OPERAND
from fa_verify.ttir.mutation.proofs import RESHAPING
from fa_verify.ttir.mutation.surgery import number

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from collections.abc import Set as AbstractSet

    from fa_verify.ttir.mutation.changes import Facts
    from fa_verify.ttir.syntax.ir import Op, Value

__all__ = ["alike", "unlike"]

_PROBE = "mutation.probe"


def unlike(loops: tuple[Op, Op], facts: Facts) -> tuple[set[Value], set[Value]]:
    """Comparisons of tiles that one body makes and the other does not."""
    table: dict[Hashable, int] = {}
    written = [_Written(loop, frozenset(), facts, table) for loop in loops]
    names = [set(one.comparisons.values()) for one in written]
    one, other = (
        {x for x, name in mine.comparisons.items() if name not in theirs}
        for mine, theirs in zip(written, names[::-1], strict=True)
    )
    return one, other


def alike(loops: tuple[Op, Op], true: Sequence[AbstractSet[Value]], facts: Facts) -> bool:
    """Whether two bodies compute the same, where conditions of each hold in every lane."""
    table: dict[Hashable, int] = {}
    one, other = (
        _Written(loop, known, facts, table) for loop, known in zip(loops, true, strict=True)
    )
    return one.text is not None and one.text == other.text


class _Written:
    """A body in a form that two bodies share if they compute the same.

    Attributes:
        text: What it hands on and writes; None where something is not understood.
        comparisons: Comparisons of integers of a tile, and what stands for them.
    """

    def __init__(
        self, loop: Op, true: AbstractSet[Value], facts: Facts, table: dict[Hashable, int]
    ) -> None:
        self._true, self._facts, self._table = true, facts, table
        self._names: dict[Value, Hashable] = {}
        self._regions = 0
        self.comparisons: dict[Value, Hashable] = {}
        self.text: Hashable = self._block(loop, "")

    def _block(self, owner: Op, where: str) -> Hashable:
        if len(owner.regions) != 1 or len(owner.regions[0].blocks) != 1:
            return None
        (block,) = owner.regions[0].blocks
        for place, arg in enumerate(block.args):
            self._names[arg] = f"{where} argument {place}"
        effects: list[Hashable] = []
        for op in block.ops:
            if op.name == _PROBE:
                continue
            content = self._op(op, where)
            if content is None:
                return None
            if not op.results:
                effects.append(content)
            if op.name == "arith.cmpi" and op.results[0].type.shape:
                self.comparisons[op.results[0]] = content
            for place, result in enumerate(op.results):
                self._names.setdefault(result, self._number((content, place)))
        return self._number(tuple(effects))

    def _op(self, op: Op, where: str) -> Hashable:
        if any(x in self._true for x in op.results):
            return "true"
        operands = [self._name(x) for x in op.operands]
        if op.name == "arith.select" and self._holds(op.operands[0]):
            self._names[op.results[0]] = operands[1]
        if op.name == "arith.andi" and op.results[0].type.scalar == "i1":
            for place in (0, 1):
                if self._holds(op.operands[place]):
                    self._names[op.results[0]] = operands[1 - place]
        if op.name == "tt.load" and len(op.operands) > 1 and self._holds(op.operands[1]):
            operands = operands[:1]
        position = MASK_OPERAND.get(op.name)
        if op.name != "tt.load" and position is not None:
            operands = operands[:position] + [
                name
                for name, x in zip(operands[position:], op.operands[position:], strict=True)
                if not self._holds(x)
            ]
        regions: Hashable = ()
        if op.regions:
            self._regions += 1
            regions = self._block(op, f"{where} {self._regions}")
            if regions is None:
                return None
        attrs = tuple(sorted(op.attrs.items()))
        types = tuple(str(x.type) for x in op.results)
        return self._number((op.name, tuple(op.words), attrs, tuple(operands), types, regions))

    def _holds(self, condition: Value) -> bool:
        """Whether a condition holds in every lane."""
        if condition in self._true or number(condition) == "true":
            return True
        op = condition.producer
        if op is None:
            return False
        if op.name in RESHAPING:
            return self._holds(op.operands[0])
        return op.name == "arith.andi" and all(map(self._holds, op.operands))

    def _name(self, value: Value) -> Hashable:
        text = number(value)
        if text is not None:
            return ("constant", text, str(value.type))
        if value in self._names:
            return self._names[value]
        return id(self._facts.numbering.of(value))

    def _number(self, content: Hashable) -> int:
        return self._table.setdefault(content, len(self._table))
