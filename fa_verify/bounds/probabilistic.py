"""The probabilistic bound: the casts of P and dS lose a random sum instead of the worst one.

It is evaluated lazily. By Cauchy-Schwarz the root of a sum of n squares is at least 1/sqrt(n) of
the sum: rows (keys, for dk and dv) whose error is below that need no further look; docs/bounds.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from fa_verify.bounds.formats import floor_power_of_two

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from fa_verify.bounds.formats import Cast

__all__ = [
    "BLOCKS",
    "Index",
    "Look",
    "Question",
    "Refiner",
    "blockings",
    "lambda_factor",
    "multiplicity",
    "names_of_blockings",
    "on_the_grid",
    "shifts",
]

Index = Any  # of some rows or keys: a slice, or a Tensor of integers

_CHUNK = 1 << 20  # elements of P that one look may hold
# Elements of P up to which all rows are looked at together, not only those in question: on a card
# it is the number of operations that costs.
_TOGETHER = {"cpu": 1 << 14, "cuda": _CHUNK}
_MOST_COUNTED = 256  # rows or keys a head whose multiplicity is counted; the rest fall back on det
_MOST_ROUNDED = 8  # of these, whose values are rounded under other scales; likewise if it matters
_SCALES = 33
BLOCKS = (16, 32, 64, 128, 256)
_ENDS = ("", ", from the last key on")


def lambda_factor(elements: int, d: float) -> float:
    """Lambda / sqrt(3): what multiplies the root of the sum of squares; (B30)."""
    return math.sqrt(2 * math.log(2 * max(1, elements) / d) / 3)


def multiplicity(logs: Tensor, width: float, floor: float) -> Tensor:
    """How many entries of the same row round alike with each, itself included; (B31).

    Args:
        logs: (..., n), logarithms of what is cast.
        width: Half the window, relative to a normal value.
        floor: Logarithm of the smallest normal value: the grid is uniform below, and so is the
            window.
    """
    below = floor + torch.expm1(logs - floor)
    values = torch.where(logs < floor, below, logs)
    order = values.sort(-1).values
    high = torch.searchsorted(order, values + width, right=True)
    low = torch.searchsorted(order, values - width)
    return (high - low).clamp_(min=1)


def on_the_grid(cast: Cast, values: Tensor) -> tuple[Tensor, Tensor]:
    """Half the spacing of a format at some values, and what rounding adds to them, in halves."""
    half = floor_power_of_two(values).clamp_(min=2.0**cast.format.emin).mul_(cast.unit)
    missed = (values / (2 * half)).round() * 2 - values / half
    return half, missed.nan_to_num_(posinf=0.0, neginf=0.0)


def blockings(x: Tensor, block_n: int | None) -> Iterator[Tensor]:
    """Logarithms of P as it is cast: up to the row's maximum, and up to that of each block; (B32).

    Args:
        x: (..., keys), S less any number per row.
        block_n: Keys a block if declared.
    """
    top = x.amax(-1, keepdim=True)
    yield x - top.masked_fill(top == -torch.inf, 0.0)
    for block, peaks in _peaks(x, block_n):
        running = peaks.cummax(-1).values
        running.masked_fill_(running == -torch.inf, 0.0)
        yield x - running.repeat_interleave(block, -1)[..., : x.shape[-1]]
        running = peaks.flip(-1).cummax(-1).values.flip(-1)
        running.masked_fill_(running == -torch.inf, 0.0)
        yield x - running.repeat_interleave(block, -1)[..., : x.shape[-1]]


def names_of_blockings(block_n: int | None, keys: int) -> tuple[str, ...]:
    """What P is relative to in each of `blockings`, in their order."""
    found = ["the row's maximum"]
    for block in (block_n,) if block_n else BLOCKS:
        if block < keys:
            found += (f"the maximum up to its block of {block} keys{end}" for end in _ENDS)
    return tuple(found)


def shifts(x: Tensor, block_n: int | None) -> Iterator[Tensor]:
    """The same, and up to what else is common to a row: lse, and stale maxima; (B42).

    Args:
        x: (..., keys), S less any number per row.
        block_n: Keys a block if declared.
    """
    yield x - x.logsumexp(-1, keepdim=True).nan_to_num_(neginf=0.0)
    yield from blockings(x, block_n)
    for _, peaks in _peaks(x, block_n):
        for order in (peaks, peaks.flip(-1)):
            first = (order > -torch.inf).to(torch.uint8).argmax(-1, keepdim=True)
            yield x - order.gather(-1, first).nan_to_num_(neginf=0.0)


def _peaks(x: Tensor, block_n: int | None) -> Iterator[tuple[int, Tensor]]:
    """Every admitted block, and the largest of each block's keys."""
    n = x.shape[-1]
    for block in (block_n,) if block_n else BLOCKS:
        if block < n:
            padded = torch.nn.functional.pad(x, (0, -n % block), value=-torch.inf)
            yield block, padded.reshape(*x.shape[:-1], -1, block).amax(-1)


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """Some rows (keys) of one tensor in detail, of one head or of several: (heads, ...) then.

    Attributes:
        rest: (rows, dim), the bound without the cast's part.
        errors: (rows, terms), at most what the cast adds to each term.
        logs: (rows, terms), logarithms of what is cast (of o: up to the block's maximum).
        weight: (terms, dim), what the terms multiply; size: its size.
        sign: (rows, terms), of what is cast; None: it is positive.
        off: (rows, terms), how far it may be from exact; None: it is not known up to what it is.
    """

    rest: Tensor
    errors: Tensor
    logs: Tensor
    weight: Tensor
    size: Tensor
    sign: Tensor | None = None
    off: Tensor | None = None

    def cut(self, head: slice | int, index: Index) -> Look:
        """Some rows of some heads, or of one, of a look at several heads."""
        place = (head, index)
        return Look(
            self.rest[place],
            self.errors[place],
            self.logs[place],
            self.weight[head],
            self.size[head],
            None if self.sign is None else self.sign[place],
            None if self.off is None else self.off[place],
        )

    def bound(self, factor: float, tiny: float, rows: Index, count: Tensor | None) -> Tensor:
        """Rest + factor sqrt(sum count errors^2 weight^2), the tiny in full; (B30), (B33).

        Rows are those of one head, in `added` too; of several heads `slice(None)` is all.
        """
        errors = self.errors[rows]
        small = self.logs[rows] < tiny
        # In float64 squares of what formats of 8 exponent bits hold, and their products, neither
        # overflow nor underflow.
        random = errors.masked_fill(small, 0.0).square_()
        if count is not None:
            random *= count
        root = (random @ self.weight.square()).sqrt_().mul_(factor)
        return root.add_(torch.where(small, errors, 0.0) @ self.size).add_(self.rest[rows])

    def added(self, cast: Cast, divisors: Iterable[float], rows: Tensor) -> Tensor:
        """The most that rounding the exact values adds, under any scale common to them; (B34)."""
        most = torch.zeros_like(self.rest[rows])
        if self.sign is None:
            return most
        errors, logs = self.errors[rows] * self.sign[rows], self.logs[rows]
        scales = torch.linspace(-cast.unit, cast.unit, _SCALES).tolist()
        for divisor, scale in itertools.product(divisors, scales):
            _, missed = on_the_grid(cast, (logs - math.log(divisor) + scale).exp())
            most = torch.maximum(most, ((errors * missed) @ self.weight).abs())
        return most


@dataclasses.dataclass(frozen=True)
class Refiner:
    """Refines one tensor's bound where an observed error is between the least and most it can be.

    Attributes:
        cast: The cast that is taken as random.
        scale: What is cast times this is what the terms are in.
        divisors: The same for each admitted moment of the cast.
        linear: The tensor's bound before output rounding, (heads, rows, dim).
        terms: Length of the sums.
        looks: ``looks(heads, rows)``, at the same rows of each head.
        castings: A look's logs up to what may be cast in their place, every admitted way of which
            entries of one row differ.
        names: What an entry is relative to in each of them.
        across: The same, every way of which entries of different rows differ.
        d: Probability.
        lifted: What is cast is at most 1, and may be multiplied by a power of two before.
    """

    cast: Cast
    scale: float
    divisors: tuple[float, ...]
    linear: Tensor
    terms: int
    looks: Callable[[slice, Index], Look]
    castings: Callable[[Tensor], Iterable[Tensor]]
    names: tuple[str, ...]
    across: Callable[[Tensor], Iterable[Tensor]]
    d: float
    lifted: bool = False

    @property
    def tiny(self) -> float:
        """Logarithm of what is too small for its rounding to be random, as terms are; (B33)."""
        return math.log(8 * self.cast.tiny * self.scale)

    @property
    def floor(self) -> float:
        """Logarithm of the smallest normal number of the cast, as terms are."""
        return math.log(self.cast.tiny / self.cast.unit * self.scale)

    @property
    def small(self) -> bool:
        """Whether all rows are looked at together."""
        heads, rows, _ = self.linear.shape
        return heads * rows * self.terms <= _TOGETHER.get(self.linear.device.type, 0)

    @functools.cached_property
    def whole(self) -> Look:
        """At all rows."""
        return self.looks(slice(None), slice(None))

    def several(self, heads: slice, index: Index) -> Look:
        """At the same rows of some heads."""
        return self.whole.cut(heads, index) if self.small else self.looks(heads, index)

    def look(self, head: int, index: Tensor) -> Look:
        """At some rows of one head."""
        if self.small:
            return self.whole.cut(head, index)
        return self.looks(slice(head, head + 1), index).cut(0, slice(None))

    def chunks(self, index: Tensor) -> tuple[Tensor, ...]:
        """Rows in portions that a look can hold."""
        return torch.split(index, max(1, _CHUNK // self.terms))

    def portions(self, asked: Tensor) -> Iterator[tuple[slice, Index]]:
        """Places that looks can hold, which have all rows that are asked for, (heads, rows)."""
        heads, rows, _ = self.linear.shape
        if heads * rows * self.terms <= _CHUNK:
            yield slice(0, heads), slice(0, rows)
            return
        for head in range(heads):
            for index in self.chunks(asked[head].nonzero().flatten()):
                if len(index):
                    yield slice(head, head + 1), index

    def least(self, elements: int) -> float:
        """The least part of det that the bound can be, anywhere in a tensor of as many elements."""
        return lambda_factor(elements, self.d) / math.sqrt(max(1, self.terms))

    def sample(self, terms: int, most_heads: int) -> tuple[slice, slice]:
        """Evenly spaced heads and rows of them, whose sums have so many terms together."""
        heads, rows, _ = self.linear.shape
        rows_each = max(1, min(rows, terms // self.terms))
        heads_used = max(1, min(heads, most_heads, terms // (self.terms * rows_each)))
        return slice(0, heads, -(-heads // heads_used)), slice(0, rows, -(-rows // rows_each))

    def refined(self, det: Tensor, error: Tensor, *, within: bool = False) -> Tensor:
        """The probabilistic bound where it decides, det elsewhere.

        Args:
            det: The deterministic bound with output rounding, any shape of as many elements.
            error: Observed, shaped as det.
            within: Every error is known to be within det, and that to be finite.
        """
        if self.least(det.numel()) >= 1.0:
            return det
        question = Question(self, det, error, within=within)
        if not bool(question.any_asked):
            return det
        if self.small:
            bound, any_over = question.together()
            if not bool(any_over):
                return bound
        return question.apart()

    def decided(
        self, head: int, index: Tensor, allowed: Tensor, factor: float, budget: int
    ) -> tuple[Tensor, int]:
        """Bounds of these rows before output rounding, and how many of them were counted in.

        Counting can only raise the bound, so rows within the uncounted one are done.
        """
        look, most, tiny = self.look(head, index), self.linear[head, index], self.tiny
        bound = look.bound(factor, tiny, torch.arange(len(index), device=index.device), None)
        over = (allowed > bound).any(-1).nonzero().flatten()
        counted, uncounted = over[:budget], over[budget:]
        if len(counted):
            counts = (
                multiplicity(cast, self.cast.unit / 4, self.floor)
                for cast in self.castings(look.logs[counted])
            )
            bound[counted] = look.bound(
                factor, tiny, counted, functools.reduce(torch.maximum, counts)
            )
            outside = counted[(allowed > bound)[counted].any(-1)]
            near, far = outside[:_MOST_ROUNDED], outside[_MOST_ROUNDED:]
            if look.sign is not None and len(near):
                without = look.bound(0.0, tiny, near, None)
                added = look.added(self.cast, self.divisors, near)
                bound[near] = torch.maximum(bound[near], (bound[near] + without) / 2 + added)
                if not bool((allowed > bound)[near].any()):
                    bound[far] = most[far]
        bound[uncounted] = most[uncounted]
        return torch.minimum(bound, most), len(counted)


class Question:
    """Where the probabilistic bound may be less than what was observed, step by step.

    Attributes:
        any_asked: Whether that is so anywhere, bool on the device: if not, the bound is det.
    """

    def __init__(self, refiner: Refiner, det: Tensor, error: Tensor, *, within: bool) -> None:
        """Ask for what `Refiner.refined` says."""
        shape = refiner.linear.shape
        self._refiner, self._shape = refiner, det.shape
        self._det, self._error = det.reshape(shape), error.reshape(shape)
        self._rounding = self._det - refiner.linear
        self._factor = lambda_factor(det.numel(), refiner.d)
        least = refiner.least(det.numel())
        open_question = self._error > torch.add(self._rounding, refiner.linear, alpha=least)
        if not within:
            open_question &= (self._error <= self._det) & self._det.isfinite()
        self._asked = open_question.any(-1)
        self.any_asked = self._asked.any()

    def together(self) -> tuple[Tensor, Tensor]:
        """The bound if no terms round alike, and whether it matters that some may, on the device.

        Of a small tensor. If it matters, `apart` has the bound.
        """
        refiner = self._refiner
        bound = refiner.whole.bound(self._factor, refiner.tiny, slice(None), None)
        bound = torch.minimum(bound, refiner.linear).add_(self._rounding)
        over = (self._error > bound).any(-1) & self._asked
        bound = torch.where(self._asked.unsqueeze(-1), bound, self._det)
        return bound.view(self._shape), over.any()

    def apart(self) -> Tensor:
        """The bound, row by row as it is asked for."""
        refiner, rounding = self._refiner, self._rounding
        result = self._det.clone()
        for head in self._asked.any(-1).nonzero().flatten().tolist():
            left = _MOST_COUNTED
            for index in refiner.chunks(self._asked[head].nonzero().flatten()):
                allowed = self._error[head, index] - rounding[head, index]
                bound, counted = refiner.decided(head, index, allowed, self._factor, left)
                left -= counted
                result[head, index] = bound + rounding[head, index]
        return result.reshape(self._shape)
