"""Control flow over lanes: scf.for, scf.if, branches, calls (scf.while is in `whiles`).

Where programs disagree, the lanes that go a way are cut out of every value that way reads, run on
their own, and put back together. Inside, nothing ever runs under a mask.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.lowering.lower import PLACE
from fa_verify.ttir.lowering.shorts import either
from fa_verify.ttir.memory.values import Pointer, merge, take
from fa_verify.ttir.numbers.floats import CARRIER, Array

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fa_verify.ttir.engine.machine import Lanes, Machine
    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step, Steps
    from fa_verify.ttir.memory.values import RuntimeValue, Selection
    from fa_verify.ttir.syntax.ir import Block, Op


def run(steps: Steps, env: Env) -> None:
    """Run a block's steps, dropping values after their last use."""
    step: Step | None = None
    try:
        for step, dying in steps:
            step(env)
            for slot in dying:
                env[slot] = None
    except Unsupported as error:
        place = getattr(step, PLACE, None)
        if error.op or place is None:
            raise
        raise Unsupported(error.what, **place) from error


def selection(keep: Array) -> Selection:
    """Lane numbers where `keep`, as a slice if they are neighbours (so that taking is a view)."""
    index = np.flatnonzero(keep)
    if index.size and index[-1] - index[0] + 1 == index.size:
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


class Narrowed:
    """Context: only the selected lanes exist; values from outside are cut down to them."""

    __slots__ = ("env", "lanes", "live", "machine", "saved", "selection")

    def __init__(
        self, machine: Machine, env: Env, live: Sequence[int], selection: Selection
    ) -> None:
        self.machine, self.env, self.live, self.selection = machine, env, live, selection

    def __enter__(self) -> None:
        self.lanes: Lanes = self.machine.lanes
        self.saved = [self.env[slot] for slot in self.live]
        self.machine.lanes = self.lanes.take(self.selection)
        for slot, value in zip(self.live, self.saved, strict=True):
            self.env[slot] = take(value, self.selection)

    def __exit__(self, *_: object) -> None:
        self.machine.lanes = self.lanes
        for slot, value in zip(self.live, self.saved, strict=True):
            self.env[slot] = value


def assign(env: Env, slots: Sequence[int], values: Sequence[RuntimeValue]) -> None:
    """Put values into slots."""
    for slot, value in zip(slots, values, strict=True):
        env[slot] = value


class Stash:
    """Results of lanes that have left a loop, until all have."""

    def __init__(self, lanes: int) -> None:
        self.count = lanes
        self.parts: list[tuple[Selection, list[RuntimeValue]]] = []

    def put(self, where: Selection, values: list[RuntimeValue]) -> None:
        """Keep what the given lanes leave with."""
        self.parts.append((where, values))

    def results(self) -> list[RuntimeValue]:
        """Return each value over all lanes."""
        width = len(self.parts[0][1])
        return [merge([(w, vs[i]) for w, vs in self.parts], self.count) for i in range(width)]


def scf_for(op: Op, low: Lowering) -> Step:
    """scf.for: uniform trip counts run plainly; otherwise finished programs are cut away."""
    machine = low.machine
    block = op.regions[0].blocks[0]
    dtype = CARRIER[block.args[0].type.scalar]
    lower_s, upper_s, step_s, *inits = (low.slot(x) for x in op.operands)
    induction, *carried_slots = [low.slot(x) for x in block.args]
    body, terminator = low.block(block)
    yields, results = ([low.slot(x) for x in xs] for xs in (terminator.operands, op.results))
    fresh = {low.slot(x) for x in terminator.operands for o in block.ops[:-1] if x in o.results}
    live = low.live_ins(op)
    met, unsigned = machine.coverage.loop(op), "unsigned" in op.words

    def iterate(env: Env, carried: list[Any], index: Array) -> list[Any]:
        machine.check()
        env[induction] = index
        assign(env, carried_slots, carried)
        carried.clear()
        run(body, env)
        results = [env[s] for s in yields]
        for slot in fresh:  # the next iteration may write over what only it sees
            env[slot] = None
        return results

    def step(env: Env) -> None:
        lower, upper, stride = (env[s].astype(np.int64) for s in (lower_s, upper_s, step_s))
        if unsigned and dtype.itemsize == 4:
            lower, upper = lower & 0xFFFFFFFF, upper & 0xFFFFFFFF
        carried = [env[s] for s in inits]
        if lower.size == upper.size == stride.size == 1:
            numbers = range(int(lower[0]), int(upper[0]), max(int(stride[0]), 1))
            met(len(numbers), len(numbers))
            for i in numbers:
                carried = iterate(env, carried, np.array([i], dtype))
            assign(env, results, carried)
            return
        lower, upper, stride = np.broadcast_arrays(lower, upper, np.maximum(stride, 1))
        trips = np.maximum(-((lower - upper) // stride), 0)
        first = int(trips.min())
        met(first, int(trips.max()))
        for k in range(first):
            carried = iterate(env, carried, _index(lower, stride, k, dtype))
        if first == int(trips.max()):
            assign(env, results, carried)
            return
        stash = Stash(trips.size)
        active: Array = np.arange(trips.size)
        start = first
        for goal in np.unique(trips):
            if goal > start:
                with Narrowed(machine, env, live, compact(active)):
                    low_n, stride_n = lower[active], stride[active]
                    for k in range(start, int(goal)):
                        carried = iterate(env, carried, _index(low_n, stride_n, k, dtype))
                start = int(goal)
            leaving = trips[active] == goal
            out, rest = selection(leaving), selection(~leaving)
            stash.put(compact(active[leaving]), [take(v, out) for v in carried])
            carried = [take(v, rest) for v in carried]
            active = active[~leaving]
        assign(env, results, stash.results())

    return step


def _index(lower: Array, stride: Array, k: int, dtype: Any) -> Array:
    index: Array = (lower + k * stride).astype(dtype)
    return index[:1] if (index == index[0]).all() else index


def compact(index: Array) -> Selection:
    """Lane numbers, as a slice if they are neighbours."""
    if index.size and index[-1] - index[0] + 1 == index.size:
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


_WAYS = ("then", "else")


def scf_if(op: Op, low: Lowering) -> Step:
    """scf.if: each branch runs on the lanes that take it."""
    machine = low.machine
    condition = low.slot(op.operands[0])
    results = [low.slot(x) for x in op.results]
    branches: list[tuple[Steps, list[int]]] = []
    coverage, ways = machine.coverage, []
    for region, name in zip(op.regions, _WAYS, strict=False):
        steps, terminator = low.block(region.blocks[0])
        branches.append((steps, [low.slot(x) for x in terminator.operands]))
        ways.append(coverage.block(region.blocks[0], op, name))
    if len(branches) == 1:
        branches.append(([], []))
        ways.append(coverage.way(op, _WAYS[1]))
    flags = coverage.flags
    # Constants and outer values may be yielded as they are, so they count as read inside.
    live = low.live_ins(op)

    def step(env: Env) -> None:
        test = env[condition]
        taken = bool(test[0])
        if test.size == 1 or (test == test[0]).all():
            steps, yields = branches[0 if taken else 1]
            flags[ways[0 if taken else 1]] = 1
            run(steps, env)
            assign(env, results, [env[s] for s in yields])
            return
        stash = Stash(test.size)
        flags[ways[0]] = flags[ways[1]] = 1
        for (steps, yields), keep in zip(branches, (test, ~test), strict=True):
            where = selection(keep)
            if steps or yields:
                with Narrowed(machine, env, live, where):
                    run(steps, env)
                    stash.put(where, [env[s] for s in yields])
        if results:
            assign(env, results, stash.results())

    return step


_BRANCHES = frozenset({"tt.return", "cf.br", "cf.cond_br", "tt.map_elementwise.return"})
Terminator = tuple[list[int], list[tuple[str, list[int]]]]  # operands; successors, what they get


class Graph:
    """Blocks that branch to each other, entered at the first."""

    def __init__(self, blocks: Sequence[Block], low: Lowering) -> None:
        """Lower all blocks."""
        self.machine = low.machine
        self.numbers = {block.label: i for i, block in enumerate(blocks)}
        lowered = [low.block(block) for block in blocks]
        self.steps = [steps for steps, _ in lowered]
        self._flags = low.machine.coverage.flags
        self._ran = [low.machine.coverage.block(block) for block in blocks]
        self.terminators = [self._terminator(op, low) for _, op in lowered]
        self.block_args = [[low.slot(x) for x in block.args] for block in blocks]
        self._inner = low.inner_slots(blocks)
        if len(blocks) > 1:  # values cross blocks: nothing may be dropped early
            self.steps = [[(step, ()) for step, _ in steps] for steps in self.steps]

    @staticmethod
    def _terminator(op: Op, low: Lowering) -> Terminator:
        if op.name not in _BRANCHES:
            raise low.failure(op, f"operation {op.name}")()  # noqa: RSE102 - the call makes it
        operands = [low.slot(x) for x in op.operands]
        return operands, [(label, [low.slot(x) for x in xs]) for label, xs in op.successors]

    def __call__(self, env: Env) -> list[RuntimeValue]:
        """Run on all current lanes; return what they leave with."""
        machine, everybody = self.machine, self.machine.lanes
        stash = Stash(everybody.linear.size)
        pending = [(0, env, np.arange(everybody.linear.size), everybody)]
        while pending:
            number, env, where, machine.lanes = pending.pop()
            machine.check()
            self._flags[self._ran[number]] = 1
            run(self.steps[number], env)
            operands, successors = self.terminators[number]
            if not successors:
                stash.put(compact(where), [env[s] for s in operands])
                continue
            test = env[operands[0]] if operands else np.ones(1, np.bool_)
            if test.size == 1 or (test == test[0]).all():
                target = self._enter(successors[0 if test[0] else 1], env)
                pending.append((target, env, where, machine.lanes))
                continue
            ways = []
            for slot in self._inner:  # what loops and branches left behind, of as many lanes
                env[slot] = None  # as were in them last
            for successor, keep in zip(successors, (test, ~test), strict=True):
                chosen = selection(keep)
                narrowed = [take(value, chosen) for value in env]
                target = self._enter(successor, narrowed)
                ways.append((target, narrowed, where[keep], machine.lanes.take(chosen)))
            pending += reversed(ways)
        machine.lanes = everybody
        return stash.results()

    def _enter(self, successor: tuple[str, list[int]], env: Env) -> int:
        label, slots = successor
        target = self.numbers[label]
        assign(env, self.block_args[target], [env[s] for s in slots])
        return target


class Body:
    """A lowered function: call it with its arguments' values."""

    def __init__(self, low: Lowering) -> None:
        """Lower all blocks."""
        self.template = low.template
        self.args = [low.slot(x) for x in low.function.args]
        self.graph = Graph(low.function.body.blocks, low)

    def __call__(self, values: Sequence[RuntimeValue]) -> list[RuntimeValue]:
        """Run on all current lanes; return the function's results."""
        return self.graph(self.bind(values))

    def bind(self, values: Sequence[RuntimeValue]) -> Env:
        """Slots before anything has run."""
        env = self.template.copy()
        assign(env, self.args, values)
        return env


def map_elementwise(op: Op, low: Lowering) -> Step:
    """tt.map_elementwise: every element (or pack of neighbours) is a lane of its own."""
    machine = low.machine
    pack, shape = int(op.attrs["pack"].split()[0]), op.operands[0].type.shape
    sources, results = ([low.slot(x) for x in xs] for xs in (op.operands, op.results))
    graph = Graph(op.regions[0].blocks, low)
    live = low.live_ins(op)

    def step(env: Env) -> None:
        programs = machine.lanes.linear.size
        count = programs * prod(shape) // pack

        def packed(x: Array) -> Array:
            return np.broadcast_to(x, (programs, *shape)).reshape(count, pack)

        scalars = [column for s in sources for column in _columns(env[s], packed, pack)]
        owner = np.repeat(np.arange(programs), count // programs)
        with Narrowed(machine, env, live, owner):
            assign(env, graph.block_args[0], scalars)
            done = graph(env)
        for i, result in enumerate(results):
            columns = [np.broadcast_to(x, count) for x in done[i * pack : (i + 1) * pack]]
            env[result] = np.stack(columns, axis=1).reshape(programs, *shape)

    return step


def _columns(value: RuntimeValue, packed: Callable[[Array], Array], pack: int) -> list[Any]:
    if isinstance(value, Pointer):
        whole = value.dense().map(packed)
        return [whole.map(lambda t, j=j: t[:, j]) for j in range(pack)]  # type: ignore[misc]
    spread = packed(value)
    return [spread[:, j] for j in range(pack)]


def call(op: Op, low: Lowering) -> Step:
    """tt.call: run another function on the current lanes."""
    name = op.callee
    operands = [low.slot(x) for x in op.operands]
    results = [low.slot(x) for x in op.results]
    callees = low.callees

    def step(env: Env) -> None:
        assign(env, results, callees[name]([env[s] for s in operands]))

    return step


RULES: dict[str, Rule] = {
    "scf.for": either(scf_for),
    "scf.if": scf_if,
    "tt.call": either(call),
    "tt.map_elementwise": map_elementwise,
}
