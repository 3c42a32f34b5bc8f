"""`verify`: one kernel, one case, one record. The only module that knows the order of the steps."""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fa_verify import checks, diagnosis, slices
from fa_verify.capabilities import Capabilities
from fa_verify.checks.rerun import refused
from fa_verify.record import CaseRecord, FailureRecord
from fa_verify.trial import Trial
from fa_verify.verdict import Failure, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.backends.base import Backend, Execution, Setup
    from fa_verify.case import Case
    from fa_verify.kernel import Kernel

__all__ = ["replay_line", "verify"]


def verify(
    case: Case,
    kernel: Kernel,
    setup: Setup,
    backend: Backend,
    *,
    independent: bool = True,
    explain: bool = False,
    others: Sequence[Case] = (),
) -> CaseRecord:
    """Run a kernel on a case, check it, and say what was found.

    Args:
        case: What to compute.
        kernel: What computes it.
        setup: How it is run.
        backend: What runs it.
        independent: The case was drawn independently of any search, so that the probabilistic
            bound counts; a shrunken or replayed case is judged by the deterministic bound alone.
        explain: Look for the likely cause of each failure (it runs some cases beside this one).
        others: Cases on which the kernel fails likewise, for the cause must explain them too.

    Returns:
        The record. A fault of the harness itself is the verdict `error`, never an exception.
    """
    start = time.perf_counter()
    trial = Trial(kernel, case, setup, backend, independent=independent)
    try:
        verdict, reason, failures, stats = _judge(trial, explain=explain, others=others)
        execution = trial.execution_so_far
    except Exception:  # noqa: BLE001 - whatever broke here is ours: report it as such
        verdict, reason = Verdict.ERROR, traceback.format_exc(limit=-6)
        failures, stats, execution = (), {}, trial.execution_so_far
    configs = execution.configs if execution else 1
    setup = dataclasses.replace(setup, config=setup.config % max(1, configs))
    seconds = execution.seconds if execution else 0.0
    return CaseRecord(
        kernel=kernel.name,
        target=kernel.target,
        source_hash=kernel.source_hash,
        case=str(case),
        setup=str(setup),
        verdict=verdict.value,
        reason=reason,
        tensors=stats,
        failures=tuple(
            FailureRecord(
                **{name: _near(getattr(f, name)) for name in FailureRecord.__struct_fields__}
            )
            for f in failures
        ),
        replay=replay_line(kernel, case, setup, drawn=independent),
        seconds={"kernel": seconds, "checks": time.perf_counter() - start - seconds},
        configs=configs,
        possible=_possible(execution),
        ran={_near(file): str(ran) for file, ran in execution.ran.items()} if execution else {},
    )


def _near(text: str) -> str:
    """A text whose paths below the working folder are relative to it, as a person types them."""
    return text.replace(f"{Path.cwd()}{os.sep}", "")


def _possible(execution: Execution | None) -> tuple[str, ...]:
    """Notes that no failure explains, a line each; where a NaN was born belongs to its failure."""
    if execution is None:
        return ()
    return tuple(
        f"{note.kind} at {_near(note.file)}:{note.line} in {note.kernel}: {note.source.strip()}"
        for note in execution.notes
        if note.kind != "nan-born"
    )


def _judge(
    trial: Trial, *, explain: bool, others: Sequence[Case]
) -> tuple[Verdict, str, tuple[Failure, ...], dict[str, checks.TensorStats]]:
    kernel, case = trial.kernel, trial.case
    reason = _undeclared(kernel, case)
    if reason:
        return Verdict.UNSUPPORTED, reason, (), {}
    execution = trial.execution
    if refused(execution, declared=kernel.capabilities is not None):
        return Verdict.UNSUPPORTED, execution.error.partition("\n")[0], (), {}
    whole = not slices.needed(case.problem)
    if whole:
        # Only kernels under test are differentiated: a sixth of the time that a small case takes
        # goes into torch's records of what might be.
        with torch.inference_mode():
            failures = _found((*checks.WHOLE, *checks.WITHIN), trial)
        failures += _found(checks.FURTHER, trial)
        with torch.inference_mode():
            stats = checks.statistics(trial)
    else:
        failures, stats = slices.judge(trial)
    if failures:
        if explain and whole:
            failures = tuple(diagnosis.diagnose(trial, failures, others))
        return Verdict.FAIL, "", failures, stats
    if not stats:
        msg = f"{trial.backend.device}: the execution returned neither a result nor an error"
        raise RuntimeError(msg)
    unbounded = [name for name, s in stats.items() if s.elements and s.inconclusive == s.elements]
    if unbounded:
        return Verdict.INCONCLUSIVE, f"no bound on any element of {', '.join(unbounded)}", (), stats
    return Verdict.PASS, "", (), stats


def _undeclared(kernel: Kernel, case: Case) -> str:
    """What of the case the kernel cannot be asked for; "" if nothing."""
    declared = kernel.capabilities
    if declared is not None:
        reason = declared.reason_against(case.problem)
        if case.backward and reason is None and not (declared.backward and kernel.backward):
            reason = "backward"
        return f"not declared: {reason}" if reason is not None else ""
    if case.backward and kernel.backward is None:
        return "the kernel has no backward"
    term = (kernel.expressible or Capabilities()).term_against(case.problem)
    return f"not declared: {term}" if term is not None else ""


def _found(several: Sequence[checks.Check], trial: Trial) -> tuple[Failure, ...]:
    return tuple(failure for check in several for failure in check(trial))


def replay_line(kernel: Kernel, case: Case, setup: Setup, *, drawn: bool) -> str:
    """The command that reproduces a record.

    Args:
        kernel: The kernel.
        case: What was run.
        setup: How it was run.
        drawn: The case was drawn independently of any search: the probabilistic bound counts.
    """
    words = ["fa-verify", "replay", kernel.target, str(case), "--setup", str(setup)]
    return shlex.join([*words, "--source", kernel.source_hash, *(["--drawn"] if drawn else [])])
