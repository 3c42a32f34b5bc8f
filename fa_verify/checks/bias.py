"""Errors that lean one way over a whole tensor, though each element is within its bound."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds import FORMATS, self_normalised
from fa_verify.checks.nearest import nearest
from fa_verify.checks.observed import comparisons
from fa_verify.trial import RUN_CASES, RUN_RISK, TENSOR_RISK
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from fa_verify.checks.comparison import Comparison
    from fa_verify.trial import Trial

__all__ = ["Lean", "check", "lean"]

# Logits of the rows that count: what a right kernel may be off by takes a look at each of them (an
# H200 takes 5 s for 2^28, measured). It says as much of any rows, if it is not their errors that
# choose them.
_MOST_LOGITS = 1 << 26
_FACTOR = math.sqrt(2 * math.log(2 / TENSOR_RISK))  # lambda of (B41)


@dataclasses.dataclass(frozen=True, slots=True)
class Lean:
    """By what a tensor is off as a whole.

    Attributes:
        size: Of lse the mean error; else the part of the reference that the error is.
        allowed: What a right kernel's may be.
        rows: That it was seen in.
    """

    size: float
    allowed: float
    rows: int


def check(trial: Trial) -> Iterator[Failure]:
    """Fail where a tensor is off by a common factor (lse: by a common term), however little.

    It holds with a stated probability on cases drawn independently of any search, and counts only
    on such. Where an element is outside its bound that is said instead.
    """
    if not trial.independent:
        return
    parts = [
        _Weighed(part)
        for part in comparisons(trial).values()
        if part.bounded.bias is not None and not part.most_prob > 1 and not part.any_broken
    ]
    for suspect in _suspects(parts):
        found, part = _lean(suspect), suspect.part
        if found is None:
            continue
        what = "on average" if part.name == "lse" else "as a whole"
        size = f"{found.size:+.3g}" if part.name == "lse" else f"{1 + found.size:.6g} times"
        yield Failure(
            check="numerics",
            title=f"{part.name} leans one way",
            message=(
                f"{part.name} is {size} {what}, in {found.rows} rows; a right kernel's is off by "
                f"at most {found.allowed:.2g} "
                f"(odds for right kernels: {RUN_RISK:g} in a run of {RUN_CASES} cases)"
                f"{nearest(part)}"
            ),
            tensor=part.name,
            diagnosis=(
                ""
                if part.name == "lse"
                else f"{part.name} is {1 + found.size:.4g} times what it should be"
            ),
        )


def _suspects(parts: Sequence[_Weighed]) -> Sequence[_Weighed]:
    """The tensors whose errors are off by more than chance, in both kinds of error: rarely any."""
    for errors in (_Weighed.signed, _Weighed.moved):
        if parts:
            facts = [x for part in parts for x in _facts(errors(part))]
            read = torch.stack(facts).view(-1, 2).tolist()  # one transfer from the device
            parts = [part for part, own in zip(parts, read, strict=True) if _beyond_chance(*own)]
    return parts


def _facts(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.sum(), rows.norm()


def _beyond_chance(total: float, norm: float) -> bool:
    """`self_normalised` where nothing is fixed."""
    return abs(total) - _FACTOR * max(norm, 1e-300) > 0


class _Weighed:
    """Of a tensor: what errors are multiplied by, where they count, and their sums by rows.

    Two kinds of errors: of what was got, and by how far it is from the nearest right number.
    """

    def __init__(self, part: Comparison) -> None:
        """Weigh it; (B40)."""
        self.part = part
        self.weights, self.counted = _weights(part)

    def signed(self) -> Tensor:
        """Sums of what was got less the reference."""
        return _rows(self.weights * self.part.difference)

    def moved(self) -> Tensor:
        """Sums of what was got less the nearest right number."""
        nearest = self.part.reference.to(getattr(torch, self.part.dtype)).double()
        return _rows(self.weights * torch.where(self.counted, self.part.got - nearest, 0.0))


def lean(part: Comparison) -> Lean | None:
    """By what a tensor is off as a whole, if by more than a right kernel may be; (B40)."""
    if part.bounded.bias is None:
        return None
    return next((_lean(suspect) for suspect in _suspects([_Weighed(part)])), None)


def _lean(suspect: _Weighed) -> Lean | None:
    part, weights, rows = suspect.part, suspect.weights, (suspect.signed(), suspect.moved())
    assert part.bounded.bias is not None  # noqa: S101 -- else it is no suspect
    allowed = part.bounded.bias(weights)
    error, jump = (float(x.sum()) for x in rows)
    fixed = allowed.fixed.flatten()
    excess = min(self_normalised(x, fixed, _FACTOR) for x in rows)
    if not excess > 0 or (error > 0) != (jump > 0):
        return None
    alike = float(fixed.sum()) + _FACTOR * math.sqrt(allowed.variance())
    excess = min(excess, abs(error) - alike)
    if not excess > 0:
        return None
    of = weights if part.name == "lse" else weights * part.reference
    one = float(of[suspect.counted].sum())
    return Lean(error / one, (min(abs(error), abs(jump)) - excess) / one, int((rows[0] != 0).sum()))


def _weights(part: Comparison) -> tuple[Tensor, Tensor]:
    """What errors are multiplied by, and where they count; (B40).

    lse: all alike. Else r / (r^2 + the row's mean r^2), for which every row counts the same. Of
    very many rows only some count: see `_MOST_LOGITS`.
    """
    if part.name == "lse":
        counted = _some(part, part.judged)
        return counted.double(), counted
    size = part.reference.abs()
    counted = size >= torch.finfo(getattr(torch, part.dtype)).tiny
    if not part.plain:
        counted &= part.judged & (size < FORMATS[part.dtype].overflow)
    counted = _some(part, counted)
    value = torch.where(counted, part.reference, 0.0)
    square = value.square()
    below = square + square.mean(-1, keepdim=True)
    return (value / below).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0), counted


def _some(part: Comparison, counted: Tensor) -> Tensor:
    """Only evenly spaced rows of those that count, so many as may be looked at."""
    rows = math.prod(counted.shape[:3])
    step = -(-rows * part.bounded.terms // _MOST_LOGITS)
    if step <= 1:
        return counted
    step += 1 - step % 2  # odd, so that it meets every place of a block
    chosen = torch.zeros(rows, dtype=torch.bool, device=counted.device)
    chosen[::step] = True
    shape = (*counted.shape[:3], *(1 for _ in counted.shape[3:]))
    return counted & chosen.reshape(shape)


def _rows(x: Tensor) -> Tensor:
    return (x if x.dim() < 4 else x.sum(-1)).flatten()
