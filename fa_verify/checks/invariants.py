"""Relations that a right result has within itself, whatever the reference says. No reruns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify.checks.observed import comparisons, empty_rows
from fa_verify.checks.where import describe
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.trial import Trial

__all__ = ["hull", "value_gradient_sum"]


def hull(trial: Trial) -> Iterator[Failure]:
    """O is a convex combination of the visible V: min V - bound <= o <= max V + bound.

    A sink's V is 0. Under dropout weights do not sum to 1, and o is nowhere in particular.

    The exact o lies in the hull, so a right kernel's lies within its bound of it; this holds even
    if the reference's softmax were wrong.
    """
    part = comparisons(trial).get("o")
    problem = trial.case.problem
    if part is None or not part.got.numel() or not problem.seqlen_k or problem.dropout:
        return
    x = trial.pristine
    _, _, v = trial.terms.operands(problem, x.q, x.k, x.v)
    v = v if problem.fp8 else v.float()  # exactly
    low, high = _extremes(v, *problem.mask.intervals(problem.seqlen_q, problem.seqlen_k))
    if problem.group > 1:
        low = low.repeat_interleave(problem.group, dim=1)
        high = high.repeat_interleave(problem.group, dim=1)
    if problem.sinks:
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    low, high = low.expand(part.got.shape), high.expand(part.got.shape)
    outside = torch.maximum(low - part.got, part.got - high)
    wrong = part.judged & (outside > part.bounded.det)
    if bool(wrong.any()):
        index = part.worst(torch.where(wrong, outside, torch.zeros_like(outside)))
        place = ", ".join(str(i) for i in index)
        yield Failure(
            check="metamorphic",
            title="o outside the hull of v",
            message=(
                f"o[{place}]: got {float(part.got[index]):.9g}, visible v lie in "
                f"[{float(low[index]):.9g}, {float(high[index]):.9g}] ± "
                f"{float(part.bounded.det[index]):.3g}; {int(wrong.sum())} of {wrong.numel()} "
                f"elements: {describe('o', wrong)}"
            ),
            tensor="o",
        )


def _extremes(v: torch.Tensor, lo: np.ndarray, hi: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest v over each row's interval of keys, (batch, heads_kv, rows or 1, dims).

    A row that does not see all of its interval lies in that hull the more.

    Running extremes where all intervals have an end in common; else a sparse table of powers of
    two: O(N log N), whatever the mask (an interval is the union of two overlapping runs of
    2^level keys).
    """
    if (lo == lo[0]).all() and (hi == hi[0]).all() and lo[0] < hi[0]:
        keys = v[:, :, int(lo[0]) : int(hi[0])]
        return keys.amin(2, keepdim=True), keys.amax(2, keepdim=True)
    if (lo == 0).all():
        last = torch.from_numpy(np.maximum(hi, 1) - 1).to(v.device)
        return v.cummin(2).values[:, :, last], v.cummax(2).values[:, :, last]
    if (hi == v.shape[2]).all():
        return _extremes(v.flip(2), np.zeros_like(lo), hi - lo)
    length = np.maximum(hi - lo, 1)
    level = np.floor(np.log2(length)).astype(np.int64)
    size = v.shape[2]
    first = np.clip(lo, 0, size - 1)
    second = np.clip(hi - (1 << level), 0, size - 1)
    least, most = v, v
    shape = (*v.shape[:2], len(lo), v.shape[3])
    low, high = v.new_zeros(shape), v.new_zeros(shape)
    for current in range(int(level.max()) + 1 if len(level) else 0):
        rows = torch.from_numpy(np.flatnonzero(level == current)).to(v.device)
        if len(rows):
            a = torch.from_numpy(first).to(v.device)[rows]
            b = torch.from_numpy(second).to(v.device)[rows]
            low[:, :, rows] = torch.minimum(least[:, :, a], least[:, :, b])
            high[:, :, rows] = torch.maximum(most[:, :, a], most[:, :, b])
        step = 1 << current
        if least.shape[2] > step:
            least = _widen(least, step, torch.minimum)
            most = _widen(most, step, torch.maximum)
    return low, high


def _widen(table: torch.Tensor, step: int, extreme: object) -> torch.Tensor:
    wide = table.clone()
    wide[:, :, :-step] = extreme(table[:, :, :-step], table[:, :, step:])  # type: ignore[operator]
    return wide


def value_gradient_sum(trial: Trial) -> Iterator[Failure]:
    """sum_j dV_j = sum_i dO_i over rows that see a key, since each row of P sums to 1.

    Tolerance: the bounds of all dV_j, plus |dO_i| expm1(bound of lse_i), because the bounds of dV
    may be conditional on the observed lse, whose rows of exp(S - lse) sum to exp(L - lse). It says
    nothing of sinks, which take a part of each row, nor of dropout.
    """
    parts, problem, do = comparisons(trial), trial.case.problem, trial.pristine.do
    part, lse = parts.get("dv"), parts.get("lse")
    if part is None or do is None or not part.got.numel() or problem.sinks or problem.dropout:
        return
    do = do.to(torch.float64)
    weight = (~empty_rows(problem, do.device)).double().expand(do.shape[:3])
    slack = lse.bounded.det if lse is not None else trial.forward_bounds[1].det
    slack = torch.where(weight > 0, torch.expm1(slack), weight)
    grouped = (problem.batch, problem.heads_kv, -1, problem.head_dim_v)
    expected = (weight[..., None] * do).reshape(grouped).sum(dim=2)
    tolerance = (slack[..., None] * do.abs()).reshape(grouped).sum(dim=2)
    tolerance = tolerance + part.bounded.det.sum(dim=2)
    got = part.got.sum(dim=2)
    error = (got - expected).abs()
    wrong = torch.isfinite(got) & (error > tolerance)
    if bool(wrong.any()) and bool(part.written.all()):
        b, h, d = (int(i) for i in wrong.nonzero()[0].tolist())
        yield Failure(
            check="metamorphic",
            title="the sum of dv differs from the sum of do",
            message=(
                f"sum over keys of dv[{b}, {h}, :, {d}]: got {float(got[b, h, d]):.9g}, "
                f"expected {float(expected[b, h, d]):.9g} ± {float(tolerance[b, h, d]):.3g} "
                f"(rows of P sum to 1); {int(wrong.sum())} of {wrong.numel()} sums"
            ),
            tensor="dv",
        )
