"""tt.dot: the matrix product and how its operands and accumulator are rounded.

fp16, bf16 and fp8 products are exact in float32, so a float32 BLAS call differs from the tensor
cores only in the order and rounding of the accumulation. float32 operands are treated as
inputPrecision says:

* ieee: as they are;
* tf32: by `FloatModel.tf32`;
* tf32x3: big + small parts, each rounded by cvt.rna.tf32, small products first (Triton's F32DotTC
pass); * bf16x3, bf16x6: the same with two or three bfloat16 parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.floats import Array, round_tf32, round_to, truncate_tf32
from fa_verify.ttir.ops_tile import full

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.ir import Op
    from fa_verify.ttir.lower import Env, Lowering, Rule, Step


def _blas(x: Array) -> Array:
    """Make the last two axes something BLAS takes without falling back to a slow loop."""
    s0, s1 = x.strides[-2:]
    item, (rows, cols) = x.itemsize, x.shape[-2:]
    if (s1 == item and s0 >= cols * item) or (s0 == item and s1 >= rows * item):
        return x
    return np.ascontiguousarray(x)


def _product(a: Array, b: Array) -> Array:
    product: Array = np.matmul(_blas(a), _blas(b))
    return product


def _split(x: Array, parts: int, round_part: Callable[[Array], Array]) -> list[Array]:
    pieces: list[Array] = []
    for _ in range(parts):
        piece = round_part(np.ascontiguousarray(x))
        pieces.append(piece)
        x = x - piece
    return pieces


def _compensated(
    parts: int, keep: int, round_part: Callable[[Array], Array]
) -> Callable[[Array, Array], Array]:
    """Sum of products of parts (i, j) with i + j < keep, smallest first."""

    def apply(a: Array, b: Array) -> Array:
        left, right = _split(a, parts, round_part), _split(b, parts, round_part)
        pairs = [(i, j) for i in range(parts) for j in range(parts) if i + j < keep]
        pairs.sort(key=lambda p: -(p[0] + p[1]))
        result: Array | None = None
        for i, j in pairs:
            product = _product(left[i], right[j])
            result = product if result is None else result + product
        if result is None:
            raise AssertionError
        # inf - inf and NaN in the small parts are replaced by zero (Triton's replaceNansWithZeros).
        if not np.isfinite(result).all():
            plain = _product(left[0], right[0])
            result = np.where(np.isnan(result), plain, result)
        return result

    return apply


def _bf16(x: Array) -> Array:
    return round_to(x, "bf16")


def dot(op: Op, low: Lowering) -> Step:
    """tt.dot: c + a b."""
    a_v, b_v, c_v = op.operands[:3]
    a_shape, b_shape = a_v.type.shape, b_v.type.shape
    a_s, b_s, c_s = low.slot(a_v), low.slot(b_v), low.slot(c_v)
    result = low.slot(op.results[0])
    scalar, operand = op.results[0].type.scalar, a_v.type.scalar
    product = _multiplier(op, low, operand, scalar)
    zero = _is_zero(op)

    def step(env: Env) -> None:
        value = product(full(env[a_s], a_shape), full(env[b_s], b_shape))
        if not zero:
            c = env[c_s]
            if c.shape[0] <= value.shape[0]:
                value += c
            else:
                value = value + c
        if scalar not in ("f32", "f64", "i32"):
            value = round_to(value, scalar)
        env[result] = value

    return step


def _is_zero(op: Op) -> bool:
    """Whether the accumulator is the constant +0 (adding it could only turn -0 into +0)."""
    producer = op.operands[2].producer
    return (
        producer is not None
        and producer.name == "arith.constant"
        and producer.attrs["value"] in ("dense<0.000000e+00>", "dense<0>")
    )


def _multiplier(
    op: Op, low: Lowering, operand: str, scalar: str
) -> Callable[[Array, Array], Array]:
    if scalar == "i32":
        return lambda a, b: _product(a.astype(np.float64), b.astype(np.float64)).astype(np.int32)
    if operand != "f32":
        return _product
    precision = op.attrs.get("inputPrecision", "ieee")
    machine = low.machine

    def tf32(a: Array, b: Array) -> Array:
        cut = truncate_tf32 if machine.floats.tf32 == "truncate" else round_tf32
        return _product(cut(np.ascontiguousarray(a)), cut(np.ascontiguousarray(b)))

    table = {
        "ieee": _product,
        "tf32": tf32,
        "tf32x3": _compensated(2, 2, round_tf32),
        "bf16x3": _compensated(2, 2, _bf16),
        "bf16x6": _compensated(3, 3, _bf16),
    }
    if precision not in table:
        msg = f"a dot with inputPrecision {precision}"
        raise Unsupported(msg)
    return table[precision]


RULES: dict[str, Rule] = {"tt.dot": dot}
