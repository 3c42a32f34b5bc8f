"""Sums of products as a Hopper's matrix units form them; not how BLAS does.

A tensor core adds `Unit.width` products and the accumulator at once: every term is cut (toward
zero) to `Unit.fraction` fraction bits of the largest exponent among them, the cut terms are added
exactly, and the sum is cut to `Unit.result` fraction bits, or rounded to nearest even when the
accumulator is fp16. Longer dots are chains of such steps in ascending k. Products are not
normalised: the exponent of a product is the sum of its factors' exponents.

Sources: Xie et al. 2025, "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores"
(arXiv:2511.10909), section on NVIDIA's truncated fused dot product-add; Khattak and Mikaitis 2025,
"Accurate models of NVIDIA tensor cores" (arXiv:2512.07004).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.numbers.floats import fma

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.ttir.numbers.floats import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Facts about one matrix instruction.

    Attributes:
        width: Products added in one step.
        fraction: Bits kept below the largest exponent.
        result: Fraction bits of a float32 result.
    """

    width: int
    fraction: int
    result: int


# Hopper.
HALF = Unit(width=16, fraction=25, result=23)  # fp16 and bf16
TF32 = Unit(width=8, fraction=25, result=23)
FP8 = Unit(width=32, fraction=13, result=13)
# The least exponent of an operand: subnormal operands are not normalised.
SMALLEST = {"f16": -14, "bf16": -126, "f32": -126, "f8E4M3FN": -6, "f8E5M2": -14}
_ABSENT = -4096  # exponent of a zero: below every other, and sums of two fit in int16


def _exponents(x: Array, smallest: int) -> Array:
    exponent = np.frexp(x)[1].astype(np.int16) - np.int16(1)
    return np.where(x == 0, np.int16(_ABSENT), np.maximum(exponent, np.int16(smallest)))


def _power_of_two(exponent: Array) -> Array:
    """2**exponent in float64, for exponents of normal numbers."""
    return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)


def _cut(x: Array, bits: int) -> Array:
    """Truncate float64 to `bits` fraction bits of a float32 significand."""
    low = np.int64((1 << (52 - bits)) - 1)
    kept = (x.view(np.int64) & ~low).view(np.float64)
    tiny = np.abs(x) < 2.0**-126
    if tiny.any():
        quantum = 2.0 ** (126 + bits)
        kept = np.where(tiny, np.trunc(x * quantum) / quantum, kept)
    return kept.astype(np.float32)


def fused_dot(
    a: Array, b: Array, c: Array, unit: Unit, smallest: tuple[int, int], *, half: bool = False
) -> Array:
    """Add a b to c by a chain of tensor-core steps.

    Args:
        a: (..., M, K) float32, representable in the operand's format.
        b: (..., K, N) likewise.
        c: (..., M, N), float32; leading axes broadcast.
        unit: The instruction.
        smallest: `SMALLEST` of the formats of a and b.
        half: Whether accumulator and result are fp16.

    Returns:
        (..., M, N) float32.
    """
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return _chain(a, b, c, unit, smallest, half=half)
    # Tiles at the end of a tensor are mostly zeros, whose products change nothing.
    lead = tuple(range(a.ndim - 2))
    rows, columns = (np.asarray(x.any((*lead, axis))) for x, axis in ((a, -1), (b, -2)))
    terms = np.asarray(a.any((*lead, -2)) & b.any((*lead, -1)))
    if rows.all() and columns.all():
        return _chain(a, b, c, unit, smallest, half=half, terms=terms)
    shape = np.broadcast_shapes(c.shape, a[..., :1].shape, b[..., :1, :].shape)
    total = np.zeros(shape, np.float32)
    if c.any():
        none = np.zeros(a.shape[-1], np.bool_)
        total = _chain(a, b, c, unit, smallest, half=half, terms=none)
    if terms.any():
        at = np.ix_(*map(np.arange, shape[:-2]), rows, columns)
        some = (a[..., rows, :], b[..., columns], np.broadcast_to(c, shape)[at])
        total[at] = _chain(*some, unit, smallest, half=half, terms=terms)
    return total


def _chain(
    a: Array,
    b: Array,
    c: Array,
    unit: Unit,
    smallest: tuple[int, int],
    *,
    half: bool,
    terms: Array | None = None,
) -> Array:
    """The same, term by term; terms says which along k are not all zero."""
    ea, eb = _exponents(a, smallest[0]), _exponents(b, smallest[1])
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    shape = np.broadcast_shapes(c.shape, wide_a[..., :1].shape, wide_b[..., :1, :].shape)
    total = np.ascontiguousarray(np.broadcast_to(c, shape)).astype(np.float32)
    product, top, sums = np.empty(shape), np.empty(shape, np.int16), np.empty(shape, np.int16)
    for start in range(0, a.shape[-1], unit.width):
        group: Sequence[int] = range(start, min(start + unit.width, a.shape[-1]))
        if terms is not None:
            group = [k for k in group if terms[k]]
        top[...] = _exponents(total, -14 if half else -126)
        for k in group:
            np.add(ea[..., k, None], eb[..., k, None, :], out=sums)
            np.maximum(top, sums, out=top)
        np.maximum(top, np.int16(-900), out=top)  # all terms zero
        scale = _power_of_two(unit.fraction - top)
        fixed = np.trunc(total * scale)
        for k in group:
            np.multiply(wide_a[..., k, None], wide_b[..., k, None, :], out=product)
            np.multiply(product, scale, out=product)
            np.trunc(product, out=product)
            np.add(fixed, product, out=fixed)
        fixed *= _power_of_two(top - unit.fraction)
        total = fixed.astype(np.float16).astype(np.float32) if half else _cut(fixed, unit.result)
        total += np.float32(0)  # a sum too small for its format is +0, whatever its sign
    return total


def fma_chain(a: Array, b: Array, c: Array) -> Array:
    """Add a b to c by fused multiply-adds in ascending k, as CUDA cores do for float32 operands."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    total = c
    for k in range(a.shape[-1]):
        total = fma(wide_a[..., k, None], wide_b[..., k, None, :], total)
    return total
