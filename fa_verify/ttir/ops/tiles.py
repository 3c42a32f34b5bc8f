"""Operations that make, move or spread tiles: no arithmetic, no memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.lowering.shorts import either
from fa_verify.ttir.memory.values import Pointer
from fa_verify.ttir.numbers.floats import CARRIER, Array
from fa_verify.ttir.numbers.shorts import alike

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.syntax.ir import Op, Type


def full(x: Array, shape: tuple[int, ...]) -> Array:
    """Spread lazily kept tile extents out (the program axis stays as it is)."""
    return x if x.shape[1:] == shape else np.broadcast_to(x, (x.shape[0], *shape))


def integer(op: Op, name: str) -> int:
    """An integer attribute such as `axis = 1 : i32`."""
    return int(op.attrs[name].split()[0])


def _mapped(function: Callable[[Array], Array]) -> Callable[[Any], Any]:
    def apply(x: Array | Pointer) -> Array | Pointer:
        return x.map(function) if isinstance(x, Pointer) else function(x)

    return apply


def _suited(op: Op, function: Callable[[Array], Array]) -> Callable[[Any], Any]:
    """`function` for arrays, or for each term of a pointer, as the operand is."""
    return _mapped(function) if op.operands[0].type.scalar == "ptr" else function


def _spread(function: Callable[[Array], Array], type_: Type) -> Callable[[Any], Any]:
    """Like _mapped for rearrangements that need the whole tile."""

    def apply(x: Array | Pointer) -> Array | Pointer:
        if isinstance(x, Pointer):
            return x.dense().map(lambda t: function(full(t, type_.shape)))
        return function(full(x, type_.shape))

    return apply


def make_range(op: Op, low: Lowering) -> None:
    """tt.make_range: the same for all programs."""
    start, end = integer(op, "start"), integer(op, "end")
    low.constant(op.results[0], np.arange(start, end, dtype=np.int32)[None])


def splat(op: Op, low: Lowering) -> Step:
    """tt.splat: extents stay 1 until needed."""
    ones = (1,) * len(op.results[0].type.shape)
    return low.unary(op, _suited(op, lambda x: x.reshape(x.shape + ones)))


def _transparent(function: Callable[[Array], Array]) -> Rule:
    def rule(op: Op, low: Lowering) -> Step:
        value = op.results[0]
        dense = low.unary(op, _suited(op, function)) if low.dense(value) else None
        if not low.lazy(value):
            if dense is None:
                raise AssertionError
            return dense
        terms, lazy = low.terms(op.operands[0]), low.lazy_slot(value)

        def step(env: Env) -> None:
            env[lazy] = tuple([function(t) for t in terms(env)])
            if dense is not None:
                dense(env)

        return step

    return rule


def expand_dims(op: Op, low: Lowering) -> Step:
    """tt.expand_dims."""
    axis = integer(op, "axis") + 1
    return _transparent(lambda x: x.reshape(*x.shape[:axis], 1, *x.shape[axis:]))(op, low)  # type: ignore[return-value]


def reshape(op: Op, low: Lowering) -> Step:
    """tt.reshape: row-major, whether or not reordering is allowed."""
    source, shape = op.operands[0].type, op.results[0].type.shape
    ones = (1,) * len(shape)

    def apply(x: Array) -> Array:
        if x.size == x.shape[0]:
            return x.reshape((x.shape[0], *ones))
        return full(x, source.shape).reshape((x.shape[0], *shape))

    whole = _spread(apply, source)
    return low.unary(op, lambda x: whole(x) if isinstance(x, Pointer) else apply(x))


def trans(op: Op, low: Lowering) -> Step:
    """tt.trans."""
    order = [int(x) for x in re.findall(r"-?\d+", op.attrs["order"].replace("i32", ""))]
    axes = (0, *(i + 1 for i in order))
    return low.unary(op, _mapped(lambda x: x.transpose(axes)))


def unsplat(op: Op, low: Lowering) -> Step:
    """tt.unsplat: the one element of a tile."""
    return low.unary(op, _mapped(lambda x: x.reshape(x.shape[0], -1)[:, 0]))


def join(op: Op, low: Lowering) -> Step:
    """tt.join: a new innermost axis of extent 2."""
    shape = op.operands[0].type.shape

    def apply(a: Array, b: Array) -> Array:
        a, b = alike(a, b)
        lanes = max(a.shape[0], b.shape[0])
        both = [np.broadcast_to(x, (lanes, *shape)) for x in (a, b)]
        return np.stack(both, axis=-1)

    return low.binary(op, apply)


def split(op: Op, low: Lowering) -> Step:
    """tt.split: undoes tt.join."""
    a, (r0, r1) = low.slot(op.operands[0]), [low.slot(x) for x in op.results]

    def step(env: Env) -> None:
        x = env[a]
        env[r0], env[r1] = x[..., 0], x[..., -1]

    return step


def cat(op: Op, low: Lowering) -> Step:
    """tt.cat: first operand first (Triton may reorder; this order is one it may choose)."""
    shape = op.operands[0].type.shape

    def apply(a: Array, b: Array) -> Array:
        a, b = alike(a, b)
        lanes = max(a.shape[0], b.shape[0])
        return np.concatenate([np.broadcast_to(x, (lanes, *shape)) for x in (a, b)], axis=1)

    return low.binary(op, apply)


def gather(op: Op, low: Lowering) -> Step:
    """tt.gather along an axis; an index outside is an error of the kernel."""
    axis = integer(op, "axis") + 1
    source_shape, index_shape = op.operands[0].type.shape, op.operands[1].type.shape

    outside = low.failure(op, "a gather with an index outside its source")

    def apply(source: Array, index: Array) -> Array:
        lanes = max(source.shape[0], index.shape[0])
        source = np.broadcast_to(source, (lanes, *source_shape))
        index = np.broadcast_to(index, (lanes, *index_shape)).astype(np.int64)
        if index.size and (index.min() < 0 or index.max() >= source_shape[axis - 1]):
            raise outside()
        return np.take_along_axis(source, index, axis=axis)

    return low.binary(op, apply)


def poison(op: Op, low: Lowering) -> None:
    """ub.poison: any value will do."""
    value = op.results[0]
    carrier = CARRIER.get(value.type.scalar)
    if carrier is None:
        msg = f"a poison value of type {value.type}"
        raise Unsupported(msg)
    fill = np.nan if carrier.kind == "f" else 1
    low.constant(value, np.full((1,) * (len(value.type.shape) + 1), fill, carrier))


def _axis(op: Op) -> str:
    word = op.words[0] if op.words else op.attrs.get("axis", "x")
    return {"0": "x", "1": "y", "2": "z"}.get(word.split()[0], word)


def program_id(op: Op, low: Lowering) -> Step:
    """tt.get_program_id."""
    machine, result, axis = low.machine, low.slot(op.results[0]), _axis(op)

    def step(env: Env) -> None:
        env[result] = getattr(machine.lanes, axis)

    return step


def num_programs(op: Op, low: Lowering) -> Step:
    """tt.get_num_programs."""
    machine, result, axis = low.machine, low.slot(op.results[0]), "xyz".index(_axis(op))

    def step(env: Env) -> None:
        env[result] = np.array([machine.grid[axis]], np.int32)

    return step


RULES: dict[str, Rule] = {
    "tt.make_range": make_range,
    "tt.splat": either(splat),
    "tt.unsplat": either(unsplat),
    "tt.broadcast": either(_transparent(lambda x: x)),
    "tt.expand_dims": either(expand_dims),
    "tt.reshape": either(reshape),
    "tt.trans": either(trans),
    "tt.join": either(join),
    "tt.split": either(split),
    "tt.cat": either(cat),
    "tt.gather": gather,
    "tt.get_program_id": program_id,
    "tt.get_num_programs": num_programs,
    "ub.poison": poison,
}
