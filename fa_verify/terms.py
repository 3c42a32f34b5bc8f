"""`Terms`: what attention has beside q, k and v, as some of the logits see it.

`Place` says which of the logits: a tile, or some rows and keys of one head. Tensors of a place are
(heads, rows, keys) or (heads, rows), float64, by key/value head as everywhere in the reference.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify import sight
from fa_verify.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor

    from fa_verify.problem import Problem
    from fa_verify.sight import Tile

__all__ = ["NO_TERMS", "Place", "Terms", "summed"]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Some of the logits.

    Attributes:
        batch: Sequence of each head, (heads, 1).
        head: Its key head, (heads, 1).
        member: Of each row, which of the group's query heads it is of, (rows,).
        row: Its query, (rows,).
        keys: Which keys.
    """

    batch: Tensor
    head: Tensor
    member: Tensor
    row: Tensor
    keys: slice | Tensor

    @classmethod
    def of(cls, problem: Problem, tile: Tile, device: torch.device) -> Place:
        """A tile, the group's rows one query head after the other."""
        heads = torch.arange(tile.heads.start, tile.heads.stop, device=device)
        rows = torch.arange(tile.rows.start, tile.rows.stop, device=device)
        member = torch.arange(problem.group, device=device)
        return cls(
            *_heads(problem, heads),
            member.repeat_interleave(len(rows)),
            rows.repeat(problem.group),
            tile.keys,
        )

    @classmethod
    def some(
        cls,
        problem: Problem,
        heads: slice,
        rows: Tensor | slice,
        keys: Tensor | slice,
        device: torch.device,
    ) -> Place:
        """Some rows, of all query heads of the group, and keys of some heads.

        Args:
            problem: The problem.
            heads: Which of the batch x heads_kv key/value heads.
            rows: Which of the group * seqlen_q rows.
            keys: Which keys.
            device: Where it is judged.
        """
        every = torch.arange(problem.group * problem.seqlen_q, device=device)[rows]
        numbers = torch.arange(problem.batch * problem.heads_kv, device=device)[heads]
        length = max(1, problem.seqlen_q)
        return cls(*_heads(problem, numbers), every // length, every % length, keys)

    def part(self, problem: Problem, x: Tensor) -> Tensor:
        """The part of what is shaped as a bias: (heads, rows, keys), or 1 key for any."""
        heads = (problem.heads_kv, problem.group) if x.shape[1] > 1 else (1, 1)
        x = x.view(x.shape[0], *heads, *x.shape[2:])
        x = x[..., self.keys] if x.shape[-1] > 1 else x
        axes = (self.batch, self.head, self.member, self.row)
        return x[tuple(i if n > 1 else i * 0 for i, n in zip(axes, x.shape, strict=False))]

    def by_head(self, problem: Problem, x: Tensor) -> Tensor:
        """Numbers of query heads, for each row, (heads, rows)."""
        return x.double().view(problem.heads_kv, problem.group)[self.head, self.member]


def _heads(problem: Problem, number: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence and key head of some heads."""
    return (number // problem.heads_kv)[:, None], (number % problem.heads_kv)[:, None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Tensors that a problem has beside q, k and v; None where it has none.

    Attributes:
        bias: `Problem.shape_bias`, any dtype and strides; -inf hides a key.
        slopes: ALiBi's, (heads_q,).
        sinks: (heads_q,); -inf is none.
        dlse: Gradient of lse, (batch, heads_q, seqlen_q).
        keep: bool, (batch, heads_q, seqlen_q, seqlen_k): elements of P that dropout keeps.
        q_scale: Of an fp8 q, `Problem.shape_scale`; k_scale, v_scale likewise.
    """

    bias: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    dlse: Tensor | None = None
    keep: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def to(self, device: str) -> Terms:
        """The same on a device."""
        return Terms(**{name: None if x is None else x.to(device) for name, x in self._named()})

    def part(self, batch: slice, heads: slice, kv_heads: slice) -> Terms:
        """Those of some sequences, query heads and their key heads."""

        def cut(name: str, x: Tensor) -> Tensor:
            if name in ("slopes", "sinks"):
                return x[heads]
            # Of a bias, and of a scale, one of either may be everybody's.
            own_heads = kv_heads if name in ("k_scale", "v_scale") else heads
            axes = zip((batch, own_heads), x.shape, strict=False)
            return x[tuple(own if n > 1 else slice(None) for own, n in axes)]

        return Terms(**{name: None if x is None else cut(name, x) for name, x in self._named()})

    def _named(self) -> list[tuple[str, Tensor | None]]:
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]

    def operands(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The problem's q, k and v: exact products with their scales where they are fp8; (B68)."""
        if not problem.fp8:
            return q, k, v
        return (
            _scaled(problem, q, self.q_scale),
            _scaled(problem, k, self.k_scale),
            _scaled(problem, v, self.v_scale),
        )

    def scales(self, name: str) -> Tensor | None:
        """Those of "q", "k" or "v"."""
        return {"q": self.q_scale, "k": self.k_scale, "v": self.v_scale}[name]

    def biases(self, problem: Problem, place: Place) -> Tensor | None:
        """What the bias adds to logits."""
        return None if self.bias is None else place.part(problem, self.bias).double()

    def distances(self, problem: Problem, place: Place) -> Tensor | None:
        """What ALiBi adds to logits: -slope |diagonal - key|."""
        if self.slopes is None:
            return None
        keys = torch.arange(problem.seqlen_k, device=self.slopes.device)[place.keys]
        diagonal = sight.diagonals(problem, self.slopes.device)[place.row]
        distance = (diagonal[:, None] - keys).abs_().neg_().double()
        return place.by_head(problem, self.slopes)[..., None] * distance

    def positions(self, problem: Problem, place: Place) -> tuple[Tensor, Tensor]:
        """Slope times key, and times the diagonal, as sizes: (heads, rows, keys or 1)."""
        assert self.slopes is not None  # noqa: S101 - asked of problems that have them
        keys = torch.arange(problem.seqlen_k, device=self.slopes.device)[place.keys]
        diagonal = sight.diagonals(problem, self.slopes.device)[place.row].abs()
        slope = place.by_head(problem, self.slopes).abs_()
        return slope[..., None] * keys, (slope * diagonal).unsqueeze(-1)

    def sink(self, problem: Problem, place: Place) -> Tensor | None:
        """The sink of each row."""
        return None if self.sinks is None else place.by_head(problem, self.sinks)

    def row_gradient(self, problem: Problem, place: Place) -> Tensor | None:
        """The gradient of each row's lse."""
        if self.dlse is None:
            return None
        every = dataclasses.replace(place, keys=slice(None))
        return every.part(problem, self.dlse.unsqueeze(-1)).squeeze(-1).double()

    def weights(self, problem: Problem, place: Place) -> Tensor | None:
        """What dropout multiplies P by: 0 or 1 / (1 - dropout)."""
        if self.keep is None:
            return None
        return place.part(problem, self.keep).double().div_(1.0 - problem.dropout)


NO_TERMS = Terms()


def _scaled(problem: Problem, x: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        msg = f"fp8={problem.fp8}: terms must have q_scale, k_scale and v_scale"
        raise InvalidInputError(msg)
    if rows := problem.scaled_rows:
        scale = scale.repeat_interleave(rows, 2)[:, :, : x.shape[2]]
    return x.double() * scale.double().unsqueeze(-1)


def summed(problem: Problem, total: Tensor, part: Tensor, tile: Tile) -> None:
    """Add a tile to a tensor of `Problem.shape_bias`, summed over the axes that this has not.

    Args:
        problem: The problem.
        total: Is added to, contiguous.
        part: (heads, group * rows, keys).
        tile: Where it is.
    """
    heads = torch.arange(tile.heads.start, tile.heads.stop, device=total.device)
    batch, head = _heads(problem, heads)
    rows, keys = (s.stop - s.start for s in (tile.rows, tile.keys))
    part = part.reshape(-1, problem.group, rows, keys)
    for axis, dim in (("h", 1), ("q", 2), ("k", 3)):
        part = part if axis in problem.bias else part.sum(dim, keepdim=True)
    own = "h" in problem.bias
    of = total.view(total.shape[0], *(problem.heads_kv, problem.group) if own else (1, 1),
                    *total.shape[2:])  # fmt: skip
    of = of[:, :, :, tile.rows if "q" in problem.bias else slice(None)]
    of = of[..., tile.keys if "k" in problem.bias else slice(None)]
    at = (batch if "b" in problem.bias else batch * 0, head if own else head * 0)
    of.index_put_(tuple(i[:, 0] for i in at), part.to(total), accumulate=True)
