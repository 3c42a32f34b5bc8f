"""One operation on several tensors: on a card it is launched once, where each would cost a launch.

They are PyTorch's own (https://docs.pytorch.org/docs/stable/torch.html#foreach-operations), whose
names begin with an underscore. Tensors of one device, dtype and layout take the short way.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = tuple[Tensor, ...] | list[Tensor]

__all__ = ["differences", "largest", "products", "ratios", "signs", "sizes"]


def differences(left: Tensors, right: Tensors) -> Tensors:
    """Left less right, each."""
    return torch._foreach_sub(left, right)  # noqa: SLF001 - it has no other name, as below


def ratios(left: Tensors, right: Tensors) -> Tensors:
    """Left over right, each."""
    return torch._foreach_div(left, right)  # noqa: SLF001


def products(left: Tensors, right: Tensors) -> Tensors:
    """Left times right, each."""
    return torch._foreach_mul(left, right)  # noqa: SLF001


def signs(tensors: Tensors) -> Tensors:
    """1, 0 or -1 for each element of each."""
    return torch._foreach_sign(tensors)  # noqa: SLF001


def sizes(tensors: Tensors) -> Tensors:
    """Each without its sign."""
    return torch._foreach_abs(tensors)  # noqa: SLF001


def largest(tensors: Tensors) -> Tensors:
    """The largest size of an element of each, none of which is empty; NaN where it has one."""
    return torch._foreach_norm(tensors, math.inf)  # noqa: SLF001
