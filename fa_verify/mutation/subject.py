"""`Subject`: a kernel on one case as it is, and what becomes of the case when a mutant runs.

What does not depend on the mutant is computed once: inputs, reference, bounds, and, for mutants of
the backward pass, the forward's outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from fa_verify import checks
from fa_verify.backends.cpu import CpuBackend
from fa_verify.checks import reruns, unmodified
from fa_verify.checks.rerun import outputs
from fa_verify.inputs import duplicate
from fa_verify.kernel import Outputs
from fa_verify.trial import Trial
from fa_verify.ttir.mutation.prover import Prover
from fa_verify.ttir.mutation.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fa_verify.backends.base import Execution, Setup
    from fa_verify.bounds import Bounded
    from fa_verify.case import Case
    from fa_verify.inputs import Inputs
    from fa_verify.kernel import Kernel
    from fa_verify.ttir.mutation.mutants import Mutant
    from fa_verify.ttir.mutation.recorder import AnyMutant
    from fa_verify.verdict import Failure

__all__ = ["Fate", "Subject"]

# A mutant may take this many times as long as the kernel, and at least so many seconds: far beyond
# what a busy machine makes of milliseconds. Launched otherwise, it may have to be compiled first.
_SLOWER, _LEAST, _COMPILING = 20.0, 1.5, 8.0
_AGAIN = 3.0  # times as long where that passed: what a busy machine made slow is no endless loop
_PATIENCE = 120.0  # seconds that the kernel itself may take


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one mutant on one case.

    Attributes:
        kind: "same" (bits), "within" (other bits that no check minds), "killed" or "invalid".
        check: What killed it; message: what that said, or why the mutant is no kernel.
    """

    kind: str
    check: str = ""
    message: str = ""


class _Base(Trial):
    """A trial of the kernel as it is.

    Attributes:
        spent: Seconds of CPU time that its run took, which other processes do not lengthen.
    """

    spent = 0.0

    @functools.cached_property
    def execution(self) -> Execution:
        begin = time.thread_time()
        found = super().execution
        self.spent = time.thread_time() - begin
        return found


class _Shared(Trial):
    """A trial of a mutant, which takes what it can from the trial of the kernel itself."""

    def __init__(self, base: Trial, backend: CpuBackend) -> None:
        super().__init__(base.kernel, base.case, base.setup, backend)
        self.base = base

    @functools.cached_property
    def pristine(self) -> Inputs:
        return self.base.pristine

    @functools.cached_property
    def inputs(self) -> Inputs:
        return duplicate(self.base.pristine)

    @functools.cached_property
    def forward_bounds(self) -> tuple[Bounded, Bounded]:
        return self.base.forward_bounds

    @functools.cached_property
    def backward_bounds(self) -> tuple[Bounded, ...]:
        mine, theirs = outputs(self.execution), outputs(self.base.execution)
        if all(_equal(mine.get(name), theirs.get(name)) for name in ("o", "lse")):
            return self.base.backward_bounds
        return super().backward_bounds


class Subject:
    """A kernel on one case.

    Attributes:
        parts: Trials of the kernel in parts that can be looked at one by one: forward, then
            backward with the outputs of that forward; or the whole where it cannot be divided.
        whole: The trial of the kernel as it is.
    """

    def __init__(self, kernel: Kernel, case: Case, setup: Setup, memory: int) -> None:
        """Divide the case; nothing runs yet."""
        self._memory = memory
        backend = CpuBackend(seconds=_PATIENCE, memory_limit=memory)
        self.whole = _Base(kernel, case, setup, backend)
        self.parts = [self.whole]
        if case.backward and callable(kernel.backward):
            kept = _Kept(kernel.forward)
            first = dataclasses.replace(kernel, forward=kept.remember)
            second = dataclasses.replace(kernel, forward=kept.recall)
            self.parts = [
                _Base(first, dataclasses.replace(case, backward=False), setup, backend),
                _Base(second, case, setup, backend),
            ]

    def failure(self) -> str:
        """Why mutants of this kernel cannot be judged on this case; "" if they can."""
        execution = self.whole.execution
        if execution.error:
            return execution.error.partition("\n")[0]
        failures = (failure for check in checks.ALL for failure in check(self.whole))
        failure = next(failures, None)
        return "" if failure is None else f"{failure.check}: {failure.message}"

    def looked(self) -> list[Recorder]:
        """What each part allows; also runs the parts.

        Raises:
            RuntimeError: Looking changed a bit, which would be a mistake of ours.
        """
        return [self._looked(part) for part in self.parts]

    def _looked(self, part: Trial) -> Recorder:
        recorder = Recorder()
        backend = CpuBackend(memory_limit=self._memory, alteration=recorder)
        execution = _Shared(part, backend).execution
        if not _same(execution, part.execution):
            why = execution.error.partition("\n")[0] or execution.incidents or "other bits"
            msg = f"comparing what mutants compute changed the results of {part.case}: {why}"
            raise RuntimeError(msg)
        return recorder

    def proofs(self, mutants: Sequence[Mutant]) -> dict[Mutant, set[str]]:
        """Why mutants change no result, in each place of each module that the case compiles."""
        prover = Prover(mutants)
        for part in self.parts:
            backend = CpuBackend(memory_limit=self._memory, alteration=prover)
            _Shared(part, backend).execution  # noqa: B018 - for its modules
        return prover.proofs

    def try_part(self, mutant: AnyMutant, index: int) -> Fate:
        """Run a mutant on one part; the checks that run it again are left out."""
        if index:
            self.parts[0].execution  # noqa: B018 - its outputs are needed
        part = self.parts[index]
        trial = self._run(part, mutant)
        fate = _broken(trial.execution)
        if fate is not None:
            return fate
        if _same(trial.execution, part.execution) and not list(unmodified.check(trial)):
            return Fate(kind="same")
        return self._judge(trial, (c for c in checks.ALL if c is not reruns.check)) or Fate(
            kind="within"
        )

    def try_whole(self, mutant: AnyMutant) -> Fate:
        """Run a mutant on the whole case under all checks."""
        trial = self._run(self.whole, mutant)
        fate = _broken(trial.execution) or self._judge(trial, iter(checks.ALL))
        if fate is not None:
            return fate
        return Fate(kind="same" if _same(trial.execution, self.whole.execution) else "within")

    def _run(self, base: _Base, mutant: AnyMutant) -> _Shared:
        """A trial of a mutant that has run; once more where it took too long."""
        trial = self._trial(base, mutant, 1.0)
        if trial.execution.error_kind == "timeout":
            trial = self._trial(base, mutant, _AGAIN)
        return trial

    def _trial(self, base: _Base, mutant: AnyMutant, times: float) -> _Shared:
        base.execution  # noqa: B018 - for its time
        seconds = times * max(_LEAST, _SLOWER * base.spent)
        if mutant.edit(mutant.kernel) is None:
            seconds += _COMPILING
        backend = CpuBackend(seconds=seconds, memory_limit=self._memory, alteration=mutant)
        return _Shared(base, backend)

    @staticmethod
    def _judge(trial: Trial, wanted: Iterator[checks.Check]) -> Fate | None:
        failures: Iterator[Failure] = (f for check in wanted for f in check(trial))
        failure = next(failures, None)
        if failure is None:
            return None
        return Fate(kind="killed", check=failure.check, message=failure.message)


class _Kept:
    """A forward pass that is run once: what it returned is handed out in copies."""

    def __init__(self, forward: Callable[..., Outputs]) -> None:
        self._forward = forward
        self._outputs: Outputs | None = None

    def remember(self, *arguments: Any, **terms: Any) -> Outputs:
        found = self._forward(*arguments, **terms)
        if self._outputs is None:  # the first run is the kernel's own
            self._outputs = _copied(found)
        return found

    def recall(self, *arguments: Any, **terms: Any) -> Outputs:
        if self._outputs is None:
            return self.remember(*arguments, **terms)
        return _copied(self._outputs)


def _copied(given: Outputs) -> Outputs:
    o, lse, *saved = (_copy(x) for x in (given.o, given.lse, *given.saved))
    return Outputs(o, lse, tuple(saved))


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value.new_empty(0).set_(  # strides and offset stay
        value.untyped_storage().clone(), value.storage_offset(), value.shape, value.stride()
    )


def _broken(execution: Execution) -> Fate | None:
    """A mutant that ended in an error: it hung, or it is no kernel that runs."""
    if not execution.error:
        return None
    first = execution.error.partition("\n")[0]
    if execution.error_kind == "timeout":
        return Fate(kind="killed", check="timeout", message=first)
    return Fate(kind="invalid", message=first)


def _same(mine: Execution, theirs: Execution) -> bool:
    """Whether two runs gave the same bits, and the first was seen to do nothing forbidden."""
    if mine.incidents or mine.unwritten:
        return False
    a, b = outputs(mine), outputs(theirs)
    return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Bit for bit."""
    if a is None or b is None:
        return a is b
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return bool(torch.equal(a.contiguous().view(kind), b.contiguous().view(kind)))
