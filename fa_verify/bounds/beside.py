"""`Beside`: what a block of the logits has beside q, k and v, and what that may be off by."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from fa_verify import sight
from fa_verify.arithmetic import DEFAULT
from fa_verify.bounds.formats import FLOAT32, FORMATS, Cast

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.arithmetic import Arithmetic
    from fa_verify.bounds.formats import Format
    from fa_verify.problem import Problem
    from fa_verify.terms import Place, Terms

__all__ = ["NOTHING", "Beside", "Extent"]


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """How far the terms of a problem reach.

    Attributes:
        addend: Of what is added to a logit, at most, -inf apart.
        sink: Of a sink, -inf apart.
        hides: Whether a bias has -inf.
        of_row: How many u32 of slope * diagonal a row is off by where ALiBi is slope * key; else 0.
        rounded: What a bias times log2 e is rounded to, and both factors; None: neither is.
    """

    addend: float = 0.0
    sink: float = 0.0
    hides: bool = False
    of_row: int = 0
    rounded: Format | None = None

    @property
    def off(self) -> float:
        """How many u32 an addend is off by, at most; (B60)."""
        return max(5, self.of_row) * self.addend + float(self.of_bias(self.addend))

    def of_bias(self, size: Any) -> Any:
        """How many u32 a bias of that size is off by, once it is multiplied by log2 e; (B77)."""
        if self.rounded is None:
            return 0.0 * size
        u32 = FLOAT32.unit_roundoff
        return size * (2.01 * self.rounded.unit_roundoff / u32) + Cast(self.rounded).tiny / u32

    def moved(self, problem: Problem, terms: Terms) -> Tensor | None:
        """Slope * diagonal, as a size, where sinks have it added, of each row; (B60)."""
        if terms.slopes is None or terms.sinks is None or not self.of_row:
            return None
        diagonal = sight.diagonals(problem, terms.slopes.device).abs().double()
        own = terms.slopes.double().abs()[:, None] * diagonal
        return own.expand(problem.batch, *own.shape).reshape(problem.shape_lse)

    @classmethod
    def of(cls, problem: Problem, terms: Terms, arithmetic: Arithmetic = DEFAULT) -> Extent:
        """Read it from the device, at once, if there are terms."""
        largest: dict[str, Tensor] = {}
        bias, slopes, sinks = terms.bias, terms.slopes, terms.sinks
        if bias is not None and bias.numel():
            hidden = bias.isneginf()
            largest["hides"] = hidden.any().double()
            largest["bias"] = bias.double().masked_fill(hidden, 0.0).abs().amax()
        if slopes is not None:
            largest["slope"] = slopes.double().abs().amax()
        if sinks is not None:
            largest["sink"] = sinks.double().masked_fill(sinks.isneginf(), 0.0).abs().amax()
        if not largest:
            return cls()
        read = dict(zip(largest, torch.stack([*largest.values()]).tolist(), strict=True))
        furthest = problem.seqlen_q + problem.seqlen_k
        addend = read.get("bias", 0.0) + read.get("slope", 0.0) * furthest
        of_row = (32 if problem.sinks else 16) if arithmetic.alibi_by_key else 0
        half = arithmetic.bias_dtype == "input" and problem.dtype != "float32"
        rounded = FORMATS[problem.dtype] if half and problem.bias else None
        hides = bool(read.get("hides"))
        return cls(addend, read.get("sink", 0.0), hides, of_row, rounded)


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """Terms of a block, float64; None where the problem has none.

    Attributes:
        addend: Of the logits, (heads, rows, keys); 0 where it hides the key.
        size: How many u32 that is off by, (heads, rows, keys); (B60).
        hides: bool, (heads, rows, keys): True where the bias hides the key.
        sink: (heads, rows).
        moved: What was added to that, at most, likewise; None: nothing.
        weights: What dropout multiplies P by, (heads, rows, keys).
    """

    addend: Tensor | None = None
    size: Tensor | None = None
    hides: Tensor | None = None
    sink: Tensor | None = None
    moved: Tensor | None = None
    weights: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, terms: Terms, place: Place, extent: Extent) -> Beside:
        """The terms of a place."""
        if not problem.terms:
            return NOTHING
        bias, distance = terms.biases(problem, place), terms.distances(problem, place)
        hides = bias.isneginf() if bias is not None and extent.hides else None
        if bias is not None and hides is not None:
            bias = bias.masked_fill(hides, 0.0)
        addend = size = moved = None
        if bias is not None:
            addend, size = bias, bias.abs()
            size = size * 4 + extent.of_bias(size)
            if extent.rounded is not None:  # (B9)
                size.masked_fill_(bias.abs() * 1.45 >= extent.rounded.overflow, torch.inf)
        if distance is not None:
            own = distance.abs() * 5
            if extent.of_row:
                of_key, of_row = terms.positions(problem, place)
                own = 5 * of_key + extent.of_row * of_row
                moved = of_row.squeeze(-1) if problem.sinks else None
            addend = distance if addend is None else addend + distance
            size = own if size is None else size + own
        sink, weights = terms.sink(problem, place), terms.weights(problem, place)
        return cls(addend, size, hides, sink, moved, weights)

    def take(self, index: Tensor) -> Beside:
        """Some rows of it."""
        names = [field.name for field in dataclasses.fields(self)]
        parts = {name: getattr(self, name) for name in names}
        return Beside(**{name: None if x is None else x[:, index] for name, x in parts.items()})

    def hidden(self, hidden: Tensor | None) -> Tensor | None:
        """What a mask hides, (rows, keys), and what the bias hides beside it."""
        if self.hides is None:
            return hidden
        return self.hides if hidden is None else self.hides | hidden


NOTHING = Beside()
