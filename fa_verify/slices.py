"""A run too large to be judged at once, judged in parts: some sequences, or some heads, each."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING

import msgspec

from fa_verify import checks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.checks import TensorStats
    from fa_verify.problem import Problem
    from fa_verify.trial import Trial
    from fa_verify.verdict import Failure

__all__ = ["MOST", "judge", "needed", "places"]

MOST = 1 << 26
"""Elements of a tensor that are judged at once: some 30 float64 tensors of them are 16 GB."""


def needed(problem: Problem) -> bool:
    """Whether a problem is larger than what is judged at once."""
    return problem.batch * _sequence(problem) > MOST and problem.batch * problem.heads_kv > 1


def places(problem: Problem) -> Iterator[tuple[slice, slice]]:
    """Cut a problem into sequences and key heads, each part at most `MOST` if a head is."""
    sequence = _sequence(problem)
    batches = max(1, MOST // sequence)
    heads = max(1, min(problem.heads_kv, MOST * problem.heads_kv // sequence))
    for b in range(0, problem.batch, batches):
        for h in range(0, problem.heads_kv, heads):
            yield (
                slice(b, min(problem.batch, b + batches)),
                slice(h, min(problem.heads_kv, h + heads)),
            )


def _sequence(p: Problem) -> int:
    """Elements of one sequence, in the largest tensor."""
    rows = max(p.heads_q * p.seqlen_q, p.heads_kv * p.seqlen_k)
    return max(1, rows * max(p.head_dim, p.head_dim_v))


def judge(trial: Trial) -> tuple[tuple[Failure, ...], dict[str, TensorStats]]:
    """Every element of the run against its bound, part by part; it is not run again.

    A failure says in which part it was seen first, and in how many parts in all.
    """
    failures = [failure for check in checks.WHOLE for failure in check(trial)]
    found: dict[tuple[str, str, str], list[Failure]] = {}
    stats: dict[str, list[tuple[TensorStats, int, int]]] = {}
    comparable = not any(failure.check == "contract" for failure in failures)
    if trial.execution.outputs is not None and comparable:
        for batch, heads in places(trial.case.problem):
            part = trial.part(batch, heads)
            for failure in (f for check in checks.WITHIN for f in check(part)):
                where = f"in sequences {_text(batch)}, key heads {_text(heads)}: "
                placed = dataclasses.replace(failure, message=where + failure.message)
                found.setdefault(failure.key, []).append(placed)
            for name, one in checks.statistics(part).items():
                first = heads.start * (1 if name in ("dk", "dv") else part.case.problem.group)
                stats.setdefault(name, []).append((one, batch.start, first))
    for same in found.values():
        more = f"; likewise in {len(same) - 1} more parts of the run" if len(same) > 1 else ""
        failures.append(dataclasses.replace(same[0], message=same[0].message + more))
    return tuple(failures), {name: _joined(parts) for name, parts in stats.items()}


def _text(part: slice) -> str:
    return f"{part.start}..{part.stop - 1}"


def _joined(parts: list[tuple[TensorStats, int, int]]) -> TensorStats:
    """What is said of a tensor, from its parts; the median is that of the parts' medians."""
    every = [one for one, _, _ in parts]
    worst, batch, head = max(parts, key=lambda part: part[0].ratio)
    elements = sum(one.elements for one in every)
    place = worst.worst
    return msgspec.structs.replace(
        worst,
        elements=elements,
        inconclusive=sum(one.inconclusive for one in every),
        ratio_prob=max(one.ratio_prob for one in every),
        ratio_median=statistics.median(one.ratio_median for one in every),
        ulp=max(one.ulp for one in every),
        bias=sum(one.bias * one.elements for one in every) / max(1, elements),
        worst=(place[0] + batch, place[1] + head, *place[2:]) if place else (),
    )
