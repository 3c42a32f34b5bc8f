"""Results that are a number times what they should be, and the softmax scale that lse betrays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fa_verify.diagnosis.evidence import Evidence, Observation

__all__ = ["multiples", "scale_in_lse"]

_ENOUGH = 16  # elements: through a few of them some factor always fits
_LIKE = 0.02  # how near a factor must lie to one that has a name


def multiples(
    evidence: Evidence, names: Sequence[str], scale: float
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Sentences and predictions for the one tensor among `names` that is wrong, if it is one."""
    wrong = [name for name in names if evidence.wrong(name)]
    if len(wrong) != 1:
        return
    (name,) = wrong
    seen = evidence.seen[name]
    factor = _factor(seen)
    if factor is None:
        return
    yield f"{name} is {_named(factor, scale)}", {name: seen.reference * factor}
    if seen.wrong.ndim == 4:
        columns = seen.wrong.any(dim=2).any(dim=1).any(dim=0)
        first = int(columns.nonzero()[0])
        if first and bool(columns[first:].float().mean() > 0.5):
            value = seen.reference.clone()
            value[..., first:] *= factor
            text = f"{name} is {_named(factor, scale)} in columns {first}..{len(columns) - 1} alone"
            yield text, {name: value}


def _factor(seen: Observation) -> float | None:
    """The median ratio where it is most certain: at the largest of the wrong elements."""
    usable = seen.wrong & torch.isfinite(seen.got) & torch.isfinite(seen.reference)
    usable &= seen.reference.abs() > 0
    if int(usable.sum()) < _ENOUGH:
        return None
    got, reference = seen.got[usable], seen.reference[usable]
    large = reference.abs() >= reference.abs().median()
    return float((got[large] / reference[large]).median())


def _named(factor: float, scale: float) -> str:
    known = (
        (-1.0, "negated: its sign is wrong"),
        (2.0, "twice what it should be: it is added twice, or into what was not zeroed"),
        (1 / scale if scale else math.inf, "lacking the factor softmax_scale"),
        (scale, "multiplied by softmax_scale once too often"),
    )
    for value, text in known:
        if abs(factor - value) <= _LIKE * abs(value) and abs(value - 1) > _LIKE:
            return text
    return f"{factor:.5g} times what it should be: a factor is wrong or has too few digits"


def scale_in_lse(evidence: Evidence) -> list[float]:
    """Softmax scales, other than the one asked, that give the observed lse of one row.

    lse of a row is convex in the scale, so that two scales at most fit it.
    """
    problem, lse = evidence.problem, evidence.seen.get("lse")
    if lse is None or problem.softcap:
        return []
    lo, hi = (
        torch.from_numpy(x) for x in problem.mask.intervals(problem.seqlen_q, problem.seqlen_k)
    )
    usable = lse.wrong & torch.isfinite(lse.got) & (hi > lo)
    if not bool(usable.any()):
        return []
    size = torch.where(usable, (hi - lo).expand(usable.shape), -1)
    batch, head, row = (int(i) for i in torch.unravel_index(size.argmax(), size.shape))
    keys = evidence.k[batch, head // problem.group, int(lo[row]) : int(hi[row])]
    products = keys @ evidence.q[batch, head, row]
    got = float(lse.got[batch, head, row])
    tried = torch.logspace(-4, 2, 121, dtype=torch.float64)
    tried = torch.cat([-tried.flip(0), tried])
    error = torch.logsumexp(tried[:, None] * products, dim=1) - got
    crossings = (error[:-1] * error[1:] < 0).nonzero().flatten().tolist()
    found = [_root(products, got, float(tried[i]), float(tried[i + 1])) for i in crossings]
    return [scale for scale in found if not math.isclose(scale, problem.scale, rel_tol=1e-3)]


def _root(products: torch.Tensor, got: float, low: float, high: float) -> float:
    def error(scale: float) -> float:
        return float(torch.logsumexp(scale * products, dim=0)) - got

    below = error(low) < 0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if (error(middle) < 0) == below else (low, middle)
    return (low + high) / 2
