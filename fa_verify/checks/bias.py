"""Errors that lean one way over a whole tensor, though each element is within its bound."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify.bounds import self_normalised
from fa_verify.checks.comparison import Comparison, comparisons
from fa_verify.checks.nearest import nearest
from fa_verify.trial import RUN_CASES, RUN_RISK, TENSOR_RISK
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

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
        part
        for part in comparisons(trial).values()
        if part.bounded.bias is not None and not part.most_prob > 1 and not part.any_broken
    ]
    for part in _suspects(parts):
        found = lean(part)
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


def _suspects(parts: list[Comparison]) -> list[Comparison]:
    """The tensors whose errors are off by more than chance: cheap, and nearly always none."""
    if not parts:
        return []
    beyond = [torch.stack([_beyond_chance(rows) for rows in _sums(part).rows]) for part in parts]
    read = torch.stack(beyond).tolist()  # one transfer from the device
    return [part for part, both in zip(parts, read, strict=True) if all(x > 0 for x in both)]


def _beyond_chance(rows: Tensor) -> Tensor:
    """`self_normalised` where nothing is fixed."""
    return rows.sum().abs().sub(rows.norm().clamp(min=1e-300), alpha=_FACTOR)


@dataclasses.dataclass(frozen=True, slots=True)
class _Sums:
    """Of a tensor: what errors are multiplied by, where they count, and their sums by rows.

    Two kinds of errors: of what was got, and by how far it is from the nearest right number.
    """

    weights: Tensor
    counted: Tensor
    rows: tuple[Tensor, Tensor]


def _sums(part: Comparison) -> _Sums:
    nearest = part.reference.to(getattr(torch, part.dtype)).double()
    weights, counted = _weights(part, nearest)
    signed = torch.where(counted, part.got - part.reference, 0.0)
    moved = torch.where(counted, part.got - nearest, 0.0)
    return _Sums(weights, counted, (_rows(weights * signed), _rows(weights * moved)))


def lean(part: Comparison) -> Lean | None:
    """By what a tensor is off as a whole, if by more than a right kernel may be; (B40)."""
    if part.bounded.bias is None or not _suspects([part]):
        return None
    sums = _sums(part)
    weights, rows = sums.weights, sums.rows
    allowed = part.bounded.bias(weights)
    error, jump = (float(x.sum()) for x in rows)
    fixed = allowed.fixed.flatten()
    alike = float(fixed.sum()) + _FACTOR * math.sqrt(allowed.variance)
    excess = min(*(self_normalised(x, fixed, _FACTOR) for x in rows), abs(error) - alike)
    if not excess > 0 or (error > 0) != (jump > 0):
        return None
    of = weights if part.name == "lse" else weights * part.reference
    one = float(of[sums.counted].sum())
    return Lean(error / one, (min(abs(error), abs(jump)) - excess) / one, int((rows[0] != 0).sum()))


def _weights(part: Comparison, nearest: Tensor) -> tuple[Tensor, Tensor]:
    """What errors are multiplied by, and where they count; (B40).

    lse: all alike. Else r / (r^2 + the row's mean r^2), for which every row counts the same. Of
    very many rows only some count: see `_MOST_LOGITS`.
    """
    if part.name == "lse":
        counted = _some(part, part.judged)
        return counted.double(), counted
    normal = part.reference.abs() >= torch.finfo(getattr(torch, part.dtype)).tiny
    counted = _some(part, part.judged & normal & nearest.isfinite())
    size = torch.where(counted, part.reference, 0.0)
    square = size.square()
    below = square + square.mean(-1, keepdim=True)
    return torch.where(counted, size / below, 0.0).nan_to_num(posinf=0.0, neginf=0.0), counted


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
