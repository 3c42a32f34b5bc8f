"""Two runs whose results must be related, whatever the reference says.

Tolerances are sums of the two runs' deterministic bounds, never guesses.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify import bounds
from fa_verify.checks.observed import comparisons, empty_rows
from fa_verify.checks.rerun import (
    apart,
    failures,
    generator,
    metamorphic,
    other_problem,
    outputs,
    screen,
)
from fa_verify.inputs import permute_keys
from fa_verify.inputs.buffers import overwrite
from fa_verify.layouts import BHSD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.problem import Problem
    from fa_verify.trial import Trial
    from fa_verify.verdict import Failure

__all__ = [
    "has_room_for_shift",
    "key_permutation",
    "permutable_keys",
    "row_shift",
    "values_of_one",
    "weights_sum_to_one",
]

_MAX_HEAD_DIM = 256
_LOGIT_SHIFT = 64.0  # moves exp by 2^92: a lost maximum shows


def permutable_keys(trial: Trial) -> bool:
    """Whether keys may be reordered: no mask nor what knows where a key is, and at least two."""
    p = trial.case.problem
    placed = p.mask.hides_anything or p.alibi or p.dropout > 0 or p.scaled_rows > 0
    return not placed and p.seqlen_k > 1 and p.seqlen_q > 0


def key_permutation(trial: Trial) -> Iterator[Failure]:
    """Without a mask the order of the keys does not matter, but for rounding: o and lse stay."""
    order = [int(i) for i in generator(trial).permutation(trial.case.problem.seqlen_k)]
    again = trial.rerun(permute_keys(trial.pristine, order))
    how = "keys and values permuted"
    yield from screen(again, how)
    first, second, parts = outputs(trial.execution), outputs(again), comparisons(trial)
    found = []
    for name in ("o", "lse"):
        if name in second and name in parts:
            wrong = apart(first[name], second[name], 2 * parts[name].bounded.det)
            because = f"{how}; they may differ by twice the bound"
            title = f"{name} depends on the order of the keys"
            found.append(metamorphic(title, name, wrong, (first[name], second[name]), because))
    yield from failures(found)


def weights_sum_to_one(trial: Trial) -> bool:
    """Whether each row of P does, as it meets V: a sink takes a part, and dropout scales."""
    p = trial.case.problem
    return p.seqlen_q > 0 and not (p.sinks or p.dropout)


def values_of_one(trial: Trial) -> Iterator[Failure]:
    """V = 1 gives o = 1 in every row that sees a key, within the bound for these inputs."""
    x = trial.pristine
    problem = trial.case.problem  # and its layout of v, for which the kernel is compiled
    ones = dataclasses.replace(x, v=overwrite(x.v, torch.ones_like(x.v)))
    terms = trial.terms
    if x.v_scale is not None:
        ones = ones.having({"v_scale": torch.ones_like(x.v_scale)})
        terms = dataclasses.replace(terms, v_scale=ones.v_scale)
    again = other_problem(trial, ones, problem)
    if again is None:
        return
    how = "all values set to 1"
    yield from screen(again, how)
    second = outputs(again)
    if "o" not in second:
        return
    due = (~empty_rows(problem, second["o"].device)).double()
    expected = due[:, None].expand(second["o"].shape)
    if bool((second["o"] == expected).all()):
        return
    arithmetic = trial.kernel.arithmetic
    bounded, _ = bounds.bound_forward(problem, arithmetic, ones.q, ones.k, ones.v, terms=terms)
    wrong = apart(expected, second["o"], bounded.det)
    because = f"{how}; a row of weights sums to 1"
    runs = (expected, second["o"])
    yield from failures([metamorphic("V = 1 does not give 1", "o", wrong, runs, because)])


def has_room_for_shift(trial: Trial) -> bool:
    """Whether further columns of q and k fit, and carry a representable shift of the logits.

    A sink would not move along; whether dropout keeps the same elements, nobody promised. Times
    the scales of fp8, a column is no such number.
    """
    p = trial.case.problem
    sizes = p.seqlen_q > 0 and p.seqlen_k > 0 and not (p.sinks or p.dropout or p.fp8)
    shifts = sizes and not p.softcap and 1e-3 <= abs(p.scale) <= 64
    shifts = shifts and abs(_column(p)) <= bounds.FORMATS[p.dtype].largest
    return shifts and _shifted_problem(trial) is not None


def _shifted_problem(trial: Trial) -> Problem | None:
    """The same with one more column, or as many as it takes to a head_dim that the kernel takes."""
    p, takes = trial.case.problem, trial.kernel.takes
    for multiple in (1, 8, 16, 32, 64, 128):
        wider, wider_v = (-(-(d + 1) // multiple) * multiple for d in (p.head_dim, p.head_dim_v))
        problem = dataclasses.replace(
            p,
            head_dim=min(wider, _MAX_HEAD_DIM),
            head_dim_v=min(wider_v, _MAX_HEAD_DIM),
            softmax_scale=p.scale,
            layout_q=BHSD,
            layout_k=BHSD,
            layout_v=BHSD,
        )
        fits = problem.head_dim > p.head_dim and problem.head_dim_v > p.head_dim_v
        if fits and (takes is None or takes.reason_against(problem) is None):
            return problem
    return None


def _column(problem: Problem) -> float:
    """A power of two in k that moves logits by about `_LOGIT_SHIFT`."""
    return float(2.0 ** round(math.log2(_LOGIT_SHIFT / abs(problem.scale))))


def row_shift(trial: Trial) -> Iterator[Failure]:
    """Adding a number to all logits of a row leaves o and moves lse by it.

    An extra column, 1 in q and a power of two in k, adds it exactly: both are representable in
    every dtype. v gets zero columns, so that head_dim = head_dim_v stays so.
    """
    p, x = trial.case.problem, trial.pristine
    problem = _shifted_problem(trial)
    assert problem is not None  # noqa: S101 - has_room_for_shift said so
    column = math.copysign(_column(p), _sign(trial))
    shifted = dataclasses.replace(
        x,
        q=_widened(x.q, 1.0, problem.head_dim),
        k=_widened(x.k, column, problem.head_dim),
        v=_widened(x.v, 0.0, problem.head_dim_v),
        do=None,
        dlse=None,
    )
    again = other_problem(trial, shifted, problem)
    if again is None:
        return
    moved = column * p.scale
    how = f"all logits moved by {moved:g}"
    yield from screen(again, how)
    second, first, parts = outputs(again), outputs(trial.execution), comparisons(trial)
    arithmetic, operands = trial.kernel.arithmetic, (shifted.q, shifted.k, shifted.v)
    o, lse = bounds.bound_forward(problem, arithmetic, *operands, terms=trial.terms)
    pairs = {}
    if "o" in second and "o" in parts:
        pairs["o"] = (first["o"], second["o"][..., : p.head_dim_v], o.det[..., : p.head_dim_v])
    if "lse" in second and "lse" in parts:
        pairs["lse"] = (first["lse"], second["lse"].to(torch.float64) - moved, lse.det)
    found = []
    for name, (a, b, bound) in pairs.items():
        wrong = apart(a, b, parts[name].bounded.det + bound)
        because = f"{how} (undone in lse); they may differ by the sum of the bounds"
        title = f"{name} does not follow a shift of the logits"
        found.append(metamorphic(title, name, wrong, (a, b), because))
    yield from failures(found)


def _sign(trial: Trial) -> float:
    return 1.0 if trial.case.seed % 2 else -1.0


def _widened(tensor: torch.Tensor, value: float, width: int) -> torch.Tensor:
    """One column of a value behind the others, then zeros."""
    column = torch.nn.functional.pad(tensor, (0, 1), value=value)
    return torch.nn.functional.pad(column, (0, width - column.shape[-1])).contiguous()
