"""A right FlashAttention kernel in slow motion: every rounding point explicit, block by block.

Plain float32 torch; tests drive it over its rounding choices and compare with the bounds. `bugs`
turns on known defects. It shares nothing with fa_verify but the problem, the mask and the terms.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fa_verify.terms import NO_TERMS

if TYPE_CHECKING:
    from fa_verify.problem import Problem
    from fa_verify.terms import Terms

__all__ = ["BUGS", "FAMILIES", "Emulator", "values"]

F32, F64 = torch.float32, torch.float64
LOG2E = 1.4426950408889634
BUGS = frozenset({
    "missing tail key", "padded keys", "no alpha in l", "no alpha in acc", "P in fp8", "no delta",
    "dq without scale", "no scale", "acc in fp16", "mask off by one", "l in fp16", "lse in base 2",
    "dk without scale", "P in bf16", "acc rounded each block", "0.1% too much",
    "log2e of five digits",
    "bias before softcap", "bias ignored", "slope sign", "slope of the next head", "no sink",
    "no sink in lse", "keep not scaled", "keep not scaled in dP", "keep of the next row",
    "dlse ignored", "dlse sign", "dbias of one row", "dbias with slope", "dbias with scale",
    "dsinks without dlse", "dsinks sign",
})  # fmt: skip


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _flush(x: Tensor) -> Tensor:
    """Flush float32 subnormals to zero."""
    return torch.where(x.abs() < 2.0**-126, 0.0, x)


@functools.lru_cache(maxsize=64)
def _wobble(seed: int, shape: torch.Size) -> Tensor:
    """Numbers in [-1, 1], mostly near the ends; the same every time."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.rand(shape, generator=generator, dtype=F64) * 2 - 1
    return found.sign() * found.abs().sqrt().sqrt()


@functools.lru_cache(maxsize=64)
def _in_tf32(problem: Problem) -> Problem:
    return dataclasses.replace(problem, dot_precision="tf32")


def _truncate(x: Tensor, unit: Tensor) -> Tensor:
    """Toward zero to a multiple of unit, float64."""
    return torch.trunc(x / unit) * unit


def _power(x: Tensor) -> Tensor:
    """2^floor(log2 |x|), 2^-149 at least."""
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - 1).clamp(min=2.0**-149)


@dataclasses.dataclass(frozen=True)
class _Beside:
    """Terms, (heads, rows, keys) float32, the sink (heads, rows, 1); None where there are none."""

    bias: Tensor | None
    alibi: Tensor | None
    keep: Tensor | None
    sink: Tensor | None

    def addends(self, keys: slice, bugs: frozenset[str] = frozenset()) -> list[Tensor | None]:
        early = "bias before softcap" in bugs
        parts = (None if early else self.bias, self.alibi)
        return [None if x is None else x[:, :, keys] for x in parts]

    def early(self, bugs: frozenset[str], keys: slice) -> Tensor | None:
        wanted = "bias before softcap" in bugs and self.bias is not None
        return self.bias[:, :, keys] if wanted else None


@dataclasses.dataclass(frozen=True)
class Emulator:
    """One choice of every rounding point.

    Attributes:
        block_n: Keys a block; queries a block are the same number.
        reverse: Walk the key blocks from the last to the first.
        exponent: "exp2": logits scaled by scale * log2(e), then exp2; "exp": x log2(e) inside;
            "fma": FlashAttention-2's fma(s, c, -m c).
        dot: "fma": float32 in some order; "mma": sixteen products and the accumulator aligned,
            truncated to 25 fraction bits, added, rounded toward zero.
        tf32: How tf32 dots read operands: "truncate", "even" or "exact".
        chain: Feed the accumulator through the dot, instead of adding the dot's result to it.
        noise: Error of exp2 in 2^-24 relative (a random number up to it).
        ds_scale: Scale dS "before" or "after" its cast.
        threshold: Rescale only when the maximum grew by more (FlashAttention-4's trick).
        sink: The sink is what l begins with ("first"), or joins it at the end ("last").
        keep: Dropout's factor is in what is cast ("before"), or multiplies the sums ("after").
    """

    block_n: int = 64
    reverse: bool = False
    exponent: str = "exp2"
    dot: str = "fma"
    tf32: str = "truncate"
    chain: bool = False
    noise: float = 4.0
    ds_scale: str = "after"
    threshold: float = 0.0
    l_from_rounded_p: bool = False
    ds_from_rounded_p: bool = False
    prescaled: str | None = None
    sink: str = "first"
    keep: str = "after"
    bugs: frozenset[str] = frozenset()
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.bugs <= BUGS, self.bugs - BUGS

    # Elementary operations

    def _exp2(self, y: Tensor) -> Tensor:
        exact = torch.exp2(y.to(F64))
        wobble = torch.where(y == 0, 0.0, _wobble(self.seed, y.shape))
        return _flush((exact * (1 + wobble * (self.noise * 2.0**-24))).to(F32))

    def _tanh(self, x: Tensor) -> Tensor:
        return 2 * torch.sigmoid(2 * x) - 1

    def _operand(self, problem: Problem, x: Tensor) -> Tensor:
        if problem.dot_precision != "tf32" or self.tf32 == "exact":
            return x
        bits = x.contiguous().view(torch.int32)
        if self.tf32 == "even":
            bits = bits + (0xFFF + ((bits >> 13) & 1)).to(torch.int32)
        return (bits & ~0x1FFF).view(F32)

    @functools.lru_cache(maxsize=256)  # noqa: B019 -- emulators are few, and small
    def _reads(self, tf32: str) -> Emulator:
        return dataclasses.replace(self, tf32=tf32)

    def _mm(self, problem: Problem, a: Tensor, b: Tensor, acc: Tensor | None = None) -> Tensor:
        """acc + a b, (heads, m, k) x (heads, k, n) -> float32."""
        if problem.dot_precision == "tf32x3":
            tf32, split, cut = _in_tf32(problem), self._reads("even"), self._reads("truncate")
            ah, bh = split._operand(tf32, a), split._operand(tf32, b)
            one = cut._mm(tf32, a - ah, bh)
            two = cut._mm(tf32, ah, b - bh, one)
            three = cut._mm(tf32, ah, bh, two)
            return three if acc is None else three + acc
        a, b = self._operand(problem, a), self._operand(problem, b)
        if self.dot == "fma":
            product = _flush(torch.bmm(a, b))
            return product if acc is None else product + acc
        step = 8 if problem.dtype == "float32" else 16
        total = (
            torch.zeros(a.shape[0], a.shape[1], b.shape[2])
            if acc is None or not self.chain
            else acc
        )
        for start in range(0, a.shape[2], step):
            part = a[:, :, start : start + step, None].to(F64) * b[
                :, None, start : start + step
            ].to(F64)
            terms = torch.cat((part, total[:, :, None].to(F64)), 2)
            unit = _power(terms.abs().amax(2, keepdim=True)) * 2.0**-25
            exact = _truncate(terms, unit).sum(2)
            total = _truncate(exact, _power(exact) * 2.0**-23).to(F32)
        return total if acc is None or self.chain else total + acc

    def _mask(self, problem: Problem) -> Tensor:
        allowed = torch.from_numpy(problem.mask.allowed(problem.seqlen_q, problem.seqlen_k))
        if "mask off by one" in self.bugs:
            allowed = torch.roll(allowed, 1, 1) | allowed
        if "missing tail key" in self.bugs:
            allowed = allowed.clone()
            allowed[:, -1] = False
        return allowed.repeat(problem.group, 1)

    def _fold(self, problem: Problem, x: Tensor) -> Tensor:
        heads = problem.batch * problem.heads_kv
        return x.to(F32).reshape(heads, -1, *x.shape[3:])

    def _blocks(self, length: int) -> list[slice]:
        cuts = [slice(i, min(length, i + self.block_n)) for i in range(0, length, self.block_n)]
        return cuts[::-1] if self.reverse else cuts

    def _unit(self, problem: Problem) -> Tensor:
        """What a natural logit is multiplied by to be a score."""
        if self.exponent == "exp":
            return torch.ones(())
        if self.exponent == "fma" and not (problem.softcap or self.prescaled):
            return torch.ones(())
        return torch.tensor(LOG2E, dtype=F32)

    def _logits(
        self, problem: Problem, q: Tensor, k: Tensor, early: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores as the exponent wants them (natural or times log2 e), the factor left, tanh."""
        scale = torch.tensor(1.0 if "no scale" in self.bugs else problem.scale, dtype=F32)
        log2e = torch.tensor(LOG2E, dtype=F32)
        native = _dtype(problem.dtype)
        if self.prescaled:
            if self.prescaled == "q":
                q = (q * scale).to(native).to(F32)
            else:
                k = (k * scale).to(native).to(F32)
            s = self._mm(problem, q, k.mT)
        else:
            s = self._mm(problem, q, k.mT)
        t = torch.zeros(())
        if problem.softcap:
            cap = torch.tensor(problem.softcap, dtype=F32)
            s = s if self.prescaled else s * scale
            s = (s if early is None else s + early) / cap
            t = self._tanh(s)
            s = t * cap
            return (
                (s, torch.ones(()), t) if self.exponent == "exp" else (s * log2e, torch.ones(()), t)
            )
        if self.prescaled:
            return (
                (s, torch.ones(()), t) if self.exponent == "exp" else (s * log2e, torch.ones(()), t)
            )
        if self.exponent == "exp":
            return s * scale, torch.ones(()), t
        if self.exponent == "fma":
            return s, scale * log2e, t
        return s * (scale * log2e), torch.ones(()), t

    def _beside(self, problem: Problem, terms: Terms) -> _Beside:
        """The terms in this emulator's order of heads and rows."""
        shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        folded = (problem.batch * problem.heads_kv, problem.group * problem.seqlen_q)
        bias = alibi = keep = sink = None
        if terms.bias is not None:
            bias = terms.bias.to(F32).expand(shape).reshape(*folded, problem.seqlen_k)
        if terms.slopes is not None:
            slopes = terms.slopes
            if "slope of the next head" in self.bugs:
                slopes = slopes.roll(1)
            if "slope sign" in self.bugs:
                slopes = -slopes
            diagonal = torch.from_numpy(problem.mask.diagonals(*shape[2:]))
            distance = (diagonal[:, None] - torch.arange(problem.seqlen_k)).abs().to(F32)
            alibi = (slopes[:, None, None] * distance).expand(shape).reshape(*folded, shape[3])
        if terms.keep is not None:
            keep = terms.keep
            if "keep of the next row" in self.bugs:
                keep = keep.roll(1, 2)
            keep = keep.reshape(*folded, problem.seqlen_k)
        if terms.sinks is not None and "no sink" not in self.bugs:
            sink = terms.sinks[None, :, None].expand(shape[:3]).reshape(*folded, 1)
        return _Beside(bias, alibi, keep, sink)

    def _with_terms(
        self, problem: Problem, s: Tensor, factor: Tensor, bias: Tensor | None, alibi: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Scores with what is added to them, in the unit that `_logits` chose."""
        if bias is None and alibi is None and not problem.sinks:
            return s, factor
        log2e = torch.tensor(LOG2E, dtype=F32)
        unit = torch.ones(())
        if self.exponent == "fma" and not (problem.softcap or self.prescaled):
            s, factor = s * torch.tensor(problem.scale, dtype=F32), log2e
        elif self.exponent != "exp":
            unit = log2e
        if bias is not None and "bias ignored" not in self.bugs:
            s = s + bias * unit
        if alibi is not None:
            s = s - alibi * unit
        return s, factor

    def _exp_difference(self, s: Tensor, m: Tensor, factor: Tensor) -> Tensor:
        """exp(s - m) with this emulator's roundings."""
        if "log2e of five digits" in self.bugs:
            s, m = s * (1.4427 / LOG2E), m * (1.4427 / LOG2E)
        if self.exponent == "exp":
            return self._exp2((s - m) * torch.tensor(LOG2E, dtype=F32))
        if self.exponent == "fma":
            mc = (m * factor).to(F64)
            return self._exp2((s.to(F64) * factor.to(F64) - mc).to(F32))
        return self._exp2(s - m)

    def forward(  # noqa: C901, PLR0912, PLR0915
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Terms = NO_TERMS
    ) -> tuple[Tensor, Tensor]:
        """Return o in the problem's dtype and lse in float32, natural logarithm."""
        beside = self._beside(problem, terms)
        sink = beside.sink
        kept = torch.tensor(1.0 / (1.0 - problem.dropout), dtype=F32)
        if "keep not scaled" in self.bugs:
            kept = torch.ones(())
        native = _dtype(problem.dtype)
        qf, kf, vf = (self._fold(problem, x) for x in (q, k, v))
        allowed = self._mask(problem)
        rows = qf.shape[:2]
        m = torch.full((*rows, 1), -math.inf)
        total = torch.zeros(*rows, 1)
        acc = torch.zeros(*rows, problem.head_dim_v)
        negative = (
            problem.scale < 0
            and self.exponent == "fma"
            and not (problem.softcap or self.prescaled)
            and not (problem.bias or problem.alibi or problem.sinks)
        )
        _, factor, _ = self._logits(problem, qf, kf[:, :0])
        _, factor = self._with_terms(problem, qf[:, :, :0], factor, *beside.addends(slice(0, 0)))
        if negative:
            factor = -factor
        own = None if sink is None else sink * self._unit(problem)
        if own is not None and self.sink == "first":
            m, total = own, torch.where(own == -math.inf, 0.0, 1.0)
        for keys in self._blocks(problem.seqlen_k):
            s, factor, _ = self._logits(problem, qf, kf[:, keys], beside.early(self.bugs, keys))
            s, factor = self._with_terms(problem, s, factor, *beside.addends(keys, self.bugs))
            if negative:
                s, factor = -s, -factor
            s = torch.where(allowed[:, keys], s, -math.inf)
            peak = s.amax(-1, keepdim=True)
            new = torch.maximum(m, peak)
            if self.threshold:
                new = torch.where((peak - m) * factor > self.threshold, new, m)
            safe = torch.where(new == -math.inf, 0.0, new)
            p = torch.where(allowed[:, keys], self._exp_difference(s, safe, factor), 0.0)
            alpha = torch.where(m == -math.inf, 0.0, self._exp_difference(m, safe, factor))
            alpha = torch.where(m == new, 1.0, alpha)
            kept_p = p
            if beside.keep is not None:
                kept_p = torch.where(beside.keep[:, :, keys], p, 0.0)
                kept_p = kept_p * kept if self.keep == "before" else kept_p
            cast = self._cast_p(native, kept_p)
            summed = p
            if self.l_from_rounded_p:
                summed = cast if beside.keep is None else self._cast_p(native, p)
            summed = summed.sum(-1, keepdim=True)
            if "padded keys" in self.bugs:
                pad = self.block_n - (keys.stop - keys.start)
                summed = summed + pad * self._exp_difference(torch.zeros_like(safe), safe, factor)
            total = total * (1.0 if "no alpha in l" in self.bugs else alpha) + summed
            if "l in fp16" in self.bugs:
                total = total.half().float()
            acc = self._mm(
                problem, cast, vf[:, keys], acc * (1.0 if "no alpha in acc" in self.bugs else alpha)
            )
            if "acc in fp16" in self.bugs:
                acc = acc.half().float()
            if "acc rounded each block" in self.bugs:
                acc = acc.to(native).float()
            m = new
        if beside.keep is not None and self.keep == "after":
            acc = acc * kept
        bare = (m, total)
        if own is not None and self.sink == "last":
            top = torch.maximum(m, own)
            safe = torch.where(top == -math.inf, 0.0, top)
            share = torch.where(m == -math.inf, 0.0, self._exp_difference(m, safe, factor))
            added = torch.where(own == -math.inf, 0.0, self._exp_difference(own, safe, factor))
            m, total, acc = top, total * share + added, acc * share
        m = torch.where(m == -math.inf, 0.0, m)
        o = torch.where(total > 0, self._normalised(acc, total), 0.0) * (
            1.001 if "0.1% too much" in self.bugs else 1
        )
        log2e, ln2 = torch.tensor(LOG2E, dtype=F32), torch.tensor(math.log(2), dtype=F32)
        if "no sink in lse" in self.bugs:
            m, total = bare
        if self.exponent == "exp":
            lse = m + torch.log(total)
        else:
            lse = (m * factor + torch.log2(total)) * ln2
        if "lse in base 2" in self.bugs:
            lse = lse * log2e
        o = self._stored(native, o)
        return o.reshape(problem.shape_o), lse.reshape(problem.shape_lse)

    def _normalised(self, acc: Tensor, total: Tensor) -> Tensor:
        return acc / total

    def _stored(self, native: torch.dtype, o: Tensor) -> Tensor:
        return _flush(o).to(native)

    def _delta(self, do: Tensor, o: Tensor) -> Tensor:
        return _flush((do * o).sum(-1, keepdim=True))

    def _cast_p(self, native: torch.dtype, p: Tensor) -> Tensor:
        if "P in fp8" in self.bugs:
            return p.to(torch.float8_e4m3fn).to(F32)
        if "P in bf16" in self.bugs:
            return p.bfloat16().float()
        return p.to(native).to(F32)

    def _cast_in_backward(self, native: torch.dtype, x: Tensor) -> Tensor:
        return x.to(native).to(F32)

    def backward(  # noqa: C901, PLR0912, PLR0915
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        do: Tensor,
        terms: Terms = NO_TERMS,
    ) -> tuple[Tensor, ...]:
        """Return dq, dk, dv in the problem's dtype, from this o and lse; dbias, dsinks if due."""
        native = _dtype(problem.dtype)
        beside, every = self._beside(problem, terms), slice(None)
        kept = torch.tensor(1.0 / (1.0 - problem.dropout), dtype=F32)
        qf, kf, vf, of, dof = (self._fold(problem, x) for x in (q, k, v, o, do))
        lsef = self._fold(problem, lse.unsqueeze(-1))
        lsef = torch.where(lsef == -math.inf, 0.0, lsef)
        allowed = self._mask(problem)
        scale, log2e = (torch.tensor(x, dtype=F32) for x in (problem.scale, LOG2E))
        s, factor, t = self._logits(problem, qf, kf, beside.early(self.bugs, every))
        s, factor = self._with_terms(problem, s, factor, *beside.addends(every, self.bugs))
        if self.exponent == "exp":
            y = (s - lsef) * log2e
        elif self.exponent == "fma":
            y = (s.to(F64) * factor.to(F64) - (lsef * log2e).to(F64)).to(F32)
        else:
            y = s - lsef * log2e
        p = torch.where(allowed, self._exp2(y), 0.0)
        delta = self._delta(dof, of)
        if "no delta" in self.bugs:
            delta = torch.zeros_like(delta)
        bare = delta
        if terms.dlse is not None and "dlse ignored" not in self.bugs:
            dlse = self._fold(problem, terms.dlse.unsqueeze(-1))
            delta = delta + dlse if "dlse sign" in self.bugs else delta - dlse
        cast_p, ds_p = self._cast_in_backward(native, p), p
        if self.ds_from_rounded_p:
            ds_p = cast_p
        dp = self._mm(problem, dof, vf.mT)
        if beside.keep is not None:
            one = torch.ones(()) if "keep not scaled in dP" in self.bugs else kept
            dp = torch.where(beside.keep, dp * one, 0.0)
            kept_p = torch.where(beside.keep, p, 0.0)
            before = self.keep == "before"
            cast_p = self._cast_in_backward(native, kept_p * kept if before else kept_p)
        ds = ds_p * (dp - delta)
        of_logits = torch.where(p == 0, 0.0, ds)
        if problem.softcap:
            ds = ds * (1 - t * t)
        before = self.ds_scale == "before"
        ds = _flush(ds * scale if before else ds)
        cast_ds = self._cast_in_backward(native, torch.where(p == 0, 0.0, ds))
        factor_q = factor_k = torch.ones(()) if before else scale
        if "dq without scale" in self.bugs:
            factor_q = torch.ones(())
        if "dk without scale" in self.bugs:
            factor_k = torch.ones(())
        dq, dk, dv = torch.zeros_like(qf), torch.zeros_like(kf), torch.zeros_like(vf)
        for keys in self._blocks(problem.seqlen_k):
            dq = self._mm(problem, cast_ds[:, :, keys], kf[:, keys], dq)
        for rows in self._blocks(qf.shape[1]):
            dk = self._mm(problem, cast_ds[:, rows].mT, qf[:, rows], dk)
            dv = self._mm(problem, cast_p[:, rows].mT, dof[:, rows], dv)
        if beside.keep is not None and self.keep == "after" and "keep not scaled" not in self.bugs:
            dv = dv * kept
        if "0.1% too much" in self.bugs:
            dq, dk, dv = (1.001 * x for x in (dq, dk, dv))
        dq, dk, dv = (_flush(x).to(native) for x in (dq * factor_q, dk * factor_k, dv))
        shapes = (problem.shape_q, problem.shape_k, problem.shape_v)
        found = [x.reshape(shape) for x, shape in zip((dq, dk, dv), shapes, strict=True)]
        if terms.bias is not None:
            if "dbias with slope" in self.bugs:
                of_logits = of_logits * (1 - t * t)
            if "dbias with scale" in self.bugs:
                of_logits = of_logits * scale
            found.append(self._bias_gradient(problem, of_logits).to(native))
        if terms.sinks is not None:
            found.append(self._sink_gradient(problem, terms.sinks, lse, delta, bare))
        return tuple(found)

    def _bias_gradient(self, problem: Problem, ds: Tensor) -> Tensor:
        """Sums in float32, in any order; of dS after its cast where that is asked for."""
        shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        total = ds.reshape(shape)
        if self.ds_scale == "before":
            total = self._cast_in_backward(_dtype(problem.dtype), total)
        for axis, (name, size) in enumerate(zip("bhqk", shape, strict=True)):
            if name in problem.bias:
                continue
            if "dbias of one row" in self.bugs and size > 1:
                total = total.narrow(axis, 0, 1)
            total = self._summed(total, axis)
        return total

    def _summed(self, x: Tensor, axis: int) -> Tensor:
        return x.sum(axis, keepdim=True)

    def _sink_gradient(
        self, problem: Problem, sinks: Tensor, lse: Tensor, delta: Tensor, bare: Tensor
    ) -> Tensor:
        row = torch.where(lse == -math.inf, 0.0, lse)
        y = (sinks[:, None] - row) * torch.tensor(LOG2E, dtype=F32)
        p = torch.where(lse == -math.inf, 0.0, self._exp2(y))
        used = bare if "dsinks without dlse" in self.bugs else delta
        total = -(p * used.reshape(problem.shape_lse)).sum((0, 2))
        return -total if "dsinks sign" in self.bugs else total


FAMILIES = (
    "normal",
    "logits x10",
    "logits x100",
    "constant",
    "two-level",
    "duplicates",
    "one-hot",
    "drifting-periodic",
    "tiny",
    "huge",
    "subnormal P",
    "uniform",
    "V = 1",
    "integers",
    "mixed magnitudes",
    "shifted",
    "equal keys",
    "near-ties",
)
_HUGE = {"float16": 3000.0, "bfloat16": 1e15, "float32": 1e15}


def values(  # noqa: C901, PLR0912 -- one branch a family
    family: str, problem: Problem, seed: int
) -> list[Tensor]:
    """q, k, v, do of one family, in the problem's dtype."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape):
        return torch.randn(shape, generator=generator, dtype=F64)

    q, k, v, do = (
        normal(shape)
        for shape in (problem.shape_q, problem.shape_k, problem.shape_v, problem.shape_o)
    )
    n = problem.seqlen_k
    index = torch.arange(n, dtype=F64)[:, None]
    ones = torch.ones_like
    match family:
        case "logits x10" | "logits x100":
            q = q * float(family.removeprefix("logits x"))
        case "constant":
            q, k = ones(q), ones(k)
        case "two-level":
            q, k = ones(q), 1 + 0.37 * (normal((*k.shape[:3], 1)) > 0) * ones(k)
        case "duplicates":
            k = k[:, :, torch.arange(n) // 4]
        case "one-hot":
            k = torch.cat(
                (k[:, :, :-1], 8 * q.mean((1, 2), keepdim=True).expand_as(k[:, :, :1])), 2
            )
        case "drifting-periodic":
            q, k = ones(q), ones(k) * ((index % 16) / 8 + (index // 16) / 64)
        case "tiny":
            q, k, v, do = (1e-4 * x for x in (q, k, v, do))
        case "huge":
            q, k, v, do = (_HUGE[problem.dtype] * x for x in (q, k, v, do))
        case "subnormal P":
            slope = -0.5 / (abs(problem.scale) or 1.0) / problem.head_dim
            q, k = 3 * ones(q), ones(k) * (index % 13) * slope
        case "uniform":
            q, k, v, do = (x.abs() for x in (q, k, v, do))
        case "V = 1":
            v = ones(v)
        case "integers":
            q, k, v, do = (x.round() for x in (q, k, v, do))
        case "mixed magnitudes":
            powers = (
                torch.exp2((4 * normal(x.shape)).round().clamp(-12, 6)) for x in (q, k, v, do)
            )
            q, k, v, do = (x * y for x, y in zip((q, k, v, do), powers, strict=True))
        case "shifted":
            k = k + 120
        case "equal keys":
            k = k[:, :, :1].expand_as(k)
        case "near-ties":
            q, k = ones(q), 1 + 1e-3 * k
        case _:
            assert family == "normal", family
    if seed % 5 == 0:
        v = v.abs()
    return [x.to(_dtype(problem.dtype)) for x in (q, k, v, do)]
