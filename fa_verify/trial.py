"""`Trial`: one kernel on one case. Execution and bounds, each computed once, on demand."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from fa_verify import bounds
from fa_verify.inputs import Inputs, materialise

if TYPE_CHECKING:
    from fa_verify.backends.base import Backend, Execution, Setup
    from fa_verify.bounds import Bounded
    from fa_verify.case import Case
    from fa_verify.kernel import Kernel
    from fa_verify.problem import Problem

__all__ = ["RUN_CASES", "RUN_RISK", "Trial"]

# A whole run of right kernels has a probabilistic failure with probability at most RUN_RISK as long
# as it judges at most RUN_CASES cases of five tensors each (union bound, docs/bounds.md).
RUN_RISK = 1e-6
RUN_CASES = 100_000
_TENSOR_RISK = RUN_RISK / (5 * RUN_CASES)


class Trial:
    """What the checks look at.

    Attributes:
        kernel: The kernel; case: the case; setup: how it is run; backend: what runs it.
        independent: The case was drawn independently of any search: the probabilistic bound counts.
    """

    def __init__(
        self,
        kernel: Kernel,
        case: Case,
        setup: Setup,
        backend: Backend,
        *,
        independent: bool = True,
    ) -> None:
        """Remember what to run; nothing runs yet."""
        self.independent = independent
        self.kernel = kernel
        self.case = case
        self.setup = setup
        self.backend = backend

    @functools.cached_property
    def inputs(self) -> Inputs:
        """q, k, v, do on the backend's device. The kernel is handed these very tensors."""
        return materialise(self.case, device=self.backend.device)

    @functools.cached_property
    def pristine(self) -> Inputs:
        """The same inputs, which no kernel has touched."""
        return materialise(self.case, device=self.backend.device)

    @functools.cached_property
    def execution(self) -> Execution:
        """The run that is judged."""
        return self.backend.run(
            self.kernel, self.case.problem, self.inputs, self.setup, backward=self.case.backward
        )

    @property
    def execution_so_far(self) -> Execution | None:
        """The execution if there was one; nothing is run for this."""
        return self.__dict__.get("execution")

    def rerun(
        self,
        inputs: Inputs,
        *,
        problem: Problem | None = None,
        backward: bool = False,
        **setup: object,
    ) -> Execution:
        """Run again, on other inputs, on another problem, or under another schedule."""
        return self.backend.run(
            self.kernel,
            problem or self.case.problem,
            inputs,
            dataclasses.replace(self.setup, **setup),  # type: ignore[arg-type]
            backward=backward,
        )

    @functools.cached_property
    def forward_bounds(self) -> tuple[Bounded, Bounded]:
        """Exact o and lse, and how far off a right kernel may be."""
        x = self.pristine
        return bounds.bound_forward(
            self.case.problem, self.kernel.arithmetic, x.q, x.k, x.v, d=_TENSOR_RISK
        )

    @functools.cached_property
    def backward_bounds(self) -> tuple[Bounded, Bounded, Bounded]:
        """The gradients, conditional on the observed o and lse where the kernel exposes both."""
        x = self.pristine
        assert x.do is not None  # noqa: S101 - materialise gives one for a backward case
        outputs = self.execution.outputs
        observed = {}
        if outputs is not None and outputs.lse is not None:
            observed = {"o": outputs.o, "lse": outputs.lse}
        return bounds.bound_backward(
            self.case.problem,
            self.kernel.arithmetic,
            x.q,
            x.k,
            x.v,
            x.do,
            **observed,
            d=_TENSOR_RISK,
        )
