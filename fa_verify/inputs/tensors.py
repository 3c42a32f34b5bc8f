"""`materialise`: a case becomes `Inputs`, laid out as it says, poison where nobody may look."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify.inputs.buffers import clone, is_sparse, lay_out, refilled, storage
from fa_verify.inputs.numbers import dropout_seed, elements
from fa_verify.layouts import BHSD, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from fa_verify.case import Case

__all__ = [
    "OF_HEADS",
    "SCALES",
    "Inputs",
    "duplicate",
    "fingerprint",
    "has_batch",
    "layout_of",
    "materialise",
    "modified",
    "with_slack",
]

OF_HEADS = ("alibi_slopes", "sinks")  # a number a query head, whatever the sequence
SCALES = ("q_scale", "k_scale", "v_scale")
_MOST_APART = 8  # elements between scales


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a kernel is handed: strided views (batch, heads, seqlen, head_dim) as they are stored.

    Attributes:
        q: (batch, heads_q, seqlen_q, head_dim).
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        do: (batch, heads_q, seqlen_q, head_dim_v), or None for a forward pass.
        bias: `Problem.shape_bias`, or None where the problem has none, as for those that follow.
        alibi_slopes: (heads_q,) float32.
        sinks: (heads_q,) float32.
        dlse: (batch, heads_q, seqlen_q) float32; None for a forward pass too.
        q_scale: Of an fp8 q, `Problem.shape_scale` float32; k_scale, v_scale likewise.
        dropout_seed: What the kernel's random numbers come from.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dlse: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    dropout_seed: int | None = None

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor there is, with its name."""
        for name in ("q", "k", "v", "do", "bias", "alibi_slopes", "sinks", "dlse", *SCALES):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def having(self, tensors: dict[str, Tensor]) -> Inputs:
        """The same with other tensors in the place of some."""
        return dataclasses.replace(self, **tensors)  # type: ignore[arg-type]

    def terms(self, *, backward: bool) -> dict[str, Tensor | int]:
        """What a kernel's forward (or backward) is handed beside q, k, v and do."""
        names = ["bias", "alibi_slopes", "sinks", "dropout_seed", *SCALES]
        names += ["dlse"] if backward else []
        return {name: x for name in names if (x := getattr(self, name)) is not None}


def materialise(case: Case, device: str = "cpu") -> Inputs:
    """The case's tensors on a device. The same case gives the same elements everywhere.

    Elements before the first (a storage offset), between rows, heads or sequences (padding) and
    the `SLACK` elements after the last are NaN; on the CPU those between elements further apart
    than `SPARSE` are 0, in memory that is never touched. Heads of a ``shared`` layout are all
    head 0. Sequences repeat where `period` says so.
    """
    tensors = {
        name: lay_out(
            torch.from_numpy(array),
            layout_of(case, name),
            _dtype(case, name),
            device,
            batch=case.problem.batch if has_batch(case, name) else None,
        )
        for name, array in elements(case).items()
    }
    return Inputs(**tensors, dropout_seed=dropout_seed(case))


def has_batch(case: Case, name: str) -> bool:
    """Whether a tensor has elements of its own for each sequence."""
    if name in SCALES:
        return case.problem.fp8 != "tensor"
    return "b" in case.problem.bias if name == "bias" else name not in OF_HEADS


def layout_of(case: Case, name: str) -> Layout:
    """How a tensor lies in memory; scales much as what they scale, unless that is dense."""
    of_scales = name in SCALES
    layout: Layout = getattr(case.problem, f"layout_{name[0] if of_scales else name}", BHSD)
    if not of_scales:
        return layout
    if str(layout) in ("bhsd", "bshd"):  # all that a kernel may take
        return BHSD
    b, h, s, d = (min(size, _MOST_APART) for size in layout.pad)
    return Layout(order=layout.order, pad=(b, h, s, d), offset=min(layout.offset, _MOST_APART))


def _dtype(case: Case, name: str) -> torch.dtype:
    if name in (*OF_HEADS, *SCALES, "dlse"):
        return torch.float32
    dtype = getattr(torch, case.problem.storage if name in "qkv" else case.problem.dtype)
    assert isinstance(dtype, torch.dtype)  # noqa: S101  # for mypy; Problem validated the name
    return dtype


def duplicate(inputs: Inputs, device: str | None = None) -> Inputs:
    """A copy, storage for storage: same bits, strides, offsets and slack; on a device if given."""
    return inputs.having({name: clone(x, device) for name, x in inputs.named()})


def with_slack(inputs: Inputs, value: float) -> Inputs:
    """A copy with another number in the slack (of sparse tensors, the same)."""
    return inputs.having({name: refilled(x, value) for name, x in inputs.named()})


def fingerprint(inputs: Inputs) -> dict[str, Tensor]:
    """The bytes of every storage, to be handed to `modified` after a launch."""
    return {name: storage(tensor).clone() for name, tensor in inputs.named()}


def modified(inputs: Inputs, before: dict[str, Tensor]) -> tuple[str, ...]:
    """What a launch did to its inputs, a sentence each; empty when it left them alone.

    Args:
        inputs: The tensors handed to the kernel, or views of the same storages.
        before: Their `fingerprint` from before the launch.
    """
    found = []
    for name, tensor in inputs.named():
        after = storage(tensor)
        if torch.equal(after, before[name]):
            continue
        width = tensor.element_size()
        changed = (after != before[name]).view(-1, width).any(dim=1)
        strides, offset = (tensor.stride(), tensor.storage_offset())
        if is_sparse(tensor):
            strides, offset = tensor.contiguous().stride(), 0
        own = changed.as_strided(tensor.shape, strides, offset)
        if own.any():
            first = tuple(torch.nonzero(own)[0].tolist())
            found.append(f"{name}: {int(own.sum())} elements changed, first at {first}")
            own.fill_(False)
        if changed.any():
            first_slack = int(torch.nonzero(changed)[0])
            found.append(
                f"{name}: {int(changed.sum())} elements of slack written, first at storage "
                f"offset {first_slack}"
            )
    return tuple(found)
