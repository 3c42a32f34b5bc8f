"""What a kernel says to its author, prints and assertions; barriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.sanitizer.hints import assume

if TYPE_CHECKING:
    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.syntax.ir import Op


def print_(op: Op, low: Lowering) -> Step:
    """tt.print: one line a program."""
    slots = [low.slot(x) for x in op.operands]
    prefix = next((w.strip('"') for w in op.words), "")
    machine = low.machine

    def step(env: Env) -> None:
        for lane, linear in enumerate(machine.lanes.linear.tolist()):
            nx, ny, _ = machine.grid
            values = [env[s] for s in slots]
            shown = [v[lane if v.shape[0] > 1 else 0] for v in values if isinstance(v, np.ndarray)]
            at = (linear % nx, linear // nx % ny, linear // (nx * ny))
            print(f"pid {at}{prefix}{' '.join(map(str, shown))}")  # noqa: T201 - what the kernel asks

    return step


def assert_(op: Op, low: Lowering) -> Step:
    """tt.assert: a failed assertion is an incident; the program goes on."""
    condition = low.slot(op.operands[0])
    message = next((w.strip('"') for w in op.words), "")
    site, machine = low.site(op), low.machine

    def step(env: Env) -> None:
        test = env[condition]
        if test.all():
            return
        lane = int(np.argmin(test.reshape(test.shape[0], -1).all(axis=1)))
        count = int(np.count_nonzero(~test))
        machine.accesses.reports.program(lane, "assertion-failed", site, count, message)

    return step


def barrier(op: Op, low: Lowering) -> Step:
    """gpu.barrier, ttg.barrier: a program has no threads here, but what they may see is watched."""
    del op
    machine = low.machine

    def step(env: Env) -> None:
        del env
        if machine.accesses.read_back is not None:
            machine.accesses.read_back.barrier()

    return step


def ordered(op: Op, low: Lowering) -> None:
    """tt.grid_dependency_*: launches run one after the other, so there is nothing to wait for."""
    del op, low


RULES: dict[str, Rule] = {
    "tt.print": print_,
    "tt.assert": assert_,
    "gpu.barrier": barrier,
    "ttg.barrier": barrier,
    "llvm.intr.assume": assume,
    "tt.grid_dependency_wait": ordered,
    "tt.grid_dependency_launch_dependents": ordered,
}
