"""Number formats: unit roundoff, half an ulp, overflow, and the TF32 operand roundings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FLOAT32", "FORMATS", "TF32", "Cast", "Format", "floor_power_of_two", "tf32_operands"]

_EXPONENT_BITS = {
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format.

    Attributes:
        precision: Significand bits, the hidden one included.
        emin: Exponent of the smallest normal number.
        largest: The largest finite number.
    """

    precision: int
    emin: int
    largest: float

    @property
    def unit_roundoff(self) -> float:
        """2^-p: relative error of rounding a normal number to nearest."""
        return 2.0**-self.precision

    @property
    def overflow(self) -> float:
        """Numbers of at least this size round to infinity (IEEE 754-2019, 4.3.1).

        Those of e4m3, which has none, to NaN or to its largest number, from 464 on.
        """
        return self.largest * (1.0 + 2.0 ** -(self.precision + 1))

    def ulp(self, x: Tensor) -> Tensor:
        """The spacing at x, ``2^(max(floor(log2|x|), emin) - p + 1)``; at 0 the subnormals'."""
        return floor_power_of_two(x.abs()).clamp_(min=2.0**self.emin).mul_(2 * self.unit_roundoff)

    def half_ulp(self, x: Tensor) -> Tensor:
        """The most that rounding any ``|y| <= |x|`` to nearest can lose; (B2)."""
        return Cast(self).error(x)


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """A rounding of an intermediate value to a format, to nearest or toward zero."""

    format: Format
    truncates: bool = False

    @property
    def unit(self) -> float:
        """Relative error of rounding a normal number."""
        return self.format.unit_roundoff * (2 if self.truncates else 1)

    @property
    def tiny(self) -> float:
        """Absolute error of rounding a subnormal number."""
        return float(2.0**self.format.emin * self.unit)

    def error(self, x: Tensor) -> Tensor:
        """The most that rounding any ``|y| <= |x|`` can lose; (B2)."""
        return self.error_below(x.abs())

    def error_below(self, size: Tensor) -> Tensor:
        """The same of any ``|y| <= size``."""
        ulp = floor_power_of_two(size).clamp_(min=2.0**self.format.emin).mul_(self.unit)
        return torch.minimum(ulp, size)


FORMATS = {
    "float16": Format(11, -14, 65504.0),
    "bfloat16": Format(8, -126, float(torch.finfo(torch.bfloat16).max)),
    "float32": Format(24, -126, float(torch.finfo(torch.float32).max)),
    "float8_e4m3fn": Format(4, -6, 448.0),
    "int8": Format(8, 7, 127.0),  # whole numbers: subnormals of a format that begins at 2^7
}
FLOAT32 = FORMATS["float32"]
TF32 = Format(11, -126, (2.0 - 2.0**-10) * 2.0**127)


def floor_power_of_two(x: Tensor) -> Tensor:
    """The largest power of two that is at most x; 0 for 0 and subnormals, inf for inf and NaN."""
    integer, mask = _EXPONENT_BITS[x.dtype]
    return x.contiguous().view(integer).bitwise_and(mask).view(x.dtype)


def tf32_operands(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A float32 tensor as a TF32 dot may read it: truncated, to nearest even, to nearest away.

    Measured on an H200 through Triton 3.6: plain tf32 operands are truncated to 10 fraction bits.
    ``cvt.rna.tf32.f32`` rounds half away from zero, an emulator usually half to even.
    """
    bits = x.contiguous().view(torch.int32)
    even = bits + (0xFFF + ((bits >> 13) & 1)).to(torch.int32)
    away = bits + 0x1000
    truncated, even, away = ((b & ~0x1FFF).view(torch.float32) for b in (bits, even, away))
    return truncated, even, away
