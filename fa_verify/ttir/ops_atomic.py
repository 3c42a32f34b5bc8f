"""Atomic updates of global memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.cells import Access
from fa_verify.ttir.floats import Array, round_to
from fa_verify.ttir.ops_memory import masks_of, pointee

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.ir import Op
    from fa_verify.ttir.lower import Env, Lowering, Rule, Step


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


def _acquires(op: Op) -> bool:
    return bool({"acquire", "acq_rel", "release"} & set(op.words))


def atomic_rmw(op: Op, low: Lowering) -> Step:
    """tt.atomic_rmw: programs take their turn in schedule order, lanes of a tile in index order."""
    pointer, value, result = (low.slot(x) for x in (*op.operands[:2], op.results[0]))
    scalar, shape = pointee(op.operands[0]).scalar, op.operands[0].type.shape
    masks = masks_of(op, low, 2)
    function = UPDATE[op.words[0]]
    access, machine = Access(low.site(op), shape, scalar), low.machine
    used, acquires = bool(op.results[0].users), _acquires(op)
    narrow = op.results[0].type.is_float and scalar not in ("f32", "f64")

    def update(old: Array, new: Array) -> Array:
        done = function(old, new)
        return round_to(done, scalar) if narrow else done

    def step(env: Env) -> None:
        env[result] = machine.accesses.atomic(
            access, env[pointer], masks(env), [env[value]], update,
            used=used, acquires=acquires,
        )  # fmt: skip

    return step


def atomic_cas(op: Op, low: Lowering) -> Step:
    """tt.atomic_cas: compares bits."""
    pointer, expected, value, result = (low.slot(x) for x in (*op.operands[:3], op.results[0]))
    scalar, shape = pointee(op.operands[0]).scalar, op.operands[0].type.shape
    access, machine = Access(low.site(op), shape, scalar), low.machine
    acquires = _acquires(op)

    def update(old: Array, compare: Array, new: Array) -> Array:
        return np.where(old == compare, new, old)

    def step(env: Env) -> None:
        env[result] = machine.accesses.atomic(
            access, env[pointer], (), [env[expected], env[value]], update,
            used=True, acquires=acquires,
        )  # fmt: skip

    return step


RULES: dict[str, Rule] = {"tt.atomic_rmw": atomic_rmw, "tt.atomic_cas": atomic_cas}
