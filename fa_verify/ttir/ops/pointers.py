"""Pointers, loads and stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.lowering.lower import MASK_OPERAND
from fa_verify.ttir.memory.cells import Access
from fa_verify.ttir.numbers.floats import RAW, Array
from fa_verify.ttir.ops.integers import wrapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.memory.values import Pointer
    from fa_verify.ttir.syntax.ir import Op, Type, Value


_STORED = {"ptr": "i64"}


def int64(x: Array) -> Array:
    """As 64-bit integers, untouched if it is."""
    return x if x.dtype == np.int64 else x.astype(np.int64)


def addptr(op: Op, low: Lowering) -> Step:
    """tt.addptr: offsets are signed and counted in elements."""
    pointer, result = low.slot(op.operands[0]), low.slot(op.results[0])
    terms, scalar = low.terms(op.operands[1]), op.operands[1].type.scalar
    machine, site = low.machine, low.site(op)
    seen: list[tuple[Array, Array]] = []  # what does not change in a loop is widened once

    def widened(index: int, term: Array) -> Array:
        if term.dtype == np.int64:
            return term
        if index < len(seen) and seen[index][0] is term:
            return seen[index][1]
        pair = (term, term.astype(np.int64))
        seen[index : index + 1] = [pair]
        return pair[1]

    def step(env: Env) -> None:
        offsets = wrapped(terms(env), scalar, machine, site)
        env[result] = env[pointer].shift([widened(i, t) for i, t in enumerate(offsets)])

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


def sides(op: Op, low: Lowering) -> tuple[int, int] | None:
    """The numbers of what an access's mask shows and hides, if it has one."""
    position = MASK_OPERAND.get(op.name)
    if position is None or len(op.operands) <= position:
        return None
    return low.machine.coverage.way(op, "shown"), low.machine.coverage.way(op, "hidden")


def load(op: Op, low: Lowering) -> Step:
    """tt.load; pointers lie in memory as addresses."""
    pointer, result = low.slot(op.operands[0]), low.slot(op.results[0])
    loaded = op.results[0].type
    scalar, shape = pointee(op.operands[0]).scalar, op.operands[0].type.shape
    masks = masks_of(op, low, 1)
    other = low.slot(op.operands[2]) if len(op.operands) > 2 else None
    access = Access(
        low.site(op),
        shape,
        _STORED.get(scalar, scalar),
        op in low.checked,
        sides(op, low),
        low.short(op.results[0]),
    )
    machine = low.machine

    def step(env: Env) -> None:
        fill = None if other is None else env[other]
        env[result] = machine.accesses.load(access, env[pointer], masks(env), fill)

    def load_pointers(env: Env) -> None:
        fill = None if other is None else address_of(env[other], loaded)
        found = machine.accesses.load(access, env[pointer], masks(env), fill)
        env[result] = machine.addresses.pointer(found, target(loaded))

    return load_pointers if scalar == "ptr" else step


def store(op: Op, low: Lowering) -> Step:
    """tt.store; pointers are stored as addresses."""
    pointer, value = low.slot(op.operands[0]), low.slot(op.operands[1])
    stored = op.operands[1].type
    scalar, shape = pointee(op.operands[0]).scalar, op.operands[0].type.shape
    masks = masks_of(op, low, 2)
    access = Access(low.site(op), shape, _STORED.get(scalar, scalar), sides=sides(op, low))
    machine = low.machine
    low.takes_short(op)

    def step(env: Env) -> None:
        machine.accesses.store(access, env[pointer], env[value], masks(env))

    def store_pointers(env: Env) -> None:
        addresses = address_of(env[value], stored)
        machine.accesses.store(access, env[pointer], addresses, masks(env))

    return store_pointers if scalar == "ptr" else step


def target(type_: Type) -> str:
    """What the elements that a pointer points to are in memory; addresses for pointers."""
    scalar = type_.pointee.scalar if type_.pointee is not None else ""
    return _STORED.get(scalar, scalar)


def address_of(pointer: Pointer, type_: Type) -> Array:
    """Byte addresses."""
    offsets, which = pointer.select_arrays(pointer.args)
    bases = np.array([arg.address for arg in pointer.args], np.int64)
    addresses: Array = bases[which] + offsets * RAW[target(type_)].itemsize
    return addresses


def ptr_to_int(op: Op, low: Lowering) -> Step:
    """tt.ptr_to_int: the byte address."""
    type_ = op.operands[0].type
    return low.unary(op, lambda x: address_of(x, type_))


def int_to_ptr(op: Op, low: Lowering) -> Step:
    """tt.int_to_ptr: whatever tensor lies at the address."""
    scalar, machine = target(op.results[0].type), low.machine
    return low.unary(op, lambda x: machine.addresses.pointer(int64(x), scalar))


def cast_pointer(op: Op, low: Lowering) -> Step:
    """tt.bitcast of a pointer: the same memory as other elements."""
    machine, scalar = low.machine, target(op.results[0].type)
    size = RAW[target(op.operands[0].type)].itemsize
    if RAW[scalar].itemsize == size:
        return low.unary(op, lambda x: x)
    return low.unary(op, lambda x: machine.addresses.cast(x, size, scalar))


RULES: dict[str, Rule] = {
    "tt.addptr": addptr,
    "tt.load": load,
    "tt.store": store,
    "tt.ptr_to_int": ptr_to_int,
    "tt.int_to_ptr": int_to_ptr,
}
