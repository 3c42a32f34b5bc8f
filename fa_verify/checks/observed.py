"""What a kernel returned, each tensor beside its bound: `comparisons`, which all checks share."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from fa_verify import sight
from fa_verify.checks.comparison import Comparison, everywhere
from fa_verify.checks.reading import look

if TYPE_CHECKING:
    from fa_verify.bounds import Bounded
    from fa_verify.problem import Problem
    from fa_verify.trial import Trial

__all__ = ["GRADIENTS", "compare", "comparisons", "empty_rows", "observed", "sound"]

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")

_CACHE: weakref.WeakKeyDictionary[Trial, dict[str, Comparison]] = weakref.WeakKeyDictionary()


def empty_rows(problem: Problem, device: torch.device | str = "cpu") -> torch.Tensor:
    """Queries that see no key, bool, shape (seqlen_q,)."""
    return sight.blind(problem, torch.device(device))


def observed(trial: Trial) -> dict[str, torch.Tensor]:
    """The outputs that exist, have the right shape and can be compared, by name.

    The contract check reports those that do not.
    """
    problem, execution = trial.case.problem, trial.execution
    shapes = {
        "o": problem.shape_o,
        "lse": problem.shape_lse,
        "dq": problem.shape_q,
        "dk": problem.shape_k,
        "dv": problem.shape_v,
        **({"dbias": problem.shape_bias} if problem.bias else {}),
        **({"dsinks": (problem.heads_q,)} if problem.sinks else {}),
    }
    found: dict[str, torch.Tensor | None] = {}
    if execution.outputs is not None:
        found |= {"o": execution.outputs.o, "lse": execution.outputs.lse}
    if execution.grads is not None:
        found |= execution.grads.named()
    return {
        name: tensor
        for name, tensor in found.items()
        if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == shapes.get(name)
    }


def compare(
    trial: Trial, name: str, got: torch.Tensor, bounded: Bounded, *, conditional: bool = False
) -> Comparison:
    """Set an observed tensor beside its bound."""
    problem = trial.case.problem
    reference = bounded.reference
    # Contiguous as the reference is: several tensors then take one operation.
    got = got.detach().to(
        device=reference.device, dtype=torch.float64, memory_format=torch.contiguous_format
    )
    unwritten = trial.execution.unwritten.get(name)
    written = everywhere(got, value=True)
    if unwritten is not None:
        written = ~unwritten.to(got.device)
    due = written
    some_empty = name in ("o", "lse", "dq") and sight.any_blind(problem)
    if some_empty:
        empty = empty_rows(problem, got.device).view(-1, *[1] * (got.dim() - 3))
        # Of such a row lse is the sink, if there is one.
        due = written & ~(empty & reference.isneginf() if name == "lse" else empty)
    return Comparison(
        name=name,
        got=got,
        dtype="float32" if name in ("lse", "dsinks") else problem.dtype,
        bounded=bounded,
        written=written,
        due=due,
        conditional=conditional,
        all_due=unwritten is None and not some_empty,
    )


def comparisons(trial: Trial) -> dict[str, Comparison]:
    """Every observed tensor beside its bound, o and lse first; computed once a trial.

    Gradients are judged given the observed o and lse, which is sharper (docs/bounds.md B22), unless
    the forward pass is already wrong: a conditional reference would then follow the kernel into its
    error, so they are judged against the end-to-end reference.
    """
    if trial not in _CACHE:
        _CACHE[trial] = _compute(trial)
    return _CACHE[trial]


def _compute(trial: Trial) -> dict[str, Comparison]:
    tensors = observed(trial)
    result: dict[str, Comparison] = {}
    if "o" in tensors or "lse" in tensors:
        for bounded in trial.forward_bounds:
            if bounded.name in tensors:
                result[bounded.name] = compare(trial, bounded.name, tensors[bounded.name], bounded)
    look(result.values())
    if not set(GRADIENTS) & set(tensors):
        return result
    # An inf in o (right where the reference overflows) would make the conditional delta NaN.
    conditional = {"o", "lse"} <= set(result) and all(
        sound(part) and part.finite for part in result.values()
    )
    gradients = trial.backward_bounds if conditional else trial.unconditional_bounds
    for bounded in gradients:
        if bounded.name in tensors:
            result[bounded.name] = compare(
                trial, bounded.name, tensors[bounded.name], bounded, conditional=conditional
            )
    look(result[name] for name in GRADIENTS if name in result)
    return result


def sound(part: Comparison) -> bool:
    """Whether everything written is within its bound, and finite where it must be."""
    return part.most <= 1 and not part.any_broken and (part.all_due or bool(part.written.all()))
