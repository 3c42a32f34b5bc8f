"""PTX's cvt: between integers, floats and packed pairs of small floats (PTX ISA 8.7, 9.7.9.21)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.numbers.floats import (
    Array,
    flush,
    narrow_once,
    round_tf32,
    round_to,
    round_toward_zero,
)
from fa_verify.ttir.ptx.bits import (
    FLOATS,
    INTEGERS,
    PAIRS,
    WIDTH,
    Instruction,
    bits_of,
    halves,
    joined,
    typed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_WHOLE: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip


def cvt(op: Instruction, *sources: Array) -> tuple[Array, ...]:
    """The instruction; of two sources the first becomes the upper half."""
    target, source = op.types[0], op.types[-1]
    if target in PAIRS:
        half = Instruction(op.name, op.suffixes, (PAIRS[target], PAIRS.get(source, source)))
        width = WIDTH[target] // 2
        if source in PAIRS:
            parts = halves(sources[0], WIDTH[source] // 2)
        else:
            parts = [sources[1], sources[0]]
        low, high = [cvt(half, part)[0] for part in parts]
        return (joined(low, high, width),)
    x = typed(sources[0], source)
    if "ftz" in op.suffixes and x.dtype == np.float32:
        x = flush(x)
    if target in INTEGERS:
        return (bits_of(_to_integer(op, x, INTEGERS[target]), target),)
    whole = next((_WHOLE[s] for s in op.suffixes if s in _WHOLE), None)
    if whole is not None:
        x = whole(x)
    result = _to_float(op, x, target)
    if "relu" in op.suffixes:
        result = np.where(result < 0, result.dtype.type(0), result)
    if "sat" in op.suffixes:
        result = np.clip(np.where(np.isnan(result), 0, result), 0, 1).astype(result.dtype)
    return (bits_of(result, target),)


def _to_integer(op: Instruction, x: Array, dtype: np.dtype[Any]) -> Array:
    if x.dtype.kind != "f":
        if "sat" in op.suffixes:
            bounds = np.iinfo(dtype)
            x = np.clip(x.astype(object), bounds.min, bounds.max)
        return x.astype(dtype)
    whole = next((_WHOLE[s] for s in op.suffixes if s in _WHOLE), np.rint)
    bounds = np.iinfo(dtype)
    if bounds.bits == 64:
        msg = "the PTX instruction cvt from a float to 64 bits"
        raise Unsupported(msg)
    cut = whole(np.where(np.isnan(x), 0, x).astype(np.float64))
    return np.clip(cut, bounds.min, bounds.max).astype(dtype)


def _to_float(op: Instruction, x: Array, target: str) -> Array:
    name = FLOATS[target][0]
    if target == "tf32":
        return round_tf32(np.ascontiguousarray(x.astype(np.float32)))
    if {"rm", "rp"} & op.suffixes:
        msg = "the PTX instruction cvt with directed rounding"
        raise Unsupported(msg)
    if "rz" in op.suffixes:
        wide = x if x.dtype.kind == "f" else x.astype(np.float64)
        return round_toward_zero(wide, name)
    if x.dtype.kind != "f" or x.dtype == np.float64:
        wide = x.astype(np.float64)
        return wide if name == "f64" else narrow_once(wide, name)
    return round_to(x, name)
