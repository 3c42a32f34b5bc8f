"""Keys that a row may not see do not reach it (ARCHITECTURE.md, the kernel's contract)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify.checks.observed import comparisons
from fa_verify.checks.rerun import Difference, apart, differing, failures, outputs, screen
from fa_verify.inputs import perturb_hidden

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.arithmetic import Arithmetic
    from fa_verify.backends.base import Execution
    from fa_verify.inputs import Inputs
    from fa_verify.trial import Trial
    from fa_verify.verdict import Failure

__all__ = ["finite", "hides", "isolates_nan", "promises_isolation"]


def hides(trial: Trial) -> bool:
    """Whether the mask hides a key from some row."""
    p = trial.case.problem
    return bool((p.mask.seen(p.seqlen_q, p.seqlen_k) < p.seqlen_k).any())


def promises_isolation(trial: Trial) -> bool:
    """Whether the kernel promises that NaN at a hidden key stays there, and the mask hides one."""
    declared = trial.kernel.capabilities
    return declared is not None and declared.isolates_masked_nan and hides(trial)


def finite(trial: Trial) -> Iterator[Failure]:
    """Other finite numbers at the keys hidden from a row change nothing in that row."""
    changed, keeps = _perturbed(trial)
    yield from _unmoved(trial, changed, keeps, "hidden keys and values were changed")


def isolates_nan(trial: Trial) -> Iterator[Failure]:
    """NaN at the keys hidden from a row does not reach it: a promise that few kernels make."""
    changed, keeps = _perturbed(trial)
    x = trial.pristine
    poisoned = {
        name: torch.where(
            differing(getattr(x, name), getattr(changed, name)), torch.nan, getattr(x, name)
        )
        for name in ("k", "v")
    }
    for name, tensor in poisoned.items():
        layout_holder = getattr(changed, name)
        written = slice(0, 1) if layout_holder.stride(1) == 0 else slice(None)
        layout_holder[:, written].copy_(tensor[:, written])
    yield from _unmoved(trial, changed, keeps, "hidden keys and values were made NaN")


def _perturbed(trial: Trial) -> tuple[Inputs, torch.Tensor]:
    rng = np.random.default_rng(trial.case.seed % 2**64)
    arithmetic = trial.kernel.arithmetic
    # Eager attention stores hidden logits and their dP as well, and dots in float16 sum them so.
    stored = arithmetic.eager and trial.case.problem.dtype == "float16"
    stored = stored or arithmetic.half_dots in ("qk", "all")
    changed, keeps = perturb_hidden(
        trial.case,
        trial.pristine,
        rng,
        masked_logit=arithmetic.masked_logit,
        reach=2.0 ** (14 if stored else 112),
        prescale=_prescale(arithmetic, trial.case.problem.scale),
    )
    return dataclasses.replace(changed), keeps


def _prescale(arithmetic: Arithmetic, scale: float) -> float:
    """What k is multiplied by in its dtype; (B5)."""
    factors = {"k": abs(scale), "qk": math.sqrt(abs(scale))}
    return factors.get(arithmetic.prescaled or "", 0.0)


def _unmoved(trial: Trial, changed: Inputs, keeps: torch.Tensor, what: str) -> Iterator[Failure]:
    if not bool(keeps.any()):
        return
    again = trial.rerun(changed, backward=trial.case.backward)
    yield from screen(again, what)
    yield from _compare(trial, again, keeps, what)


def _compare(trial: Trial, again: Execution, keeps: torch.Tensor, what: str) -> Iterator[Failure]:
    """Rows of o, lse and dq: bits where the kernel is deterministic, else within twice the bound.

    dk and dv of the unchanged keys may move: rows that do see the changed keys feed them.
    """
    declared = trial.kernel.capabilities
    exact = declared is not None and declared.deterministic
    first, second = outputs(trial.execution), outputs(again)
    parts = comparisons(trial)
    found = []
    for name in ("o", "lse", "dq"):
        if name not in second or name not in parts:
            continue
        a, b = first[name], second[name]
        if exact:
            wrong, because = differing(a, b), f"{what}; a row that sees none keeps its bits"
        else:
            wrong = apart(a, b, 2 * parts[name].bounded.det)
            because = f"{what}; a row that sees none keeps its value within twice the bound"
        rows = torch.zeros_like(wrong)
        rows[:, :, keeps.to(wrong.device)] = True
        found.append(
            Difference(
                check="masking",
                title=f"hidden keys reach {name}",
                name=name,
                wrong=wrong & rows,
                runs=(a, b),
                because=because,
            )
        )
    yield from failures(found)
