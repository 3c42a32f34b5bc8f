"""Pointers, loads and stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.cells import Access
from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.ops_int import wrapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.floats import Array
    from fa_verify.ttir.ir import Op, Type, Value
    from fa_verify.ttir.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.values import Pointer


def int64(x: Array) -> Array:
    """As 64-bit integers, untouched if it is."""
    return x if x.dtype == np.int64 else x.astype(np.int64)


def addptr(op: Op, low: Lowering) -> Step:
    """tt.addptr: offsets are signed and counted in elements."""
    pointer, result = low.slot(op.operands[0]), low.slot(op.results[0])
    terms = low.terms(op.operands[1])
    machine, site = low.machine, low.site(op)

    def step(env: Env) -> None:
        offsets = wrapped(terms(env), machine, site)
        env[result] = env[pointer].shift([int64(t) for t in offsets])

    return step


def pointee(value: Value) -> Type:
    """The element type a pointer points to."""
    target = value.type.pointee
    if target is None or target.shape:
        msg = f"an access through {value.type}"
        raise Unsupported(msg)
    return target


def masks_of(op: Op, low: Lowering, position: int) -> Callable[[Env], tuple[Array, ...]]:
    """Reads the mask operand, if there is one, as terms."""
    if len(op.operands) <= position:
        return lambda _: ()
    return low.terms(op.operands[position])


def load(op: Op, low: Lowering) -> Step:
    """tt.load."""
    pointer, result = low.slot(op.operands[0]), low.slot(op.results[0])
    scalar, shape = pointee(op.operands[0]).scalar, op.operands[0].type.shape
    if scalar == "ptr":
        msg = "a load of pointers"
        raise Unsupported(msg)
    masks = masks_of(op, low, 1)
    other = low.slot(op.operands[2]) if len(op.operands) > 2 else None
    access, machine = Access(low.site(op), shape, scalar), low.machine

    def step(env: Env) -> None:
        fill = None if other is None else env[other]
        env[result] = machine.accesses.load(access, env[pointer], masks(env), fill)

    return step


def store(op: Op, low: Lowering) -> Step:
    """tt.store."""
    pointer, value = low.slot(op.operands[0]), low.slot(op.operands[1])
    scalar, shape = pointee(op.operands[0]).scalar, op.operands[0].type.shape
    if scalar == "ptr":
        msg = "a store of pointers"
        raise Unsupported(msg)
    masks = masks_of(op, low, 2)
    access, machine = Access(low.site(op), shape, scalar), low.machine

    def step(env: Env) -> None:
        machine.accesses.store(access, env[pointer], env[value], masks(env))

    return step


def ptr_to_int(op: Op, low: Lowering) -> Step:
    """tt.ptr_to_int: the byte address."""
    bits = pointee(op.operands[0]).bits

    def apply(pointer: Pointer) -> Array:
        offsets, which = pointer.select_arrays(pointer.args)
        bases = np.array([arg.address for arg in pointer.args], np.int64)
        address: Array = bases[which] + offsets * max(bits // 8, 1)
        return address

    return low.unary(op, apply)


def int_to_ptr(op: Op, low: Lowering) -> Step:
    """tt.int_to_ptr cannot be run yet: an address names no argument."""
    raise low.failure(op, "operation tt.int_to_ptr (an address made from an integer)")()  # noqa: RSE102 - makes it


RULES: dict[str, Rule] = {
    "tt.addptr": addptr,
    "tt.load": load,
    "tt.store": store,
    "tt.ptr_to_int": ptr_to_int,
    "tt.int_to_ptr": int_to_ptr,
}
