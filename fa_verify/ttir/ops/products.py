"""tt.dot: the matrix product and how its operands and accumulator are rounded.

How the sum is formed is `FloatModel.accumulation`'s choice. float32 operands are treated as
inputPrecision says:

* ieee: as they are;
* tf32: by `FloatModel.tf32`;
* tf32x3: big + small parts, big rounded by cvt.rna.tf32, small products first (Triton's F32DotTC
  pass); the tensor core then treats a small part as any tf32 operand;
* bf16x3, bf16x6: the same with two or three bfloat16 parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.numbers import tensor_core
from fa_verify.ttir.numbers.floats import (
    FP8,
    Array,
    narrow_once,
    round_tf32,
    round_to,
    truncate_tf32,
)
from fa_verify.ttir.ops.tiles import full

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.syntax.ir import Op, Value

    Product = Callable[[Array, Array, Array | None], Array]  # c + a b; None is zero

# Parts (of a, of b) whose products are added, in Triton's order (F32DotTC.cpp).
_PAIRS = {
    "tf32x3": ((1, 0), (0, 1), (0, 0)),
    "bf16x3": ((1, 0), (0, 1), (0, 0)),
    "bf16x6": ((1, 1), (2, 0), (0, 2), (1, 0), (0, 1), (0, 0)),
}


def _blas(x: Array) -> Array:
    """Make the last two axes something BLAS takes without falling back to a slow loop."""
    s0, s1 = x.strides[-2:]
    item, (rows, cols) = x.itemsize, x.shape[-2:]
    if (s1 == item and s0 >= cols * item) or (s0 == item and s1 >= rows * item):
        return x
    return np.ascontiguousarray(x)


def _product(a: Array, b: Array, c: Array | None) -> Array:
    """In the operands' own precision; fp16, bf16 and fp8 products are exact in float32."""
    product: Array = np.matmul(_blas(a), _blas(b))
    if c is None:
        return product
    if c.shape[0] <= product.shape[0]:
        product += c
        return product
    return product + c


def _exact(a: Array, b: Array, c: Array | None) -> Array:
    return _product(a.astype(np.float64), b.astype(np.float64), c)


def _integers(a: Array, b: Array, c: Array | None) -> Array:
    return _exact(a, b, c).astype(np.int64).astype(np.int32)


def _split(x: Array, parts: int, round_part: Callable[[Array], Array]) -> list[Array]:
    pieces: list[Array] = []
    for _ in range(parts):
        piece = round_part(np.ascontiguousarray(x))
        pieces.append(piece)
        x = x - piece
    return pieces


def _compensated(precision: str, product: Product, cut: Callable[[Array], Array]) -> Product:
    """Sum the products of the parts, smallest first, then the accumulator."""
    *small, _ = _PAIRS[precision]

    def parts(x: Array) -> list[Array]:
        if precision == "tf32x3":
            big = round_tf32(np.ascontiguousarray(x))
            return [big, cut(x - big)]
        return _split(x, 3 if precision == "bf16x6" else 2, _bf16)

    def apply(a: Array, b: Array, c: Array | None) -> Array:
        left, right = parts(a), parts(b)
        i, j = small[0]
        total = product(left[i], right[j], None)
        for i, j in small[1:]:
            total = product(left[i], right[j], total)
        # Small parts of infinities are NaN (Triton's replaceNansWithZeros).
        total = np.where(np.isnan(total), total.dtype.type(0), total)
        total = product(left[0], right[0], total)
        return total if c is None else total + c

    return apply


def _bf16(x: Array) -> Array:
    return round_to(x, "bf16")


def dot(op: Op, low: Lowering) -> Step:
    """tt.dot: c + a b."""

    def reader(value: Value) -> Callable[[Env], Array]:
        slot, shape = low.slot(value), value.type.shape
        return lambda env: full(env[slot], shape)

    return dot_of(op, low, (reader(op.operands[0]), reader(op.operands[1])))


def dot_of(op: Op, low: Lowering, read: tuple[Callable[[Env], Array], ...]) -> Step:
    """A dot whose operands are read in the given ways."""
    left, right = read
    c_s, result = low.slot(op.operands[2]), low.slot(op.results[0])
    scalar = op.results[0].type.scalar
    product = _multiplier(op, low)
    zero = _is_zero(op)

    def step(env: Env) -> None:
        c = None if zero else env[c_s]
        value = product(left(env), right(env), c)
        if value.dtype == np.float64 and scalar != "f64":
            value = narrow_once(value, scalar)
        elif scalar not in ("f32", "f64", "i32"):
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


def _multiplier(op: Op, low: Lowering) -> Product:
    scalar, operand = op.results[0].type.scalar, op.operands[0].type.scalar
    if scalar == "i32":
        return _integers
    if scalar == "f64":
        return _product
    precision = op.attrs.get("inputPrecision", "ieee") if operand == "f32" else ""
    cut = truncate_tf32 if low.floats.tf32 == "truncate" else round_tf32
    chip = low.floats.accumulation == "tensor_core"
    if chip or (low.floats.accumulation == "float32" and _takes_fp8(op)):
        product = _tensor_core(op, precision)
    else:
        product = _exact if low.floats.accumulation == "exact" else _product
    if precision in ("", "ieee"):
        return product
    if precision == "tf32":
        return lambda a, b, c: product(
            cut(np.ascontiguousarray(a)), cut(np.ascontiguousarray(b)), c
        )
    if precision in _PAIRS:
        return _compensated(precision, product, cut)
    msg = f"a dot with inputPrecision {precision}"
    raise Unsupported(msg)


def _imprecise(op: Op) -> int:
    """How many fp8 products may be added up before the sum goes to a float32 register."""
    return int(op.attrs.get("maxNumImpreciseAcc", "0").split()[0])


def _takes_fp8(op: Op) -> bool:
    """Whether wgmma takes the operands as fp8; mma.sync gets them converted to fp16.

    num_warps is taken to be a multiple of 4 (Utility.cpp, supportMMA).
    """
    left, columns = op.operands[0].type, op.operands[1].type.shape[-1]
    *batch, rows, depth = left.shape
    fits = not batch and rows % 64 == 0 and columns % 8 == 0 and depth >= 32
    half = op.results[0].type.scalar == "f16"
    return left.scalar in FP8 and fits and (half or _imprecise(op) >= 32)


def _tensor_core(op: Op, precision: str) -> Product:
    """The instruction that Triton picks for sm_90 (AccelerateMatmul, supportMMA)."""
    left, right = op.operands[0].type, op.operands[1].type
    depth = left.shape[-1]
    half = op.results[0].type.scalar == "f16"
    pair = (left.scalar, right.scalar)
    if precision == "ieee":
        return _with_zero(tensor_core.fma_chain)
    unit = tensor_core.TF32 if precision.startswith("tf32") else tensor_core.HALF
    segment, order = 0, None
    if precision.startswith("bf16"):
        pair = ("bf16", "bf16")
    elif _takes_fp8(op):
        unit, keep = tensor_core.FP8, _imprecise(op)
        segment = -(-keep // unit.width) * unit.width if keep <= depth and not half else 0
    elif left.scalar in FP8:
        pair, order = ("f16", "f16"), _promoted_order(depth)
    smallest = (tensor_core.SMALLEST[pair[0]], tensor_core.SMALLEST[pair[1]])

    def chain(a: Array, b: Array, c: Array) -> Array:
        if order is not None:
            a, b = a[..., order], b[..., order, :]
        return tensor_core.fused_dot(a, b, c, unit, smallest, half=half)

    def promoted(a: Array, b: Array, c: Array) -> Array:
        """Sums of `segment` products each, added in float32 (WGMMA.cpp, faddAccumulate)."""
        zero = np.zeros((1,) * c.ndim, np.float32)
        for start in range(0, depth, segment):
            stop = start + segment
            c = c + chain(a[..., start:stop], b[..., start:stop, :], zero)
        return c

    return _with_zero(promoted if segment else chain)


def _promoted_order(depth: int) -> Array:
    """Order in which mma.sync takes the elements along k of operands that were 8 bits wide.

    A thread holds four neighbours along k of an 8-bit operand (kWidth = 4), and one instruction on
    the converted operand takes two of them: of each 32, those with k % 4 < 2 first. Found on an
    H200: the only order tried of which every element of the results has the same bits.
    """
    k = np.arange(depth)
    return np.lexsort((k, k % 4 >= 2, k // 32))


def _with_zero(product: Callable[[Array, Array, Array], Array]) -> Product:
    def apply(a: Array, b: Array, c: Array | None) -> Array:
        return product(a, b, np.zeros((1,) * a.ndim, np.float32) if c is None else c)

    return apply


RULES: dict[str, Rule] = {"tt.dot": dot}
