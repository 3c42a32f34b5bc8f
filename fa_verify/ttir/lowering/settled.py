"""Computes once what a launch derives from its numbers and program ids alone, and remembers it.

A third of a small launch goes into index arithmetic on strides and sizes, and the same numbers come
back: a case is run several times over, with other values. Only operations without effects count;
what reported something (an overflow) is computed again each time, so that it is reported again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fa_verify.ttir.engine.control import run
from fa_verify.ttir.lowering.hoist import is_pure
from fa_verify.ttir.memory.values import nbytes
from fa_verify.ttir.numbers.floats import CARRIER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.ttir.engine.control import Graph
    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.lowering.lower import Env, Lowering
    from fa_verify.ttir.syntax.ir import Function, Value

_PLACES = frozenset({"tt.get_program_id", "tt.get_num_programs"})
# For each kernel: launches remembered, and bytes of each; a thousand kernels may be in use.
_LAUNCHES, _LARGEST = 4, 1 << 17
_SMALL = 1024  # elements a program; larger tiles would have to be kept for too long


def settle(function: Function) -> int:
    """Move what depends on numbers only to the front of the first block; return how many."""
    block = function.body.blocks[0]
    known: set[Value] = {arg for arg in function.args if arg.type.scalar in CARRIER}
    first, rest = [], []
    for op in block.ops:
        small = all(result.type.numel <= _SMALL for result in op.results)
        if small and (op.name in _PLACES or (is_pure(op) and known.issuperset(op.operands))):
            known.update(op.results)
            first.append(op)
        else:
            rest.append(op)
    block.ops = first + rest
    return len(first)


class Settled:
    """The first steps of a kernel, whose results are remembered."""

    def __init__(self, low: Lowering, graph: Graph, count: int) -> None:
        """Take the steps of the first `count` operations out of the lowered kernel."""
        places = low.places[low.function.body.blocks[0]]
        steps = sum(place < count for place in places)
        self._steps, graph.steps[0] = graph.steps[0][:steps], graph.steps[0][steps:]
        args = enumerate(low.function.args)
        self._numbers = [i for i, arg in args if arg.type.scalar in CARRIER]
        self._known: dict[Any, list[tuple[int, Any]]] = {}

    def __call__(self, machine: Machine, env: Env, values: Sequence[Any]) -> None:
        """Run, or do as if."""
        if machine.turns is not None:  # one program at a time: none comes back
            run(self._steps, env)
            return
        numbers = [values[i].tobytes() for i in self._numbers]
        key = (machine.accesses.sanitize, machine.grid, machine.lanes.linear.tobytes(), *numbers)
        known = self._known.get(key)
        if known is not None:
            for slot, value in known:
                env[slot] = value
            return
        before, noted = env.copy(), machine.accesses.findings.noted
        run(self._steps, env)
        pairs = enumerate(zip(env, before, strict=True))
        results = [(i, x) for i, (x, old) in pairs if x is not old and x is not None]
        quiet = machine.accesses.findings.noted == noted
        if quiet and sum([nbytes(x) for _, x in results]) <= _LARGEST:
            if len(self._known) == _LAUNCHES:
                del self._known[next(iter(self._known))]
            self._known[key] = results
