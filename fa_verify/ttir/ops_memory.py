"""Operations on global memory: pointers, loads, stores, atomics, tensor descriptors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.cells import Access
from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.floats import CARRIER, Array, round_tf32, round_to
from fa_verify.ttir.ops_int import wrapped
from fa_verify.ttir.values import Descriptor, Pointer

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.ir import Op, Type, Value
    from fa_verify.ttir.lower import Env, Lowering, Rule, Step


def _int64(x: Array) -> Array:
    return x if x.dtype == np.int64 else x.astype(np.int64)


def addptr(op: Op, low: Lowering) -> Step:
    """tt.addptr: offsets are signed and counted in elements."""
    pointer, result = low.slot(op.operands[0]), low.slot(op.results[0])
    terms = low.terms(op.operands[1])
    machine, site = low.machine, low.site(op)

    def step(env: Env) -> None:
        offsets = wrapped(terms(env), machine, site)
        env[result] = env[pointer].shift([_int64(t) for t in offsets])

    return step


def _pointee(value: Value) -> Type:
    pointee = value.type.pointee
    if pointee is None or pointee.shape:
        msg = f"an access through {value.type}"
        raise Unsupported(msg)
    return pointee


def _masks(op: Op, low: Lowering, position: int) -> Callable[[Env], tuple[Array, ...]]:
    if len(op.operands) <= position:
        return lambda _: ()
    return low.terms(op.operands[position])


def load(op: Op, low: Lowering) -> Step:
    """tt.load."""
    pointer, result = low.slot(op.operands[0]), low.slot(op.results[0])
    scalar, shape = _pointee(op.operands[0]).scalar, op.operands[0].type.shape
    if scalar == "ptr":
        msg = "a load of pointers"
        raise Unsupported(msg)
    masks = _masks(op, low, 1)
    other = low.slot(op.operands[2]) if len(op.operands) > 2 else None
    access, machine = Access(low.site(op), shape, scalar), low.machine

    def step(env: Env) -> None:
        fill = None if other is None else env[other]
        env[result] = machine.accesses.load(access, env[pointer], masks(env), fill)

    return step


def store(op: Op, low: Lowering) -> Step:
    """tt.store."""
    pointer, value = low.slot(op.operands[0]), low.slot(op.operands[1])
    scalar, shape = _pointee(op.operands[0]).scalar, op.operands[0].type.shape
    if scalar == "ptr":
        msg = "a store of pointers"
        raise Unsupported(msg)
    masks = _masks(op, low, 2)
    access, machine = Access(low.site(op), shape, scalar), low.machine

    def step(env: Env) -> None:
        machine.accesses.store(access, env[pointer], env[value], masks(env))

    return step


def _unsigned(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def apply(a: Array, b: Array) -> Array:
        kind = f"u{a.dtype.itemsize}"
        return function(a.view(kind), b.view(kind)).view(a.dtype)

    return apply


_UPDATE: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "fadd": np.add, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "max": np.maximum, "min": np.minimum, "umax": _unsigned(np.maximum),
    "umin": _unsigned(np.minimum), "exch": lambda _, new: new,
}  # fmt: skip


def _acquires(op: Op) -> bool:
    return bool({"acquire", "acq_rel", "release"} & set(op.words))


def atomic_rmw(op: Op, low: Lowering) -> Step:
    """tt.atomic_rmw: programs take their turn in schedule order, lanes of a tile in index order."""
    pointer, value, result = (low.slot(x) for x in (*op.operands[:2], op.results[0]))
    scalar, shape = _pointee(op.operands[0]).scalar, op.operands[0].type.shape
    masks = _masks(op, low, 2)
    function = _UPDATE[op.words[0]]
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
    scalar, shape = _pointee(op.operands[0]).scalar, op.operands[0].type.shape
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


def ptr_to_int(op: Op, low: Lowering) -> Step:
    """tt.ptr_to_int: the byte address."""
    bits = _pointee(op.operands[0]).bits

    def apply(pointer: Pointer) -> Array:
        offsets, which = pointer.select_arrays(pointer.args)
        bases = np.array([arg.address for arg in pointer.args], np.int64)
        address: Array = bases[which] + offsets * max(bits // 8, 1)
        return address

    return low.unary(op, apply)


def int_to_ptr(op: Op, low: Lowering) -> Step:
    """tt.int_to_ptr cannot be run yet: an address names no argument."""
    raise low.failure(op, "operation tt.int_to_ptr (an address made from an integer)")()  # noqa: RSE102 - makes it


# -- tensor descriptors
def make_descriptor(op: Op, low: Lowering) -> Step:
    """tt.make_tensor_descriptor."""
    block = op.results[0].type.pointee
    if block is None:
        raise AssertionError
    rank = len(block.shape)
    base, result = low.slot(op.operands[0]), low.slot(op.results[0])
    shape = [low.slot(x) for x in op.operands[1 : 1 + rank]]
    strides = [low.slot(x) for x in op.operands[1 + rank : 1 + 2 * rank]]
    padding = " ".join([*op.words, *op.attrs.values()]).lower()
    nan = "nan" in padding or op.attrs.get("padding", "").startswith("2")

    def step(env: Env) -> None:
        env[result] = Descriptor(
            env[base], tuple([_int64(env[s]) for s in shape]),
            tuple([_int64(env[s]) for s in strides]),
            block.shape, block.scalar, nan,
        )  # fmt: skip

    return step


def _along(x: Array, rank: int) -> Array:
    return x.reshape((-1,) + (1,) * rank)


def _tile_of(
    descriptor: Descriptor, indices: list[Array], shape: tuple[int, ...]
) -> tuple[Pointer, tuple[Array, ...]]:
    """Addresses and mask of a block at `indices`; `shape` may lack leading extents of 1."""
    rank, block = len(shape), descriptor.block
    lead = len(block) - rank
    terms: list[Array] = []
    masks: list[Array] = []
    for axis, index in enumerate(indices):
        at = _along(_int64(index), rank)
        place = axis - lead
        if place >= 0:
            steps = np.arange(shape[place], dtype=np.int64)
            at = at + steps.reshape([-1 if d == place + 1 else 1 for d in range(rank + 1)])
        extent = _along(descriptor.shape[axis], rank)
        masks.append((at >= 0) & (at < extent))
        terms.append(at * _along(descriptor.strides[axis], rank))
    base = descriptor.base.map(lambda t: _along(t, rank))
    # Keep start and range apart so that a contiguous axis is recognised.
    split: list[Array] = []
    for axis, term in enumerate(terms):
        place = axis - lead
        if place >= 0 and term.shape[0] == 1:
            first = term.reshape(-1)[0]
            split += [np.full((1,) * (rank + 1), first), term - first]
        elif place >= 0:
            stride = _along(descriptor.strides[axis], rank)
            steps = np.arange(shape[place], dtype=np.int64)
            spread = steps.reshape([-1 if d == place + 1 else 1 for d in range(rank + 1)])
            split += [_along(_int64(indices[axis]), rank) * stride, spread * stride]
        else:
            split.append(term)
    return base.shift(split), tuple(masks)


def _indices(op: Op) -> list[Value]:
    return op.operands[1 : 1 + op.groups[0]] if op.groups else op.operands[1:]


def descriptor_load(op: Op, low: Lowering) -> Step:
    """tt.descriptor_load: outside the descriptor's shape reads as its padding."""
    descriptor, result = low.slot(op.operands[0]), low.slot(op.results[0])
    indices = [low.slot(x) for x in _indices(op)]
    shape, scalar = op.results[0].type.shape, op.results[0].type.scalar
    access, machine = Access(low.site(op), shape, scalar), low.machine
    fill_nan = np.full((1,) * (len(shape) + 1), np.nan, np.float32)

    def step(env: Env) -> None:
        desc: Descriptor = env[descriptor]
        pointer, masks = _tile_of(desc, [env[s] for s in indices], shape)
        other = fill_nan if desc.nan_padding and CARRIER[scalar].kind == "f" else None
        value = machine.accesses.load(access, pointer, masks, other)
        env[result] = round_tf32(np.ascontiguousarray(value)) if desc.round_f32_to_tf32 else value

    return step


def descriptor_store(op: Op, low: Lowering) -> Step:
    """tt.descriptor_store: what lies outside the descriptor's shape is not stored."""
    descriptor = low.slot(op.operands[0])
    indices = [low.slot(x) for x in _indices(op)]
    value = op.operands[-1]
    source, shape, scalar = low.slot(value), value.type.shape, value.type.scalar
    access, machine = Access(low.site(op), shape, scalar), low.machine

    def step(env: Env) -> None:
        pointer, masks = _tile_of(env[descriptor], [env[s] for s in indices], shape)
        machine.accesses.store(access, pointer, env[source], masks)

    return step


def descriptor_reduce(op: Op, low: Lowering) -> Step:
    """tt.descriptor_reduce: an atomic update of a block."""
    descriptor = low.slot(op.operands[0])
    indices = [low.slot(x) for x in _indices(op)]
    value = op.operands[-1]
    source, shape, scalar = low.slot(value), value.type.shape, value.type.scalar
    kind = next((w for w in op.words if w in _UPDATE or w in ("inc", "dec")), "")
    if kind not in _UPDATE:
        msg = f"a descriptor reduction by {op.words}"
        raise Unsupported(msg)
    function = _UPDATE[kind]
    access, machine = Access(low.site(op), shape, scalar), low.machine
    narrow = value.type.is_float and scalar not in ("f32", "f64")

    def update(old: Array, new: Array) -> Array:
        done = function(old, new)
        return round_to(done, scalar) if narrow else done

    def step(env: Env) -> None:
        pointer, masks = _tile_of(env[descriptor], [env[s] for s in indices], shape)
        machine.accesses.atomic(
            access, pointer, masks, [env[source]], update, used=False, acquires=False
        )

    return step


# -- talking to the host
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
        machine.accesses.assertion(site, lane, int(np.count_nonzero(~test)), message)

    return step


def _nothing(op: Op, low: Lowering) -> None:
    del op, low


RULES: dict[str, Rule] = {
    "tt.addptr": addptr,
    "tt.load": load,
    "tt.store": store,
    "tt.atomic_rmw": atomic_rmw,
    "tt.atomic_cas": atomic_cas,
    "tt.ptr_to_int": ptr_to_int,
    "tt.int_to_ptr": int_to_ptr,
    "tt.make_tensor_descriptor": make_descriptor,
    "tt.descriptor_load": descriptor_load,
    "tt.experimental_descriptor_load": descriptor_load,
    "tt.descriptor_store": descriptor_store,
    "tt.experimental_descriptor_store": descriptor_store,
    "tt.descriptor_reduce": descriptor_reduce,
    "tt.print": print_,
    "tt.assert": assert_,
    "gpu.barrier": _nothing,
    "ttg.barrier": _nothing,
    "llvm.intr.assume": _nothing,
}
