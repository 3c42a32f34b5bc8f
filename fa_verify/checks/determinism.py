"""The same launch again, and the same programs in another order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.checks.observed import compare, comparisons
from fa_verify.checks.rerun import (
    Difference,
    agree,
    apart,
    differing,
    failures,
    outputs,
    screen,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from fa_verify.trial import Trial
    from fa_verify.verdict import Failure

__all__ = ["repeated", "reversed_order", "schedulable", "shuffled_order"]


def schedulable(trial: Trial) -> bool:
    """Whether the backend lets the order of the programs be chosen (the CPU does)."""
    return trial.setup.backend == "cpu" and trial.setup.schedule == "forward"


def repeated(trial: Trial) -> Iterator[Failure]:
    """The same launch once more."""
    yield from _again(trial, "the same launch again")


def reversed_order(trial: Trial) -> Iterator[Failure]:
    """The programs from last to first."""
    yield from _again(trial, "programs in reverse order", schedule="reverse")


def shuffled_order(trial: Trial) -> Iterator[Failure]:
    """The programs in an order drawn from the case's seed."""
    seed = trial.case.seed % 2**32
    yield from _again(trial, "programs in shuffled order", schedule=f"shuffled:{seed}")


def _again(trial: Trial, how: str, **setup: str) -> Iterator[Failure]:
    """Same bits where the kernel is deterministic; else the second run lies within its bounds too.

    A kernel with atomics sums dq in another order each time: each sum is judged by itself, and the
    two may differ by what their order explains (B50). Gradients are judged only when o and lse came
    out the same, since their bounds are conditional on them.
    """
    first = outputs(trial.execution)
    again = trial.rerun(trial.pristine, backward=trial.case.backward, **setup)  # type: ignore[arg-type]
    yield from screen(again, how)
    second = outputs(again)
    declared = trial.kernel.capabilities
    exact = declared is not None and declared.deterministic
    same = agree(first, second)
    same_forward = all(same.get(name, True) for name in ("o", "lse"))
    found = []

    def note(name: str, title: str, wrong: torch.Tensor, why: str) -> None:
        runs, because = (first[name], second[name]), f"{how}; {why}"
        found.append(
            Difference(
                check="determinism",
                title=title,
                name=name,
                wrong=wrong,
                runs=runs,
                because=because,
            )
        )

    for name, part in comparisons(trial).items():
        if same.get(name, True):  # within its bound too, as the first run is
            continue
        a, b = first[name], second[name]
        if exact:
            why = "the kernel is declared deterministic"
            note(name, f"{name} differs between runs", differing(a, b), why)
        elif same_forward or name in ("o", "lse"):
            judged = compare(trial, name, b, part.bounded, conditional=part.conditional)
            wrong = (judged.ratio > 1) | judged.broken
            note(name, f"{name} leaves its bound when run again", wrong, "it leaves its bound")
            if name == "dq" and trial.kernel.arithmetic.dq_atomics and part.conditional:
                why = "sums by atomics may differ by what their order explains"
                title = "dq differs by more than its order explains"
                note(name, title, apart(a, b, trial.dq_spread), why)
    yield from failures(found)
