"""Calls a kernel's forward and backward on inputs, and catches what they raise."""

from __future__ import annotations

import dataclasses
import traceback
from typing import TYPE_CHECKING, Any

import torch

from fa_verify.backends.raised import innermost, place
from fa_verify.errors import ResultError, UnsupportedProblemError
from fa_verify.kernel import Grads, Outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fa_verify.inputs import Inputs
    from fa_verify.kernel import Kernel
    from fa_verify.problem import Problem

__all__ = ["Called", "call"]

_DIFFERENTIABLE = ("bias", "sinks")


@dataclasses.dataclass(slots=True)
class Called:
    """The results and, if any, the exception, its text, and the stage and line where it arose."""

    outputs: Outputs | None = None
    grads: Grads | None = None
    error: str = ""
    error_kind: str = ""
    error_at: str = ""
    stage: str = ""
    exception: BaseException | None = None


def call(
    kernel: Kernel,
    problem: Problem,
    inputs: Inputs,
    *,
    backward: bool,
    unsupported: tuple[type[BaseException], ...] = (),
    timeout: tuple[type[BaseException], ...] = (),
    forwarded: Callable[[Outputs], None] = lambda _: None,
) -> Called:
    """Run the kernel. Exceptions of the kernel become data, exits too; KeyboardInterrupt passes.

    Args:
        kernel: The kernel.
        problem: The problem.
        inputs: q, k, v, for the backward do, and what the problem has beside them.
        backward: Whether gradients are wanted.
        unsupported: Exceptions that mean that the backend cannot run it.
        timeout: Exceptions that mean that time ran out.
        forwarded: Told of the forward's result before the backward runs.
    """
    called = Called(stage="forward")
    autograd = backward and kernel.backward == "autograd"
    tensors = [inputs.q, inputs.k, inputs.v]
    if kernel.layout == "bshd":
        tensors = [x.transpose(1, 2) for x in tensors]
    terms = inputs.terms(backward=False)
    if autograd:
        tensors = [x.detach().requires_grad_() for x in tensors]
        terms |= {
            name: x.detach().requires_grad_()
            for name, x in terms.items()
            if name in _DIFFERENTIABLE and isinstance(x, torch.Tensor)
        }
    try:
        outputs = kernel.forward(problem, *tensors, **terms)
        if not isinstance(outputs, Outputs) or not isinstance(outputs.o, torch.Tensor):
            what = type(outputs).__name__
            if isinstance(outputs, Outputs):
                what = f"a result of type {type(outputs.o).__name__}"
            msg = f"forward returned {what}: it must return Outputs(o, lse=None), o a tensor"
            raise ResultError(msg)  # noqa: TRY301 - reported like any other fault of the kernel
        _check_dense({"o": outputs.o, "lse": outputs.lse})
        called.outputs = _logical(kernel, outputs)
        if not backward:
            return called
        forwarded(called.outputs)
        called.stage = "backward"
        do = inputs.do
        assert do is not None  # noqa: S101 - materialise gives one whenever backward is asked
        if autograd:
            leaves = {name: x for name, x in terms.items() if name in _DIFFERENTIABLE}
            called.grads = _autograd(kernel, outputs, tensors, leaves, inputs)
        elif callable(kernel.backward):
            shown = do.transpose(1, 2) if kernel.layout == "bshd" else do
            terms = inputs.terms(backward=True)
            grads = kernel.backward(problem, *tensors, outputs, shown, **terms)
            _check_gradients(grads)
            dq, dk, dv = (_bhsd(kernel, x) for x in (grads.dq, grads.dk, grads.dv))
            called.grads = dataclasses.replace(grads, dq=dq, dk=dk, dv=dv)
        else:
            msg = "the kernel has no backward"
            raise UnsupportedProblemError(msg)  # noqa: TRY301
    except unsupported as error:
        called.error_kind, called.error = "unsupported", _text(error)
    except timeout as error:
        called.error_kind, called.error = "timeout", _text(error)
    except UnsupportedProblemError as error:
        called.error_kind, called.error = "unsupported", _text(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - part of the verdict, whatever it is
        called.error_kind, called.error = "raised", _text(error)
        called.error_at = place(error)
        called.exception = error
    return called


def _check_gradients(grads: object) -> None:
    """Refuse what are no three tensors."""
    what = "" if isinstance(grads, Grads) else type(grads).__name__
    for name in ("dq", "dk", "dv"):
        found = getattr(grads, name, None)
        if not what and not isinstance(found, torch.Tensor):
            what = f"{name} of type {type(found).__name__}"
    if what:
        msg = f"backward returned {what}: it must return Grads(dq, dk, dv), each a tensor"
        raise ResultError(msg)
    _check_dense({name: getattr(grads, name) for name in ("dq", "dk", "dv", "dbias", "dsinks")})


def _check_dense(results: Mapping[str, object]) -> None:
    """Refuse tensors whose elements nobody can look at."""
    for name, x in results.items():
        if isinstance(x, torch.Tensor) and (x.layout != torch.strided or x.is_meta):
            what = f"layout={x.layout}" if x.layout != torch.strided else "device='meta'"
            msg = f"{name}: {what}; it must be a dense tensor with elements"
            raise ResultError(msg)


def _autograd(
    kernel: Kernel,
    outputs: Outputs,
    tensors: list[Any],
    leaves: dict[str, Any],
    inputs: Inputs,
) -> Grads:
    if outputs.o.grad_fn is None:
        msg = "o has no grad_fn: the function is not differentiable"
        raise UnsupportedProblemError(msg)
    do = inputs.do
    assert do is not None  # noqa: S101 - materialise gives one whenever backward is asked
    of, given = [outputs.o], [do.transpose(1, 2) if kernel.layout == "bshd" else do]
    if inputs.dlse is not None and outputs.lse is not None:
        of, given = [*of, outputs.lse], [*given, inputs.dlse]
    dq, dk, dv, *more = torch.autograd.grad(of, [*tensors, *leaves.values()], given)
    further = {f"d{name}": x for name, x in zip(leaves, more, strict=True)}
    return Grads(*(_bhsd(kernel, x) for x in (dq, dk, dv)), **further)


def _logical(kernel: Kernel, outputs: Outputs) -> Outputs:
    return Outputs(
        _bhsd(kernel, outputs.o.detach()),
        None if outputs.lse is None else outputs.lse.detach(),
        outputs.saved,
    )


def _bhsd(kernel: Kernel, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2) if kernel.layout == "bshd" else tensor


def _text(error: BaseException) -> str:
    said = str(innermost(error))
    if not said:  # a bare assert says it in its source
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{frame.line} ({frame.filename}:{frame.lineno})"
    first, *more = said.strip().splitlines()
    if more and first.endswith(":"):  # a compiler says where, shows the code, and ends with what
        said = f"{first} {more[-1]}\n{said}"
    head = f"{type(error).__name__}: {said}"
    frames = "".join(traceback.format_exception(error)[-6:])
    return f"{head}\n{frames}"
