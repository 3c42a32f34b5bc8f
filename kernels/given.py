"""What callers give, by kind: tensors, numbers, switches, windows; what is none is refused by name.

Numbers come back as Python's own, whichever they were: a NumPy integer is no argument of a kernel.
"""

import reprlib

import numpy as np
import torch

__all__ = ["choice", "integer", "number", "switch", "tensors", "window"]


def tensors(optional=(), **given):  # noqa: ANN003
    """Refuse what is no dense tensor.

    Raises:
        ValueError: One is not, or is None and not among the names in `optional`.
    """
    for name, x in given.items():
        if x is None and name in optional:
            continue
        if not isinstance(x, torch.Tensor):
            msg = f"{name}: {type(x).__name__}: must be a tensor, as torch.as_tensor makes them"
            raise ValueError(msg)  # noqa: TRY004 (what the front raises)
        if x.is_nested or x.layout != torch.strided:
            kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            rule = "attention_varlen takes packed sequences" if x.is_nested else "use x.to_dense()"
            msg = f"{name}: a {kind} tensor: must be a strided one; {rule}"
            raise ValueError(msg)


def number(name, value, *, optional=False):
    """A float; if optional, None stays None."""
    if type(value) is float or (optional and value is None):
        return value
    if not isinstance(value, (int, float, np.number)):
        _refuse(name, value, "a number")
    return float(value)


def integer(name, value, *, optional=False):
    """An int; if optional, None stays None."""
    if type(value) is int or (optional and value is None):
        return value
    if not isinstance(value, (int, np.integer)):
        _refuse(name, value, "an integer")
    return int(value)


def switch(name, value):
    """A bool."""
    if not isinstance(value, (bool, int, np.bool_)):
        _refuse(name, value, "True or False")
    return bool(value)


def choice(name, value, choices):
    """One of a few."""
    if value not in choices:
        _refuse(name, value, f"one of {', '.join(choices)}")
    return value


def window(window_size):
    """Both sides of a window.

    Raises:
        ValueError: It is no pair of integers, or one is below -1.
    """
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        _refuse("window_size", window_size, "(left, right); -1: no limit")
    left, right = (integer("window_size", size) for size in window_size)
    if min(left, right) < -1:
        _refuse("window_size", window_size, "(left, right); -1: no limit")
    return left, right


def _refuse(name, value, rule):
    """Say what a value must be."""
    hint = "; a tensor would get no gradient" if isinstance(value, torch.Tensor) else ""
    shown = type(value).__name__ if hint else reprlib.repr(value)
    msg = f"{name}={shown}: must be {rule}{hint}"
    raise ValueError(msg)
