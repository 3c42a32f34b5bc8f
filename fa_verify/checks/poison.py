"""What nobody owns holds something else, and nothing may change: no result depends on it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from fa_verify.checks.observed import compare, comparisons
from fa_verify.checks.rerun import Difference, agree, differing, failures, outputs, screen
from fa_verify.inputs import with_slack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.trial import Trial
    from fa_verify.verdict import Failure

__all__ = ["between_fences", "other_poison"]

# Finite in every dtype, and large beside the elements of most value families: who adds it, takes a
# maximum with it or weighs it returns something else.
_SLACK = 240.0


def between_fences(trial: Trial) -> bool:
    """Whether the kernel ran between fences whose poison is NaN."""
    fence = trial.setup.fence
    card = trial.setup.backend == "cuda" and trial.case.problem.seqlen_q > 0
    return card and fence.mode != "off" and not fence.finite


def other_poison(trial: Trial) -> Iterator[Failure]:
    """A second run with large finite numbers where NaN was: a NaN may be dropped on its way.

    Pages lie at the other end of tensors then. That may move bits (a library's choice of algorithm
    follows alignment); so where bits moved, the finite poison is compared with the NaN in the same
    place. A kernel that promises no bits is held to its bound.
    """
    fence = dataclasses.replace(trial.setup.fence, finite=True)
    if fence.mode == "page":
        fence = dataclasses.replace(fence, start=not fence.start)
    how = "large finite numbers in the slack and in what nobody wrote"
    backward = trial.case.backward
    slack = with_slack(trial.pristine, _SLACK)
    again = trial.rerun(slack, backward=backward, fence=fence)
    yield from screen(again, how)
    second = outputs(again)
    if all(agree(outputs(trial.execution), second).values()):
        return
    fence = dataclasses.replace(fence, finite=False)
    first = outputs(trial.rerun(trial.pristine, backward=backward, fence=fence))
    same = agree(first, second)
    exact = trial.kernel.capabilities is not None and trial.kernel.capabilities.deterministic
    same_forward = all(same.get(name, True) for name in ("o", "lse"))
    found = []
    for name, part in comparisons(trial).items():
        if same.get(name, True) or not (exact or same_forward or name in ("o", "lse")):
            continue
        wrong = differing(first[name], second[name])
        if not exact:
            judged = compare(trial, name, second[name], part.bounded, conditional=part.conditional)
            wrong = (judged.ratio > 1) | judged.broken
        found.append(
            Difference(
                check="memory",
                title=f"{name} depends on memory that is nobody's",
                name=name,
                wrong=wrong,
                runs=(first[name], second[name]),
                because=f"{how}, NaN before",
            )
        )
    yield from failures(found)
