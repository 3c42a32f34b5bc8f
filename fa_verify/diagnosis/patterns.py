"""Where the wrong elements lie, as a sentence: what is known when no known defect explains them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fa_verify.checks.observed import empty_rows
from fa_verify.checks.where import axes_of, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.diagnosis.evidence import Observation
    from fa_verify.problem import Problem

__all__ = ["empty", "pattern", "unwritten"]

_BLOCKS = (16, 32, 64, 128, 256)  # rows of usual tiles


def unwritten(
    name: str, holes: torch.Tensor, others: Sequence[tuple[torch.Tensor, Problem]]
) -> str:
    """What the places say that nobody wrote.

    Args:
        name: The tensor.
        holes: Where nobody wrote.
        others: The same of other cases and of this one, whole tensors too, with what was computed.
    """
    lengths = _lengths(name, others)
    if lengths:
        return lengths
    if name != "lse":
        columns = _indices(holes, 3)
        tile = columns[0] if columns else 0
        tail = columns == list(range(tile, holes.shape[3]))
        if tail and tile in (16, 32, 64, 128) and tile < holes.shape[3]:
            width = "head_dim_v" if name in ("o", "dv") else "head_dim"
            return (
                f"columns {tile}..{holes.shape[3] - 1} of {name} are never written: BLOCK_D={tile} "
                f"cuts {width}={holes.shape[3]} off"
            )
    documents = _documents(name, others)
    if documents:
        return documents
    positions = _indices(holes, 2)
    size, label = holes.shape[2], axes_of(name)[2]
    if 0 < len(positions) < size and positions == list(range(positions[0], size)):
        return (
            f"{label} {ranges(positions)} of {size} of {name} are never written: the grid or the "
            "loop ends too early"
        )
    if bool(holes.all()):
        return f"no program writes {name}"
    return f"{name} is not written everywhere: a store goes elsewhere, or its mask is too narrow"


def _lengths(name: str, others: Sequence[tuple[torch.Tensor, Problem]]) -> str:
    """That as many blocks of rows are written as there are of keys, or the other way round."""
    due, given = ("seqlen_k", "seqlen_q") if name in ("dk", "dv") else ("seqlen_q", "seqlen_k")
    short = [(holes, p) for holes, p in others if bool(holes.any())]
    if any(getattr(p, given) >= getattr(p, due) for _, p in short):
        return ""  # the other length would have been enough
    if not any(getattr(p, given) for _, p in short):
        return ""
    for block in _BLOCKS:
        if all(
            _blocks(holes, block)
            == math.prod(holes.shape[:2]) * -(-min(getattr(p, due), getattr(p, given)) // block)
            for holes, p in others
        ):
            label = axes_of(name)[2]
            return (
                f"the later {label} of {name} are never written: the grid or the loop counts "
                f"blocks of {given} where {due} is due"
            )
    return ""


def _documents(name: str, others: Sequence[tuple[torch.Tensor, Problem]]) -> str:
    """What all cases say of where in each sequence, or document, nobody writes."""
    side, label = (1 if name in ("dk", "dv") else 0), axes_of(name)[2]
    short = [
        (left, _lengths_of(problem, side, left.shape[0]))
        for left, problem in ((_rows(holes), problem) for holes, problem in others)
        if left is not None
    ]
    if not any(bool(left.any()) for left, _ in short):
        return ""
    for block in _BLOCKS:
        if any(
            all(torch.equal(left.flatten(), _tails(n, block, least)) for left, n in short)
            for least in (0, 1)
        ):
            return (
                f"the last, partial blocks of {label} (of {block}) of {name} are never written: "
                "the grid or the loop ends too early, or these blocks return early"
            )
    for block in _BLOCKS:
        if any(len(lengths) > 1 for _, lengths in short) and all(
            torch.equal(left.flatten(), _beyond(lengths, lengths[0], block))
            for left, lengths in short
        ):
            return (
                f"{label} of {name} past the length of the first document (in blocks of {block}) "
                "are never written: the grid must be as long as the longest document"
            )
    if all(torch.equal(left.flatten(), _last_one(lengths)) for left, lengths in short):
        return (
            f"the last sequence or document of {name} is never written: the grid is one short, or "
            "cu_seqlens is read one entry too early"
        )
    return ""


def _rows(holes: torch.Tensor) -> torch.Tensor | None:
    """Which rows nobody writes, (batch, rows), where heads and columns agree; else None."""
    left = holes.any(dim=3) if holes.ndim > 3 else holes
    if not left.numel() or not bool((left == left[:, :1]).all()):
        return None
    return left[:, 0]


def _lengths_of(problem: Problem, side: int, batch: int) -> list[int]:
    """The lengths of all sequences or documents, one after the other."""
    whole = ((problem.seqlen_q, problem.seqlen_k),) * batch
    return [lengths[side] for lengths in problem.mask.documents or whole]


def _tails(lengths: Sequence[int], block: int, least: int) -> torch.Tensor:
    """Rows past the whole blocks, of which at least so many are written."""
    return _laid_out([torch.arange(n) >= max(least, n // block) * block for n in lengths])


def _beyond(lengths: Sequence[int], first: int, block: int) -> torch.Tensor:
    end = max(1, -(-first // block)) * block
    return _laid_out([torch.arange(n) >= end for n in lengths])


def _last_one(lengths: Sequence[int]) -> torch.Tensor:
    last = len(lengths) - 1
    return _laid_out([torch.full((n,), i == last and i > 0) for i, n in enumerate(lengths)])


def _laid_out(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts))


def _blocks(holes: torch.Tensor, block: int) -> int:
    """How many blocks of rows are written, in all sequences and heads; -1: some only in part."""
    written = (~holes).any(dim=3) if holes.ndim > 3 else ~holes
    whole, some = (
        torch.nn.functional.pad(written, (0, -written.shape[2] % block), value=value)
        .reshape(*written.shape[:2], -1, block)
        .sum(dim=3)
        for value in (True, False)
    )
    full = whole == block
    return int(full.sum()) if bool((full | (some == 0)).all()) else -1


def empty(name: str, seen: Observation, problem: Problem, *, sound: bool) -> str:
    """What rows that see no key, or blocks that a row does not see, do to a result; "" if nothing.

    Args:
        name: The tensor.
        seen: Its observation.
        problem: What was computed.
        sound: The forward pass is right.
    """
    nothing = empty_rows(problem)
    nan = torch.isnan(seen.got) & seen.wrong
    if name in ("dk", "dv"):
        if bool(nan.any()) and bool(nothing.any()) and sound:
            return (
                "a row that sees no key gives NaN in P or dS (exp(-inf - -inf)), which spoils the "
                "gradients of every key in its blocks: guard an lse of -inf"
            )
        return ""
    rows = torch.zeros(seen.wrong.shape[2], dtype=torch.bool)
    rows[_indices(seen.wrong, 2)] = True
    if bool(rows.any()) and bool((rows <= nothing).all()):
        return _blind(problem, nan=bool(nan.any()))
    seen_keys = problem.mask.seen(problem.seqlen_q, problem.seqlen_k)
    hidden = torch.from_numpy(seen_keys < problem.seqlen_k)
    where = torch.zeros_like(rows)
    where[_indices(nan, 2)] = True
    if name in ("o", "lse") and bool(where.any()) and bool((where <= hidden).all()):
        return (
            "-inf - -inf where a block or a split of keys is wholly hidden from a row, which is "
            "NaN: guard a maximum of -inf"
        )
    return ""


def _blind(problem: Problem, *, nan: bool) -> str:
    """What rows that see no key do, where they alone are wrong."""
    if nan:
        return (
            "rows that see no key compute exp(-inf - -inf), which is NaN: guard a maximum or "
            "an lse of -inf"
        )
    if problem.mask.documents:
        return ""  # a number may be another document's: its keys are seen
    return (
        "rows that see no key are not treated apart: a finite number or +inf stands where -inf "
        "(of lse) and 0 (of o and dq) are due"
    )


def pattern(name: str, wrong: torch.Tensor, problem: Problem) -> str:
    """What all wrong elements have in common; "" when nothing."""
    if not bool(wrong.any()):
        return ""
    facts = []
    if wrong.ndim == 4:
        columns = _indices(wrong, 3)
        if len(columns) < wrong.shape[3]:
            text = f"only columns {ranges(columns)} of {wrong.shape[3]} are wrong"
            if columns[0] in (16, 32, 64, 128) and columns[-1] == wrong.shape[3] - 1:
                text += f", the tail past a tile of {columns[0]} (BLOCK_D={columns[0]})"
            facts.append(text)
    positions, size = _indices(wrong, 2), wrong.shape[2]
    label = axes_of(name)[2]
    if name in ("o", "lse", "dq"):
        empty = empty_rows(problem)
        rows = torch.zeros(size, dtype=torch.bool)
        rows[positions] = True
        if bool(empty.any()) and bool((rows <= empty).all()):
            return f"only rows that see no key are wrong ({label} {ranges(positions)})"
    if len(positions) < size:
        facts.append(_positions(label, positions, size))
    for axis, text in ((1, axes_of(name)[1]), (0, "batches")):
        indices = _indices(wrong, axis)
        if len(indices) < wrong.shape[axis]:
            facts.append(f"only {text} {ranges(indices)} of {wrong.shape[axis]}")
    return "; ".join(facts)


def _positions(label: str, positions: list[int], size: int) -> str:
    for block in (128, 64, 32, 16):
        last = size // block * block
        if size % block and last and positions[0] >= last:
            return (
                f"only the last, partial block of {label} ({ranges(positions)} of {size}) is wrong"
            )
    return f"only {label} {ranges(positions)} of {size} are wrong"


def _indices(wrong: torch.Tensor, axis: int) -> list[int]:
    others = [other for other in range(wrong.ndim) if other != axis]
    return [int(i) for i in wrong.any(dim=others).nonzero().flatten().tolist()]
