"""Inputs come back as they were, bit for bit, the slack between their rows included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fa_verify.checks.where import describe
from fa_verify.inputs import SPARSE, duplicate
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.trial import Trial

__all__ = ["check", "same_bits"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise: the same bits (NaN equals the same NaN, 0 differs from -0)."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.uint8}[a.element_size()]
    return a.contiguous().view(integer) == b.contiguous().view(integer)


def check(trial: Trial) -> Iterator[Failure]:
    """Fail when q, k, v or do was written to, or the slack around it."""
    trial.execution  # noqa: B018 - the kernel must have run
    after = trial.inputs
    if trial.device != trial.backend.device:
        after = duplicate(after, trial.device)
    pairs = {name: (x, getattr(trial.pristine, name)) for name, x in after.named()}
    # One transfer from the device, and nearly always the end.
    same = torch.stack([_unchanged(*pair) for pair in pairs.values()]).tolist()
    for (name, (used, fresh)), unchanged in zip(pairs.items(), same, strict=True):
        if unchanged:
            continue
        sparse = _is_sparse(used)
        changed = ~same_bits(used, fresh)
        if bool(changed.any()):
            first = tuple(int(i) for i in changed.nonzero()[0].tolist())
            place = ", ".join(str(i) for i in first)
            yield Failure(
                check="inputs",
                title=f"{name} was modified",
                message=(
                    f"{name}[{place}]: got {float(used[first]):.9g}, "
                    f"was {float(fresh[first]):.9g}; "
                    f"{int(changed.sum())} of {changed.numel()} elements: {describe(name, changed)}"
                ),
                tensor=name,
            )
            continue
        if sparse:
            continue  # to look at slack of gigabytes would fill them; the backend watches writes
        slack = torch.as_tensor(~same_bits(_storage(used), _storage(fresh)))
        if bool(slack.any()):
            offset = int(slack.nonzero()[0]) // used.element_size() - used.storage_offset()
            yield Failure(
                check="inputs",
                title=f"the slack of {name} was written to",
                message=(
                    f"{name}: element {offset} from its first one belongs to nobody and was "
                    f"written to; {int(slack.sum())} bytes of slack in all"
                ),
                tensor=name,
            )


def _is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= SPARSE * tensor.element_size()


def _unchanged(used: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """Whether a tensor is as it was, the slack around it included."""
    if not _is_sparse(used):
        used, fresh = _storage(used), _storage(fresh)
    return same_bits(used, fresh).all()


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())
