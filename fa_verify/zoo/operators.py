"""The operators: defects that an oracle sees of a launcher's slips, on any kernel."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from fa_verify import loader
from fa_verify.errors import InvalidInputError
from fa_verify.masks import Mask
from fa_verify.zoo.operator import Operator
from fa_verify.zoo.slips import (
    by_strides_of_v,
    key_of_the_next,
    last_key_dropped,
    lse_by,
    masked,
    nan_at_the_end,
    o_by,
    one_key_more,
    other_alignment,
    rolled_heads,
    swapped_grads,
    term_by,
    without_last_row,
)

if TYPE_CHECKING:
    from pathlib import Path

    from fa_verify.kernel import Kernel

__all__ = ["OPERATORS", "applied", "planted"]

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
        ask=masked(documents=()),
        needs="documents",
        causes=("documents are ignored", "documents see each other"),
    ),
    Operator(
        name="document-takes-a-key",
        defect="A packed document ends one key too late, and the next one begins there.",
        ask=key_of_the_next,
        needs="documents",
    ),
    Operator(
        name="gaps-ignored",
        defect="What a mask hides beside its band is seen.",
        ask=masked(pattern=""),
        needs="patterns",
        causes=("gaps are ignored",),
    ),
    Operator(
        name="one-key-more",
        defect="A mask's right end shows one key too many.",
        ask=one_key_more,
        needs="window",
        causes=("also sees the key after its diagonal", "on the right: one key too many"),
    ),
    Operator(
        name="other-alignment",
        defect="The mask's diagonal ends in the other corner.",
        ask=other_alignment,
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
        inputs=by_strides_of_v,
        causes=("k is addressed with v's strides",),
    ),
    Operator(
        name="wrong-key-head",
        defect="Query heads read the neighbouring key head.",
        inputs=rolled_heads,
        causes=("the key head before their own",),
    ),
    Operator(
        name="last-row-zero",
        defect="The last row of o is 0.",
        outputs=o_by(without_last_row),
        causes=("of o are 0: they are not computed",),
    ),
    Operator(
        name="o-times-1.001",
        defect="o is multiplied by 1.001.",
        outputs=o_by(lambda _p, o: o * 1.001),
        causes=("o is 1.001", "o is 1.0009", "o is 1.0010", "o is 1.0011"),
    ),
    Operator(
        name="nan-at-the-end",
        defect="The last element of o is NaN.",
        outputs=o_by(nan_at_the_end),
    ),
    Operator(
        name="heads-swapped-in-o",
        defect="The heads of o are in another order.",
        outputs=o_by(lambda _p, o: o.flip(1)),
        causes=("the heads of o are in another order",),
    ),
    Operator(
        name="lse-in-base-2",
        defect="lse is in base 2.",
        outputs=lse_by(lambda lse: lse / math.log(2.0)),
        needs="lse",
        causes=("lse is in base 2",),
    ),
    Operator(
        name="lse-finite-where-empty",
        defect="lse of a row that sees no key is a large negative number.",
        outputs=lse_by(lambda lse: lse.clamp(min=-1e30)),
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
        grads=swapped_grads,
        needs="backward",
        causes=("in each other's place",),
    ),
    Operator(
        name="dv-without-last-key",
        defect="dv of the last key is 0.",
        grads=last_key_dropped,
        needs="backward",
        causes=("of dv are 0: they are not computed",),
    ),
    Operator(
        name="bias-ignored",
        defect="The bias is ignored.",
        terms=term_by("bias", torch.zeros_like),
        needs="bias",
        causes=("the bias is ignored",),
    ),
    Operator(
        name="slopes-negated",
        defect="ALiBi's slopes have the wrong sign.",
        terms=term_by("alibi_slopes", torch.neg),
        needs="alibi",
        causes=("ALiBi's slopes have the wrong sign",),
    ),
    Operator(
        name="sinks-left-out",
        defect="There is no sink.",
        terms=term_by("sinks", lambda sinks: torch.full_like(sinks, -math.inf)),
        needs="sinks",
        causes=("the sink is missing",),
    ),
    Operator(
        name="dropout-of-another-seed",
        defect="Dropout keeps the elements of another seed.",
        terms=term_by("dropout_seed", lambda seed: seed + 1),
        needs="dropout",
    ),
    Operator(
        name="dlse-ignored",
        defect="The gradient of lse is ignored.",
        terms=term_by("dlse", torch.zeros_like),
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
