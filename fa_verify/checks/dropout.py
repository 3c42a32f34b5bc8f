"""What a kernel says that dropout keeps: a share of 1 - p, drawn anew for each element and seed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fa_verify import sight
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from fa_verify.problem import Problem
    from fa_verify.trial import Trial

__all__ = ["check"]

_RISK = 1e-18
"""Of a false alarm by each look (B66): in a run of a million cases they add nothing to RUN_RISK."""
_RESOLUTION = 2.0**-8
"""How far a kernel's probability may be from p: the usual coarsest threshold is a byte."""


def check(trial: Trial) -> Iterator[Failure]:
    """Fail where the share of kept elements is not 1 - p, or where draws repeat.

    Results are judged beside the elements that the kernel itself says it keeps (docs/bounds.md,
    B62), so what it says must be a draw. The odds are those of independent elements, and count only
    on cases that were drawn independently of any search. Repetition is looked for where every query
    sees every key: of others a kernel may say what it likes.
    """
    problem, keep, states = trial.case.problem, trial.terms.keep, trial.kernel.dropout_keep
    if keep is None or states is None or not trial.independent or not keep.numel():
        return
    yield from _share(problem, keep)
    if problem.mask.hides_anything:
        return
    heads = keep.flatten(0, 1)
    for name, units, last in (
        ("heads", heads.flatten(1), ()),
        ("rows", keep.flatten(0, 2), (problem.seqlen_q,)),
        ("keys", heads.mT.flatten(0, 1), (problem.seqlen_k,)),
    ):
        pair = _alike(problem, units)
        if pair is not None:
            first, second = (
                tuple(int(i) for i in torch.unravel_index(at, (*keep.shape[:2], *last)))
                for at in pair
            )
            yield _failure(
                f"dropout keeps the same in different {name}",
                f"{first} and {second} of {', '.join(('(batch', 'head', name)[: 2 + len(last)])}) "
                f"agree in all of {units.shape[1]} elements",
            )
    seed = trial.pristine.dropout_seed
    assert seed is not None  # noqa: S101 -- else nothing is kept
    other = states(problem, seed ^ 1, trial.device)
    if torch.equal(keep, other) and _agree(problem) * keep.numel() < math.log(_RISK):
        yield _failure("dropout ignores its seed", f"seeds {seed} and {seed ^ 1} keep the same")


def _share(problem: Problem, keep: Tensor) -> Iterator[Failure]:
    """By Chernoff's bound: n elements keep a share f, or a stranger one, with exp(-n KL(f, q))."""
    mask, size = problem.mask, (problem.seqlen_q, problem.seqlen_k)
    n = int(mask.seen(*size).sum()) * problem.batch * problem.heads_q
    due = 1.0 - problem.dropout
    if not n:
        return
    if mask.hides_anything:
        keep = keep & ~sight.hidden(problem, slice(None), slice(None), keep.device)
    got = int(keep.count_nonzero()) / n
    nearest = min(max(got, due - _RESOLUTION), due + _RESOLUTION)
    odds = math.log(2.0) - n * _divergence(got, nearest)
    if odds < math.log(_RISK):
        yield _failure(
            "dropout keeps another share",
            f"{got:.6f} of {n} elements are kept, due are {due:.6f} (log of the odds: {odds:.0f})",
        )


def _divergence(f: float, q: float) -> float:
    """Of two Bernoulli distributions, f from q."""
    if f == q:
        return 0.0
    if not 0.0 < q < 1.0:
        return math.inf
    parts = ((f, q), (1.0 - f, 1.0 - q))
    return sum(a * math.log(a / b) for a, b in parts if a > 0.0)


def _agree(problem: Problem) -> float:
    """Log of the odds, at most, that two draws agree."""
    rarer = max(0.0, min(problem.dropout, 1.0 - problem.dropout) - _RESOLUTION)
    return math.log(rarer**2 + (1.0 - rarer) ** 2)


def _alike(problem: Problem, units: Tensor) -> Tensor | None:
    """Two of the units that agree in every element, unless chance may have made them."""
    count, size = units.shape
    if 2.0 * math.log(max(count, 1)) + size * _agree(problem) >= math.log(_RISK):
        return None
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(1 << 62), 1 << 62, (size,), generator=generator)
    sums = (units * weights.to(units.device)).sum(-1)  # wraps, and is exact
    order = sums.argsort()
    same = (sums[order][1:] == sums[order][:-1]).nonzero().flatten()
    for at in same.tolist():
        pair = order[at : at + 2]
        if torch.equal(units[pair[0]], units[pair[1]]):
            return pair
    return None


def _failure(title: str, message: str) -> Failure:
    return Failure(check="dropout", title=title, message=message)
