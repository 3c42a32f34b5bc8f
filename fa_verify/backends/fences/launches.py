"""`watched`: each launch of a Triton function is told of before it begins and waited for after.

A fault on the card is reported by whatever call comes next, in any order; waiting for each launch
by itself tells which one faulted.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from fa_verify.spool import Argument, Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fa_verify.backends.fences.slots import Slots

__all__ = ["watched"]


@contextmanager
def watched(
    slots: Slots, begins: Callable[[Launch], None], ended: Callable[[], None]
) -> Iterator[None]:
    """Tell of every launch of this process.

    Args:
        slots: Where tensors lie.
        begins: Told of a launch before it is made.
        ended: Called once it was made.
    """
    launch = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        begins(_launch(self, slots, {**dict(zip(self.arg_names, args, strict=False)), **kwargs}))
        result = launch(self, *args, **kwargs)
        ended()
        return result

    with patch.object(JITFunction, "run", run):
        yield


def _launch(function: Any, slots: Slots, arguments: dict[str, Any]) -> Launch:
    code = function.fn.__code__
    found = (
        _argument(name, getattr(value, "base", value), slots)  # a host-side tensor descriptor's
        for name, value in arguments.items()
        if isinstance(getattr(value, "base", value), torch.Tensor)
    )
    return Launch(
        kernel=function.fn.__name__,
        file=code.co_filename,
        line=code.co_firstlineno,
        arguments=tuple(found),
    )


def _argument(name: str, tensor: torch.Tensor, slots: Slots) -> Argument:
    slot = slots.at(tensor.untyped_storage().data_ptr())
    return Argument(
        name=name,
        label="" if slot is None else slot.label,
        shape=tuple(tensor.shape),
        strides=tensor.stride(),
        offset=int(tensor.storage_offset()),
        itemsize=tensor.element_size(),
    )
