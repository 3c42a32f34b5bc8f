"""`materialise`: a case becomes tensors, laid out as it says, with poison wherever nobody may look.

Also the copies of inputs that the checks compare: hidden keys changed, keys or heads permuted,
one sequence alone.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify.errors import InvalidInputError
from fa_verify.layouts import BHSD
from fa_verify.values import DO_FAMILIES, QK_FAMILIES, TERM_FAMILIES, V_FAMILIES, Facts, stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from fa_verify.case import Case
    from fa_verify.layouts import Layout
    from fa_verify.problem import Problem

__all__ = [
    "REPEATS",
    "SLACK",
    "SPARSE",
    "Inputs",
    "among_others",
    "dropout_seed",
    "duplicate",
    "elements",
    "fingerprint",
    "materialise",
    "modified",
    "period",
    "permute_batch_heads",
    "permute_keys",
    "perturb_hidden",
    "select_sequence",
    "with_slack",
]

_OF_HEADS = ("alibi_slopes", "sinks")  # a number a query head, whatever the sequence

SLACK = 64
"""Poisoned elements after the last one of each tensor."""

SPARSE = 1 << 28
"""Elements from which on a buffer is sparse: it takes memory only where elements are."""

REPEATS = 1 << 27
"""Elements of a tensor from which on its sequences repeat: making all would take minutes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a kernel is handed: strided views (batch, heads, seqlen, head_dim) in the storage dtype.

    Attributes:
        q: (batch, heads_q, seqlen_q, head_dim).
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        do: (batch, heads_q, seqlen_q, head_dim_v), or None for a forward pass.
        bias: `Problem.shape_bias`, or None where the problem has none, as for those that follow.
        alibi_slopes: (heads_q,) float32.
        sinks: (heads_q,) float32.
        dlse: (batch, heads_q, seqlen_q) float32; None for a forward pass too.
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
    dropout_seed: int | None = None

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor there is, with its name."""
        for name in ("q", "k", "v", "do", "bias", "alibi_slopes", "sinks", "dlse"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def having(self, tensors: dict[str, Tensor]) -> Inputs:
        """The same with other tensors in the place of some."""
        return dataclasses.replace(self, **tensors)  # type: ignore[arg-type]

    def terms(self, *, backward: bool) -> dict[str, Tensor | int]:
        """What a kernel's forward (or backward) is handed beside q, k, v and do."""
        names = ("bias", "alibi_slopes", "sinks", "dropout_seed", *(("dlse",) if backward else ()))
        return {name: x for name in names if (x := getattr(self, name)) is not None}


def elements(case: Case) -> dict[str, npt.NDArray[np.float64]]:
    """The float64 elements of each tensor, before rounding; finite in the storage dtype.

    But for -inf in a bias and among sinks. Of a case whose sequences repeat, only those of one
    `period`.
    """
    p, values = dataclasses.replace(case.problem, batch=period(case)), case.values
    facts = Facts.of(p.dtype, p.scale)
    q, k = QK_FAMILIES[values.qk](stream(case.seed, "qk"), p.shape_q, p.shape_k, facts)
    arrays = {
        "q": q * values.logits,
        "k": k,
        "v": V_FAMILIES[values.v](stream(case.seed, "v"), p.shape_v, facts),
    }
    if case.backward:
        arrays["do"] = DO_FAMILIES[values.do](stream(case.seed, "do"), p.shape_o, facts)
    for array in arrays.values():
        np.clip(array, -facts.largest, facts.largest, out=array)
    return arrays | _terms(case, p, facts)


def _terms(case: Case, p: Problem, facts: Facts) -> dict[str, npt.NDArray[np.float64]]:
    """The elements of what the problem has beside q, k, v and do."""
    due = {
        "bias": ("bias", bool(p.bias), p.shape_bias),
        "alibi_slopes": ("slopes", p.alibi, (p.heads_q,)),
        "sinks": ("sinks", p.sinks, (p.heads_q,)),
        "dlse": ("dlse", p.lse_grad and case.backward, p.shape_lse),
    }
    arrays = {
        name: TERM_FAMILIES[family][getattr(case.values, family)](
            stream(case.seed, family), shape, facts
        )
        for name, (family, there, shape) in due.items()
        if there
    }
    if "bias" in arrays and np.isneginf(arrays["bias"]).any():
        _leave_a_key(p, arrays["bias"], case.seed)
    return arrays


def _leave_a_key(p: Problem, bias: npt.NDArray[np.float64], seed: int) -> None:
    """Make -inf 0 at one key of those that a row sees, whatever row the bias is read for."""
    order = stream(seed, "bias").spawn(1)[0].random(p.seqlen_k)
    step = max(1, (1 << 22) // max(1, p.seqlen_k))
    for start in range(0, p.seqlen_q, step):
        rows = np.arange(start, min(start + step, p.seqlen_q))
        seen = p.mask.allowed(p.seqlen_q, p.seqlen_k, slice(start, start + step))
        key = (seen * (1.0 + order)).argmax(1)
        at = (slice(None), slice(None), rows if bias.shape[2] > 1 else np.zeros_like(rows), key)
        bias[at] = np.where(np.isneginf(bias[at]), 0.0, bias[at])


def dropout_seed(case: Case) -> int | None:
    """What the kernel's random numbers come from, of 31 bits; None where none are needed."""
    return int(stream(case.seed, "dropout").integers(1 << 31)) if case.problem.dropout else None


def period(case: Case) -> int:
    """After how many sequences their elements repeat; the batch itself, but for huge tensors.

    It is odd: an offset that wraps at a power of two then finds other elements, not the same ones.
    """
    p = case.problem
    sequence = max(math.prod(s[1:]) for s in (p.shape_q, p.shape_k, p.shape_v, p.shape_o))
    if p.batch * sequence < REPEATS:
        return p.batch
    fit = REPEATS // 2 // max(1, sequence)
    return min(p.batch, max(1, fit - 1 + fit % 2))


def materialise(case: Case, device: str = "cpu") -> Inputs:
    """The case's tensors on a device. The same case gives the same elements everywhere.

    Elements before the first (a storage offset), between rows, heads or sequences (padding) and
    the `SLACK` elements after the last are NaN; on the CPU those between elements further apart
    than `SPARSE` are 0, in memory that is never touched. Heads of a ``shared`` layout are all
    head 0. Sequences repeat where `period` says so.
    """
    tensors = {
        name: _lay_out(
            torch.from_numpy(array),
            _layout(case, name),
            _dtype(case, name),
            device,
            batch=case.problem.batch if _has_batch(case, name) else None,
        )
        for name, array in elements(case).items()
    }
    return Inputs(**tensors, dropout_seed=dropout_seed(case))


def _has_batch(case: Case, name: str) -> bool:
    """Whether a tensor has elements of its own for each sequence."""
    return "b" in case.problem.bias if name == "bias" else name not in _OF_HEADS


def _dtype(case: Case, name: str) -> torch.dtype:
    if name in _OF_HEADS or name == "dlse":
        return torch.float32
    dtype = getattr(torch, case.problem.dtype)
    assert isinstance(dtype, torch.dtype)  # noqa: S101  # for mypy; Problem validated the name
    return dtype


def _layout(case: Case, name: str) -> Layout:
    layout: Layout = getattr(case.problem, f"layout_{name}", BHSD)
    return layout


def _lay_out(
    values: Tensor, layout: Layout, dtype: torch.dtype, device: str, *, batch: int | None = None
) -> Tensor:
    """A poisoned buffer holding the values, again and again in a larger batch, in the layout.

    A tensor of fewer axes lies as if the others had one element and came last.
    """
    count = values.shape[0]
    shape = (count if batch is None else batch, *values.shape[1:])
    b, h, s, d = (*shape, 1, 1, 1)[:4]
    buffer = _buffer(layout.offset + layout.span((b, h, s, d)) + SLACK, dtype, device)
    strides = layout.strides((b, h, s, d))[: len(shape)]
    view = buffer.as_strided(shape, strides, layout.offset)
    written = _written(view)
    values = values[written]
    if buffer.device.type != "cpu":
        # Rounded on the CPU whatever the device, so that the bits do not depend on it.
        values = values.to(dtype).to(device)
    for start in range(0, shape[0], max(1, count)):
        part = view[start : start + count][written]
        part.copy_(values[: len(part)])
    return view


def _written(tensor: Tensor) -> tuple[slice, ...]:
    """Through a stride-0 head axis only head 0 can be written; all heads hold its values."""
    shared = tensor.dim() == 4 and tensor.stride(1) == 0
    return (slice(None), slice(0, 1)) if shared else (slice(None),)


def _buffer(size: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if size < SPARSE or torch.device(device).type != "cpu":
        return torch.full((size,), torch.nan, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize), dtype=dtype)


def _is_sparse(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= SPARSE * tensor.element_size()


def _storage(tensor: Tensor) -> Tensor:
    """All bytes that the tensor's storage holds, slack included; of a sparse one, its elements."""
    if _is_sparse(tensor):
        return tensor.contiguous().view(-1).view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _clone(tensor: Tensor, device: str | None = None) -> Tensor:
    if _is_sparse(tensor):  # gigabytes of slack stay where they are
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        copy = _buffer(size, tensor.dtype, device or tensor.device)
        copy = copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        copy[_written(copy)].copy_(tensor[_written(tensor)])
        return copy
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    flat = whole.set_(tensor.untyped_storage()).to(device or tensor.device, copy=True)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def duplicate(inputs: Inputs, device: str | None = None) -> Inputs:
    """A copy, storage for storage: same bits, strides, offsets and slack; on a device if given."""
    return inputs.having({name: _clone(x, device) for name, x in inputs.named()})


def with_slack(inputs: Inputs, value: float) -> Inputs:
    """A copy with another number in the slack (of sparse tensors, the same)."""
    return inputs.having({name: _with_slack(x, value) for name, x in inputs.named()})


def _with_slack(tensor: Tensor, value: float) -> Tensor:
    if _is_sparse(tensor):
        return _clone(tensor)
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = torch.full((size,), value, dtype=tensor.dtype, device=tensor.device)
    copy = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    copy[_written(copy)].copy_(tensor[_written(tensor)])
    return copy


def fingerprint(inputs: Inputs) -> dict[str, Tensor]:
    """The bytes of every storage, to be handed to `modified` after a launch."""
    return {name: _storage(tensor).clone() for name, tensor in inputs.named()}


def modified(inputs: Inputs, before: dict[str, Tensor]) -> tuple[str, ...]:
    """What a launch did to its inputs, a sentence each; empty when it left them alone.

    Args:
        inputs: The tensors handed to the kernel, or views of the same storages.
        before: Their `fingerprint` from before the launch.
    """
    found = []
    for name, tensor in inputs.named():
        after = _storage(tensor)
        if torch.equal(after, before[name]):
            continue
        width = tensor.element_size()
        changed = (after != before[name]).view(-1, width).any(dim=1)
        strides, offset = (tensor.stride(), tensor.storage_offset())
        if _is_sparse(tensor):
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


def _overwrite(tensor: Tensor, values: Tensor) -> Tensor:
    """A copy of the tensor, in its own layout, with other elements."""
    copy = _clone(tensor)
    copy[_written(copy)].copy_(values[_written(copy)])
    return copy


def perturb_hidden(
    case: Case,
    inputs: Inputs,
    rng: np.random.Generator,
    *,
    row: int | None = None,
    masked_logit: float = -math.inf,
) -> tuple[Inputs, Tensor]:
    """Replace every key and value hidden from one query row by other, large, finite ones.

    Keys hidden from all queries are among them. A right kernel gives the same bits (up to the sign
    of zero) for every row that sees none of the changed keys.

    Args:
        case: The case of the inputs.
        inputs: The inputs; left alone.
        rng: Chooses the row and the new values.
        masked_logit: What hidden logits become: the new ones stay below a quarter of it.
        row: The query row; by default one of those from which something is hidden.

    Returns:
        The changed copy, and the rows that must not change: bool, (seqlen_q,), on the CPU. When
        nothing is hidden from any row (or from `row`) no row is marked: there is nothing to check.
    """
    p = case.problem
    seen = p.mask.seen(p.seqlen_q, p.seqlen_k)
    candidates = np.flatnonzero(seen < p.seqlen_k)
    if row is None and len(candidates):
        row = int(rng.choice(candidates))
    if row is None or seen[row] == p.seqlen_k:
        return inputs, torch.zeros(p.seqlen_q, dtype=torch.bool)
    changed = ~p.mask.allowed(p.seqlen_q, p.seqlen_k, slice(row, row + 1))[0]
    keeps = torch.from_numpy(_blind_to(p, changed))
    largest = Facts.of(p.dtype, 1.0).largest
    # q k' and do v' stay finite in float32: inf - inf in a masked tile is no fault of a kernel.
    reach = 2.0**112 / max(1.0, abs(p.scale))
    below = abs(masked_logit) / 4 / max(2.0**-126, abs(p.scale))
    size_k = min(largest, min(reach, below) / (_magnitude(inputs.q) * p.head_dim))
    size_v = min(largest, reach / (_magnitude(inputs.do) * p.head_dim_v))
    where = torch.from_numpy(changed).to(inputs.k.device)
    new = {}
    for name, size in (("k", size_k), ("v", size_v)):
        tensor: Tensor = getattr(inputs, name)
        noise = rng.uniform(0.5, 1.0, (tensor.shape[0], tensor.shape[1], *tensor.shape[2:]))
        noise *= size * np.where(rng.random(noise.shape) < 0.5, -1.0, 1.0)
        other = torch.from_numpy(noise).to(tensor.dtype).to(tensor.device)
        new[name] = _overwrite(tensor, torch.where(where[:, None], other, tensor))
    return inputs.having(new), keeps


def _blind_to(p: Problem, keys: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Queries that see none of these keys."""
    if not p.mask.pattern:
        lo, hi = p.mask.intervals(p.seqlen_q, p.seqlen_k)
        before = np.concatenate([[0], np.cumsum(keys)])
        blind: npt.NDArray[np.bool_] = before[hi] == before[lo]
        return blind
    strips = p.mask.strips(p.seqlen_q, p.seqlen_k)
    return np.concatenate([~(rows & keys).any(1) for _, rows in strips])


def _magnitude(tensor: Tensor | None) -> float:
    if tensor is None or tensor.numel() == 0:
        return 1.0
    return max(1.0, float(tensor.abs().max()))


def permute_keys(inputs: Inputs, order: Sequence[int]) -> Inputs:
    """Key and value rows in another order: nothing but rounding may change where no mask is.

    Nor a term that knows where a key is, as ALiBi and dropout do.
    """
    index = torch.as_tensor(order, device=inputs.k.device)
    if sorted(order) != list(range(inputs.k.shape[2])):
        msg = f"order={order!r}: must be a permutation of the {inputs.k.shape[2]} keys"
        raise InvalidInputError(msg)
    bias = inputs.bias
    if bias is not None and bias.shape[3] > 1:
        bias = _overwrite(bias, bias[..., index])
    return dataclasses.replace(
        inputs,
        k=_overwrite(inputs.k, inputs.k[:, :, index]),
        v=_overwrite(inputs.v, inputs.v[:, :, index]),
        bias=bias,
    )


def permute_batch_heads(
    inputs: Inputs, batch_order: Sequence[int], kv_head_order: Sequence[int]
) -> tuple[Inputs, tuple[int, ...]]:
    """Sequences and heads in another order; the query heads of a group move together.

    Returns:
        The permuted copy, and the order of the query heads: output ``o'[b, h]`` of the copy must
        be ``o[batch_order[b], head_order[h]]`` of the original.
    """
    batch, heads_kv = inputs.k.shape[:2]
    for name, order, size in (
        ("batch_order", batch_order, batch),
        ("kv_head_order", kv_head_order, heads_kv),
    ):
        if sorted(order) != list(range(size)):
            msg = f"{name}={order!r}: must be a permutation of range({size})"
            raise InvalidInputError(msg)
    group = inputs.q.shape[1] // heads_kv
    head_order = tuple(h * group + member for h in kv_head_order for member in range(group))
    moved = {}
    for name, tensor in inputs.named():
        heads = kv_head_order if name in ("k", "v") else head_order
        b = torch.as_tensor(batch_order, device=tensor.device)
        h = torch.as_tensor(heads, device=tensor.device)
        if name in _OF_HEADS:
            moved[name] = _overwrite(tensor, tensor[h])
            continue
        other = tensor[b] if tensor.shape[0] == batch else tensor
        other = other[:, h] if other.shape[1] == len(heads) else other
        moved[name] = _overwrite(tensor, other)
    return inputs.having(moved), head_order


def select_sequence(case: Case, inputs: Inputs, batch_index: int) -> tuple[Case, Inputs]:
    """One sequence alone, in fresh poisoned buffers of the same layouts.

    The case describes the shapes; its seed does not reproduce the elements.
    """
    if not 0 <= batch_index < case.problem.batch:
        msg = f"batch_index={batch_index}: must be in range({case.problem.batch})"
        raise InvalidInputError(msg)
    alone = dataclasses.replace(case, problem=dataclasses.replace(case.problem, batch=1))
    tensors = {
        name: _lay_out(
            (tensor[batch_index : batch_index + 1] if _has_batch(case, name) else tensor).cpu(),
            _layout(case, name),
            tensor.dtype,
            str(tensor.device),
        )
        for name, tensor in inputs.named()
    }
    return alone, inputs.having(tensors)


def among_others(
    case: Case, inputs: Inputs, batch_index: int, *, batch: int, place: int
) -> tuple[Case, Inputs]:
    """One sequence at a place in another batch, in fresh poisoned buffers of the same layouts.

    Its mates hold the same numbers negated, rows in reverse order: finite, and never its own. The
    case describes the shapes; its seed does not reproduce the elements.
    """
    if not 0 <= batch_index < case.problem.batch or not 0 <= place < batch:
        msg = f"batch_index={batch_index}, place={place}: must be in the old and the new batch"
        raise InvalidInputError(msg)
    other = dataclasses.replace(case, problem=dataclasses.replace(case.problem, batch=batch))
    tensors = {}
    for name, tensor in inputs.named():
        own = tensor.cpu()
        if _has_batch(case, name):
            own = own[batch_index : batch_index + 1]
            mates = -own.flip(2).expand(batch, *own.shape[1:])
            mates[mates == torch.inf] = 0.0  # where a bias hides a key
            mates[place] = own[0]
            own = mates
        layout = _layout(case, name)
        tensors[name] = _lay_out(own, layout, tensor.dtype, str(tensor.device))
    return other, inputs.having(tensors)
