"""Tensor descriptors: blocks of a tensor, read with padding and written with clipping."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.memory.access import Update
from fa_verify.ttir.memory.cells import Access
from fa_verify.ttir.memory.values import Descriptor, Pointer, total
from fa_verify.ttir.numbers.floats import CARRIER, Array, round_tf32
from fa_verify.ttir.ops.atomics import UPDATE, rounded_update
from fa_verify.ttir.ops.pointers import int64
from fa_verify.ttir.sanitizer import descriptor_rules

if TYPE_CHECKING:
    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.syntax.ir import Op, Value


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
    machine, site = low.machine, low.site(op)

    def step(env: Env) -> None:
        env[result] = Descriptor(
            env[base], tuple([int64(env[s]) for s in shape]),
            tuple([int64(env[s]) for s in strides]),
            block.shape, block.scalar, nan,
        )  # fmt: skip
        if machine.accesses.sanitize:
            descriptor_rules.check(env[result], site, machine.accesses.reports)

    return step


_FEW = 64  # more numbers NumPy looks through faster than Python


def _along(x: Array, rank: int) -> Array:
    return x.reshape((-1,) + (1,) * rank)


@lru_cache(maxsize=1024)  # the same array each time: what is known of it is not asked again
def _steps(count: int, stride: int, axis: int, rank: int) -> Array:
    """Multiples of a stride, from 0, along one axis of a tile."""
    steps = np.arange(count, dtype=np.int64) * np.int64(stride)
    steps.flags.writeable = False
    return steps.reshape([-1 if d == axis + 1 else 1 for d in range(rank + 1)])


def _tile_of(
    descriptor: Descriptor, indices: list[Array], shape: tuple[int, ...]
) -> tuple[Pointer, tuple[Array, ...]]:
    """Addresses and mask of a block at `indices`; `shape` may lack leading extents of 1."""
    base, rank = descriptor.base, len(shape)
    lead = len(descriptor.block) - rank
    offset, starts = 0, list(base.terms)  # of all programs; of each
    steps: list[Array] = []  # apart from where they start: a contiguous axis is recognised
    masks: list[Array] = []
    bounds = zip(indices, descriptor.shape, descriptor.strides, strict=True)
    for axis, (index, extent, stride) in enumerate(bounds, -lead):
        count = shape[axis] if axis >= 0 else 1
        low, high = _extremes(index)
        start = index[:1] if low == high else index
        if start.size == stride.size == 1:
            offset += low * stride.item()
        else:
            starts.append(int64(start) * stride)
        if low < 0 or high > _extremes(extent)[0] - count:
            at = _along(int64(start), rank)
            at = at + _steps(count, 1, axis, rank) if count > 1 else at
            masks.append((at >= 0) & (at < _along(extent, rank)))
        if count > 1 and stride.size == 1:
            steps.append(_steps(count, stride.item(), axis, rank))
        elif count > 1:
            steps.append(_steps(count, 1, axis, rank) * _along(stride, rank))
    first = _along(total(starts) + _wrapped(offset), rank)
    which = None if base.which is None else _along(base.which, rank)
    return Pointer(base.args, (first, *steps), which), tuple(masks)


def _extremes(numbers: Array) -> tuple[int, int]:
    """The least and the largest of some integers, one a program or one for all."""
    if numbers.size > _FEW:
        return int(numbers.min()), int(numbers.max())
    listed = numbers.tolist()
    return min(listed), max(listed)


def _wrapped(number: int) -> int:
    """A number as 64 bits hold it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _rows_of(
    descriptor: Descriptor, rows: Array, column: Array, shape: tuple[int, ...]
) -> tuple[Pointer, tuple[Array, ...]]:
    """Addresses and mask of the chosen rows, from `column` on."""
    extents, strides = ([_along(x, 2) for x in xs] for xs in (descriptor.shape, descriptor.strides))
    down, first = int64(rows)[..., None], _along(int64(column), 2)
    across = np.arange(shape[1], dtype=np.int64).reshape(1, 1, -1)
    right = first + across
    base = descriptor.base.map(lambda t: _along(t, 2))
    terms = (down * strides[0], first * strides[1], across * strides[1])
    masks = ((down >= 0) & (down < extents[0]), (right >= 0) & (right < extents[1]))
    return base.shift(terms), masks


def descriptor_gather(op: Op, low: Lowering) -> Step:
    """tt.descriptor_gather: whole rows; rows and columns outside read as padding."""
    descriptor, rows, column = (low.slot(x) for x in op.operands)
    result, type_, machine = low.slot(op.results[0]), op.results[0].type, low.machine
    short = low.short(op.results[0])
    access = Access(low.site(op), type_.shape, type_.scalar, short=short)

    def step(env: Env) -> None:
        desc: Descriptor = env[descriptor]
        pointer, masks = _rows_of(desc, env[rows], env[column], type_.shape)
        env[result] = _read(machine, access, desc, pointer, masks)

    return step


def descriptor_scatter(op: Op, low: Lowering) -> Step:
    """tt.descriptor_scatter: whole rows; what lies outside is not stored."""
    descriptor, rows, column, source = (low.slot(x) for x in op.operands)
    type_ = op.operands[3].type
    access, machine = Access(low.site(op), type_.shape, type_.scalar), low.machine

    def step(env: Env) -> None:
        pointer, masks = _rows_of(env[descriptor], env[rows], env[column], type_.shape)
        machine.accesses.store(access, pointer, env[source], masks)

    return step


def _read(
    machine: Machine, access: Access, desc: Descriptor, pointer: Pointer, masks: tuple[Array, ...]
) -> Array:
    """Load a tile; outside the descriptor's shape it is the padding."""
    other = None
    if desc.nan_padding and CARRIER[access.scalar].kind == "f":
        other = np.full((1,) * (len(access.shape) + 1), np.nan, np.float32)
    value = machine.accesses.load(access, pointer, masks, other)
    return round_tf32(np.ascontiguousarray(value)) if desc.round_f32_to_tf32 else value


def _indices(op: Op) -> list[Value]:
    return op.operands[1 : 1 + op.groups[0]] if op.groups else op.operands[1:]


def descriptor_load(op: Op, low: Lowering) -> Step:
    """tt.descriptor_load: outside the descriptor's shape reads as its padding."""
    descriptor, result = low.slot(op.operands[0]), low.slot(op.results[0])
    indices = [low.slot(x) for x in _indices(op)]
    shape, scalar = op.results[0].type.shape, op.results[0].type.scalar
    access = Access(low.site(op), shape, scalar, short=low.short(op.results[0]))
    machine = low.machine

    def step(env: Env) -> None:
        desc: Descriptor = env[descriptor]
        pointer, masks = _tile_of(desc, [env[s] for s in indices], shape)
        env[result] = _read(machine, access, desc, pointer, masks)

    return step


def descriptor_store(op: Op, low: Lowering) -> Step:
    """tt.descriptor_store: what lies outside the descriptor's shape is not stored."""
    descriptor = low.slot(op.operands[0])
    indices = [low.slot(x) for x in _indices(op)]
    value = op.operands[-1]
    source, shape, scalar = low.slot(value), value.type.shape, value.type.scalar
    access, machine = Access(low.site(op), shape, scalar), low.machine
    low.takes_short(op)

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
    block = op.operands[0].type.pointee
    if block is None:
        raise AssertionError
    kind = ("u" if block.unsigned and op.words[0] in ("max", "min") else "") + op.words[0]
    if kind not in UPDATE:
        msg = f"a descriptor reduction by {kind}"
        raise Unsupported(msg)
    access, machine = Access(low.site(op), shape, scalar), low.machine
    function = rounded_update(kind, value.type)
    update = Update(function, reads=True, used=False, acquires=False, releases=False)

    def step(env: Env) -> None:
        pointer, masks = _tile_of(env[descriptor], [env[s] for s in indices], shape)
        machine.accesses.atomic(access, pointer, masks, [env[source]], update)

    return step


RULES: dict[str, Rule] = {
    "tt.make_tensor_descriptor": make_descriptor,
    "tt.descriptor_load": descriptor_load,
    "tt.descriptor_store": descriptor_store,
    "tt.descriptor_reduce": descriptor_reduce,
    "tt.descriptor_gather": descriptor_gather,
    "tt.descriptor_scatter": descriptor_scatter,
}
