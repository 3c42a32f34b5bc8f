"""Inputs come back as they were, bit for bit, the slack between their rows included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fa_verify.checks.where import describe
from fa_verify.inputs import duplicate
from fa_verify.inputs.buffers import is_sparse, storage
from fa_verify.ttir.memory.views import coordinates
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
    if _all_same([_bytes(*pair) for pair in pairs.values()]):
        return
    for name, (used, fresh) in pairs.items():
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
        elif not is_sparse(used):  # slack of gigabytes would be filled; the backend watches
            yield from _slack(name, used, fresh)


def _bytes(used: torch.Tensor, fresh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All bytes of a tensor as it is and as it was, the slack around it included."""
    if is_sparse(used):
        now, then = (x.contiguous().flatten().view(torch.uint8) for x in (used, fresh))
        return now, then
    return _common(used, fresh)[:2]


def _all_same(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether both of each pair are equal; on a card they are compared as one."""
    if pairs[0][0].device.type != "cpu":
        now, then = (torch.cat(some) for some in zip(*pairs, strict=True))
        return torch.equal(now, then)
    return all(torch.equal(now, then) for now, then in pairs)


def _slack(name: str, used: torch.Tensor, fresh: torch.Tensor) -> Iterator[Failure]:
    """A write to what lies between the elements, or around them, and belongs to nobody."""
    now, then, before = _common(used, fresh)
    slack = ~same_bits(now, then)
    if not bool(slack.any()):
        return
    offset = (int(slack.nonzero()[0]) - before) // used.element_size()
    where = coordinates(tuple(used.shape), used.stride(), offset)
    place = "" if where is None else f", ({', '.join(map(str, where))}),"
    yield Failure(
        check="inputs",
        title=f"out-of-bounds-write into the slack of {name}",
        message=(
            f"{name}: element {offset} from its first one{place} belongs to nobody and was "
            f"written to; {int(slack.sum())} bytes of slack in all"
        ),
        tensor=name,
    )


def _common(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The bytes that both storages have, and those of them before the first element.

    On a card a tensor lies in a slot of its own: what lay around it stayed behind.
    """
    wholes = [storage(x) for x in (a, b)]
    firsts = [int(x.storage_offset()) * x.element_size() for x in (a, b)]
    before = min(firsts)
    after = min(len(w) - first for w, first in zip(wholes, firsts, strict=True))
    now, then = (w[f - before : f + after] for w, f in zip(wholes, firsts, strict=True))
    return now, then, before
