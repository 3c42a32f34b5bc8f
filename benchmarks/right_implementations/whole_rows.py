"""`Algorithm`: a right kernel in slow motion that has all logits of a row at once.

What it does with them, and what its gradients are made from, are methods to be replaced.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from .emulation import Emulator, emulated, flush

__all__ = ["LN2", "LOG2E", "Algorithm", "Rows", "State", "kernel", "zeroed"]

LOG2E, LN2 = torch.tensor(1.4426950408889634), torch.tensor(math.log(2))
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # maximum, denominator, sum of P V


def kernel(name, algorithm, arithmetic=None, **limits):
    """The algorithm as a kernel."""
    return emulated(name, lambda _problem: algorithm, arithmetic, **limits)


def zeroed(x):
    """The same with 0 for -inf."""
    return torch.where(x == -math.inf, 0.0, x)


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a way of attending sees: scores, values, dropout's factors, the sink; or None."""

    problem: Any
    s: torch.Tensor
    v: torch.Tensor
    factors: torch.Tensor | None
    sink: torch.Tensor | None

    def cut(self, keys):
        """Some keys of all rows, without the sink."""
        factors = None if self.factors is None else self.factors[:, :, keys]
        return dataclasses.replace(
            self, s=self.s[:, :, keys], v=self.v[:, keys], factors=factors, sink=None
        )


@dataclasses.dataclass(frozen=True)
class Algorithm(Emulator):
    """All logits of a row first, then whatever `_attend` does with them."""

    exponent: str = "exp"
    p_unit: float = 1.0  # what a cast P is multiplied by in the end

    def forward(self, problem, q, k, v, terms):
        """As the emulator's."""
        beside = self._beside(problem, terms)
        qf, kf = self._operands(problem, q, k)
        vf = self._fold(problem, v)
        s, _ = self._scores(problem, qf, kf, beside)
        o, lse = self._attend(Rows(problem, s, vf, _factors(problem, beside), beside.sink))
        native = getattr(torch, problem.dtype)
        return (
            self._stored(native, torch.where(lse == -math.inf, 0.0, o)).reshape(problem.shape_o),
            lse.float().reshape(problem.shape_lse),
        )

    def _operands(self, problem, q, k):
        """Q and k as the dots read them."""
        return self._fold(problem, q), self._fold(problem, k)

    def _scores(self, problem, q, k, beside):
        """Natural logits, -inf where hidden, and tanh."""
        s, factor, t = self._logits(problem, q, k)
        s, _ = self._with_terms(problem, s, factor, *beside.addends(slice(None)))
        return torch.where(self._mask(problem), s, -math.inf), t

    def _attend(self, rows):
        """O in float32 and lse."""
        return self._finished(rows, self._state(rows))

    def _state(self, rows) -> State:
        return self._leaf(rows)

    def _leaf(self, rows, m=None) -> State:
        if m is None:
            m = self._peak(rows.s)
        p = self._exp(rows.s - zeroed(m))
        kept = p if rows.factors is None else p * rows.factors
        cast = self._cast_p(getattr(torch, rows.problem.dtype), kept)
        return m, p.sum(-1, keepdim=True), self._mm(rows.problem, cast, rows.v) * self.p_unit

    def _peak(self, s):
        return (
            s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
        )

    def _exp(self, x):
        return self._exp2(x * LOG2E)

    def _merged(self, a: State, b: State) -> State:
        m = torch.maximum(a[0], b[0])
        left, right = (self._exp(x[0] - zeroed(m)) for x in (a, b))
        return m, a[1] * left + b[1] * right, a[2] * left + b[2] * right

    def _in_turn(self, states) -> State:
        total, *others = states
        for state in others:
            total = self._merged(total, state)
        return total

    def _finished(self, rows, state):
        if rows.sink is not None:
            state = self._merged(state, (rows.sink, torch.ones_like(rows.sink), 0 * state[2]))
        m, total, acc = state
        total = torch.where(m == -math.inf, 0.0, total)
        return self._normalised(acc, total), zeroed(m) + total.log()

    def _leaves(self, rows):
        return [self._leaf(rows.cut(keys)) for keys in self._blocks(rows.s.shape[-1])] or [
            self._leaf(rows)
        ]

    def backward(self, problem, q, k, v, o, lse, do, terms):
        """As the emulator's."""
        beside = self._beside(problem, terms)
        qf, kf = self._operands(problem, q, k)
        vf, of, dof = (self._fold(problem, x) for x in (v, o, do))
        native = getattr(torch, problem.dtype)
        scale = torch.tensor(self._gradient_scale(problem))
        s, t = self._scores(problem, qf, kf, beside)
        p = self._weights(s, self._fold(problem, lse.unsqueeze(-1)), beside.sink)
        dp, factors = self._mm(problem, dof, vf.mT), _factors(problem, beside)
        kept = p if factors is None else p * factors
        dp = dp if factors is None else dp * factors
        bare = self._row_sums(p, dp, dof, of)
        delta = bare
        if terms.dlse is not None:
            delta = bare - self._fold(problem, terms.dlse.unsqueeze(-1))
        of_logits = ds = torch.where(p == 0, 0.0, self._difference(p, dp, delta))
        if problem.softcap:
            ds = ds * (1 - t * t)
        cast_p, cast_ds = (
            self._cast_p(native, flush(kept)),
            self._cast_in_backward(native, flush(ds)),
        )
        dq = self._over_keys(problem, cast_ds, kf) * scale
        dk = self._by_key(problem, cast_ds, qf, scale)
        dv = self._by_key(problem, cast_p, dof, self.p_unit)
        shapes = problem.shape_q, problem.shape_k, problem.shape_v
        pairs = zip((dq, dk, dv), shapes, strict=True)
        found = [flush(x).to(native).reshape(shape) for x, shape in pairs]
        if terms.bias is not None:
            found.append(self._bias_gradient(problem, of_logits).to(native))
        if terms.sinks is not None:
            found.append(self._sink_gradient(problem, terms.sinks, lse, delta, bare).float())
        return tuple(found)

    def _weights(self, s, lse, sink):
        del sink
        return self._exp(s - zeroed(lse))

    def _row_sums(self, p, dp, do, o):
        del p, dp
        return self._delta(do, o)

    def _difference(self, p, dp, delta):
        return p * (dp - delta)

    def _gradient_scale(self, problem):
        return problem.scale

    def _over_keys(self, problem, a, b):
        return self._mm(problem, a, b)

    def _by_key(self, problem, a, b, factor):
        return self._over_rows(problem, a, b) * factor

    def _over_rows(self, problem, a, b):
        return self._mm(problem, a.mT, b)


def _factors(problem, beside):
    """What dropout multiplies P by."""
    return None if beside.keep is None else beside.keep * (1 / (1 - torch.tensor(problem.dropout)))
