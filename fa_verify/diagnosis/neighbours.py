"""Cases beside a failing one: what also fails, and what does not, tells causes apart. No torch."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from fa_verify.case import Case, Values
from fa_verify.layouts import BHSD
from fa_verify.masks import FULL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.layouts import Layout
    from fa_verify.masks import Mask
    from fa_verify.problem import Problem

__all__ = ["longer_shorter", "moderate", "simpler"]

# Two to four of the usual blocks with a tail that no block size divides, so that tails, blocks and
# diagonals are told apart; nine heads of it are 2^17 logits.
_LENGTHS = (83, 149)
_SHORT = (21, 37)  # of a case with all heads on which causes are tried in a fraction of the time
_HEADS = 3  # key heads, and query heads of each: the ways to map the ones to the others differ
_MOST_HEADS = 9
_MOST_COLUMNS = 9 * 160  # of q and k, or of v, in all heads: more take too long to execute
_FEW_COLUMNS = 32
_WITHOUT: tuple[dict[str, Any], ...] = (
    {"bias": "", "layout_bias": BHSD},
    {"alibi": False},
    {"sinks": False},
    {"dropout": 0.0},
    {"lse_grad": False},
)
_HIDES = 3  # a window is at least this much narrower than the keys


def moderate(case: Case, *, plain: bool, sequences: int = 1) -> Case:
    """A case of moderate size with the features of this one.

    Args:
        case: One that failed.
        plain: Standard normal values instead of its families; with fp8, of which dots are exact.
        sequences: As many at least as the case has, of so many, at the expense of heads.
    """
    rich = _rich(case, min(case.problem.batch, sequences))
    return rich if plain else dataclasses.replace(rich, values=case.values)


def simpler(case: Case) -> Iterator[Case]:
    """The case without each of its features."""
    p = case.problem
    least = min(p.seqlen_q, p.seqlen_k)
    changes: tuple[dict[str, Any], ...] = (
        _narrow(p),
        _lengths(p, *(_SHORT if p.seqlen_q <= p.seqlen_k else _SHORT[::-1])),
        {"batch": 1, "heads_q": p.heads_kv * (_HEADS if p.group == 1 < p.heads_kv else 1)},
        dict(item for of_one in _WITHOUT for item in of_one.items()),
        *_WITHOUT,
        {"mask": FULL},
        {"softcap": 0.0},
        {"fp8": "tensor" if p.fp8 else ""},
        {"layout_q": BHSD, "layout_k": BHSD, "layout_v": BHSD, "layout_do": BHSD},
        {"softmax_scale": None},
        {"mask": dataclasses.replace(p.mask, alignment="bottom-right")},
        {"mask": dataclasses.replace(p.mask, documents=())},
        {"mask": dataclasses.replace(p.mask, pattern="")},
        _lengths(p, least, least),
        {"head_dim_v": p.head_dim},
        _apart(),
        _lengths(p, 64, 128),
    )
    for change in changes:
        problem = dataclasses.replace(p, **change)
        if problem != p:
            yield dataclasses.replace(case, problem=problem)


def longer_shorter(case: Case) -> Iterator[Case]:
    """The case with a key more, a key less and a row more."""
    p = case.problem
    for rows, keys in ((0, 1), (0, -1), (1, 0)):
        if p.seqlen_k + keys > 0:
            changes = _lengths(p, p.seqlen_q + rows, p.seqlen_k + keys)
            problem = dataclasses.replace(p, **changes)  # type: ignore[arg-type]
            yield dataclasses.replace(case, problem=problem)


def _lengths(p: Problem, seqlen_q: int, seqlen_k: int) -> dict[str, object]:
    mask = p.mask.resized(seqlen_q, seqlen_k)
    return {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "mask": mask}


def _narrow(p: Problem) -> dict[str, int]:
    """One head of few columns, on which a cause is tried in a fraction of the time."""
    columns = {name: min(getattr(p, name), _FEW_COLUMNS) for name in ("head_dim", "head_dim_v")}
    return {"batch": 1, "heads_q": 1, "heads_kv": 1, **columns}


def _apart() -> dict[str, Layout]:
    """Layouts of which no two share a stride, so that whose were used shows."""
    return {
        "layout_q": dataclasses.replace(BHSD, pad=(0, 0, 16, 0)),
        "layout_k": dataclasses.replace(BHSD, pad=(0, 0, 8, 0)),
        "layout_v": dataclasses.replace(BHSD, order="bshd", pad=(0, 0, 24, 0)),
        "layout_do": dataclasses.replace(BHSD, order="bshd", pad=(0, 0, 40, 0)),
    }


def _rich(case: Case, sequences: int) -> Case:
    p = case.problem
    short, long = _LENGTHS
    lengths = (long, short) if p.seqlen_q > p.seqlen_k else (short, long)
    most = max(1, min(_MOST_HEADS, 2 * _MOST_COLUMNS // (p.head_dim + p.head_dim_v)))
    heads = max(1, most // sequences)
    group, heads_kv = min(p.group, _HEADS), min(p.heads_kv, _HEADS)
    while heads_kv * group > heads:
        group, heads_kv = (group - 1, heads_kv) if group >= heads_kv else (group, heads_kv - 1)
    usual = p.head_dim**-0.5
    scale = p.softmax_scale
    if scale is not None and not 0.25 <= abs(scale) / usual <= 4:  # weights alike, or all but one 0
        scale = math.copysign(1.5 * usual, scale)
    problem = dataclasses.replace(
        p,
        softmax_scale=scale,
        batch=min(p.batch, max(1, most // (heads_kv * group))),
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        mask=_narrowed(p.mask.resized(*lengths), lengths[1] - _HIDES),
    )
    logits = case.values.logits if case.values.logits < 16 else 1.0
    values = Values(logits=logits, scales="coarse" if p.fp8 else Values().scales)
    return dataclasses.replace(case, problem=problem, values=values)


def _narrowed(mask: Mask, most: int) -> Mask:
    sides = (mask.window_left, mask.window_right)
    left, right = (side if side is None else min(side, most) for side in sides)
    return dataclasses.replace(mask, window_left=left, window_right=right)
