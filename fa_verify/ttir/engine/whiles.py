"""scf.while over lanes, and for one program that waits for others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.engine.control import Narrowed, Stash, assign, compact, run, selection
from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.lowering.shorts import either
from fa_verify.ttir.memory.values import take

if TYPE_CHECKING:
    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step, Steps
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.syntax.ir import Op


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A lowered loop: two blocks that hand values to each other."""

    machine: Machine
    inits: list[int]
    results: list[int]
    before_args: list[int]
    before: Steps
    condition: int
    forwarded: list[int]
    after_args: list[int]
    after: Steps
    yields: list[int]
    flags: bytearray
    tested: int
    turned: int

    def test(self, env: Env, carried: list[Any]) -> tuple[Array, list[Any]]:
        """Run the first block; the condition, and what it forwards."""
        self.machine.check()
        self.flags[self.tested] = 1
        assign(env, self.before_args, carried)
        run(self.before, env)
        return env[self.condition], [env[s] for s in self.forwarded]

    def turn(self, env: Env, values: list[Any]) -> list[Any]:
        """Run the second block; what it carries into the next turn."""
        self.flags[self.turned] = 1
        assign(env, self.after_args, values)
        run(self.after, env)
        return [env[s] for s in self.yields]


def scf_while(op: Op, low: Lowering) -> Step:
    """scf.while: programs leave as their condition turns false."""
    before, after = op.regions[0].blocks[0], op.regions[1].blocks[0]
    coverage = low.machine.coverage
    before_steps, condition = low.block(before)
    after_steps, following = low.block(after)
    parts = Parts(
        low.machine,
        [low.slot(x) for x in op.operands],
        [low.slot(x) for x in op.results],
        [low.slot(x) for x in before.args],
        before_steps,
        low.slot(condition.operands[0]),
        [low.slot(x) for x in condition.operands[1:]],
        [low.slot(x) for x in after.args],
        after_steps,
        [low.slot(x) for x in following.operands],
        coverage.flags,
        coverage.block(before),
        coverage.block(after, op, "loop"),
    )
    return _waiting(op, parts) if op in low.waiting else _lockstep(parts, low.live_ins(op))


def _waiting(op: Op, parts: Parts) -> Step:
    """The loop of one program that gives way after each turn."""
    at = op.location
    hopeless = partial(Unsupported, op=op.name, file=at.file, line=at.line)

    def step(env: Env) -> None:
        turns = parts.machine.turns
        if turns is None:
            raise AssertionError
        outer = turns.begin()
        carried = [env[s] for s in parts.inits]
        while True:
            test, values = parts.test(env, carried)
            if not test[0]:
                break
            following = parts.turn(env, values)
            turns.again(carried, following, hopeless)
            carried = following
        turns.end(outer)
        assign(env, parts.results, values)

    return step


def _lockstep(parts: Parts, live: tuple[int, ...]) -> Step:
    machine = parts.machine

    def step(env: Env) -> None:
        lanes = machine.lanes.linear.size
        stash = Stash(lanes)
        active: Array = np.arange(lanes)
        carried = [env[s] for s in parts.inits]
        while True:
            with Narrowed(machine, env, live, compact(active)):
                test, values = parts.test(env, carried)
                if test.size == 1:
                    test = np.broadcast_to(test, active.shape)
                if not test.all():
                    stash.put(compact(active[~test]), [take(v, selection(~test)) for v in values])
                    values = [take(v, selection(test)) for v in values]
                active = active[test]
            if not active.size:
                break
            with Narrowed(machine, env, live, compact(active)):
                carried = parts.turn(env, values)
        if parts.results:
            assign(env, parts.results, stash.results())

    return step


RULES: dict[str, Rule] = {"scf.while": either(scf_while)}
