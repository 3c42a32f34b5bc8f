"""Bits in PTX registers (uint64, one entry a lane), and the numbers of a type they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa_verify.ttir.numbers.floats import Array, decode, encode

INTEGERS = {
    f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}")
    for kind in "usb" for bits in (8, 16, 32, 64)
}  # fmt: skip
# MLIR's name of a format, and the unsigned integers of its size.
FLOATS = {
    "f16": ("f16", np.uint16), "bf16": ("bf16", np.uint16), "f32": ("f32", np.uint32),
    "tf32": ("f32", np.uint32), "f64": ("f64", np.uint64),
    "e4m3": ("f8E4M3FN", np.uint8), "e5m2": ("f8E5M2", np.uint8),
}  # fmt: skip
PAIRS = {"f16x2": "f16", "bf16x2": "bf16", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}
WIDTH = {
    "pred": 1, **{name: dtype.itemsize * 8 for name, dtype in INTEGERS.items()},
    "f16": 16, "bf16": 16, "f32": 32, "tf32": 32, "f64": 64,
    **{name: 32 if "f16" in name else 16 for name in PAIRS},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction's name, all its suffixes, and those of them that are types."""

    name: str
    suffixes: frozenset[str]
    types: tuple[str, ...]

    def source(self, position: int) -> str:
        """The type of a source operand."""
        if self.name == "selp" and position == 2:
            return "pred"
        if self.name in ("shl", "shr", "bfe") and position > 0:
            return "u32"
        return self.types[-1] if self.types else "b32"


def typed(bits: Array, kind: str) -> Array:
    """Bits as numbers of a type."""
    if kind == "pred":
        return bits.astype(np.bool_)
    if kind in INTEGERS:
        dtype = INTEGERS[kind]
        return bits.astype(f"u{dtype.itemsize}").view(dtype)
    name, raw = FLOATS[kind]
    stored = bits.astype(raw)
    if name in ("f32", "f64"):
        return stored.view(np.float32 if name == "f32" else np.float64)
    return decode(stored.view(f"i{stored.itemsize}"), name)


def bits_of(values: Array, kind: str) -> Array:
    """Numbers of a type as bits."""
    if kind == "pred":
        return values.astype(np.uint64)
    if kind in INTEGERS:
        dtype = INTEGERS[kind]
        whole: Array = values.astype(dtype)
        return whole.view(f"u{dtype.itemsize}").astype(np.uint64)
    name, raw = FLOATS[kind]
    stored: Array = encode(np.ascontiguousarray(values), name)
    bits: Array = stored.view(raw)
    return bits.astype(np.uint64)


def halves(bits: Array, width: int) -> list[Array]:
    """The lower and the upper half."""
    return [bits & np.uint64((1 << width) - 1), bits >> np.uint64(width)]


def joined(low: Array, high: Array, width: int) -> Array:
    """Undo `halves`."""
    whole: Array = low | high << np.uint64(width)
    return whole
