"""Right kernels in slow motion whose gradients are made in other ways; plain torch on the CPU."""

from __future__ import annotations

import dataclasses
import math

import torch

from fa_verify import Arithmetic

from .whole_rows import Algorithm, kernel, zeroed


@dataclasses.dataclass(frozen=True)
class _RecomputedLse(Algorithm):
    """The backward pass finds lse anew, in one pass where the forward pass merged blocks."""

    def _state(self, rows):
        return self._in_turn(self._leaves(rows))

    def _weights(self, s, lse, sink):
        del lse
        m, total = self._softmax(s, sink)
        return self._exp(s - zeroed(zeroed(m) + total.log()))

    def _softmax(self, s, sink):
        m = self._peak(s)
        total = self._exp(s - zeroed(m)).sum(-1, keepdim=True)
        if sink is not None:
            zero = torch.zeros_like(m)
            m, total, _ = self._merged((m, total, zero), (sink, torch.ones_like(sink), zero))
        return m, torch.where(m == -math.inf, 0.0, total)


@dataclasses.dataclass(frozen=True)
class _MaximumAndSum(_RecomputedLse):
    """The backward pass divides by a denominator, as softmax's own would."""

    def _weights(self, s, lse, sink):
        del lse
        m, total = self._softmax(s, sink)
        return torch.where(total > 0, self._exp(s - zeroed(m)) / total, 0.0)


@dataclasses.dataclass(frozen=True)
class _FusedDelta(Algorithm):
    """dS = P dP - P delta, delta the sum of the first."""

    def _row_sums(self, p, dp, do, o):
        del do, o
        return (p * dp).sum(-1, keepdim=True)

    def _difference(self, p, dp, delta):
        return p * dp - p * delta


@dataclasses.dataclass(frozen=True)
class _HeadsStored(Algorithm):
    """Each query head's dk and dv is stored before a group's are added."""

    def _by_key(self, problem, a, b, factor):
        if problem.group == 1:
            return super()._by_key(problem, a, b, factor)
        native, shape = getattr(torch, problem.dtype), (problem.group, problem.seqlen_q)
        parts = zip(*(x.unflatten(1, shape).unbind(1) for x in (a, b)), strict=True)
        return sum((self._mm(problem, x.mT, y) * factor).to(native).float() for x, y in parts)


@dataclasses.dataclass(frozen=True)
class _BlocksStored(Algorithm):
    """Gradients are in the inputs' dtype after each block that is added to them."""

    def _over_keys(self, problem, a, b):
        native, total = (
            getattr(torch, problem.dtype),
            super()._over_keys(problem, a[:, :, :0], b[:, :0]),
        )
        for keys in self._blocks(a.shape[2]):
            total = self._mm(problem, a[:, :, keys], b[:, keys], total).to(native).float()
        return total

    def _over_rows(self, problem, a, b):
        return self._over_keys(problem, a.mT, b)


@dataclasses.dataclass(frozen=True)
class _BothPrescaled(Algorithm):
    """The root of the scale goes into q and into k, and is in the k and q of dq and dk then."""

    def _operands(self, problem, q, k):
        root = abs(problem.scale) ** 0.5
        sign = math.copysign(1.0, problem.scale)
        return self._fold(problem, q * (sign * root)), self._fold(problem, k * root)

    def _logits(self, problem, q, k, early=None):
        return super()._logits(dataclasses.replace(problem, softmax_scale=1.0), q, k, early)

    def _gradient_scale(self, problem):
        return abs(problem.scale) ** 0.5

    def _over_keys(self, problem, a, b):
        return super()._over_keys(problem, a, b) * math.copysign(1.0, problem.scale)


heads_stored = kernel("heads_stored", _HeadsStored(), Arithmetic(gqa_dtype="input"))
blocks_stored = kernel(
    "blocks_stored", _BlocksStored(block_n=16), Arithmetic(gradient_dtype="input", ds_scale="after")
)
both_prescaled = kernel("both_prescaled", _BothPrescaled(), Arithmetic(prescaled="qk"))
recomputed_lse = kernel("recomputed_lse", _RecomputedLse(block_n=16))
maximum_and_sum = kernel("maximum_and_sum", _MaximumAndSum(block_n=16))
fused_delta = kernel("fused_delta", _FusedDelta(), Arithmetic(delta_from_p_dp=True))
