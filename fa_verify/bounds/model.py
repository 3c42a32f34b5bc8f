"""Elementary error models: what one dot, exp2 or cast may be off by; see docs/bounds.md."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from fa_verify.bounds.formats import FLOAT32, FORMATS, TF32, Cast, Format

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.arithmetic import Arithmetic
    from fa_verify.problem import Problem

__all__ = ["FLUSH", "FP8_BITS", "LARGEST", "SLACK", "Model", "U"]

U = FLOAT32.unit_roundoff
# Bounds are evaluated in float32 and the reference in float64: relative errors far below 1% in
# each, also when a user lets float32 matmuls run in TF32. Products of two or more u32 that the
# derivation drops are below it too. See "Evaluation" in docs/bounds.md.
SLACK = 1.01
# What one operation may lose to subnormals or flush to zero in float32, times two for our own.
FLUSH = 2.0**-125
LARGEST = 3.38e38
_STEP = 16  # products that one matrix-unit instruction adds to its accumulator, at most
_TF32X3_OPERANDS = 3 * 2.0**-20
_HALF = FORMATS["float16"]
_HALF_ULPS = 2048  # two roundings toward zero to float16 for each _STEP products; (B75)
_FP8_STEP = 32  # likewise, of fp8
FP8_BITS = 14  # of a sum of fp8 products: 13 fraction bits and the leading one; (B69)


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """The coefficients of one problem under one arithmetic.

    Attributes:
        problem: Shapes, scale and softcap.
        arithmetic: The kernel's declared rounding points.
        tf32: None, or whether a TF32 dot truncates its operands (True) or rounds them (False).
        exact_dots: Every q k^T of fp8 operands is exact, as they are; (B69).
        p: The cast of P before P V and P^T dO; None: none.
        ds: The cast of dS before dS K and dS^T Q; None: none.
    """

    problem: Problem
    arithmetic: Arithmetic
    tf32: bool | None = None
    exact_dots: bool = False
    p: Cast | None = dataclasses.field(init=False)
    ds: Cast | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Resolve the casts."""
        object.__setattr__(self, "p", self._cast(self.arithmetic.p_dtype))
        object.__setattr__(self, "ds", self._cast(self.arithmetic.ds_dtype))

    def _cast(self, dtype: str) -> Cast | None:
        read = self.arithmetic.dequantized if self.problem.fp8 else None
        name = (read or self.problem.storage) if dtype == "input" else dtype
        if name != "float32":
            return Cast(FORMATS[name])
        return None if self.tf32 is None else Cast(TF32, truncates=self.tf32)

    @property
    def out(self) -> Format:
        """Format of o and of the gradients."""
        return FORMATS[self.problem.dtype]

    @property
    def storage(self) -> Format:
        """Format of q, k and v."""
        return FORMATS[self.problem.storage]

    def ieee_dot(self, k: int, *, half: bool = False) -> float:
        """Error of a k-term dot relative to the sum of |products|; (B3), in float16 (B75)."""
        ulps = self.arithmetic.dot_ulps + (_HALF_ULPS if half else 0)
        n = ulps * _STEP * math.ceil(k / _STEP) * U
        return n / (1.0 - n) if n < 0.5 else math.inf  # beyond it gamma says nothing

    def dot(self, k: int, of: str = "") -> float:
        """The same for a dot of the problem's dot_precision, splits included; (B3)."""
        gamma = self.ieee_dot(k, half=self.halves(of))
        if self.problem.dot_precision == "tf32x3":
            return gamma * (1 + 2.0**-7) + 3 * U + _TF32X3_OPERANDS
        return gamma

    def halves(self, of: str) -> bool:
        """Whether dots "qk", "pv" or others are summed in float16; (B75)."""
        return self.arithmetic.half_dots in (of, "all")

    def half_tiny(self, k: int, of: str = "") -> float:
        """What a k-term dot loses to subnormals of float16; (B75)."""
        steps = math.ceil(k / _STEP) + self.blocks(k)
        return 4 * Cast(_HALF).tiny * steps if self.halves(of) else 0.0

    def sums_largest(self, of: str = "") -> float:
        """From where on a sum of the sizes of a dot's products says that it may overflow; (B9)."""
        if not self.halves(of):
            return LARGEST
        if self.problem.fp8:  # not derived: sums are of what is stored
            return 0.0
        keys = self.problem.head_dim if of == "qk" else self.problem.seqlen_k
        off = self.dot(keys, of) if of == "qk" else self.long_dot(keys, keys, of)
        return _HALF.largest / (1.02 * (1 + off) * max(1.0, self.arithmetic.p_scale))

    def fp8_dot(self, k: int) -> float:
        """The same for fp8 operands, as far as their sums go into one accumulator; (B69)."""
        n = self.arithmetic.fp8_dot_ulps * _FP8_STEP * math.ceil(k / _FP8_STEP) * U
        return n / (1.0 - n) if n < 0.5 else math.inf

    def logit_dot(self) -> float:
        """Error of q k^T, relative to the sum of |products|; (B5), (B69)."""
        if not self.problem.fp8 or self.arithmetic.dequantized:
            return self.dot(self.problem.head_dim, "qk") + 2.01 * self.dequantization
        if self.exact_dots and not self.arithmetic.prescaled:
            return self.dot(self.problem.head_dim)  # of operands that were scaled in float32
        return self.fp8_dot(self.problem.head_dim)

    def value_dot(self, keys: int) -> float:
        """Error of P V and of the loop that adds it up, likewise; (B4), (B69)."""
        if self.p is None or self.p.format != FORMATS["float8_e4m3fn"]:
            return self.long_dot(keys, keys, "pv")
        together = self._together(keys)
        # Keys that a block begins with may be hidden: one step more.
        return self.fp8_dot(together + _FP8_STEP) + math.ceil(keys / together) * U

    def _together(self, k: int) -> int:
        """How many of k products go into one sum that is not float32."""
        promoted = self.arithmetic.promoted
        return max(1, k if promoted is None else min(k, promoted))

    def blocks(self, length: int) -> int:
        """Blocks that a loop over ``length`` keys or queries may take."""
        return math.ceil(length / (self.arithmetic.block_n or _STEP))

    def long_dot(self, k: int, length: int, of: str = "") -> float:
        """Error of a k-term dot whose loop adds one partial sum per block of ``length``; (B4)."""
        if not self.halves(of):
            return self.dot(k) + self.blocks(length) * U
        together, blocks = self._together(k), self.blocks(length)
        if self.arithmetic.promoted is None:  # rescaled and added in float16, by a factor in it
            return self.dot(k, of) + 3 * blocks * _HALF.unit_roundoff
        return self.dot(together + _STEP, of) + (math.ceil(k / together) + blocks) * U

    @property
    def scale(self) -> float:
        """|softmax_scale|."""
        return abs(self.problem.scale)

    @property
    def logit(self) -> float:
        """Error of one logit relative to (|q||k|^T): dot, scale, and a pre-scaled operand; (B5)."""
        own = self.logit_dot() + (8 if self.problem.softcap else 4) * U
        own += 5 * U if self.problem.fp8 else 0.0  # scales, and a product of factors; (B68)
        if self.problem.bias or self.problem.alibi:
            own += 2 * U  # the sum is rounded with either; (B60)
        operands, unit = len(self.arithmetic.prescaled or ""), self.storage.unit_roundoff
        own += unit * (operands + unit * (operands - 1) if operands else 0)
        if operands and self.problem.dot_precision == "tf32":  # s round(q) against round(s q)
            own += operands * 2 * Cast(TF32, truncates=True).unit
        return self.scale * own + 2 * FLUSH

    @property
    def prescale_tiny(self) -> float:
        """What a pre-scaled operand loses to subnormals, over the rest of the scale; (B5)."""
        if not self.arithmetic.prescaled:
            return 0.0
        return Cast(self.storage).tiny * self.prescale_rest

    @property
    def prescale(self) -> float:
        """What a pre-scaled operand is multiplied by; (B5)."""
        return math.sqrt(self.scale) if self.arithmetic.prescaled == "qk" else self.scale

    @property
    def prescale_rest(self) -> float:
        """What the other operand is multiplied by; (B5)."""
        return math.sqrt(self.scale) if self.arithmetic.prescaled == "qk" else 1.0

    def prescale_floor(self, largest_operand: float) -> float:
        """The most that does to one logit; (B5)."""
        both = 2 * largest_operand + Cast(self.storage).tiny
        size = both if self.arithmetic.prescaled == "qk" else largest_operand
        return self.prescale_tiny * self.problem.head_dim * size

    def logit_floor(self, largest_operand: float) -> float:
        """Absolute error of one logit: underflow in the dot, and softcap's tanh; (B5), (B6)."""
        floor = self.scale * self.problem.head_dim * FLUSH * (1.0 + largest_operand)
        floor += self.scale * self.half_tiny(self.problem.head_dim, "qk")
        return floor + self.problem.softcap * (self.arithmetic.tanh_ulps + 4) * U

    @property
    def kept(self) -> float:
        """What dropout multiplies the elements by that it keeps."""
        return 1.0 / (1.0 - self.problem.dropout)

    @property
    def keep_error(self) -> float:
        """Relative error of that factor, and of the product with it; (B62)."""
        return (8 + self.problem.dropout * self.kept) * U if self.problem.dropout else 0.0

    @property
    def dequantization(self) -> float:
        """Relative error of an fp8 operand that is rounded once it is scaled; (B71)."""
        form = self.arithmetic.dequantized if self.problem.fp8 else None
        return FORMATS[form].unit_roundoff if form else 0.0

    @property
    def value_error(self) -> float:
        """Relative error of V, and of what P V is multiplied by: dropout, a scale; (B62), (B68).

        With it what the o of parts lose that are stored; (B72).
        """
        own = self.keep_error + (2 * U if self.problem.fp8 else 0.0) + self.dequantization
        return own + self.part_error

    @property
    def part_error(self) -> float:
        """Relative error of the o of parts that are stored, and merged again; (B72)."""
        if self.arithmetic.part_dtype == "float32":
            return 0.0
        n = self.arithmetic.merges * self.out.unit_roundoff
        return n / (1.0 - n) if n < 0.5 else math.inf

    @property
    def p_tiny(self) -> float:
        """What a P of at most 1 loses to subnormals of the format that it is cast to; (B12)."""
        return 0.0 if self.p is None else self.p.tiny / self.arithmetic.p_scale

    @property
    def p_overflow(self) -> float:
        """From where on a P is beyond that format; (B9)."""
        return math.inf if self.p is None else self.p.format.overflow / self.arithmetic.p_scale

    def sink_error(self, size: Tensor, sink: Tensor, moved: Tensor | None = None) -> Tensor:
        """Error of the exponent of a sink beside keys whose logits are of this size; (B61).

        Args:
            size: Of the keys' maximum.
            sink: The sinks, of the rank of that.
            moved: What was added to logits and sinks, (heads, rows); (B60).
        """
        own = 8 * U + (3 * self.out.unit_roundoff if self.arithmetic.eager else 0.0)
        error = (sink.abs() + size) * own + self.exponentials
        if moved is None:
            return error
        return error + U * (2 * sink.abs() + 50 * moved.reshape(error.shape))

    @property
    def exponentials(self) -> float:
        """Error in the exponent of p that all keys share: exp2, and the rescales; (B7)."""
        x, changes = self.arithmetic.exp2_ulps, self.blocks(self.problem.seqlen_k) - 1
        changes += self.problem.sinks  # it comes like a block of its own; (B61)
        return (x + (x + 1) * max(0, changes) + 4 * self.lift) * U

    @property
    def lift(self) -> float:
        """How far the exponents of P are moved by what it is multiplied by; (B12)."""
        return abs(math.log(self.arithmetic.p_scale))

    def merge(self, m: Tensor | float, below: Tensor | float = 0.0) -> Tensor | float:
        """Relative error of weights exp(lse of a part - lse of all); (B67), (B72).

        Args:
            m: The largest logit.
            below: How far the least is below it, where parts are merged by a sigmoid.
        """
        if not self.arithmetic.merged_by_lse:
            return 0.0
        size, turns = abs(m) if isinstance(m, float) else m.abs(), self.arithmetic.merges
        log = math.log(max(1, self.problem.seqlen_k))
        found = (3 + 2 * turns) * size + ((16 + 2 * turns) * log + 13 * turns)
        if self.arithmetic.merged_by_sigmoid:
            found = found + turns * (8 * (below + log) + 4 * size)
        return U * found

    @property
    def distances(self) -> int:
        """Roundings of S - m in the exponents of p, and of parts that are merged; (B7), (B67)."""
        return 3 + (4 + 2 * self.arithmetic.merges if self.arithmetic.merged_by_lse else 0)

    @property
    def denominator(self) -> float:
        """Relative error of summing l; (B8)."""
        block = self.arithmetic.block_n
        terms = min(block, self.problem.seqlen_k) if block else self.problem.seqlen_k
        terms += 3 * self.problem.sinks  # added, after l is scaled; (B61)
        n = (terms + 2 * self.blocks(self.problem.seqlen_k)) * U
        return n / (1.0 - n) if n < 0.5 else math.inf
