"""The shape of what comes back: it ran, shapes, dtypes, devices, no aliasing."""

from __future__ import annotations

import linecache
from typing import TYPE_CHECKING

import torch

from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.trial import Trial

__all__ = ["check"]


def check(trial: Trial) -> Iterator[Failure]:
    """Fail on an exception inside declared capabilities and on outputs of the wrong kind.

    What a target without Capabilities raises clearly is `unsupported`: `fa_verify.verify` says so,
    and no check sees it.
    """
    yield from _exception(trial)
    problem, execution = trial.case.problem, trial.launched
    due: list[tuple[str, object, tuple[int, ...], str]] = []
    if execution.outputs is not None:
        due.append(("o", execution.outputs.o, problem.shape_o, problem.dtype))
        if execution.outputs.lse is not None:
            half = trial.kernel.arithmetic.lse_dtype == "input"
            stored = problem.dtype if half else "float32"
            due.append(("lse", execution.outputs.lse, problem.shape_lse, stored))
    if execution.grads is not None:
        grads = execution.grads
        due.append(("dq", grads.dq, problem.shape_q, problem.dtype))
        due.append(("dk", grads.dk, problem.shape_k, problem.dtype))
        due.append(("dv", grads.dv, problem.shape_v, problem.dtype))
        if problem.bias:
            due.append(("dbias", grads.dbias, problem.shape_bias, problem.dtype))
        if problem.sinks:
            due.append(("dsinks", grads.dsinks, (problem.heads_q,), "float32"))
    for name, tensor, shape, dtype in due:
        yield from _kind(trial, name, tensor, shape, dtype)
    yield from _aliasing(trial, {name: tensor for name, tensor, _, _ in due})


def _exception(trial: Trial) -> Iterator[Failure]:
    execution = trial.launched
    if not execution.error:
        return
    first, _, _ = execution.error.partition("\n")
    if execution.error_kind == "timeout":
        yield Failure(check="timeout", title=f"{execution.stage} timed out", message=first)
        return
    where = " inside the declared capabilities" if trial.kernel.capabilities else ""
    file, _, line = execution.error_at.rpartition(":")
    yield Failure(
        check="contract",
        title=f"{execution.stage} raised {first.partition(':')[0]}",
        message=f"{execution.stage} raised{where}: {first}",
        location=execution.error_at,
        source=linecache.getline(file, int(line)).strip() if file else "",
    )


def _kind(
    trial: Trial, name: str, tensor: object, shape: tuple[int, ...], dtype: str
) -> Iterator[Failure]:
    if not isinstance(tensor, torch.Tensor):
        yield _failure(name, "is no tensor", f"{name}: got {type(tensor).__name__}")
        return
    if tuple(tensor.shape) != shape:
        text = f"{name}.shape={tuple(tensor.shape)}: must be {shape}"
        yield _failure(name, "has the wrong shape", text)
    if tensor.dtype != getattr(torch, dtype):
        text = f"{name}.dtype={tensor.dtype}: must be torch.{dtype}"
        yield _failure(name, "has the wrong dtype", text)
    if tensor.device != trial.inputs.q.device:
        text = f"{name}.device={tensor.device}: must be {trial.inputs.q.device}, where q is"
        yield _failure(name, "is on the wrong device", text)


def _aliasing(trial: Trial, outputs: dict[str, object]) -> Iterator[Failure]:
    """An output that lies in an input's memory, or in another output's, will be overwritten.

    Autograd may hand out one zero for several gradients: what it makes is nobody's to overwrite.
    """
    if trial.kernel.backward == "autograd":
        outputs = {name: outputs[name] for name in ("o", "lse") if name in outputs}
    inputs = dict(trial.inputs.named())
    names = list(outputs)
    for index, name in enumerate(names):
        others = inputs | {other: outputs[other] for other in names[:index]}
        for other, tensor in others.items():
            if _overlap(outputs[name], tensor):
                yield _failure(name, f"aliases {other}", f"{name} lies in the memory of {other}")


def _failure(name: str, title: str, text: str) -> Failure:
    return Failure(check="contract", title=f"{name} {title}", message=text, tensor=name)


def _overlap(a: object, b: object) -> bool:
    """Whether two tensors share an element's address (slices of one packed buffer do not)."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride * tensor.element_size()
    return offsets.flatten() + tensor.data_ptr()
