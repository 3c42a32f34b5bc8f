"""fp16 and bf16 tiles in their own 16 bits, beside the float32 ones of `floats`.

A sum of two such tiles is one call of torch, which widens, adds and rounds to nearest even in
registers: the same numbers as a float32 sum that is rounded afterwards, for half the time. NumPy
has no bf16 and is slow with fp16, so all else is done in float32. A short array says what it is by
its dtype; bf16's takes part in no arithmetic of NumPy's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fa_verify.ttir.numbers.floats import SHORT, as_torch, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.numbers.floats import Array

_SCALAR = {dtype: scalar for scalar, dtype in SHORT.items()}
_HALF = np.dtype(np.float16)
_INFINITY = {"f16": 0x7C00, "bf16": 0x7F80}
_FEW = 512  # below this many elements NumPy's slower conversion beats the call into torch
_SIGN = np.int16(-0x8000)


def is_short(x: Array) -> bool:
    """Whether an array holds 16-bit floats as they are."""
    return x.dtype in _SCALAR


def is_few(x: Array, y: Array) -> bool:
    """Whether these are so few fp16 numbers that NumPy, which rounds them alike, is faster."""
    return x.size < _FEW and x.dtype is _HALF is y.dtype and x.shape == y.shape


def shorten(x: Array, scalar: str) -> Array:
    """Float32, rounded to nearest even, in 16 bits; what is short stays as it is."""
    if is_short(x):
        return x
    if scalar == "f16" and x.size < _FEW:
        return x.astype(np.float16)
    short = np.empty_like(x, SHORT[scalar])
    as_tensor(short).copy_(as_torch(x))
    return short


def widen(x: Array) -> Array:
    """A short array as float32, to the bit; any other as it is."""
    scalar = _SCALAR.get(x.dtype)
    return x if scalar is None else decode(x.view(np.int16), scalar)


def alike(x: Array, y: Array) -> tuple[Array, Array]:
    """Two arrays, both short or both not; a single number becomes as the other is."""
    if is_short(x) == is_short(y):
        return x, y
    if y.size == 1 and is_short(x):
        return x, _exactly(y, x.dtype)
    if x.size == 1 and is_short(y):
        return _exactly(x, y.dtype), y
    return widen(x), widen(y)


def _exactly(x: Array, dtype: np.dtype[Any]) -> Array:
    return encode(np.ascontiguousarray(x), _SCALAR[dtype]).view(dtype)


def as_tensor(x: Array) -> torch.Tensor:
    """View a short array as a tensor of torch's type."""
    if not x.flags.writeable:
        x = x.copy()
    if x.dtype is _HALF:
        return torch.from_numpy(x)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def as_array(x: torch.Tensor) -> Array:
    """View a tensor of 16-bit floats as a short array."""
    scalar = "f16" if x.dtype == torch.float16 else "bf16"
    return x.view(torch.int16).numpy().view(SHORT[scalar])


@lru_cache(maxsize=1024)
def _number(raw: bytes, scalar: str) -> torch.Tensor:
    """A single number, short or float32, as a tensor without dimensions."""
    x = np.frombuffer(raw, SHORT[scalar] if len(raw) == 2 else np.float32)
    return as_tensor(shorten(x, scalar)).reshape(())


def _flat(x: Array) -> torch.Tensor:
    """bf16 without gaps, as a tensor that is faster to make; all that it costs is the shape."""
    return torch.frombuffer(x, dtype=torch.bfloat16)


def compute(
    function: Callable[..., torch.Tensor], x: Array, y: Array, scalar: str, out: Array | None
) -> Array:
    """An operation of torch's on two tiles of which one at least is short; the result is.

    `out` is where it goes, if that is short itself.
    """
    a = b = None
    if x.dtype is not y.dtype or x.shape != y.shape or x.dtype not in _SCALAR:
        if y.size == 1 < x.size and y.ndim <= x.ndim:
            b = _number(y.tobytes(), scalar)
            x = y = shorten(x, scalar)
        elif x.size == 1 < y.size and x.ndim <= y.ndim:
            a = _number(x.tobytes(), scalar)
            x = y = shorten(y, scalar)
        else:
            x, y = shorten(x, scalar), shorten(y, scalar)
    if out is None or out.dtype is not x.dtype:
        shape = x.shape if x.shape == y.shape else np.broadcast(x, y).shape
        full = x if x.shape == shape else y
        out = np.empty_like(full) if full.shape == shape else np.empty(shape, SHORT[scalar])
    same = scalar == "bf16" and x.shape == y.shape == out.shape and x.size > 0
    dense = same and x.flags.carray and y.flags.carray and out.flags.carray
    view = _flat if dense else as_tensor
    a = view(x) if a is None else a
    b = view(y) if b is None else b
    function(a, b, out=a if out is x and a.ndim else view(out))
    return out


def negative(x: Array, out: Array | None = None) -> Array:
    """-x for a short array: the other sign bit."""
    return np.bitwise_xor(x.view(np.int16), _SIGN, out=_bits(out)).view(x.dtype)


def absolute(x: Array, out: Array | None = None) -> Array:
    """|x| for a short array: no sign bit."""
    return np.bitwise_and(x.view(np.int16), ~_SIGN, out=_bits(out)).view(x.dtype)


def _bits(out: Array | None) -> Array | None:
    return None if out is None else out.view(np.int16)


def any_nan(x: Array) -> bool:
    """Whether a short array has a NaN: what lies above infinity, of either sign."""
    bits, infinity = x.view(np.uint16), _INFINITY[_SCALAR[x.dtype]]
    positive = x.view(np.int16).max(initial=0) > infinity
    return bool(positive or bits.max(initial=0) > (infinity | 0x8000))
