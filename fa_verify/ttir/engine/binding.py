"""What a launch is given, as run-time values: how is decided once for each parameter."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.memory.addresses import Addresses
from fa_verify.ttir.memory.values import Descriptor, Pointer
from fa_verify.ttir.numbers.floats import CARRIER, round_to

if TYPE_CHECKING:
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.syntax.ir import Type

_INDEX = np.dtype(np.int64)
Binder = Callable[[str, Any, Addresses], Any]  # (name, value, addresses) -> run-time value


def binder(type_: Type) -> Binder:
    """What makes an argument of a type a run-time value."""
    if type_.scalar in ("ptr", "desc"):
        if type_.pointee is None:
            raise AssertionError
        return partial(_pointer if type_.scalar == "ptr" else _descriptor, type_.pointee)
    carrier = CARRIER[type_.scalar]
    if carrier.kind == "f":
        return lambda _name, value, _: round_to(np.array([value], np.float64), type_.scalar)
    return lambda _name, value, _: _integer(int(value), carrier)


def _pointer(pointee: Type, name: str, value: Any, addresses: Addresses) -> Pointer:
    tensor = _tensor(value)
    argument = addresses.argument(name, tensor, pointee.scalar)
    start = 0 if value is tensor else _start(value, tensor)
    return Pointer((argument,), (_integer(start, _INDEX),))


def _descriptor(pointee: Type, name: str, value: Any, addresses: Addresses) -> Descriptor:
    argument = addresses.argument(name, _tensor(value.base), pointee.scalar)
    return Descriptor(
        Pointer((argument,), (_integer(0, _INDEX),)),
        tuple([_integer(x, _INDEX) for x in value.shape]),
        tuple([_integer(x, _INDEX) for x in value.strides]),
        pointee.shape, pointee.scalar, value.nan_padding, value.round_f32_to_tf32,
    )  # fmt: skip


@lru_cache(maxsize=4096)  # a launch has dozens of strides and sizes, mostly the same as before
def _integer(number: int, carrier: np.dtype[Any]) -> Array:
    if carrier.kind == "b":
        return np.array([bool(number)])
    bits = carrier.itemsize * 8
    number &= (1 << bits) - 1
    return np.array([number - (1 << bits) if number >> (bits - 1) else number], carrier)


def _tensor(value: Any) -> torch.Tensor:
    """The tensor itself, or the one inside what stands for one: anything that has data_ptr()."""
    while not isinstance(value, torch.Tensor):
        inner = getattr(value, "base", None)  # triton.reinterpret's
        if inner is None:
            held = getattr(value, "__dict__", {}).values()
            inner = next((x for x in held if isinstance(x, torch.Tensor)), None)
        if inner is None:
            msg = f"a pointer argument that is a {type(value).__name__}, not a tensor"
            raise Unsupported(msg)
        value = inner
    return value


def _start(value: Any, tensor: torch.Tensor) -> int:
    """How many elements after `tensor` something that stands for it begins."""
    return int(value.data_ptr() - tensor.data_ptr()) // tensor.element_size()
