"""What the body of a loop does, where some of its conditions are known.

`adds_nothing`: an iteration hands on what it was handed. `alike`: two bodies compute the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fa_verify.ttir.lowering.lower import MASK_OPERAND
from fa_verify.ttir.mutation.proofs import RESHAPING
from fa_verify.ttir.mutation.surgery import number
from fa_verify.ttir.ops.choice import parse_number
from fa_verify.ttir.syntax.ir import Type

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from collections.abc import Set as AbstractSet

    from fa_verify.ttir.mutation.changes import Facts
    from fa_verify.ttir.syntax.ir import Op, Value

__all__ = ["adds_nothing", "alike", "chosen_by", "unlike"]

_KEEPING = RESHAPING | {"arith.truncf", "arith.extf", "tt.trans", "tt.reshape", "tt.fp_to_fp"}
_WRITING = ("tt.store", "tt.descriptor_store", "tt.atomic_cas")
_PROBE = "mutation.probe"


def chosen_by(loop: Op) -> set[Value]:
    """What a loop's body chooses numbers of a tile by."""
    ops = loop.regions[0].blocks[0].ops
    return {op.operands[0] for op in ops if op.name == "arith.select" and op.operands[0].type.shape}


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


def adds_nothing(loop: Op, false: AbstractSet[Value]) -> bool:
    """Whether an iteration hands on what it was handed, where some conditions hold in no lane.

    A number times 0 is taken for 0, and 0 is added without a trace: what is read is finite.
    """
    block = loop.regions[0].blocks[0]
    known: dict[Value, object] = {x: x for x in block.args}
    for op in block.ops:
        if op.name == "scf.yield":
            handed = [_content(x, known) for x in op.operands]
            return all(x is y for x, y in zip(handed, block.args[1:], strict=True))
        if op.name in _WRITING:
            return False
        if op.name == "tt.load" and len(op.operands) < 2 and _depends(op.operands[0], loop):
            return False  # an address that no mask guards
        if op.name == "tt.atomic_rmw" and _content(op.operands[1], known) != 0:
            return False
        content = _made(op, known, false)
        if content is not None:
            known[op.results[0]] = content
    return False


def _depends(value: Value, loop: Op) -> bool:
    """Whether a value is another in each iteration."""
    if value in loop.regions[0].blocks[0].args:
        return True
    op = value.producer
    return op is not None and any(_depends(x, loop) for x in op.operands)


def _content(value: Value, known: dict[Value, object]) -> object:
    """A number that every lane holds, an argument of the body, or None."""
    if value in known:
        return known[value]
    text = number(value)
    if text is None or not value.type.is_float:
        return None
    return float(parse_number(text, Type(value.type.scalar)))


def _made(op: Op, known: dict[Value, object], false: AbstractSet[Value]) -> object:  # noqa: PLR0911
    if op.name == "arith.select" and op.operands[0] in false:
        return _content(op.operands[2], known)
    inner = [_content(x, known) for x in op.operands]
    if op.name in _KEEPING:
        return inner[0] if isinstance(inner[0], float) else None
    if op.name == "tt.dot" and 0.0 in (inner[0], inner[1]):
        return inner[2]
    for one, other in (inner, inner[::-1]) if len(inner) == 2 else ():
        if op.name == "arith.addf" and one == 0.0:
            return other
        if op.name in ("arith.maxnumf", "arith.maximumf") and one == -math.inf:
            return other
    if op.name == "tt.reduce" and len(inner) == 1 and isinstance(inner[0], float):
        combine = {x.name for x in op.regions[0].blocks[0].ops}
        if inner[0] == 0.0 and "arith.addf" in combine:
            return 0.0
        if inner[0] == -math.inf and combine & {"arith.maxnumf", "arith.maximumf"}:
            return -math.inf
    return None


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
