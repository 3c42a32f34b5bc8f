"""Where a set of elements lies, in words: "rows 0..63, head_dim 64..79, every head"."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["axes_of", "describe", "ranges"]

_MAX_RANGES = 4
_SINGULAR = {
    "batches": "batch",
    "heads": "head",
    "kv heads": "kv head",
    "rows": "row",
    "keys": "key",
    "head_dim": "column",
}


_AXES = {
    **dict.fromkeys(("bias", "dbias"), ("batches", "heads", "rows", "keys")),
    **dict.fromkeys(("alibi_slopes", "sinks", "dsinks"), ("heads",)),
}


def axes_of(name: str) -> tuple[str, ...]:
    """The names of a tensor's axes: rows are queries, keys are keys."""
    if name in _AXES:
        return _AXES[name]
    position = "keys" if name in ("k", "v", "dk", "dv") else "rows"
    heads = "kv heads" if name in ("k", "v", "dk", "dv") else "heads"
    return ("batches", heads, position) + (() if name in ("lse", "dlse") else ("head_dim",))


def ranges(indices: Sequence[int]) -> str:
    """Sorted indices as text: ``0..3, 7, 9..12``; long lists are cut.

    >>> ranges([0, 1, 2, 5])
    '0..2, 5'
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    texts = [f"{first}" if first == last else f"{first}..{last}" for first, last in runs]
    if len(texts) > _MAX_RANGES:
        texts = [*texts[: _MAX_RANGES - 1], f"... {texts[-1]} ({len(indices)} in all)"]
    return ", ".join(texts)


def describe(name: str, wrong: torch.Tensor) -> str:
    """Along which indices of each axis a bool tensor has a True.

    >>> import torch
    >>> wrong = torch.zeros(1, 2, 4, 8, dtype=torch.bool)
    >>> wrong[0, :, 1:3, 5:] = True
    >>> describe("o", wrong)
    'every head, rows 1..2 of 4, head_dim 5..7 of 8'
    """
    parts = []
    for axis, label in enumerate(axes_of(name)):
        size = wrong.shape[axis]
        if size == 1:
            continue
        others = [other for other in range(wrong.ndim) if other != axis]
        along = wrong.any(dim=others) if others else wrong
        indices = along.nonzero().flatten().tolist()
        if len(indices) == size:
            parts.append(f"every {_SINGULAR[label]}")
        else:
            parts.append(f"{label} {ranges(indices)} of {size}")
    return ", ".join(parts) or "the only element"
