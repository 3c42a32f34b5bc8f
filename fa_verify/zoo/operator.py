"""`Operator`: a defect that can be put on any `Kernel` from outside.

It changes what the kernel is asked (problem, inputs, terms) or what it gave (outputs, grads).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from fa_verify.problem import TERMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.kernel import Grads, Kernel, Outputs
    from fa_verify.problem import Problem

__all__ = ["Operator", "Tensors"]

_DECLARED = (*TERMS, "documents", "patterns")  # what nobody has unless he says so
_CAPABILITIES = ("window", "softcap", "gqa", *_DECLARED)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _same_problem(problem: Problem) -> Problem:
    return problem


def _same_inputs(_problem: Problem, tensors: Tensors) -> Tensors:
    return tensors


def _same_terms(terms: dict[str, Any]) -> dict[str, Any]:
    return terms


def _same_outputs(_problem: Problem, outputs: Outputs) -> Outputs:
    return outputs


def _same_grads(_problem: Problem, grads: Grads) -> Grads:
    return grads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One defect from outside.

    Attributes:
        name: Its name; defect: what is wrong, in a sentence.
        ask: What the kernel is asked instead.
        inputs: What it is handed instead of q, k, v.
        terms: What it is handed by name instead.
        outputs: What is made of its outputs; grads: of its gradients.
        needs: What a kernel must take for the defect to show: "", "backward", "lse", or the name of
            a capability.
        causes: As of a `fa_verify.zoo.defects.Defect`.
    """

    name: str
    defect: str
    ask: Callable[[Problem], Problem] = _same_problem
    inputs: Callable[[Problem, Tensors], Tensors] = _same_inputs
    terms: Callable[[dict[str, Any]], dict[str, Any]] = _same_terms
    outputs: Callable[[Problem, Outputs], Outputs] = _same_outputs
    grads: Callable[[Problem, Grads], Grads] = _same_grads
    needs: str = ""
    causes: tuple[str, ...] = ()

    def shows_on(self, kernel: Kernel) -> bool:
        """Whether the kernel has what the defect touches, as far as it declares."""
        if self.needs == "backward":
            return kernel.backward is not None
        takes = kernel.takes
        if self.needs in _CAPABILITIES and takes is not None:
            return bool(getattr(takes, self.needs))
        return self.needs not in _DECLARED

    def on(self, kernel: Kernel) -> Kernel:
        """The kernel with the defect."""

        def forward(problem: Problem, *tensors: torch.Tensor, **terms: Any) -> Outputs:
            q, k, v = self.inputs(problem, (tensors[0], tensors[1], tensors[2]))
            found = kernel.forward(self.ask(problem), q, k, v, **self.terms(terms))
            return self.outputs(problem, found)

        def backward(problem: Problem, *arguments: Any, **terms: Any) -> Grads:
            q, k, v = self.inputs(problem, arguments[:3])
            assert callable(kernel.backward)  # noqa: S101 - for mypy: else it is not replaced
            given = self.terms(terms)
            found = kernel.backward(self.ask(problem), q, k, v, *arguments[3:], **given)
            return self.grads(problem, found)

        own = backward if callable(kernel.backward) else kernel.backward
        return dataclasses.replace(kernel, name=self.name, forward=forward, backward=own)
