"""What both passes need of the inputs: float64 values by key/value head, and their ranges."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify import foreach
from fa_verify.bounds import eager, finite
from fa_verify.bounds.beside import NOTHING, Beside, Extent
from fa_verify.bounds.formats import Cast, tf32_operands
from fa_verify.bounds.model import FP8_BITS, SLACK, Model
from fa_verify.reference import by_kv_head
from fa_verify.terms import NO_TERMS, Place, Terms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from fa_verify.arithmetic import Arithmetic
    from fa_verify.problem import Problem
    from fa_verify.reference import Tile

__all__ = [
    "SMALL",
    "Block",
    "Inputs",
    "expm1_bound",
    "few_enough",
    "inputs",
    "keeps",
    "operand_models",
    "spread",
    "variants",
    "with_column",
]

# Up to it every expm1(h) is cheap to bound and 1/(1-he) is small; chosen, not critical.
SMALL = 0.25
_LOG2E = 1.45  # rounded up
_FP8_STEPS = 512.0  # in 1: e4m3's smallest subnormal is 2^-9
# Logits up to which the one tile of a problem is kept for later looks at it: some 300 MB.
_KEPT = 1 << 22


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """The operands of one tile of the logits, float64.

    Attributes:
        q: (heads, rows, head_dim); do likewise with head_dim_v, or none of it.
        k: (heads, keys, head_dim); v likewise with head_dim_v.
        hidden: bool, (rows, keys) or (heads, rows, keys): True where the row must not see the key;
            None: sees them all.
        beside: Terms.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    hidden: Tensor | None
    beside: Beside = NOTHING

    def take(self, index: Tensor) -> Block:
        """Some rows of it."""
        hidden = None if self.hidden is None else self.hidden[..., index, :]
        some = self.beside.take(index)
        return Block(self.q[:, index], self.k, self.v, self.do[:, index], hidden, some)

    def logits(self, scale: float, softcap: float) -> tuple[Tensor, Tensor | None]:
        """S, -inf where hidden, and tanh if there is a softcap; both (heads, rows, keys)."""
        s, t = torch.bmm(self.q * scale, self.k.mT), None
        if softcap:
            t = s.div_(softcap).tanh_()
            s = t * softcap
        if self.beside.addend is not None:
            s.add_(self.beside.addend)
        if self.hidden is not None:
            s.masked_fill_(self.hidden, -torch.inf)
        return s, t

    def overflows(self, model: Model) -> Tensor:
        """Where a logit or what it is made of may overflow, or hidden ones come through; (B9)."""
        raw = torch.bmm(self.q.abs(), self.k.abs().mT)
        raw.mul_(max(1.0, _LOG2E * model.scale))
        over = raw >= model.sums_largest("qk")
        if self.beside.size is not None:
            raw.add_(self.beside.size)
        over |= raw >= eager.limit(model)
        factor = _LOG2E * model.prescale
        for name in model.arithmetic.prescaled or "":
            scaled = self.q if name == "q" else self.k
            far = (scaled.abs() * factor >= model.storage.overflow).any(-1, keepdim=True)
            over |= far if name == "q" else far.mT
        through = finite.come_through(model, self)
        return over if through is None else over | through

    def logit_errors(
        self, model: Model, constant: Tensor | float, x: Tensor, per_x: float
    ) -> Tensor:
        """Errors of logits, a constant of the row, and x so many times; (B5).

        Args:
            model: Coefficients.
            constant: (heads, rows, 1), or one number.
            x: (heads, rows, keys), in the precision that the sum is wanted in.
            per_x: What x counts.
        """
        left, tiny = self.q.abs(), SLACK * model.prescale_tiny
        if "k" in (prescaled := model.arithmetic.prescaled or ""):
            constant = constant + tiny * left.sum(-1, keepdim=True)
            if prescaled == "qk":
                constant = constant + tiny * Cast(model.storage).tiny * left.shape[-1]
            else:
                tiny = 0.0
        left.mul_(SLACK * model.logit)
        left = left.add_(tiny) if tiny else left
        errors = torch.baddbmm(x, left.to(x.dtype), self.k.abs().to(x.dtype).mT, beta=per_x)
        return errors.add_(constant if isinstance(constant, float) else constant.to(x.dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """The operands of one operand model.

    Attributes:
        q: float64 (heads, group, seqlen_q, head_dim); do likewise with head_dim_v, or none of it.
        k: float64 (heads, seqlen_k, head_dim); v likewise with head_dim_v.
        raw: |q||k|^T at most, over all pairs (Cauchy-Schwarz).
        largest: Of any element of q, k.
        largest_v: Of any element of v.
        largest_do: Of any element of do; 0 without do.
        value: |do||v|^T at most, over all pairs; 0 without do.
        problem: The problem; terms: what it has beside q, k and v; extent: how far that reaches.
        whole: What the one tile of a problem has beside its operands, once it was asked for, if it
            is kept; all operand models share it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    raw: float
    largest: float
    largest_v: float
    largest_do: float
    value: float
    problem: Problem
    terms: Terms
    extent: Extent
    whole: list[tuple[Beside, Tensor | None]]

    def overflows(self, model: Model) -> bool:
        """Whether a float32 logit, or a partial sum of one, or its operand may overflow; (B9)."""
        scale = _LOG2E * model.scale
        operand = model.arithmetic.prescaled and (
            self.largest * _LOG2E * model.prescale >= model.storage.overflow
        )
        raw = self.raw * max(1.0, scale)
        furthest = raw + max(5 * self.extent.addend, self.extent.off)
        if finite.may_come_through(model, self) or furthest >= eager.limit(model):
            return True
        return bool(operand) or raw >= model.sums_largest("qk")

    def block(self, tile: Tile) -> Block:
        """The operands of one tile, the group's rows one head after the other."""
        kept = keeps(self.problem, tile)
        beside, hidden = self.whole[0] if self.whole and kept else self._around(tile)
        if not self.whole and kept:
            self.whole.append((beside, hidden))
        return Block(
            self.q[tile.heads, :, tile.rows].flatten(1, 2),
            self.k[tile.heads, tile.keys],
            self.v[tile.heads, tile.keys],
            self.do[tile.heads, :, tile.rows].flatten(1, 2),
            hidden,
            beside,
        )

    def _around(self, tile: Tile) -> tuple[Beside, Tensor | None]:
        """The terms of one tile, and what they and the mask hide."""
        hidden = None if tile.hidden is None else tile.hidden.repeat(self.q.shape[1], 1)
        if not self.problem.terms:
            return NOTHING, hidden
        beside = self.beside(Place.of(self.problem, tile, self.q.device))
        return beside, beside.hidden(hidden)

    def beside(self, place: Place) -> Beside:
        """The terms of some of the logits."""
        return Beside.of(self.problem, self.terms, place, self.extent)


def keeps(problem: Problem, tile: Tile) -> bool:
    """Whether what is found of a tile's elements is kept: later looks then take it from there."""
    return few_enough(problem) and tile.holds_all(problem)


def few_enough(problem: Problem) -> bool:
    """Whether its operands and elements may be kept."""
    return problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k <= _KEPT


def inputs(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None = None,
    *,
    terms: Terms = NO_TERMS,
    extent: Extent | None = None,
    whole: list[tuple[Beside, Tensor | None]] | None = None,
) -> Inputs:
    """Convert the operands and find their ranges (one synchronisation with the device).

    How far the terms reach is found as well, unless it is given.
    """
    q4, k4, v4 = (by_kv_head(problem, x) for x in (q, k, v))
    do4 = q4[..., :0] if do is None else by_kv_head(problem, do)
    some = [x for x in (q4, k4, v4, do4) if x.numel()]
    norms = [torch.linalg.vector_norm(x, dim=-1) for x in some]
    found = iter(torch.stack([*foreach.largest([*some, *norms])]).tolist() if some else ())
    largest = [next(found) if x.numel() else 0.0 for x in (q4, k4, v4, do4)]
    longest = [next(found) if x.numel() else 0.0 for x in (q4, k4, v4, do4)]
    return Inputs(
        q=q4,
        k=k4[:, 0],
        v=v4[:, 0],
        do=do4,
        raw=longest[0] * longest[1],
        largest=max(largest[0], largest[1]),
        largest_v=largest[2],
        largest_do=largest[3],
        value=longest[3] * longest[2],
        problem=problem,
        terms=terms,
        extent=extent or Extent.of(problem, terms),
        whole=[] if whole is None else whole,
    )


def operand_models(
    problem: Problem, arithmetic: Arithmetic, *tensors: Tensor
) -> Iterator[tuple[Model, tuple[Tensor, ...]]]:
    """Yield what the dots may read: the tensors, and each admitted rounding of tf32; (B20)."""
    yield Model(problem, arithmetic), tensors
    if problem.dot_precision != "tf32":
        return
    truncated, even, away = zip(*map(tf32_operands, tensors), strict=True)
    yield Model(problem, arithmetic, True), truncated
    yield Model(problem, arithmetic, False), even
    yield Model(problem, arithmetic, False), away


def variants(  # noqa: PLR0917 -- the operands of attention, in their usual order
    problem: Problem,
    arithmetic: Arithmetic,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None = None,
    *,
    terms: Terms = NO_TERMS,
) -> Iterator[tuple[Model, Inputs]]:
    """Yield what the dots may read, the exact operands first; (B20)."""
    if problem.fp8:
        model = Model(problem, arithmetic, exact_dots=_dots_are_exact(problem, q, k))
        yield model, inputs(problem, *terms.operands(problem, q, k, v), terms=terms)
        return
    tensors = (q, k, v) if do is None else (q, k, v, do)
    extent = Extent.of(problem, terms, arithmetic)
    whole: list[tuple[Beside, Tensor | None]] = []
    for model, operands in operand_models(problem, arithmetic, *tensors):
        yield model, inputs(problem, *operands, terms=terms, extent=extent, whole=whole)


def _dots_are_exact(problem: Problem, q: Tensor, k: Tensor) -> bool:
    """Whether 14 bits hold every partial sum of every q k^T, as fp8 is stored; (B69)."""
    if not (q.numel() and k.numel()):
        return True
    reach = problem.head_dim
    for x in (q, k):
        whole = (x.float() * _FP8_STEPS).to(torch.int32)  # of the smallest subnormal
        size, step = whole.abs(), whole & -whole  # the lowest bit that is set
        most, least = int(size.max()), int(step.masked_fill(step == 0, 1 << 20).min())
        reach *= most // least
    return reach < 1 << FP8_BITS


def with_column(x: Tensor, column: Tensor | float) -> Tensor:
    """Append a column to a (heads, rows, dim) matrix, so that a matmul adds a term per row."""
    if not isinstance(column, torch.Tensor):
        column = x.new_full((*x.shape[:-1], 1), column)
    return torch.cat((x, column.to(x.dtype)), -1)


def expm1_bound(h: Tensor) -> Tensor:
    """At least expm1(h) for 0 <= h <= 1/4: h + 0.55 h^2; (B10)."""
    return torch.addcmul(h, h, h, value=0.55)


def spread(x: Tensor, h: Tensor, hidden: Tensor | None) -> Tensor:
    """exp(x + h) - exp(x) in float64 without clamping h; inf where it overflows; (B10)."""
    high = x + h.double()
    if hidden is not None:
        high.masked_fill_(hidden, -torch.inf)
    return high.exp_().sub_(x.exp()).nan_to_num_(nan=torch.inf, posinf=torch.inf)
