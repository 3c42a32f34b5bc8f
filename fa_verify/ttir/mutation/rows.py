"""Whether what masked lanes of a load hold can reach memory: it stays in rows that nobody stores.

A tile's lanes are hidden by conditions, each of which looks at one axis: row 5 is past the end. A
value is *touched* in the lanes where one of certain conditions is false. Elementwise operations
keep these lanes, products and sums mix those of one axis, selects and stores under the same
condition leave them out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fa_verify.ttir.lowering.lower import MASK_OPERAND
from fa_verify.ttir.mutation.proofs import RESHAPING
from fa_verify.ttir.ops.tiles import integer

if TYPE_CHECKING:
    from fa_verify.ttir.mutation.changes import Facts
    from fa_verify.ttir.syntax.ir import Op, Value

__all__ = ["Condition", "hidden_again", "never_seen", "never_taken", "stays_within", "stored_where"]


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of what lies along one axis (None: the same in the whole tile; `_ALL`: any)."""

    relation: str
    left: Value
    right: Value
    axis: int | None


_ALL = -1  # the axis of a comparison that differs from lane to lane
_Lanes = frozenset[Condition]
_STORES = frozenset({"tt.store", "tt.atomic_rmw"})


def never_seen(load: Op, facts: Facts) -> str:
    """What a load's hidden lanes hold never reaches memory, an address or a decision."""
    hidden, complete = _conditions(load.operands[1], facts)
    if not complete or not _Spread(load.results[0], hidden, facts).contained:
        return ""
    return "lanes that the mask hides only reach lanes that are never stored"


def never_taken(op: Op, kept: int, facts: Facts) -> str:
    """Where a minimum or maximum is not its operand `kept`, nothing that matters is made of it.

    `where(x < c, f(min(x, c)), g)`: what min(x, c) is where x is not below c never reaches memory.
    """
    number = facts.numbering.of
    one, other = number(op.operands[kept]), number(op.operands[1 - kept])
    name = op.name.partition(".")[2]
    relation = "olt" if name.endswith("f") else "slt"  # equal zeros may differ in their sign
    lesser, greater = (one, other) if name.startswith("min") else (other, one)
    lanes = frozenset({Condition(relation, lesser, greater, _ALL)})
    if not _Spread(op.results[0], lanes, facts).contained:
        return ""
    return "where the other operand is taken, another value is chosen afterwards"


def hidden_again(value: Value, mask: Value, facts: Facts) -> str:
    """What a value is where a mask is false never reaches memory: the same mask hides it again."""
    lanes, complete = _conditions(mask, facts)
    if not complete or not _Spread(value, lanes, facts).contained:
        return ""
    return "where its mask is false, the same mask hides what is made of it"


def stored_where(facts: Facts) -> set[Condition]:
    """What masks of stores ask of one axis each, whichever it is."""
    masks = [
        op.operands[MASK_OPERAND[op.name]]
        for op in facts.module.entry.walk()
        if op.name in _STORES and len(op.operands) > MASK_OPERAND[op.name]
    ]
    found = frozenset[Condition]().union(*(_conditions(mask, facts)[0] for mask in masks))
    return {replace(x, axis=0) for x in found if x.axis not in {None, _ALL}}


def stays_within(value: Value, hidden: Condition, facts: Facts) -> bool:
    """Whether what a value is in lanes where a condition is false reaches no others, and no memory.

    Masks of stores alone leave such lanes out; selects, which not every loop has, do not count.
    """
    return _Spread(value, frozenset({hidden}), facts, stores_only=True).contained


def _conditions(mask: Value, facts: Facts) -> tuple[_Lanes, bool]:
    """Conditions that all hold where a mask is true, and whether these are all it asks for."""
    op = mask.producer
    if op is None:
        return frozenset(), False
    if op.name == "arith.andi":
        (a, all_a), (b, all_b) = (_conditions(x, facts) for x in op.operands)
        return a | b, all_a and all_b
    if op.name in RESHAPING:
        inner, complete = _conditions(op.operands[0], facts)
        return _moved(op, inner), complete
    if op.name not in ("arith.cmpi", "arith.cmpf"):
        return frozenset(), False
    lines = [_line(x) for x in op.operands]
    axes = lines[0][1] | lines[1][1]
    across = op.name == "arith.cmpf" or len(axes) > 1
    compared = op.operands if across else [value for value, _ in lines]
    left, right = map(facts.numbering.of, compared)
    relation = op.words[0]
    if relation.endswith(("gt", "ge")):
        relation, left, right = f"{relation[:-2]}l{relation[-1]}", right, left
    axis = _ALL if across else next(iter(axes), None)
    return frozenset({Condition(relation, left, right, axis)}), True


def _line(value: Value) -> tuple[Value, frozenset[int]]:
    """What was spread over a tile, and along which axes it differs."""
    op = value.producer
    if op is None or op.name not in RESHAPING:
        extents = value.type.shape
        return value, frozenset(i for i, n in enumerate(extents) if n > 1 and not _constant(op))
    inner, axes = _line(op.operands[0])
    if op.name == "tt.expand_dims":
        at = integer(op, "axis")
        axes = frozenset(x + (x >= at) for x in axes)
    return inner, axes


def _constant(op: Op | None) -> bool:
    return op is not None and op.name == "arith.constant" and "[" not in op.attrs["value"]


def _moved(op: Op, lanes: _Lanes) -> _Lanes:
    """The same lanes after an operation that gives a tile another shape."""
    if op.name == "tt.expand_dims":
        at = integer(op, "axis")
        return _renamed(lanes, lambda axis: axis + (axis >= at))
    if op.name == "tt.trans":
        order = [int(x) for x in re.findall(r"\d+", op.attrs["order"].replace("i32", ""))]
        return _renamed(lanes, order.index)
    return lanes


def _renamed(lanes: _Lanes, rename: object) -> _Lanes:
    assert callable(rename)  # noqa: S101 - for mypy
    return frozenset(
        Condition(x.relation, x.left, x.right, None if x.axis is None else rename(x.axis))
        for x in lanes
    )


class _Spread:
    """Follows touched lanes from a value through all that reads it."""

    def __init__(
        self, start: Value, hidden: _Lanes, facts: Facts, *, stores_only: bool = False
    ) -> None:
        self.contained = True
        self._stores_only = stores_only
        self._facts = facts
        self._touched: dict[Value, _Lanes] = {}
        self._pending: list[Value] = []
        self._touch(start, hidden)
        while self._pending and self.contained:
            value = self._pending.pop()
            for user in list(dict.fromkeys(value.users)):
                self._read(user, value)

    def _touch(self, value: Value, lanes: _Lanes) -> None:
        known = self._touched.get(value, frozenset())
        if lanes - known:
            self._touched[value] = known | lanes
            self._pending.append(value)

    def _of(self, value: Value) -> _Lanes:
        return self._touched.get(value, frozenset())

    def _read(self, op: Op, value: Value) -> None:
        lanes = self._of(value)
        if op.name in _STORES:
            self._stored(op, value, lanes)
        elif op.name in ("scf.yield", "scf.for"):
            self._carried(op, value, lanes)
        elif op.name == "tt.reduce" and len(op.operands) == 1:
            self._summed(op, lanes)
        elif op.name == "tt.dot":
            self._multiplied(op)
        elif op.name == "arith.select":
            first = self._of(op.operands[1])
            if not self._stores_only:
                first -= _conditions(op.operands[0], self._facts)[0]
            self._touch(op.results[0], self._of(op.operands[0]) | first | self._of(op.operands[2]))
        elif op.name == "arith.andi" and not self._stores_only:
            self._touch(op.results[0], self._either_false(op))
        elif op.name in RESHAPING or op.name == "tt.trans":
            if any(x.axis == _ALL for x in lanes):  # compared in another shape
                self.contained = False
                return
            self._touch(op.results[0], _moved(op, lanes))
        elif op.name.startswith(("arith.", "math.", "tt.fp_to_fp", "tt.precise")):
            self._touch(op.results[0], lanes)
        else:
            self.contained = False

    def _either_false(self, op: Op) -> _Lanes:
        """Lanes of a & b: a false b that is not touched hides what a holds."""
        one, other = (self._of(x) for x in op.operands)
        if (one and other) or op.results[0].type.scalar != "i1":
            return one | other
        hiding = op.operands[1 if one else 0]
        return (one | other) - _conditions(hiding, self._facts)[0]

    def _stored(self, op: Op, value: Value, lanes: _Lanes) -> None:
        position = MASK_OPERAND[op.name]
        shown: _Lanes = frozenset()
        if len(op.operands) > position:
            shown, _ = _conditions(op.operands[position], self._facts)
        only_value = [i for i, x in enumerate(op.operands) if x is value] == [1]
        self.contained &= only_value and lanes <= shown and not any(x.users for x in op.results)

    def _carried(self, op: Op, value: Value, lanes: _Lanes) -> None:
        if op.name == "scf.yield":
            self._yielded(op, value, lanes)
            return
        block = op.regions[0].blocks[0]
        for index, operand in enumerate(op.operands):
            if operand is not value:
                continue
            if index < 3:
                self.contained = False
                return
            self._touch(block.args[index - 2], lanes)
            self._touch(op.results[index - 3], lanes)

    def _yielded(self, op: Op, value: Value, lanes: _Lanes) -> None:
        """To the results of what yields, and to a loop's next iteration."""
        owner = self._facts.owners.get(op)
        if owner is None or owner.name not in ("scf.for", "scf.if"):
            self.contained = False
            return
        if owner.name == "scf.for":
            inside, varies = self._facts.inside(owner), self._facts.numbering.varies
            if any(varies(x.left, inside) or varies(x.right, inside) for x in lanes):
                self.contained = False  # the next iteration's condition is another
                return
        for index, operand in enumerate(op.operands):
            if operand is value:
                self._touch(owner.results[index], lanes)
                if owner.name == "scf.for":
                    self._touch(owner.regions[0].blocks[0].args[index + 1], lanes)

    def _summed(self, op: Op, lanes: _Lanes) -> None:
        at = integer(op, "axis")
        if any(x.axis in (at, _ALL) for x in lanes):
            self.contained = False
            return
        self._touch(op.results[0], _renamed(lanes, lambda axis: axis - (axis > at)))

    def _multiplied(self, op: Op) -> None:
        left, right, start = (self._of(x) for x in op.operands[:3])
        if any(x.axis in (1, _ALL) for x in left) or any(x.axis in (0, _ALL) for x in right):
            self.contained = False
            return
        self._touch(op.results[0], left | right | start)
