"""How far the mean of lse may be off where dots round to nearest: plain float32; (B43)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds.bias import Allowance, Phases
from fa_verify.bounds.model import LARGEST, SLACK, Model, U
from fa_verify.bounds.probabilistic import BLOCKS, blockings
from fa_verify.reference import grouped, tiles

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.bounds.inputs import Block, Inputs

__all__ = ["lse_allowance", "rounds_to_nearest"]

_BINS = 1 << 16  # of a binade: values in one are taken to round alike


def rounds_to_nearest(model: Model) -> bool:
    """Whether every operation before lse is one of float32, to nearest."""
    problem, arithmetic = model.problem, model.arithmetic
    plain = problem.storage == "float32" and problem.dot_precision == "ieee"
    plain = plain and not (problem.softcap or problem.terms)
    plain = plain and model.p is None and arithmetic.prescaled is None
    plain = plain and not model.halves("qk")
    return plain and not (arithmetic.merged_by_lse or arithmetic.eager)


def lse_allowance(model: Model, given: Inputs, weights: Tensor) -> Allowance:
    """What ``sum(weights * error of lse)`` may be; where it says nothing, infinite.

    Args:
        model: Of a problem that `rounds_to_nearest`.
        given: Its operands.
        weights: 1 where a row counts, else 0, shaped as lse.
    """
    used = weights.reshape(given.q.shape[:3])
    if given.overflows(model):
        return Allowance(torch.full_like(used, math.inf).flatten(0, 1), lambda: math.inf)

    def variance() -> float:
        random = _Random.empty(given.q)
        _fixed(model, given, used, random)
        return random.variance()

    floor = SLACK * model.logit_floor(given.largest) + 2.0**-22
    fixed = _fixed(model, given, used, None) + floor * used
    return Allowance(fixed.flatten(1, 2), variance)


def _fixed(model: Model, given: Inputs, used: Tensor, random: _Random | None) -> Tensor:
    """The fixed part of each row, tile by tile; the rest goes into ``random`` if that is given."""
    fixed = torch.zeros_like(used)
    for tile in tiles(model.problem, given.q.device):
        block, part = given.block(tile), used[tile.heads, :, tile.rows].flatten(1, 2)
        counting = (part > 0).any(0).nonzero().flatten()
        own = torch.zeros_like(part)
        if len(counting):
            some = block.take(counting)
            own[:, counting] = _tile(model, some, part[:, counting], random)
        fixed[tile.heads, :, tile.rows] = grouped(model.problem, own)
    return fixed


@dataclasses.dataclass(frozen=True, slots=True)
class _Random:
    """Roundings to nearest that may go alike: of logits, of lse's last steps, of l's terms.

    Attributes:
        terms: One for each admitted blocking.
    """

    logits: Phases
    steps: Phases
    terms: tuple[Phases, ...]

    @classmethod
    def empty(cls, like: Tensor) -> _Random:
        every = (Phases(like, _BINS) for _ in range(2 * len(BLOCKS) + 1))
        return cls(Phases(like, _BINS), Phases(like, _BINS), tuple(every))

    def variance(self) -> float:
        terms = max(x.variance() for x in self.terms)
        return self.logits.variance() + self.steps.variance() + terms


def _tile(model: Model, block: Block, used: Tensor, random: _Random | None) -> Tensor:
    """The fixed part of a tile's rows; the rest goes into ``random`` if that is given."""
    s, _ = block.logits(model.problem.scale, 0.0)
    m = s.amax(-1, keepdim=True)
    m.masked_fill_(m == -torch.inf, 0.0)
    x = s - m
    p = x.exp()
    total = p.sum(-1, keepdim=True).clamp_(min=1.0)
    p /= total
    lse, m = (m + total.log()).squeeze(-1), m.squeeze(-1)
    steps = 3 * (lse.abs() + m.abs())
    if random is not None:
        one = used.unsqueeze(-1) * U * SLACK
        # A dot of k products to nearest: k roundings of partial sums that are at most |q||k|^T.
        raw = torch.bmm(block.q.abs(), block.k.abs().mT).mul_(model.scale)
        dot = math.sqrt(model.problem.head_dim) * model.arithmetic.dot_ulps
        size = s.abs()
        random.logits.add(size.log(), p * (dot * raw + 4 * size.clamp(max=LARGEST)) * one)
        random.steps.add(lse.abs().log(), steps * used * (U * SLACK))
        terms = (p > 0) * one * (1 + 2 / 16)  # a block's sum is added too
        ways = itertools.chain(blockings(x, model.arithmetic.block_n), itertools.repeat(x))
        for phases, logs in zip(random.terms, ways, strict=False):
            phases.add(logs, terms)
    far = (p * x.clamp(min=-1e30)).sum(-1).abs()  # how far below the maximum P is, on average
    ulps = model.arithmetic.exp2_ulps
    fixed = 3 * far + ulps + (ulps + 1) * _changes(x) + steps + 2 * (lse - m)
    return fixed * used * (U * SLACK)


def _changes(x: Tensor) -> Tensor:
    """How often the running maximum of blocks of 16 or more keys grows, from either end."""
    n = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -n % 16), value=-torch.inf)
    peaks = padded.reshape(*x.shape[:-1], -1, 16).amax(-1)
    counts = []
    for order in (peaks, peaks.flip(-1)):
        running = order.cummax(-1).values
        grows = (running[..., 1:] > running[..., :-1]) & (running[..., :-1] > -torch.inf)
        counts.append(grows.sum(-1))
    return torch.maximum(*counts)
