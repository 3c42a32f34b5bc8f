"""Where NaN and inf are right, and where not; what fully masked rows hold."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify import sight
from fa_verify.checks.observed import comparisons, empty_rows
from fa_verify.checks.where import describe
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.checks.comparison import Comparison
    from fa_verify.trial import Trial

__all__ = ["check"]


def check(trial: Trial) -> Iterator[Failure]:
    """Judge every NaN, every inf, and every fully masked row.

    * An element without a bound (det = inf: an overflow that the arithmetic allows) may hold
      anything; it is counted as inconclusive elsewhere.
    * inf is right where the reference overflows the output format, with the reference's sign.
    * A fully masked row has o = 0, dq = 0 and the declared lse (-inf unless declared otherwise);
      with a sink its lse is judged like any other.
    * Everything else is a finite number.
    """
    for part in comparisons(trial).values():
        yield from _numbers(trial, part)
        if part.name in ("o", "lse", "dq"):
            yield from _empty_rows(trial, part)


def _numbers(trial: Trial, part: Comparison) -> Iterator[Failure]:
    if not part.any_broken:
        return
    for what, where in (("NaN", torch.isnan(part.got)), ("inf", torch.isinf(part.got))):
        wrong = where & part.broken
        if bool(wrong.any()):
            failure = _failure(part, wrong, what, f"{part.name} has {what}")
            yield _born(trial, failure) if what == "NaN" else failure


def _born(trial: Trial, failure: Failure) -> Failure:
    """The failure with the line where the NaN was born, if the backend knows it."""
    births = [note for note in trial.execution.notes if note.kind == "nan-born"]
    if not births:
        return failure
    own = [note for note in births if failure.tensor in note.argument.lower().split("_")]
    note = (own or births)[0]
    return dataclasses.replace(
        failure,
        message=f"{failure.message}; {note.kernel}: {note.detail}",
        location=f"{note.file}:{note.line}",
        source=note.source.strip(),
    )


def _empty_rows(trial: Trial, part: Comparison) -> Iterator[Failure]:
    if not sight.any_blind(trial.case.problem):
        return
    rows = empty_rows(trial.case.problem, part.got.device)
    empty = rows.view(-1, *[1] * (part.got.dim() - 3))
    if part.name == "lse":  # a sink is a number like any other
        empty = empty & part.reference.isneginf()
    due = 0.0
    if part.name == "lse" and trial.kernel.capabilities is not None:
        due = trial.kernel.capabilities.empty_row_lse
    elif part.name == "lse":
        due = -math.inf
    right = torch.isnan(part.got) if math.isnan(due) else part.got == due
    wrong = empty & part.written & ~right
    if bool(wrong.any()):
        title = f"{part.name} of a fully masked row is not {due:g}"
        yield _failure(part, wrong, f"{due:g} due", title)


def _failure(part: Comparison, wrong: torch.Tensor, what: str, title: str) -> Failure:
    index = part.worst(wrong.to(torch.float64))
    place = ", ".join(str(i) for i in index)
    return Failure(
        check="nonfinite",
        title=title,
        message=(
            f"{part.name}[{place}]: got {float(part.got[index]):.9g}, "
            f"expected {float(part.reference[index]):.9g}; {what} in {int(wrong.sum())} of "
            f"{wrong.numel()} elements: {describe(part.name, wrong)}"
        ),
        tensor=part.name,
    )
