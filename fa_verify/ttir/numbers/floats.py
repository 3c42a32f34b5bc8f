"""Number formats: how elements lie in memory, and how a result is rounded to its type.

fp16, bf16 and fp8 values are carried as float32 arrays that hold only representable values, and are
rounded where the kernel's IR rounds; fp16 and bf16 tiles may also stay in 16 bits (`SHORT`, see
`shorts`). One rounding of a float32 result is the hardware's: float32
has more than twice the precision plus two bits, so add, sub, mul, div and sqrt do not suffer from
double rounding (Figueroa 1995, "When is double rounding innocuous?"). Callers keep NumPy from
warning of overflow and NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isnan
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]

# Carrier (how a value is computed with) and raw (how it lies in memory) for each MLIR scalar type.
CARRIER: dict[str, np.dtype[Any]] = {
    "i1": np.dtype(np.bool_), "i8": np.dtype(np.int8), "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32), "i64": np.dtype(np.int64), "index": np.dtype(np.int64),
    "f16": np.dtype(np.float32), "bf16": np.dtype(np.float32), "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}  # fmt: skip
RAW: dict[str, np.dtype[Any]] = {
    "i1": np.dtype(np.int8), "i8": np.dtype(np.int8), "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32), "i64": np.dtype(np.int64),
    "f16": np.dtype(np.int16), "bf16": np.dtype(np.int16), "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A floating-point format.

    Attributes:
        fraction: Stored significand bits.
        smallest: Exponent of the smallest normal number.
        largest: Largest finite number.
        infinite: Whether there is an infinity.
    """

    fraction: int
    smallest: int
    largest: float
    infinite: bool = True


FORMATS: dict[str, Format] = {
    "f32": Format(fraction=23, smallest=-126, largest=float(np.finfo(np.float32).max)),
    "f16": Format(fraction=10, smallest=-14, largest=65504.0),
    "bf16": Format(fraction=7, smallest=-126, largest=float(np.uint32(0x7F7F0000).view("f4"))),
    # OCP 8-bit Floating Point Specification, 5.1; the other two are AMD's.
    "f8E4M3FN": Format(fraction=3, smallest=-6, largest=448.0, infinite=False),
    "f8E5M2": Format(fraction=2, smallest=-14, largest=57344.0),
    "f8E4M3FNUZ": Format(fraction=3, smallest=-7, largest=240.0, infinite=False),
    "f8E5M2FNUZ": Format(fraction=2, smallest=-15, largest=57344.0, infinite=False),
}
FP8: dict[str, torch.dtype] = {
    "f8E4M3FN": torch.float8_e4m3fn,
    "f8E5M2": torch.float8_e5m2,
    "f8E4M3FNUZ": torch.float8_e4m3fnuz,
    "f8E5M2FNUZ": torch.float8_e5m2fnuz,
}
for _name in FP8:
    CARRIER[_name] = np.dtype(np.float32)
    RAW[_name] = np.dtype(np.int8)
NARROW = frozenset({"f16", "bf16", *FP8})  # carried as float32
# How 16-bit tiles that stay short are told from others; the second is no number to NumPy.
SHORT: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype([("bf16", np.int16)]),
}
_TORCH: dict[str, torch.dtype] = {"f16": torch.float16, "bf16": torch.bfloat16, **FP8}
# Where 16-bit formats are rounded: stays in the cache, where fresh memory would not be.
_SCRATCH = torch.empty(1 << 18, dtype=torch.int16)


@lru_cache(maxsize=256)
def _scratch_part(size: int, scalar: str) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # or nobody could write to it outside of that mode
        return _SCRATCH[:size].view(_TORCH[scalar])


def _scratch(size: int, scalar: str) -> torch.Tensor:
    """Room for `size` elements of a 16-bit format."""
    if size <= _SCRATCH.numel():
        return _scratch_part(size, scalar)
    return torch.empty(size, dtype=_TORCH[scalar])


_SMALL = 512  # below this many elements NumPy's slower conversion beats the call into torch


def as_torch(x: Array) -> torch.Tensor:
    """View an array as a tensor, copying only what torch cannot view."""
    if not x.flags.writeable:
        x = x.copy()
    return torch.from_numpy(x)


def decode(raw: Array, scalar: str) -> Array:
    """Turn elements as they lie in memory into their carrier; a NaN's payload survives."""
    if scalar in ("f32", "f64", "i8", "i16", "i32", "i64"):
        return raw
    if scalar == "i1":
        return np.not_equal(raw, 0)
    if scalar == "bf16":
        upper = raw.astype(np.int32)
        upper <<= 16
        return upper.view(np.float32)
    if scalar in FP8:
        return _DECODED[scalar].take(raw.view(np.uint8))
    wide: Array
    if raw.size < _SMALL:
        wide = raw.view(np.float16).astype(np.float32)
    else:
        wide = np.empty(raw.shape, np.float32)
        torch.from_numpy(wide).copy_(as_torch(raw).view(torch.float16))
    if _any_nan(wide):  # conversions make signalling NaNs quiet
        bits = raw.astype(np.int32)
        nan = (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13
        wide = np.where(np.isnan(wide), nan.view(np.float32), wide)
    return wide


def encode(values: Array, scalar: str) -> Array:
    """Turn carrier values (already representable) into elements as they lie in memory."""
    if values.dtype == SHORT.get(scalar):
        return values.view(RAW[scalar])
    if scalar in ("f32", "f64", "i8", "i16", "i32", "i64"):
        return values
    if scalar == "i1":
        return values.astype(np.int8)
    if scalar == "bf16":  # the upper half, which keeps a NaN's payload
        return np.ascontiguousarray(values.view(np.int16)[..., 1::2])
    raw: Array
    if scalar == "f16" and values.size < _SMALL:
        raw = values.astype(np.float16).view(np.int16)
    else:
        kind = torch.int16 if RAW[scalar].itemsize == 2 else torch.int8
        raw = as_torch(values).to(_TORCH[scalar]).view(kind).numpy()
    if scalar in ("f16", "f8E5M2") and _any_nan(values):
        fraction, width = FORMATS[scalar].fraction, RAW[scalar].itemsize * 8
        bits = values.view(np.int32)
        payload = bits >> (23 - fraction) & (1 << fraction) - 1
        infinity = (1 << width - 1) - (1 << fraction)
        nan = np.where(bits < 0, -1 << width - 1, 0) | infinity | np.where(payload == 0, 1, payload)
        raw = np.where(np.isnan(values), nan.astype(raw.dtype), raw)
    return raw


def _any_nan(x: Array) -> bool:
    """Whether some element is NaN: the sum of squares is NaN then and only then."""
    flat = x.ravel()
    return isnan(np.dot(flat, flat))


def _decoded(scalar: str) -> Array:
    """Values of all 256 patterns of an 8-bit format, each NaN with its own payload."""
    raw = np.arange(256).astype(np.uint8)
    values: Array = torch.from_numpy(raw).view(FP8[scalar]).to(torch.float32).numpy()
    payload = (raw.astype(np.int32) & 3) << 21 | (raw.astype(np.int32) & 0x80) << 24 | 0x7F800000
    nan = payload.view(np.float32) if scalar == "f8E5M2" else values
    return np.where(np.isnan(values), nan, values)


_DECODED = {name: _decoded(name) for name in FP8}


def round_to(x: Array, scalar: str, out: Array | None = None) -> Array:
    """Round carrier values to nearest even in `scalar`'s format.

    fp8 saturates, infinities included: Triton's downcasts are cvt.rn.satfinite on sm_90.
    `out`, x itself perhaps, is where the result may go; use what is returned.
    """
    if scalar == "f32":
        return x if x.dtype == np.float32 else x.astype(np.float32)
    if scalar == "f64":
        return x.astype(np.float64, copy=False)
    if scalar in FP8:
        largest = FORMATS[scalar].largest
        clipped = np.clip(x, -largest, largest).astype(np.float32)
        return as_torch(clipped).to(FP8[scalar]).to(torch.float32).numpy()
    if scalar == "f16" and (x.size < _SMALL or x.dtype == np.float64):
        return x.astype(np.float16).astype(np.float32)
    if out is x and x.flags.carray:  # the common case, without what the others need
        flat = torch.from_numpy(x.reshape(-1))
        flat.copy_(_scratch(x.size, scalar).copy_(flat))
        return x
    source = x.ravel("K")  # as it lies in memory: a view, if there are no gaps
    if source.base is None:
        x = np.ascontiguousarray(x)
        source, out = x.reshape(-1), None
    if out is None or out.strides != x.strides:
        out = np.empty_like(x, np.float32)
    narrow = _scratch(x.size, scalar).copy_(as_torch(source))
    torch.from_numpy(out.ravel("K")).copy_(narrow)
    return out


def narrow_once(x: Array, scalar: str) -> Array:
    """Round float64 to a narrower format with a single rounding (round-to-odd in between)."""
    if scalar == "f32":
        return x.astype(np.float32)
    if scalar == "f16" and x.size < _SMALL:
        return x.astype(np.float16).astype(np.float32)
    near = x.astype(np.float32, order="C")
    inexact = near != x
    if not inexact.any():
        return round_to(near, scalar, near)
    # The second rounding can go wrong only where the first landed halfway between two neighbours.
    format_, bits = FORMATS[scalar], near.view(np.int32)
    half = 1 << (22 - format_.fraction)
    subnormal = np.abs(near) < np.float32(2.0**format_.smallest)
    halfway = (bits & (2 * half - 1) == half) | (subnormal & (bits & half - 1 == 0))
    halfway &= inexact
    if halfway.any():
        near[halfway] = _to_odd(x[halfway])
    return round_to(near, scalar, near)


def _to_odd(x: Array) -> Array:
    """Round float64 to float32, to odd where inexact: then a second rounding is the only one.

    Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums".
    """
    near = x.astype(np.float32)
    inexact = (near.astype(np.float64) != x) & np.isfinite(near)
    bits = near.view(np.int32)
    too_big = np.abs(near).astype(np.float64) > np.abs(x)
    odd = np.where(too_big & (bits & 1 == 0), bits - 1, bits) | np.int32(1)
    return np.where(inexact, odd.view(np.float32), near)


def fma(a: Array, b: Array, c: Array, scalar: str = "f32") -> Array:
    """A b + c rounded once to `scalar`; operands are float32, or float64 holding float32 values.

    The product is exact in float64. Where float64 had to round the sum, the sum is rounded to odd,
    which makes the rounding to `scalar` the only one (Boldo and Melquiond 2008); for float32 that
    matters only halfway between two numbers, and among subnormal ones.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    bits = total.view(np.int64)
    if scalar == "f32":
        matters = (bits & 0x1FFF_FFFF) == 0x1000_0000
        matters |= np.abs(total) < 2.0**-126
    else:
        matters = np.isfinite(total)
    if matters.any():
        back = total - product
        error = (product - (total - back)) + (c - back)
        even = matters & (error != 0) & (bits & 1 == 0) & np.isfinite(total)
        outward = np.where((error > 0) == (total > 0), 1, -1)
        total = np.where(even, bits + outward, bits).view(np.float64)
    return narrow_once(total, scalar)


def round_toward_zero(x: Array, scalar: str) -> Array:
    """Round to `scalar`'s format without ever growing in magnitude.

    Infinities stay where the format has them: for e5m2 Triton goes through cvt.rz.f16.f32 and drops
    the lower byte (ElementwiseOpToLLVM.cpp, Fp16_to_Fp8E5M2_RTZ).
    """
    if scalar == "f64":
        return x
    format_ = FORMATS[scalar]
    wide = x.astype(np.float64)
    exponent = np.maximum(np.frexp(wide)[1] - 1, format_.smallest) - format_.fraction
    cut = np.ldexp(np.trunc(np.ldexp(wide, -exponent)), exponent)
    cut = np.clip(cut, -format_.largest, format_.largest)
    if format_.infinite:
        cut = np.where(np.isinf(wide), wide, cut)
    rounded: Array = cut.astype(np.float32)
    return rounded


def flush(x: Array) -> Array:
    """Subnormal numbers as zeros of the same sign."""
    tiny = np.abs(x) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(x.dtype.type(0), x), x) if tiny.any() else x


def constants(words: str) -> Array:
    """float32 numbers from the hexadecimal words in which PTX writes them."""
    return np.array([int(word, 16) for word in words.split()], np.uint32).view(np.float32)


def truncate_tf32(x: Array) -> Array:
    """Drop the 13 low mantissa bits, as Hopper's tensor cores do with float32 operands."""
    return (x.view(np.int32) & np.int32(-8192)).view(np.float32)


def round_tf32(x: Array) -> Array:
    """Round to 10 mantissa bits, ties away from zero (PTX cvt.rna.tf32.f32)."""
    bits = x.view(np.int32)
    rounded = ((bits + np.int32(0x1000)) & np.int32(-8192)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)


def poison(scalar: str) -> Any:
    """What an illegal read yields: NaN, or a large odd integer."""
    carrier = CARRIER[scalar]
    if carrier.kind == "f":
        return carrier.type(np.nan)
    if carrier.kind == "b":
        return np.bool_(True)
    return carrier.type(0x5A5A5A5A5A5A5A5B & np.iinfo(carrier).max)
