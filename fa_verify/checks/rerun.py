"""What the checks that run a kernel again share: screening the second run, comparing the two."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify.checks.memory import incidents
from fa_verify.checks.where import describe
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fa_verify.backends.base import Execution
    from fa_verify.inputs import Inputs
    from fa_verify.problem import Problem
    from fa_verify.trial import Trial

__all__ = [
    "Difference",
    "agree",
    "apart",
    "differing",
    "failures",
    "generator",
    "metamorphic",
    "other_problem",
    "outputs",
    "refused",
    "screen",
]

# What a function that declares nothing may raise to say that it does not take a problem: Python's
# words for bad arguments, and Triton's for a kernel that cannot be compiled for them.
_CLEAR = (
    *("ValueError", "TypeError", "NotImplementedError", "AssertionError", "RuntimeError"),
    *("CompilationError", "CompileTimeAssertionFailure", "OutOfResources"),
)


def refused(execution: Execution, *, declared: bool) -> bool:
    """Whether the kernel said clearly that it does not take the problem.

    An op that the backend cannot run is no verdict on the kernel either. A declared capability that
    raises is a failure, whatever it raises.
    """
    if execution.error_kind == "unsupported":
        return not declared or execution.error.startswith("Unsupported:")
    name = execution.error.partition("\n")[0].partition(":")[0]
    return not declared and execution.error_kind == "raised" and name in _CLEAR


def generator(trial: Trial) -> np.random.Generator:
    """What a rerun of the trial draws from."""
    return np.random.default_rng(trial.case.seed % 2**64)


def other_problem(
    trial: Trial, inputs: Inputs, problem: Problem, *, backward: bool = False
) -> Execution | None:
    """The run of a problem that nobody drew; None where the kernel does not take it."""
    takes, declared = trial.kernel.takes, trial.kernel.capabilities is not None
    if takes is not None and takes.reason_against(problem) is not None:
        return None
    again = trial.rerun(inputs, problem=problem, backward=backward)
    return None if refused(again, declared=declared) else again


def outputs(execution: Execution) -> dict[str, torch.Tensor]:
    """What a run returned, by name."""
    found: dict[str, torch.Tensor | None] = {}
    if execution.outputs is not None:
        found |= {"o": execution.outputs.o, "lse": execution.outputs.lse}
    if execution.grads is not None:
        found |= execution.grads.named()
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


def screen(execution: Execution, how: str) -> Iterator[Failure]:
    """What a second run did wrong in itself: it raised, or touched memory that it must not."""
    if execution.error and execution.error_kind != "unsupported":
        first, _, _ = execution.error.partition("\n")
        yield Failure(
            check="contract",
            title=f"{execution.stage} raised {first.partition(':')[0]}",
            message=f"{execution.stage} raised when run again ({how}), not at first: {first}",
        )
    yield from incidents(execution)


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors differ in value: bits, up to the sign of zero and the payload of NaN."""
    return ~((a == b) | (torch.isnan(a) & torch.isnan(b)))


def apart(a: torch.Tensor, b: torch.Tensor, tolerance: torch.Tensor) -> torch.Tensor:
    """Where two tensors are further apart than a tolerance; an inf tolerance says nothing."""
    a, b = a.to(torch.float64), b.to(torch.float64)
    error = (a - b).abs()
    far = ~(error <= tolerance) & torch.isfinite(tolerance)
    return far & differing(a, b)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two runs that must agree in one tensor, and where they do not.

    Attributes:
        check: Who asks; title: what it is if there is any.
        name: The tensor.
        wrong: bool, its shape.
        runs: What the two gave.
        because: Why they must agree.
    """

    check: str
    title: str
    name: str
    wrong: torch.Tensor
    runs: tuple[torch.Tensor, torch.Tensor]
    because: str

    def failure(self) -> Failure:
        """Where it is, what the two runs gave, and why they must agree."""
        index = tuple(int(i) for i in self.wrong.nonzero()[0].tolist())
        place = ", ".join(str(i) for i in index)
        first, then = (float(run[index]) for run in self.runs)
        return Failure(
            check=self.check,
            title=self.title,
            message=(
                f"{self.name}[{place}]: first {first:.9g}, then {then:.9g}; {self.because}; "
                f"{int(self.wrong.sum())} of {self.wrong.numel()} elements differ: "
                f"{describe(self.name, self.wrong)}"
            ),
            tensor=self.name,
        )


def metamorphic(
    title: str,
    name: str,
    wrong: torch.Tensor,
    runs: tuple[torch.Tensor, torch.Tensor],
    because: str,
) -> Difference:
    """A difference between runs that must be related, whatever the reference says."""
    return Difference(
        check="metamorphic", title=title, name=name, wrong=wrong, runs=runs, because=because
    )


def failures(differences: Sequence[Difference]) -> Iterator[Failure]:
    """A failure for each that is somewhere; one transfer from the device asks them all."""
    if not differences:
        return
    some = torch.stack([difference.wrong.any() for difference in differences]).tolist()
    for difference, any_wrong in zip(differences, some, strict=True):
        if any_wrong:
            yield difference.failure()


def agree(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Whether two runs gave the same in each tensor that both have; see `differing`."""
    names = [name for name in a if name in b]
    if not names:
        return {}
    # NaN differs from itself in the first look, which nearly always is the last.
    some = torch.stack([(a[name] != b[name]).any() for name in names]).tolist()
    return {
        name: not (differs and bool(differing(a[name], b[name]).any()))
        for name, differs in zip(names, some, strict=True)
    }
