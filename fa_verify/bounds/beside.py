"""`Beside`: what a block of the logits has beside q, k and v, and what that may be off by."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

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
        by_key: Whether ALiBi is slope * key.
    """

    addend: float = 0.0
    sink: float = 0.0
    hides: bool = False
    by_key: bool = False

    @property
    def ulps(self) -> int:
        """How many u32 of itself an addend is off by, at most; (B60)."""
        return 16 if self.by_key else 5

    @classmethod
    def of(cls, problem: Problem, terms: Terms, *, by_key: bool = False) -> Extent:
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
        return cls(addend, read.get("sink", 0.0), bool(read.get("hides")), by_key)


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """Terms of a block, float64; None where the problem has none.

    Attributes:
        addend: Of the logits, (heads, rows, keys); 0 where it hides the key.
        size: How many u32 that is off by, (heads, rows, keys); (B60).
        hides: bool, (heads, rows, keys): True where the bias hides the key.
        sink: (heads, rows).
        weights: What dropout multiplies P by, (heads, rows, keys).
    """

    addend: Tensor | None = None
    size: Tensor | None = None
    hides: Tensor | None = None
    sink: Tensor | None = None
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
        addend = size = None
        if bias is not None:
            addend, size = bias, bias.abs() * 4
        if distance is not None:
            own = distance.abs() * 5
            if extent.by_key:
                of_key, of_row = terms.positions(problem, place)
                own = 5 * of_key + 16 * of_row
            addend = distance if addend is None else addend + distance
            size = own if size is None else size + own
        sink, weights = terms.sink(problem, place), terms.weights(problem, place)
        return cls(addend, size, hides, sink, weights)

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
