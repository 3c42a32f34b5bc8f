"""`Reading`: what a module's integers are, as linear expressions of what is not known of them.

A minimum, a choice or a quotient is an unknown of its own; what else holds of it is one of two
things (`refutation`). Sums and products are taken not to wrap, and what is divided by to be above 0
where it is not written: they are indices and lengths.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from fa_verify.ttir.mutation.inequalities import ONE, at_least, minus, plus, times
from fa_verify.ttir.mutation.proofs import RESHAPING
from fa_verify.ttir.mutation.surgery import number
from fa_verify.ttir.ops.choice import parse_number
from fa_verify.ttir.ops.tiles import integer
from fa_verify.ttir.syntax.ir import Type

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from collections.abc import Set as AbstractSet

    from fa_verify.ttir.mutation.changes import Facts
    from fa_verify.ttir.mutation.inequalities import Inequality, Linear
    from fa_verify.ttir.syntax.ir import Op, Value

__all__ = ["Altered", "Reading", "UnclearError", "either"]

Axes = tuple[int | None, ...]


Side = tuple[list["Inequality"], list[Any]]
Parted = tuple[Side, Side]


class UnclearError(Exception):
    """Nothing can be told."""


class Altered:
    """One value that is another, and all that depends on it."""

    def __init__(self, mine: Value, other: Value, reach: AbstractSet[Value]) -> None:
        """Note the two.

        Args:
            mine: As it is.
            other: As it would be.
            reach: Values that depend on `mine`.
        """
        self.mine, self.other, self._reach = mine, other, reach

    def reaches(self, value: Value) -> bool:
        """Whether a value may be another one."""
        return value is self.mine or value in self._reach


class Reading:
    """What is supposed, and what follows of the values that are asked for.

    Attributes:
        facts: All of these are supposed.
        either: Of each of these, one side, with what is either one or the other of it.
        known: All of these hold, of the values that were asked for; parted: likewise, as `either`.
    """

    def __init__(self, module: Facts) -> None:
        """Suppose nothing yet.

        Args:
            module: What is known of it.
        """
        self.facts: list[Inequality] = []
        self.either: list[Parted] = []
        self.known: list[Inequality] = []
        self.parted: list[Parted] = []
        self._numbering, self._counters = module.numbering, module.counters
        self._given: dict[Value, Linear] = {}
        self._read: dict[tuple[Value, Axes, bool], Linear] = {}
        self._quotients: set[Hashable] = set()

    def knows(self, value: Value, content: Linear) -> None:
        """Say what a value is: a loop's counter."""
        self._given[value] = content

    def value(self, value: Value, axes: Axes = (), altered: Altered | None = None) -> Linear:
        """What an integer is, in one lane of a tile; axes: which of the tile's each of its own is.

        Raises:
            UnclearError: It is a tile whose lanes nothing is known of.
        """
        if altered is not None:
            if value is altered.mine:
                return self.value(altered.other, axes)
            if not altered.reaches(value):
                altered = None
        if value in self._given:
            return self._given[value]
        value = value if altered is not None else self._numbering.of(value)
        key = (value, axes, altered is not None)
        if key not in self._read:
            self._read[key] = self._found(value, axes, altered)
        return self._read[key]

    def _found(self, value: Value, axes: Axes, altered: Altered | None) -> Linear:
        text = number(value)
        if text is not None:
            return {ONE: int(parse_number(text, Type(value.type.scalar)))}
        op, name = value.producer, (value, axes, altered is not None)
        if value in self._counters:
            return self._turn(self._counters[value], name)
        rule = None if op is None else self._RULES.get(op.name)
        if op is None or rule is None:
            return self._unknown(name, value)
        return rule(self, op, name, axes, altered)

    def _turn(self, loop: Op, name: Hashable) -> Linear:
        """The counter of a loop that nothing altered reaches, in some iteration."""
        step = number(loop.operands[2])
        if step is None or int(step) <= 0:
            return {name: 1}
        turn: Linear = {("turn", name): 1}
        begin, end = (self.value(x) for x in loop.operands[:2])
        counter = plus(begin, times(turn, int(step)))
        self.known += [turn, at_least(end, counter, 1)]
        return counter

    def _spread(self, op: Op, _name: Hashable, axes: Axes, altered: Altered | None) -> Linear:
        return self.value(op.operands[0], _inner(op, axes), altered)

    def _index(self, op: Op, _name: Hashable, axes: Axes, _altered: Altered | None) -> Linear:
        first = integer(op, "start")
        lane: Linear = {("lane", *axes): 1}
        self.known += [lane, at_least({ONE: integer(op, "end") - 1 - first}, lane)]
        return plus(lane, {ONE: first})

    def _program(self, op: Op, name: Hashable, _axes: Axes, _altered: Altered | None) -> Linear:
        program = self._unknown(name, op.results[0])
        self.known.append(program)
        return program

    def _sum(self, op: Op, _name: Hashable, axes: Axes, altered: Altered | None) -> Linear:
        a, b = (self.value(x, axes, altered) for x in op.operands)
        return plus(a, b) if op.name == "arith.addi" else minus(a, b)

    def _product(self, op: Op, name: Hashable, axes: Axes, altered: Altered | None) -> Linear:
        a, b = (self.value(x, axes, altered) for x in op.operands)
        for one, other in ((a, b), (b, a)):
            if not set(one) - {ONE}:
                return times(other, one.get(ONE, 0))
        return self._unknown(name, op.results[0])

    def _unknown(self, name: Hashable, value: Value) -> Linear:
        if value.type.shape:
            raise UnclearError
        return {name: 1}

    def _limit(self, op: Op, name: Hashable, axes: Axes, altered: Altered | None) -> Linear:
        a, b = (self.value(x, axes, altered) for x in op.operands)
        limit = {name: 1}
        if op.name == "arith.minsi":
            self.known += [at_least(a, limit), at_least(b, limit)]
            self.parted.append(either([at_least(limit, a)], [at_least(limit, b)]))
        else:
            self.known += [at_least(limit, a), at_least(limit, b)]
            self.parted.append(either([at_least(a, limit)], [at_least(b, limit)]))
        return limit

    def _choice(self, op: Op, name: Hashable, axes: Axes, altered: Altered | None) -> Linear:
        chosen = {name: 1}
        sides = []
        for place, holds in ((1, True), (2, False)):
            one = self.value(op.operands[place], axes, altered)
            assume = partial(self.assume, op.operands[0], axes, altered, holds=holds)
            facts, more = self._side(assume)
            sides.append(([*facts, at_least(one, chosen), at_least(chosen, one)], more))
        self.parted.append((sides[0], sides[1]))
        return chosen

    def _quotient(self, op: Op, name: Hashable, axes: Axes, altered: Altered | None) -> Linear:
        """Towards zero."""
        x, by = (self.value(y, axes, altered) for y in op.operands)
        n = by.get(ONE, 0)
        if set(by) - {ONE} or n <= 0:
            unknown = self._unknown(name, op.results[0])
            if set(by) - {ONE}:
                self.known.append(at_least(by, {}, 1))
                rest = [at_least(by, unknown, 1)] if op.name == "arith.remsi" else []
                self.parted.append(either([x, unknown, *rest], [at_least({}, x, 1)]))
            return unknown
        key = ("quotient", frozenset(x.items()), n)
        quotient: Linear = {key: 1}
        whole = times(quotient, n)
        if key not in self._quotients:
            self._quotients.add(key)
            self.known += [at_least(x, whole, 1 - n), at_least(whole, x, 1 - n)]
            self.parted.append(
                either([x, at_least(x, whole)], [at_least({}, x, 1), at_least(whole, x)])
            )
        return quotient if op.name == "arith.divsi" else minus(x, whole)

    def assume(
        self, condition: Value, axes: Axes = (), altered: Altered | None = None, *, holds: bool
    ) -> None:
        """Take a condition to hold, or not to hold, in one lane; what is unclear says nothing."""
        if altered is not None and condition is altered.mine:
            condition, altered = altered.other, None
        elif altered is not None and not altered.reaches(condition):
            altered = None
        op = condition.producer
        text = number(condition)
        if text is not None:
            if (text == "true") != holds:
                self.facts.append({ONE: -1})
        elif op is None:
            return
        elif op.name in RESHAPING:
            self.assume(op.operands[0], _inner(op, axes), altered, holds=holds)
        elif op.name in ("arith.andi", "arith.ori"):
            self._both(op, axes, altered, holds=holds)
        elif op.name == "arith.cmpi":
            try:
                a, b = (self.value(x, axes, altered) for x in op.operands)
            except UnclearError:
                return
            self.compare(op.words[0], a, b, holds=holds)

    def _both(self, op: Op, axes: Axes, altered: Altered | None, *, holds: bool) -> None:
        """`a & b`, or `a | b`: both hold, or both fail, or one of them does."""
        if holds == (op.name == "arith.andi"):
            for operand in op.operands:
                self.assume(operand, axes, altered, holds=holds)
        else:
            self._one_of(op.operands, axes, altered, holds=holds)

    def differ(self, one: Value, other: Value, axes: Axes) -> None:
        """Take one condition to hold and the other not, or the other way round."""

        def unlike(*, holds: bool) -> None:
            self.assume(one, axes, holds=holds)
            self.assume(other, axes, holds=not holds)

        first, second = (self._side(partial(unlike, holds=x)) for x in (True, False))
        self.either.append((first, second))

    def _one_of(
        self, conditions: Sequence[Value], axes: Axes, altered: Altered | None, *, holds: bool
    ) -> None:
        """At least one of two conditions holds, or fails."""
        first, second = (
            self._side(partial(self.assume, x, axes, altered, holds=holds)) for x in conditions
        )
        self.either.append((first, second))

    def _side(self, suppose: Callable[[], None]) -> Side:
        """What is supposed, apart from all else."""
        facts, more, self.facts, self.either = self.facts, self.either, [], []
        suppose()
        facts, more, self.facts, self.either = self.facts, self.either, facts, more
        return facts, more

    def compare(self, relation: str, a: Linear, b: Linear, *, holds: bool) -> None:
        """Take a comparison of integers to hold, or not to hold."""
        if relation in ("eq", "ne"):
            if holds == (relation == "eq"):
                self.facts += [at_least(a, b), at_least(b, a)]
            else:
                self.either.append(either([at_least(a, b, 1)], [at_least(b, a, 1)]))
            return
        if relation[0] != "s":
            return
        strict, a, b = relation[2] == "t", *((a, b) if relation[1] == "g" else (b, a))
        self.facts.append(at_least(a, b, int(strict)) if holds else at_least(b, a, int(not strict)))

    _RULES: ClassVar[dict[str, Callable[..., Linear]]] = {
        "tt.splat": _spread,
        "tt.broadcast": _spread,
        "tt.expand_dims": _spread,
        "arith.extsi": _spread,
        "tt.make_range": _index,
        "tt.get_program_id": _program,
        "arith.addi": _sum,
        "arith.subi": _sum,
        "arith.muli": _product,
        "arith.minsi": _limit,
        "arith.maxsi": _limit,
        "arith.select": _choice,
        "arith.divsi": _quotient,
        "arith.remsi": _quotient,
    }


def _inner(op: Op, axes: Axes) -> Axes:
    """Which axes of the tile those of an operand are."""
    if op.name == "tt.splat":
        return ()
    if op.name == "tt.expand_dims":
        at = integer(op, "axis")
        return axes[:at] + axes[at + 1 :]
    return axes


def either(one: list[Inequality], other: list[Inequality]) -> Parted:
    """All of one, or all of the other."""
    return (one, []), (other, [])
