"""Turns a function's operations into a list of closures over numbered slots.

Owns slot numbering, which values stay lazy, when a slot can be dropped, and how much memory one
program needs. What each operation does is in the ops_* tables; control flow is in `control`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.lowering.flows import addresses
from fa_verify.ttir.lowering.retries import checked
from fa_verify.ttir.lowering.shorts import short_tiles, widened
from fa_verify.ttir.numbers.floats import CARRIER, Array
from fa_verify.ttir.sanitizer.hints import watched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.memory.values import RuntimeValue, Terms
    from fa_verify.ttir.options import FloatModel
    from fa_verify.ttir.syntax.ir import Block, Function, Module, Op, Value

Env = list[Any]
Step = Callable[[Env], None]
Steps = list[tuple[Step, tuple[int, ...]]]
Rule = Callable[["Op", "Lowering"], "Step | None"]

COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
PLACE = "place"  # attribute of a step: what `Unsupported` says about where
# Operations through which a lazy sum or a lazy mask passes unchanged.
_TRANSPARENT = frozenset({"tt.broadcast", "tt.expand_dims"})
MASK_OPERAND = {
    "tt.load": 1, "tt.store": 2, "tt.atomic_rmw": 2, "tt.atomic_load": 1, "tt.atomic_store": 2,
}  # fmt: skip


class Lowering:
    """Lowers one function; `rules` maps operation names to rules."""

    def __init__(
        self,
        *,
        function: Function,
        module: Module,
        machine: Machine,
        rules: dict[str, Rule],
        site: Callable[[Op], Any],
        callees: dict[str, Any],
        floats: FloatModel,
        waiting: frozenset[Op] = frozenset(),
    ) -> None:
        """Prepare to lower `function`; what is in `waiting` may wait for another program."""
        self.function, self.module, self.machine = function, module, machine
        self.rules, self.site, self.callees, self.floats = rules, site, callees, floats
        self.waiting = waiting
        self._slots: dict[Value, int] = {}
        self._lazy: dict[Value, int] = {}
        self._demand: dict[tuple[Value, str], tuple[bool, bool]] = {}
        self._addresses = addresses(function)
        self.checked = checked(function)
        self._short = short_tiles(function)
        self._takes_short: set[Op] = set()
        self._last_use: dict[Value, Op] = {}
        blocks = function.body.blocks
        self._crossing = blocks if len(blocks) > 1 else []  # values may be read in other blocks
        self.template: Env = []
        self.peak_bytes = 0
        # Which operation of a block each of its steps carries out.
        self.places: dict[Block, list[int]] = {}

    # -- slots
    def slot(self, value: Value) -> int:
        """Slot of a value's ordinary form."""
        found = self._slots.get(value)
        if found is None:
            found = self._slots[value] = self._new()
        return found

    def lazy_slot(self, value: Value) -> int:
        """Slot of a value's lazy form (a tuple of terms)."""
        found = self._lazy.get(value)
        if found is None:
            found = self._lazy[value] = self._new()
        return found

    def _new(self) -> int:
        self.template.append(None)
        return len(self.template) - 1

    def constant(self, value: Value, content: Array) -> None:
        """Fix a value before anything runs."""
        self.template[self.slot(value)] = content

    def terms(self, value: Value) -> Callable[[Env], Terms]:
        """Read a value as terms, whether or not it was produced that way."""
        if self.lazy(value):
            lazy = self.lazy_slot(value)
            return lambda env: env[lazy]
        dense = self.slot(value)
        return lambda env: (env[dense],)

    # -- laziness
    def lazy(self, value: Value) -> bool:
        """Whether a value is produced as terms for at least one reader."""
        return self._wants(value)[0] and self._can_be_lazy(value)

    def dense(self, value: Value) -> bool:
        """Whether a value is (also) needed spread out."""
        return self._wants(value)[1] or not self._can_be_lazy(value)

    def _can_be_lazy(self, value: Value) -> bool:
        op = value.producer
        if op is None or not value.type.shape or not value.type.is_int:
            return False
        if op.name == "arith.andi":
            return value.type.scalar == "i1"
        if op.name == "arith.addi":
            return value.type.scalar in ("i32", "i64")
        if op.name in _TRANSPARENT or op.name == "arith.extsi":
            return self._can_be_lazy(op.operands[0])
        return False

    def _wants(self, value: Value) -> tuple[bool, bool]:
        key = (value, "")
        found = self._demand.get(key)
        if found is None:
            self._demand[key] = (False, True)  # breaks cycles; SSA has none outside loops
            lazy = dense = False
            for user in value.users:
                if _reads_lazily(user, value):
                    lazy = True
                elif user.name in _TRANSPARENT or user.name in (
                    "arith.addi", "arith.andi", "arith.extsi",
                ):  # fmt: skip
                    result = user.results[0]
                    if self._can_be_lazy(result):
                        wants = self._wants(result)
                        lazy, dense = lazy or wants[0], dense or wants[1]
                    else:
                        dense = True
                else:
                    dense = True
            found = self._demand[key] = (lazy, dense)
        return found

    def feeds_address(self, value: Value) -> bool:
        """Whether a value may become part of an address."""
        return value in self._addresses

    # -- 16-bit tiles
    def short(self, value: Value) -> bool:
        """Whether a value had better be produced short (see `lowering.shorts`)."""
        return value in self._short

    def takes_short(self, op: Op) -> None:
        """Let an operation see short tiles as they are; others see them widened."""
        self._takes_short.add(op)

    # -- blocks
    def block(self, block: Block) -> tuple[Steps, Op]:
        """Lower all operations but the terminator, which is returned."""
        steps: list[tuple[Step, int]] = []
        last_use: dict[Value, int] = {}
        for index, op in enumerate(block.ops):
            for inner in op.walk():
                for operand in inner.operands:
                    last_use[operand] = index
                for _, values in inner.successors:
                    for value in values:
                        last_use[value] = index
        body, terminator = block.ops[:-1], block.ops[-1]
        if block not in self._crossing:
            own = {*block.args, *(r for op in body for r in op.results)}
            self._last_use |= {value: block.ops[last_use[value]] for value in own & last_use.keys()}
        for index, op in enumerate(body):
            step = self._lower(op)
            if step is not None:
                steps.append((step, index))
        dying: dict[int, list[int]] = {}
        live_until: list[tuple[int, int, int]] = []
        defined = [(arg, -1) for arg in block.args]
        defined += [(r, i) for i, op in enumerate(body) for r in op.results]
        for value, born in defined:
            end = last_use.get(value, born)
            live_until.append((born, end, _bytes(value)))
            slots = [table[value] for table in (self._slots, self._lazy) if value in table]
            if 0 <= end < len(body):  # what is fixed before anything runs has to stay
                drop = [slot for slot in slots if self.template[slot] is None]
                dying.setdefault(end, []).extend(drop)
        self.peak_bytes = max(self.peak_bytes, _peak(live_until, len(block.ops)))
        self.places[block] = [index for _, index in steps]
        done: Steps = []
        for step, index in steps:
            done.append((step, tuple(dying.pop(index, ()))))
        return done, terminator

    def last_uses(self, op: Op) -> list[Value]:
        """Operands that nothing after `op` reads, whatever way control takes."""
        return [x for x in dict.fromkeys(op.operands) if self._last_use.get(x) is op]

    def _lower(self, op: Op) -> Step | None:
        rule = self.rules.get(op.name)
        if rule is None:
            raise self.failure(op, f"operation {op.name}")()  # noqa: RSE102 - the call makes it
        try:
            step = rule(op, self)
        except Unsupported as error:
            if error.op:
                raise
            raise self.failure(op, error.what)() from error  # noqa: RSE102 - the call makes it
        if step is not None and op not in self._takes_short:
            step = widened(op, self, step)
        if step is not None and op.attrs:
            step = watched(op, self, step)
        if step is not None:  # for what turns out only while it runs
            setattr(step, PLACE, _place(op))
        return step

    @staticmethod
    def failure(op: Op, what: str) -> Callable[[], Unsupported]:
        """Make the error that names an operation and its line, without holding on to it."""
        return partial(Unsupported, what, **_place(op))

    def live_ins(self, op: Op) -> tuple[int, ...]:
        """Slots of values from outside that are read inside the regions of `op`."""
        inside: set[Value] = set()
        used: set[Value] = set()
        for region in op.regions:
            for block in region.blocks:
                inside.update(block.args)
                for top in block.ops:
                    for inner in top.walk():
                        inside.update(inner.results)
                        used.update(inner.operands)
                        for nested in inner.regions:
                            for nested_block in nested.blocks:
                                inside.update(nested_block.args)
        slots: list[int] = []
        for value in used - inside:
            slots += [table[value] for table in (self._slots, self._lazy) if value in table]
        return tuple([slot for slot in slots if self.template[slot] is None])

    def inner_slots(self, blocks: Sequence[Block]) -> tuple[int, ...]:
        """Slots of what is computed in loops and branches of these blocks, and read there only."""
        inner: list[Value] = []
        for top in (op for block in blocks for op in block.ops):
            for op in top.walk():
                inner += () if op is top else op.results
                inner += [x for region in op.regions for block in region.blocks for x in block.args]
        slots = [table[x] for x in inner for table in (self._slots, self._lazy) if x in table]
        return tuple([slot for slot in slots if self.template[slot] is None])

    # -- common shapes of rule
    def unary(self, op: Op, function: Callable[[RuntimeValue], RuntimeValue]) -> Step:
        """Result = function(operand)."""
        a, r = self.slot(op.operands[0]), self.slot(op.results[0])

        def step(env: Env) -> None:
            env[r] = function(env[a])

        return step

    def binary(self, op: Op, function: Callable[[Any, Any], RuntimeValue]) -> Step:
        """Result = function(left, right)."""
        a, b, r = self.slot(op.operands[0]), self.slot(op.operands[1]), self.slot(op.results[0])

        def step(env: Env) -> None:
            env[r] = function(env[a], env[b])

        return step

    def nary(self, op: Op, function: Callable[..., RuntimeValue]) -> Step:
        """Result = function(*operands)."""
        if len(op.operands) == 1:
            return self.unary(op, function)
        if len(op.operands) == 2:
            return self.binary(op, function)
        slots, r = [self.slot(x) for x in op.operands], self.slot(op.results[0])

        def step(env: Env) -> None:
            env[r] = function(*[env[s] for s in slots])

        return step


def _place(op: Op) -> dict[str, Any]:
    return {"op": op.name, "file": op.location.file, "line": op.location.line}


def _reads_lazily(user: Op, value: Value) -> bool:
    """Whether `user` itself understands `value` as terms (in every operand position it has)."""
    if user.name == "tt.addptr":
        return user.operands[1] is value
    position = MASK_OPERAND.get(user.name)
    if position is None:
        return False
    at = [i for i, operand in enumerate(user.operands) if operand is value]
    return at == [position]


# Results that are views of their operands or never spread out.
_FREE = frozenset({
    "arith.constant", "tt.addptr", "tt.broadcast", "tt.expand_dims", "tt.make_range", "tt.splat",
    "tt.trans", "tt.reshape",
})  # fmt: skip


def _bytes(value: Value) -> int:
    if value.producer is not None and value.producer.name in _FREE:
        return 0
    itemsize = CARRIER[value.type.scalar].itemsize if value.type.scalar in CARRIER else 16
    return value.type.numel * itemsize if value.type.shape else 0


def _peak(spans: list[tuple[int, int, int]], length: int) -> int:
    change = np.zeros(length + 2, np.int64)
    for born, end, size in spans:
        change[born + 1] += size
        change[min(max(end, born) + 2, length + 1)] -= size
    return int(np.cumsum(change).max())
