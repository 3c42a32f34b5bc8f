"""Right kernels in slow motion that attend to parts of the keys and merge what they stored."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch.nn.functional import logsigmoid

from fa_verify import Arithmetic

from .whole_rows import Algorithm, kernel, zeroed


@dataclasses.dataclass(frozen=True)
class _InTurn(Algorithm):
    """Parts joined one after the other, as on a ring of devices or chunk by chunk.

    "stored": the o of a part, and of what is joined again, is in the inputs' dtype.
    """

    parts: int = 8
    stored: bool = False

    def _attend(self, rows):
        n = rows.s.shape[-1]
        size = max(1, -(-n // self.parts))
        cuts = [slice(i, min(n, i + size)) for i in range(0, n, size)] or [slice(0, 0)]
        o = lse = None
        for keys in cuts:
            part = rows.cut(keys)
            own, of_own = self._finished(part, self._leaf(part))
            own = self._kept(rows, torch.where(of_own == -math.inf, 0.0, own))
            o, lse = (
                (own, of_own) if o is None else self._joined(self._kept(rows, o), lse, own, of_own)
            )
        if rows.sink is not None:
            o, lse = self._joined(self._kept(rows, o), lse, 0 * o, rows.sink)
        return o, lse

    def _kept(self, rows, o):
        return o.to(getattr(torch, rows.problem.dtype)).float() if self.stored else o

    def _joined(self, o, lse, own, of_own):
        top = zeroed(torch.maximum(lse, of_own))
        both = top + (self._exp(lse - top) + self._exp(of_own - top)).log()
        finite = zeroed(both)
        return self._exp(lse - finite) * o + self._exp(of_own - finite) * own, both


@dataclasses.dataclass(frozen=True)
class _Sigmoid(_InTurn):
    """As ring-flash-attention joins them."""

    def _joined(self, o, lse, own, of_own):
        none, alone = of_own == -math.inf, lse == -math.inf
        below = torch.where(none | alone, 0.0, of_own - lse)
        joined = o - torch.sigmoid(below) * (o - own)
        both = zeroed(lse) - logsigmoid(-below)
        joined = torch.where(none, o, torch.where(alone, own, joined))
        return joined, torch.where(none, lse, torch.where(alone, of_own, both))


ring = kernel("ring", _InTurn(), Arithmetic(merges=8))
chunks_in_turn = kernel(
    "chunks_in_turn", _InTurn(parts=24, stored=True), Arithmetic(merges=24, part_dtype="input")
)
two_stored_parts = kernel(
    "two_stored_parts",
    _InTurn(parts=2, stored=True),
    Arithmetic(merged_by_lse=True, part_dtype="input"),
    sinks=False,
)
sigmoid_ring = kernel("sigmoid_ring", _Sigmoid(), Arithmetic(merges=8, merged_by_sigmoid=True))
