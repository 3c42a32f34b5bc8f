"""Defects that can be put on any `Kernel` from outside: what an oracle sees of a launcher's slips.

Each operator changes what the kernel is asked (problem, inputs) or what it gave (outputs, grads).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from fa_verify import loader
from fa_verify.errors import InvalidInputError
from fa_verify.masks import Mask
from fa_verify.problem import TERMS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fa_verify.kernel import Grads, Kernel, Outputs
    from fa_verify.masks import Alignment
    from fa_verify.problem import Problem

__all__ = ["OPERATORS", "Operator", "applied", "planted"]

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


def _o(change: Callable[[Problem, torch.Tensor], torch.Tensor]) -> Any:
    def outputs(problem: Problem, found: Outputs) -> Outputs:
        return dataclasses.replace(found, o=change(problem, found.o))

    return outputs


def _lse(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def outputs(_problem: Problem, found: Outputs) -> Outputs:
        return dataclasses.replace(found, lse=None if found.lse is None else change(found.lse))

    return outputs


def _without_last_row(_problem: Problem, o: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(o.shape[2], device=o.device)[:, None]
    return torch.where(rows == o.shape[2] - 1, torch.zeros_like(o), o)


def _nan_at_the_end(_problem: Problem, o: torch.Tensor) -> torch.Tensor:
    flat = torch.arange(o.numel(), device=o.device).reshape(o.shape)
    return torch.where(flat == o.numel() - 1, torch.full_like(o, math.nan), o)


def _by_strides_of_v(_problem: Problem, tensors: Tensors) -> Tensors:
    q, k, v = tensors
    strides = v.stride()
    last = sum((size - 1) * stride for size, stride in zip(k.shape, strides, strict=True))
    held = k.untyped_storage().nbytes() // k.element_size() - k.storage_offset()
    return (q, k.as_strided(k.shape, strides) if 0 <= last < held else k, v)


def _rolled_heads(_problem: Problem, tensors: Tensors) -> Tensors:
    q, k, v = tensors
    return q, k.roll(1, dims=1), v.roll(1, dims=1)


def _one_key_more(problem: Problem) -> Problem:
    mask = problem.mask
    if mask.causal:
        mask = dataclasses.replace(mask, causal=False, window_right=1)
    elif mask.window_right is not None:
        mask = dataclasses.replace(mask, window_right=mask.window_right + 1)
    return dataclasses.replace(problem, mask=mask)


def _other_alignment(problem: Problem) -> Problem:
    other: Alignment = "top-left" if problem.mask.alignment == "bottom-right" else "bottom-right"
    return dataclasses.replace(problem, mask=dataclasses.replace(problem.mask, alignment=other))


def _masked(**fields: Any) -> Callable[[Problem], Problem]:
    return lambda p: dataclasses.replace(p, mask=dataclasses.replace(p.mask, **fields))


def _key_of_the_next(problem: Problem) -> Problem:
    """The first document that has one after it with keys takes a key from it."""
    documents = [list(lengths) for lengths in problem.mask.documents]
    for one, following in itertools.pairwise(documents):
        if following[1]:
            one[1], following[1] = one[1] + 1, following[1] - 1
            break
    return _masked(documents=tuple((q, k) for q, k in documents))(problem)


def _swapped(_problem: Problem, grads: Grads) -> Grads:
    if grads.dk.shape != grads.dv.shape:
        return grads
    return dataclasses.replace(grads, dk=grads.dv, dv=grads.dk)


def _last_key_dropped(_problem: Problem, grads: Grads) -> Grads:
    rows = torch.arange(grads.dv.shape[2], device=grads.dv.device)[:, None]
    last = rows == grads.dv.shape[2] - 1
    return dataclasses.replace(grads, dv=torch.where(last, torch.zeros_like(grads.dv), grads.dv))


def _other(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Something else in the place of a term, where there is one."""

    def terms(given: dict[str, Any]) -> dict[str, Any]:
        return given | {name: change(given[name])} if name in given else given

    return terms


OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="scale-left-out",
        defect="The softmax scale is 1.",
        ask=lambda p: dataclasses.replace(p, softmax_scale=1.0),
        causes=("softmax_scale is missing",),
    ),
    Operator(
        name="scale-of-its-own",
        defect="The softmax scale that is asked is ignored: it is 1 / sqrt(head_dim).",
        ask=lambda p: dataclasses.replace(p, softmax_scale=None),
        causes=("1/sqrt(head_dim) is used",),
    ),
    Operator(
        name="mask-ignored",
        defect="The mask is ignored.",
        ask=lambda p: dataclasses.replace(p, mask=Mask()),
        causes=("is ignored",),
    ),
    Operator(
        name="documents-ignored",
        defect="Packed documents are one sequence.",
        ask=_masked(documents=()),
        needs="documents",
        causes=("documents are ignored", "documents see each other"),
    ),
    Operator(
        name="document-takes-a-key",
        defect="A packed document ends one key too late, and the next one begins there.",
        ask=_key_of_the_next,
        needs="documents",
    ),
    Operator(
        name="gaps-ignored",
        defect="What a mask hides beside its band is seen.",
        ask=_masked(pattern=""),
        needs="patterns",
        causes=("gaps are ignored",),
    ),
    Operator(
        name="one-key-more",
        defect="A mask's right end shows one key too many.",
        ask=_one_key_more,
        needs="window",
        causes=("also sees the key after its diagonal", "on the right: one key too many"),
    ),
    Operator(
        name="other-alignment",
        defect="The mask's diagonal ends in the other corner.",
        ask=_other_alignment,
        causes=("the mask is aligned",),
    ),
    Operator(
        name="softcap-ignored",
        defect="The softcap is ignored.",
        ask=lambda p: dataclasses.replace(p, softcap=0.0),
        needs="softcap",
        causes=("the softcap is missing",),
    ),
    Operator(
        name="k-by-vs-strides",
        defect="k is addressed by v's strides.",
        inputs=_by_strides_of_v,
        causes=("k is addressed with v's strides",),
    ),
    Operator(
        name="wrong-key-head",
        defect="Query heads read the neighbouring key head.",
        inputs=_rolled_heads,
        causes=("the key head before their own",),
    ),
    Operator(
        name="last-row-zero",
        defect="The last row of o is 0.",
        outputs=_o(_without_last_row),
        causes=("of o are 0: they are not computed",),
    ),
    Operator(
        name="o-times-1.001",
        defect="o is multiplied by 1.001.",
        outputs=_o(lambda _p, o: o * 1.001),
        causes=("o is 1.001", "o is 1.0009", "o is 1.0010", "o is 1.0011"),
    ),
    Operator(
        name="nan-at-the-end",
        defect="The last element of o is NaN.",
        outputs=_o(_nan_at_the_end),
    ),
    Operator(
        name="heads-swapped-in-o",
        defect="The heads of o are in another order.",
        outputs=_o(lambda _p, o: o.flip(1)),
        causes=("the heads of o are in another order",),
    ),
    Operator(
        name="lse-in-base-2",
        defect="lse is in base 2.",
        outputs=_lse(lambda lse: lse / math.log(2.0)),
        needs="lse",
        causes=("lse is in base 2",),
    ),
    Operator(
        name="lse-finite-where-empty",
        defect="lse of a row that sees no key is a large negative number.",
        outputs=_lse(lambda lse: lse.clamp(min=-1e30)),
        needs="lse",
        causes=("rows that see no key are not treated apart",),
    ),
    Operator(
        name="dq-negated",
        defect="dq has the wrong sign.",
        grads=lambda _p, g: dataclasses.replace(g, dq=-g.dq),
        needs="backward",
        causes=("dq is negated",),
    ),
    Operator(
        name="dq-unscaled",
        defect="dq lacks the softmax scale.",
        grads=lambda p, g: dataclasses.replace(g, dq=g.dq / (p.scale or 1.0)),
        needs="backward",
        causes=("dq lacks the factor softmax_scale",),
    ),
    Operator(
        name="dk-dv-swapped",
        defect="dk and dv are returned in each other's place.",
        grads=_swapped,
        needs="backward",
        causes=("in each other's place",),
    ),
    Operator(
        name="dv-without-last-key",
        defect="dv of the last key is 0.",
        grads=_last_key_dropped,
        needs="backward",
        causes=("of dv are 0: they are not computed",),
    ),
    Operator(
        name="bias-ignored",
        defect="The bias is ignored.",
        terms=_other("bias", torch.zeros_like),
        needs="bias",
        causes=("the bias is ignored",),
    ),
    Operator(
        name="slopes-negated",
        defect="ALiBi's slopes have the wrong sign.",
        terms=_other("alibi_slopes", torch.neg),
        needs="alibi",
        causes=("ALiBi's slopes have the wrong sign",),
    ),
    Operator(
        name="sinks-left-out",
        defect="There is no sink.",
        terms=_other("sinks", lambda sinks: torch.full_like(sinks, -math.inf)),
        needs="sinks",
        causes=("the sink is missing",),
    ),
    Operator(
        name="dropout-of-another-seed",
        defect="Dropout keeps the elements of another seed.",
        terms=_other("dropout_seed", lambda seed: seed + 1),
        needs="dropout",
    ),
    Operator(
        name="dlse-ignored",
        defect="The gradient of lse is ignored.",
        terms=_other("dlse", torch.zeros_like),
        needs="lse_grad",
        causes=("the gradient of lse is ignored",),
    ),
    Operator(
        name="dsinks-negated",
        defect="The gradient of the sinks has the wrong sign.",
        grads=lambda _p, g: g if g.dsinks is None else dataclasses.replace(g, dsinks=-g.dsinks),
        needs="sinks",
        causes=("dsinks is negated",),
    ),
)


def applied(target: str, name: str) -> Kernel:
    """The kernel at a target with the defect of this name."""
    (kernel,) = loader.load(target)
    (operator,) = (operator for operator in OPERATORS if operator.name == name)
    return operator.on(kernel)


def planted(target: str, folder: Path) -> dict[Operator, str]:
    """A module for each operator that shows on the kernel at a target; their targets.

    Raises:
        InvalidInputError: The target names no kernel, or several.
    """
    kernels = loader.load(target)
    if len(kernels) != 1:
        msg = f"target={target!r}: names {len(kernels)} kernels; selftest needs file.py:NAME"
        raise InvalidInputError(msg)
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for index, operator in enumerate(OPERATORS):
        if operator.shows_on(kernels[0]):
            file = folder / f"operator_{index:03d}.py"
            file.write_text(
                "from fa_verify.zoo.operators import applied\n\n"
                f"kernel = applied({kernels[0].target!r}, {operator.name!r})\n",
                encoding="utf-8",
            )
            found[operator] = f"{file}:kernel"
    return found
