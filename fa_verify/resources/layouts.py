"""Operands of products in Triton's IR for GPUs, and a fault of Triton 3.6 and 3.7 in their layout.

A product on registers (mma.sync) gives each of four threads of a row `kWidth` columns next to each
other (Triton, "DotOperandEncodingAttr"). Triton takes kWidth from the narrowest loads that an
operand comes from, and doubles it where they are joined (`computeOrigBitWidth`): bytes, a mask's
say, and a `tl.join` give 8. For all of 16 columns two threads are enough then, the other two repeat
them, and the product counts them twice: on an H200 its results were wrong, and right with 32.
"""

from __future__ import annotations

import re

__all__ = ["repeated"]

_THREADS = 4  # next to each other in a row
_LAYOUT = re.compile(r"^(?P<name>#\w+) = #ttg\.nvidia_mma<\{versionMajor = 2,", re.MULTILINE)
_PRODUCT = re.compile(
    r"tt\.dot .*? : tensor<(?:\d+x)*(?P<columns>\d+)x\w+, "
    r"#ttg\.dot_op<\{opIdx = 0, parent = (?P<layout>#\w+), kWidth = (?P<width>\d+)\}>>"
)


def repeated(ttgir: str) -> int:
    """How many products have operands with fewer columns than their threads hold."""
    layouts = set(_LAYOUT.findall(ttgir))
    return sum(
        product["layout"] in layouts and int(product["columns"]) < _THREADS * int(product["width"])
        for product in _PRODUCT.finditer(ttgir)
    )
