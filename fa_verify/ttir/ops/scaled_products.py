"""tt.dot_scaled: a product of microscaled operands (OCP MX v1.0), as Triton runs it on sm_90.

Hopper has no instruction for it: Triton's DecomposeScaledBlocked pass makes fp16 of the operands if
one of them is fp16, bf16 otherwise, multiplies each by its scales in that type, and makes a dot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.numbers.floats import Array, round_to
from fa_verify.ttir.ops.products import dot_of
from fa_verify.ttir.ops.tiles import full
from fa_verify.ttir.syntax.ir import Op, Type, Value

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)


def _unpacked(x: Array, axis: int) -> Array:
    """fp4 numbers from bytes that hold two neighbours along `axis`, the first in the low half."""
    pairs = np.stack([_E2M1[x & 15], _E2M1[x >> 4 & 15]], axis=axis + 1)
    return pairs.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def _scales(x: Array, compute: str) -> tuple[Array, Array]:
    """Scales as numbers, and where they are NaN. Bytes are exponents (e8m0), 255 is NaN."""
    if x.dtype.kind == "f":
        return round_to(x, compute), np.isnan(x)
    exponent = x.view(np.uint8).astype(np.uint32)
    return round_to((exponent << 23).view(np.float32), compute), exponent == 255


class _Operand:
    """One side of the product: its element format, and how its scales spread along k."""

    def __init__(self, op: Op, position: int, *, side: str, compute: str) -> None:
        """Take the operand at a position, and the scales behind it if it has any."""
        scaled = op.attrs.get("scales", "").split()
        self.value = op.operands[position]
        self.scale = op.operands[position + 1] if str(position + 1) in scaled else None
        rank, left = len(self.value.type.shape), side == "lhs"
        self.depth = rank if left else rank - 1  # the k axis, programs counted
        self.packed = None
        if op.attrs[side] == "e2m1":
            along_k = not op.attrs.get(f"{side}_k_pack", "true").startswith("false")
            self.packed = self.depth if along_k else 2 * rank - 1 - self.depth
        self.left, self.compute, self.fast = left, compute, op.attrs.get("fastMath") == "true"

    @property
    def type(self) -> Type:
        """What the dot gets."""
        shape = list(self.value.type.shape)
        if self.packed is not None:
            shape[self.packed - 1] *= 2
        return Type(self.compute, tuple(shape))

    def reader(self, low: Lowering) -> Callable[[Env], Array]:
        """The operand, unpacked and scaled."""
        slot, shape = low.slot(self.value), self.value.type.shape
        scale_slot = None if self.scale is None else low.slot(self.scale)
        scale_shape = () if self.scale is None else self.scale.type.shape

        def read(env: Env) -> Array:
            x = full(env[slot], shape)
            x = round_to(x, self.compute) if self.packed is None else _unpacked(x, self.packed)
            if scale_slot is None:
                return x
            return self._scaled(x, full(env[scale_slot], scale_shape))

        return read

    def _scaled(self, x: Array, scale: Array) -> Array:
        numbers, wrong = _scales(np.ascontiguousarray(scale), self.compute)
        repeat = x.shape[self.depth] // scale.shape[-1]
        spread = [np.repeat(s, repeat, axis=-1) for s in (numbers, wrong)]
        if not self.left:
            spread = [s.swapaxes(-1, -2) for s in spread]
        scaled = round_to(x * spread[0], self.compute)
        return scaled if self.fast else np.where(spread[1], np.float32(np.nan), scaled)


def dot_scaled(op: Op, low: Lowering) -> Step:
    """tt.dot_scaled: c + (a scaled) (b scaled)."""
    compute = "f16" if "fp16" in (op.attrs["lhs"], op.attrs["rhs"]) else "bf16"
    left = _Operand(op, 0, side="lhs", compute=compute)
    right = _Operand(op, 1 if left.scale is None else 2, side="rhs", compute=compute)
    operands = [Value("lhs", left.type), Value("rhs", right.type), op.operands[-1]]
    return dot_of(Op("tt.dot", operands, op.results), low, (left.reader(low), right.reader(low)))


RULES: dict[str, Rule] = {"tt.dot_scaled": dot_scaled}
