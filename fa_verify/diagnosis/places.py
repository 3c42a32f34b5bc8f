"""Results that are right but stand elsewhere: heads, sequences or rows out of order; zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fa_verify.checks.where import axes_of, ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fa_verify.diagnosis.evidence import Evidence, Observation

__all__ = ["misplaced", "zeros"]

_LEAST = 8  # elements of a slice: fewer agree by chance
_APART = 4.0  # tolerances: nearer to each other slices are alike
_MOST = 64  # slices that are compared with each other


def misplaced(
    evidence: Evidence, names: Sequence[str]
) -> Iterator[tuple[str, str, dict[str, torch.Tensor]]]:
    """Names, sentences and predictions of results whose slices stand elsewhere."""
    for name in names:
        if not evidence.wrong(name):
            continue
        seen = evidence.seen[name]
        for axis, text in ((1, axes_of(name)[1]), (0, "sequences"), (2, axes_of(name)[2])):
            order = _order(seen, axis)
            if order is None:
                continue
            moved = [i for i, source in enumerate(order) if source != i]
            first = f"{text.rstrip('s')} {moved[0]} holds that of {order[moved[0]]}"
            sentence = f"the {text} of {name} are in another order: {first}"
            value = seen.reference.index_select(axis, torch.tensor(order))
            yield f"{text} of {name} out of order", sentence, {name: value}


def _order(seen: Observation, axis: int) -> list[int] | None:
    """Which slice of the reference each slice along an axis holds; None where one fits none."""
    size = seen.got.shape[axis]
    if not 1 < size <= _MOST or seen.got.numel() // size < _LEAST:
        return None
    got = seen.got.movedim(axis, 0).reshape(size, -1)
    reference = seen.reference.movedim(axis, 0).reshape(size, -1)
    tolerance = torch.nan_to_num(seen.det, posinf=0.0).movedim(axis, 0).reshape(size, -1)
    tolerance = 2 * tolerance.amax(dim=1)
    wrong = seen.wrong.movedim(axis, 0).reshape(size, -1).any(dim=1)
    order = list(range(size))
    for index in wrong.nonzero().flatten().tolist():
        far = (got[index] - reference).abs().amax(dim=1)
        source = int(torch.nan_to_num(far, nan=torch.inf).argmin())
        if source == index or not bool(far[source] <= tolerance[source] + 1e-300):
            return None
        if not bool(reference[source].any()):  # what is lost is 0, as some results are: no order
            return None
        if int((far <= _APART * tolerance).sum()) > 1:  # slices that are alike tell no order
            return None
        order[index] = source
    return order


def zeros(
    evidence: Evidence, names: Sequence[str]
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Results that are 0 in whole rows, columns or heads, and right elsewhere."""
    for name in names:
        if not evidence.wrong(name):
            continue
        seen = evidence.seen[name]
        if not bool((seen.got[seen.wrong] == 0).all()) or int(seen.wrong.sum()) < _LEAST:
            continue
        for axis in (2, 3, 1, 0):
            if axis >= seen.wrong.ndim:
                continue
            others = [other for other in range(seen.wrong.ndim) if other != axis]
            gone = seen.wrong.any(dim=others)
            if bool(gone.all()):
                continue
            shape = [-1 if other == axis else 1 for other in range(seen.wrong.ndim)]
            label = ("sequences", *axes_of(name)[1:])[axis] if axis < 3 else "columns"
            indices = [int(i) for i in gone.nonzero().flatten().tolist()]
            value = torch.where(gone.reshape(shape), torch.zeros_like(seen.got), seen.reference)
            text = (
                f"{label} {ranges(indices)} of {len(gone)} of {name} are 0: they are not computed"
            )
            yield f"{text}, or lost on the way", {name: value}
            break
