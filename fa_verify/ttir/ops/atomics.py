"""Atomic updates of global memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.memory.access import Update
from fa_verify.ttir.memory.cells import Access
from fa_verify.ttir.numbers.floats import Array, round_to
from fa_verify.ttir.ops.pointers import masks_of, pointee, sides

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.syntax.ir import Op, Type


def _unsigned(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def apply(a: Array, b: Array) -> Array:
        kind = f"u{a.dtype.itemsize}"
        return function(a.view(kind), b.view(kind)).view(a.dtype)

    return apply


UPDATE: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "fadd": np.add, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "max": np.maximum, "min": np.minimum, "umax": _unsigned(np.maximum),
    "umin": _unsigned(np.minimum), "exch": lambda _, new: new,
}  # fmt: skip


def rounded_update(kind: str, type_: Type) -> Callable[[Array, Array], Array]:
    """The update of that name, rounded to the type of the cells."""
    function, scalar = UPDATE[kind], type_.scalar
    if type_.is_float and scalar not in ("f32", "f64"):
        return lambda old, new: round_to(function(old, new), scalar)
    return function


def _compare_and_swap(old: Array, expected: Array, new: Array) -> Array:
    kind = f"i{old.dtype.itemsize}"
    return np.where(old.view(kind) == expected.view(kind), new, old)


def _orders(op: Op, how: str) -> bool:
    return how in op.words or "acq_rel" in op.words


def _atomic(
    op: Op, low: Lowering, function: Callable[..., Array] | None, operands: int,
    *, replaces: bool = False,
) -> Step:  # fmt: skip
    """An atomic operation whose pointer is followed by `operands` values and perhaps a mask.

    What it was before matters not to one that `replaces` it, unless somebody looks.
    """
    pointer, *values = [low.slot(x) for x in op.operands[: 1 + operands]]
    result = low.slot(op.results[0]) if op.results else None
    masks = masks_of(op, low, 1 + operands)
    shape, scalar = op.operands[0].type.shape, pointee(op.operands[0]).scalar
    access = Access(low.site(op), shape, scalar, sides=sides(op, low))
    used, machine = bool(op.results and op.results[0].users), low.machine
    acquires, releases = (_orders(op, word) for word in ("acquire", "release"))
    reads = used or not replaces
    update = Update(function, reads=reads, used=used, acquires=acquires, releases=releases)

    def step(env: Env) -> None:
        before = machine.accesses.atomic(
            access, env[pointer], masks(env), [env[s] for s in values], update
        )
        if result is not None:
            env[result] = before

    return step


def atomic_rmw(op: Op, low: Lowering) -> Step:
    """tt.atomic_rmw: programs take their turn in schedule order, lanes of a tile in index order."""
    update = rounded_update(op.words[0], op.results[0].type)
    return _atomic(op, low, update, 1, replaces=op.words[0] == "exch")


def atomic_cas(op: Op, low: Lowering) -> Step:
    """tt.atomic_cas: compares bits."""
    return _atomic(op, low, _compare_and_swap, 2)


def atomic_load(op: Op, low: Lowering) -> Step:
    """tt.atomic_load."""
    return _atomic(op, low, None, 0)


def atomic_store(op: Op, low: Lowering) -> Step:
    """tt.atomic_store: an exchange whose result nobody wants."""
    return _atomic(op, low, UPDATE["exch"], 1, replaces=True)


def atomic_poll(op: Op, low: Lowering) -> Step:
    """tt.atomic_poll: a loop that waits; with a timeout, only as long as others can go on."""
    pointer, expected, result = (low.slot(x) for x in (*op.operands[:2], op.results[0]))
    access = Access(low.site(op), op.operands[0].type.shape, pointee(op.operands[0]).scalar)
    update = Update(None, reads=True, used=True, acquires=_orders(op, "acquire"), releases=False)
    machine, patient, at = low.machine, len(op.operands) == 2, op.location
    hopeless = partial(Unsupported, op=op.name, file=at.file, line=at.line)

    def step(env: Env) -> None:
        turns = machine.turns
        if turns is None:
            raise AssertionError
        outer = turns.begin()
        while True:
            seen = machine.accesses.atomic(access, env[pointer], (), [], update)
            arrived = np.equal(seen, env[expected])
            if arrived.all() or not turns.again((), (), hopeless, patient=patient):
                break
        turns.end(outer)
        env[result] = arrived

    return step


RULES: dict[str, Rule] = {
    "tt.atomic_rmw": atomic_rmw,
    "tt.atomic_cas": atomic_cas,
    "tt.atomic_load": atomic_load,
    "tt.atomic_store": atomic_store,
    "tt.atomic_poll": atomic_poll,
}
