"""Results that are a number times what they should be, and the softmax scale that lse betrays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fa_verify.diagnosis.evidence import Evidence, Observation
    from fa_verify.problem import Problem

__all__ = ["fitted", "multiples", "scale_in_lse"]

_ENOUGH = 16  # elements: through a few of them some factor always fits
_LIKE = 0.02  # how near a factor must lie to one that has a name


_SETS = (
    ("o",),
    ("lse",),
    ("dq",),
    ("dk",),
    ("dv",),
    ("dk", "dv"),
    ("dq", "dk"),
    ("dq", "dk", "dv"),
)


def multiples(
    group: int, right: dict[str, torch.Tensor]
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Sentences and predictions of results that are a known number times what they should be.

    Args:
        group: Query heads of a key head.
        right: What a right kernel writes.
    """
    known = [
        (-1.0, "negated: the sign is wrong"),
        (2.0, "twice what is due: added twice, or into what was not zeroed"),
    ]
    if group > 1:
        known.append((1 / group, "divided by the group's size: a mean where a sum is due"))
    for some in _SETS:
        if set(some) <= set(right):
            for factor, text in known:
                verb = "is" if len(some) == 1 else "are"
                yield f"{_listed(some)} {verb} {text}", right | {n: right[n] * factor for n in some}


def fitted(
    evidence: Evidence, names: Sequence[str], right: dict[str, torch.Tensor]
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """The same with the number that fits the results, for those tensors that are wrong."""
    wrong = [name for name in names if evidence.wrong(name)]
    factors = [_factor(evidence.seen[name], right[name]) for name in wrong]
    found = [factor for factor in factors if factor is not None]
    if not found or len(found) < len(wrong):
        return
    factor = found[0]
    if any(abs(other - factor) > _LIKE * abs(factor) for other in found):
        return
    verb = "is" if len(wrong) == 1 else "are"
    text = f"{factor:.5g} times what is due: a factor is wrong or has too few digits"
    values = {name: right[name] * factor for name in wrong}
    yield f"{_listed(wrong)} {verb} {text}", values
    seen = evidence.seen[wrong[0]]
    if len(wrong) == 1 and seen.wrong.ndim == 4:
        columns = seen.wrong.any(dim=2).any(dim=1).any(dim=0)
        first = int(columns.nonzero()[0])
        if first and abs(factor) > _LIKE and bool(columns[first:].float().mean() > 0.5):
            value = right[wrong[0]].clone()
            value[..., first:] *= factor
            tail = f"columns {first}..{len(columns) - 1} of {wrong[0]} alone are"
            yield f"{tail} {_tail(factor, evidence.problem)}", {wrong[0]: value}


def _tail(factor: float, problem: Problem) -> str:
    if problem.scale and abs(factor * problem.scale - 1) <= _LIKE:
        return "lacking the factor softmax_scale"
    return f"{factor:.5g} times what is due"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(", ".join(names).rsplit(", ", 1))


def _factor(seen: Observation, right: torch.Tensor) -> float | None:
    """The median ratio where it is most certain: at the largest of the wrong elements."""
    usable = seen.wrong & torch.isfinite(seen.got) & torch.isfinite(right) & (right.abs() > 0)
    if int(usable.sum()) < _ENOUGH:
        return None
    got, reference = seen.got[usable], right[usable]
    large = reference.abs() >= reference.abs().median()
    return float((got[large] / reference[large]).median())


def scale_in_lse(evidence: Evidence) -> list[float]:
    """Softmax scales, other than the one asked, that give the observed lse of one row.

    Without a softcap, lse of a row is convex in the scale, so that two scales at most fit it.
    """
    problem, lse = evidence.problem, evidence.seen.get("lse")
    if lse is None or problem.terms:  # other logits, or another sum
        return []
    seen = torch.from_numpy(problem.mask.seen(problem.seqlen_q, problem.seqlen_k))
    usable = lse.wrong & torch.isfinite(lse.got) & (seen > 0)
    if not bool(usable.any()):
        return []
    size = torch.where(usable, seen.expand(usable.shape), -1)
    batch, head, row = (int(i) for i in np.unravel_index(int(size.argmax()), size.shape))
    (allowed,) = problem.mask.allowed(problem.seqlen_q, problem.seqlen_k, slice(row, row + 1))
    keys = evidence.k[batch, head // problem.group, torch.from_numpy(allowed)]
    products = keys @ evidence.q[batch, head, row]
    got = float(lse.got[batch, head, row])
    tried = torch.logspace(-4, 2, 121, dtype=torch.float64)
    tried = torch.cat([-tried.flip(0), tried])
    error = _lse(tried[:, None] * products, problem) - got
    crossings = (error[:-1] * error[1:] < 0).nonzero().flatten().tolist()

    def far(scale: float) -> float:
        return float(_lse(scale * products, problem)) - got

    found = [_root(far, float(tried[i]), float(tried[i + 1])) for i in crossings]
    return [scale for scale in found if not math.isclose(scale, problem.scale, rel_tol=1e-3)]


def _lse(scores: torch.Tensor, problem: Problem) -> torch.Tensor:
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    return torch.logsumexp(scores, dim=-1)


def _root(far: Callable[[float], float], low: float, high: float) -> float:
    below = far(low) < 0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if (far(middle) < 0) == below else (low, middle)
    return (low + high) / 2
