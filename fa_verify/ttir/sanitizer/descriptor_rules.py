"""What hardware asks of a tensor descriptor: alignment and contiguity.

The rules are those of cuTensorMapEncodeTiled in the CUDA driver API: a base address and strides
that are multiples of 16 bytes, a contiguous last dimension, at least 16 bytes of it in a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.memory.values import total

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.ttir.memory.values import Descriptor
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.sanitizer.findings import Site
    from fa_verify.ttir.sanitizer.reports import Reports

_ALIGNED = 16  # bytes


def check(descriptor: Descriptor, site: Site, reports: Reports) -> None:
    """Report each rule that a descriptor breaks, for the first program that does."""
    if _keeps_all(descriptor):
        return
    arg = descriptor.base.args[0]
    for wrong, detail in _broken(descriptor):
        if wrong.any():
            lane = int(np.argmax(wrong.reshape(wrong.shape[0], -1).any(axis=1)))
            reports.program(lane, "descriptor-rule", site, int(wrong.sum()), detail, argument=arg)


def _keeps_all(descriptor: Descriptor) -> bool:
    """Whether a descriptor that is the same for all programs keeps every rule: a quick look."""
    terms, (*strides, last) = descriptor.base.terms, descriptor.strides
    if any(x.size > 1 for x in (*terms, *strides, last)):
        return False
    arg = descriptor.base.args[0]
    size = arg.flat.itemsize
    starts = (
        arg.address + size * sum(x.item() for x in terms),
        *(size * x.item() for x in strides),
    )
    aligned = not any(start % _ALIGNED for start in starts)
    return aligned and last.item() == 1 and descriptor.block[-1] * size >= _ALIGNED


def _broken(descriptor: Descriptor) -> Iterator[tuple[Array, str]]:
    arg = descriptor.base.args[0]
    size = arg.flat.itemsize
    base = arg.address + total(descriptor.base.terms) * size
    wrong = base % _ALIGNED != 0
    over = int(base[wrong][0] % _ALIGNED) if wrong.any() else 0
    yield wrong, f"the base lies {over} bytes past a multiple of {_ALIGNED}"
    for axis, stride in enumerate(descriptor.strides[:-1]):
        wrong = stride * size % _ALIGNED != 0
        due = f"stride {axis} is {int(stride[wrong.argmax()]) * size} bytes"
        yield wrong, f"{due}, no multiple of {_ALIGNED}"
    last = descriptor.strides[-1]
    yield last != 1, f"the last dimension has stride {int(last[(last != 1).argmax()])}, not 1"
    inner = descriptor.block[-1] * size
    yield np.array([inner < _ALIGNED]), f"a block has {inner} bytes of the last dimension"
