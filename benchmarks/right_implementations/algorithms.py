"""Right kernels in slow motion that go about the softmax in other ways; plain torch on the CPU.

Two passes, P normalised before its cast, trees of merges, a ring of devices, two accumulators, a
maximum that is a power of two, the first block's maximum, polynomials for exp2, products of
bfloat16 parts, a scaled P, heads one by one, float64.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from fa_verify import Arithmetic

from .emulation import flush
from .whole_rows import LN2, LOG2E, Algorithm, kernel, zeroed


@dataclasses.dataclass(frozen=True)
class _TwoPasses(Algorithm):
    """The maximum of all keys first; P and its sums block by block afterwards."""

    def _state(self, rows):
        m, total, acc = self._peak(rows.s), 0.0, torch.zeros(*rows.s.shape[:2], rows.v.shape[-1])
        for keys in self._blocks(rows.s.shape[-1]):
            _, own, products = self._leaf(rows.cut(keys), m)
            total, acc = total + own, acc + products
        return m, total + torch.zeros_like(m), acc


@dataclasses.dataclass(frozen=True)
class _Normalised(Algorithm):
    """Softmax as such: P is divided before it is cast."""

    def _attend(self, rows):
        m, total, _ = self._leaf(rows)
        if rows.sink is not None:
            own = rows.sink, torch.ones_like(m), torch.zeros_like(m)
            m, total, _ = self._merged((m, total, torch.zeros_like(m)), own)
        total = torch.where(m == -math.inf, 0.0, total)
        p = torch.where(total > 0, self._exp(rows.s - zeroed(m)) / total, 0.0)
        kept = p if rows.factors is None else p * rows.factors
        cast = self._cast_p(getattr(torch, rows.problem.dtype), kept)
        return self._mm(rows.problem, cast, rows.v), zeroed(m) + total.log()


@dataclasses.dataclass(frozen=True)
class _Tree(Algorithm):
    """Blocks merged two by two, by maximum and denominator."""

    def _state(self, rows):
        states = self._leaves(rows)
        while len(states) > 1:
            pairs = zip(states[::2], [*states[1::2], None][: len(states[::2])], strict=True)
            states = [a if b is None else self._merged(a, b) for a, b in pairs]
        return states[0]


@dataclasses.dataclass(frozen=True)
class _TwoAccumulators(Algorithm):
    """Even and odd blocks in accumulators of their own, as of two warp groups."""

    def _state(self, rows):
        states = self._leaves(rows)
        return self._in_turn([self._in_turn(x) for x in (states[::2], states[1::2]) if x])


@dataclasses.dataclass(frozen=True)
class _PowersOfTwo(Algorithm):
    """The maximum rounded up to a whole number in base 2: every rescaling is exact."""

    def _peak(self, s):
        return torch.ceil(super()._peak(s))

    def _leaf(self, rows, m=None):
        return super()._leaf(dataclasses.replace(rows, s=rows.s * LOG2E), m)

    def _exp(self, x):
        return self._exp2(x)

    def _state(self, rows):
        return self._in_turn(self._leaves(rows))

    def _finished(self, rows, state):
        m, total, acc = state
        if rows.sink is not None:
            own = rows.sink * LOG2E, torch.ones_like(rows.sink), 0 * acc
            m, total, acc = self._merged(state, own)
        total = torch.where(m == -math.inf, 0.0, total)
        return self._normalised(acc, total), (zeroed(m) + total.log2()) * LN2

    def _weights(self, s, lse, sink):
        del sink
        return self._exp2(s * LOG2E - zeroed(lse) * LOG2E)


@dataclasses.dataclass(frozen=True)
class _FirstBlock(Algorithm):
    """The first block's maximum serves until a block exceeds it by more than 2^8."""

    def _state(self, rows):
        blocks = self._blocks(rows.s.shape[-1]) or [slice(0, 0)]
        total = self._leaf(rows.cut(blocks[0]))
        for keys in blocks[1:]:
            part = rows.cut(keys)
            peak = self._peak(part.s)
            m = torch.where(peak - total[0] > 8 * LN2, peak, total[0])
            alpha = torch.where(m == total[0], 1.0, self._exp(total[0] - zeroed(m)))
            _, own, products = self._leaf(part, m)
            total = m, total[1] * alpha + own, total[2] * alpha + products
        return total


@dataclasses.dataclass(frozen=True)
class _Polynomial(Algorithm):
    """exp2 by range reduction and a polynomial fitted to 2^f on [0, 1)."""

    degree: int = 3

    def _exp2(self, y):
        whole = torch.floor(y)
        f = torch.where(y == -math.inf, 0.0, y - whole)
        value = torch.zeros_like(f)
        for coefficient in reversed(_fit(self.degree)):
            value = value * f + coefficient
        return flush(torch.where(y < -126, 0.0, torch.ldexp(value, whole.clamp(-126, 127))))


def _fit(degree):
    """Coefficients, from the constant on, that interpolate 2^f at Chebyshev's points and 0."""
    at = torch.arange(degree, dtype=torch.float64)
    points = 0.5 - 0.5 * torch.cos(math.pi * (2 * at + 1) / (2 * degree))
    # 2^f = 1 + f g(f): exact where f = 0, so that the maximum's own weight is 1.
    powers = points[:, None] ** at
    inner = torch.linalg.solve(powers, (torch.exp2(points) - 1) / points)
    return [1.0, *inner.tolist()]


@dataclasses.dataclass(frozen=True)
class _Bfloat16Parts(Algorithm):
    """Dots of float32 as sums of products of bfloat16 parts: 3 products of 2 parts, or 6 of 3."""

    parts: int = 2

    def _mm(self, _problem, a, b, acc=None):
        left, right = self._split(a), self._split(b)
        total = torch.zeros(a.shape[0], a.shape[1], b.shape[2]) if acc is None else acc
        pairs = [(i, j) for i in range(self.parts) for j in range(self.parts) if i + j < self.parts]
        for i, j in sorted(pairs, key=sum, reverse=True):
            total = total + torch.bmm(left[i], right[j])
        return total

    def _split(self, x):
        found = []
        for _ in range(self.parts):
            found.append(x.bfloat16().float())
            x = x - found[-1]
        return found


@dataclasses.dataclass(frozen=True)
class _Chunks(Algorithm):
    """Logits from sixteen columns at a time, from the last to the first; dK and dV head by head."""

    def _mm(self, problem, a, b, acc=None):
        total = acc
        for start in range(0, a.shape[2], 16)[::-1]:
            keys = slice(start, start + 16)
            total = super()._mm(problem, a[:, :, keys], b[:, keys], total)
        return super()._mm(problem, a, b, acc) if total is None else total

    def _over_rows(self, problem, a, b):
        size = a.shape[1] // problem.group
        parts = zip(a.split(size, 1), b.split(size, 1), strict=True) if size else ()
        sums = [super(_Chunks, self)._mm(problem, x.mT, y) for x, y in parts]
        return sum(sums) if sums else super()._over_rows(problem, a, b)


@dataclasses.dataclass(frozen=True)
class _ScaledHalfP(Algorithm):
    """P times 2^8 in float16, whatever the inputs are."""

    p_unit: float = 2.0**-8

    def _cast_p(self, native, p):
        del native
        return (p / self.p_unit).half().float()


@dataclasses.dataclass(frozen=True)
class _Double(Algorithm):
    """In float64, rounded once: better than any declaration."""

    def _fold(self, problem, x):
        return super()._fold(problem, x).double()

    def _exp(self, x):
        return torch.exp(x)

    def _cast_p(self, _native, p):
        return p

    def _cast_in_backward(self, _native, x):
        return x

    def _mm(self, _problem, a, b, acc=None):
        product = a.double() @ b.double()
        return product if acc is None else product + acc


@dataclasses.dataclass(frozen=True)
class _ByKey(Algorithm):
    """ALiBi is slope times key under a causal mask, and lse corrected, as flash-attn has it.

    Sinks are moved along with the logits of their row.
    """

    moved: torch.Tensor | None = dataclasses.field(default=None, compare=False)

    def _beside(self, problem, terms):
        found = super()._beside(problem, terms)
        if found.alibi is None or not problem.mask.causal:
            return found
        slopes, moved = self._by_row(problem, terms)
        keys = torch.arange(problem.seqlen_k, dtype=torch.float32)
        sink = None if found.sink is None else found.sink + moved
        return dataclasses.replace(found, alibi=-slopes * keys, sink=sink)

    def _by_row(self, problem, terms):
        """Slopes and slopes times the diagonal, of each row."""
        shape = (problem.batch, problem.heads_q, problem.seqlen_q)
        folded = (problem.batch * problem.heads_kv, problem.group * problem.seqlen_q, 1)
        slopes = terms.slopes[None, :, None].expand(shape).reshape(folded)
        diagonal = torch.from_numpy(problem.mask.diagonals(problem.seqlen_q, problem.seqlen_k))
        moved = (terms.slopes[:, None] * diagonal.float()).expand(shape).reshape(folded)
        return slopes, moved

    def forward(self, problem, q, k, v, terms):
        o, lse = super().forward(problem, q, k, v, terms)
        if terms.slopes is None or not problem.mask.causal:
            return o, lse
        return o, lse - self._by_row(problem, terms)[1].reshape(lse.shape)

    def backward(self, problem, q, k, v, o, lse, do, terms):
        moved = None
        if terms.slopes is not None and problem.mask.causal:
            moved = self._by_row(problem, terms)[1]
        inner = dataclasses.replace(self, moved=moved)
        return super(_ByKey, inner).backward(problem, q, k, v, o, lse, do, terms)

    def _weights(self, s, lse, sink):
        return super()._weights(s, lse if self.moved is None else lse + self.moved, sink)

    def _sink_gradient(self, problem, sinks, lse, delta, bare):
        if self.moved is None:
            return super()._sink_gradient(problem, sinks, lse, delta, bare)
        moved = self.moved.reshape(lse.shape)
        p = self._exp2((sinks[:, None] + moved - zeroed(lse + moved)) * LOG2E)
        return -(p * delta.reshape(lse.shape)).sum((0, 2))


@dataclasses.dataclass(frozen=True)
class _TanhApprox(Algorithm):
    """PTX's tanh.approx.f32, off by up to 2^-11 of itself."""

    def _tanh(self, x):
        wobble = torch.rand(x.shape, generator=torch.Generator().manual_seed(self.seed)) * 2 - 1
        wobble = wobble.sign() * wobble.abs().sqrt() * 2.0**-11
        return (torch.tanh(x) * (1 + wobble)).clamp(-1, 1)


@dataclasses.dataclass(frozen=True)
class _Above(Algorithm):
    """What exponents are relative to lies ``by`` above the maximum, as a bound of it may."""

    by: float = 10.0

    def _peak(self, s):
        return super()._peak(s) + self.by


tanh_approx = kernel("tanh_approx", _TanhApprox(), Arithmetic(tanh_ulps=8400))
above = kernel("above", _Above(block_n=32), Arithmetic(p_scale=2.0**-15))
lifted = kernel("lifted", _Above(by=-8 * math.log(2)), Arithmetic(p_scale=256.0), sinks=False)
two_passes = kernel("two_passes", _TwoPasses(block_n=32))
normalised = kernel("normalised", _Normalised(), Arithmetic(p_normalised=True))
tree = kernel("tree", _Tree(block_n=16, tf32="even"))
by_key = kernel("by_key", _ByKey(), Arithmetic(alibi_by_key=True))
double = kernel("double", _Double())
two_accumulators = kernel("two_accumulators", _TwoAccumulators(block_n=64))
powers_of_two = kernel("powers_of_two", _PowersOfTwo(block_n=48), Arithmetic(p_scale=0.5))
first_block = kernel("first_block", _FirstBlock(block_n=32))
cubic_exp2 = kernel("cubic_exp2", _Polynomial(), Arithmetic(exp2_ulps=4096))
quadratic_exp2 = kernel("quadratic_exp2", _Polynomial(degree=2), Arithmetic(exp2_ulps=1 << 17))
chunks = kernel("chunks", _Chunks(block_n=128))
scaled_half_p = kernel(
    "scaled_half_p", _ScaledHalfP(block_n=1 << 16), Arithmetic(p_dtype="float16", p_scale=256.0)
)
_FLOAT32 = {"dtypes": ("float32",), "dot_precisions": ("ieee",)}
bfloat16x3 = kernel("bfloat16x3", _Bfloat16Parts(), Arithmetic(dot_ulps=32), **_FLOAT32)
bfloat16x6 = kernel("bfloat16x6", _Bfloat16Parts(parts=3), **_FLOAT32)
