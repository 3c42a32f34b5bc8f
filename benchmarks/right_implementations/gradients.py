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


recomputed_lse = kernel("recomputed_lse", _RecomputedLse(block_n=16))
maximum_and_sum = kernel("maximum_and_sum", _MaximumAndSum(block_n=16))
fused_delta = kernel("fused_delta", _FusedDelta(), Arithmetic(delta_from_p_dp=True))
