"""Lets the result of an operation take the place of an operand that nobody will look at again.

Fresh memory for each tile costs about as much as the arithmetic on it. An operand may be written
over if this is its last use, if it owns its memory, and if the interpreter counts no reference to
it but its slot's: a view, a merge or a list that still holds it would count as one more.
"""

from __future__ import annotations

from sys import getrefcount
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fa_verify.ttir.lowering.lower import Env, Lowering, Step
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.syntax.ir import Op

_WORTHWHILE = 4096  # elements; looking costs a microsecond, so does adding up these


def _references(env: Env, slot: int) -> int:
    return getrefcount(env[slot])


_ALONE = _references([np.empty(0)], 0)  # how many those are differs between versions of Python


def spare(env: Env, slots: Sequence[int], shape: tuple[int, ...]) -> Array | None:
    """Return the first array in `slots` that has this shape and may be written over.

    The caller must not hold any of them itself, not even as an argument of the call.
    """
    for slot in slots:
        if _references(env, slot) == _ALONE:
            found: Array = env[slot]
            if found.shape == shape and found.base is None:
                return found
    return None


def elementwise(op: Op, low: Lowering, function: Callable[..., Array]) -> Step:
    """Result = function(*operands), all of one type; `function` takes `out` as ufuncs do."""
    slots, result = [low.slot(x) for x in op.operands], low.slot(op.results[0])
    last = [low.slot(x) for x in low.last_uses(op)]
    if len(slots) == 1:
        return _unary(slots[0], result, function, last)
    if len(slots) != 2:
        return low.nary(op, function)
    a, b = slots

    def step(env: Env) -> None:
        if env[a].size < _WORTHWHILE > env[b].size:
            env[result] = function(env[a], env[b])
            return
        shape = env[a].shape
        if shape != env[b].shape:
            shape = np.broadcast(env[a], env[b]).shape
        out = spare(env, last, shape) if last else None
        env[result] = function(env[a], env[b], out=out)

    return step


def _unary(a: int, result: int, function: Callable[..., Array], last: list[int]) -> Step:
    def step(env: Env) -> None:
        out = spare(env, last, env[a].shape) if env[a].size >= _WORTHWHILE else None
        env[result] = function(env[a], out=out)

    return step


def blend(condition: Array, yes: Array, no: Array) -> Array:
    """np.where(condition, yes, no) for operands of one type.

    Several times faster where the condition is irregular: bits are blended, nothing is predicted.
    """
    if yes.dtype.itemsize not in (2, 4) or condition.size < _WORTHWHILE:
        return np.where(condition, yes, no)
    kind = np.dtype(f"i{yes.dtype.itemsize}")
    mask = condition.view(np.int8).astype(kind)
    np.negative(mask, out=mask)
    left, right = yes.view(kind), no.view(kind)
    shape = np.broadcast(mask, left, right).shape
    blended: Array = mask if mask.shape == shape else np.empty(shape, kind)
    if no.size == 1 and not right.any():
        np.bitwise_and(mask, left, out=blended)
    else:
        difference = left ^ right
        np.bitwise_and(mask, difference, out=blended)
        np.bitwise_xor(blended, right, out=blended)
    result: Array = blended.view(yes.dtype)
    return result
