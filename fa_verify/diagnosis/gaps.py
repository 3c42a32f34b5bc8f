"""Packed documents and masks with gaps that go wrong: who then still sees whom."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from fa_verify.diagnosis.cause import Cause
from fa_verify.diagnosis.knobs import Knobs
from fa_verify.masks import Mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.masks import Alignment
    from fa_verify.problem import Problem

__all__ = ["AS_MANY", "BY_KEYS", "OTHER", "causes", "own_keys", "through_gaps"]

BY_KEYS = "queries are packed by the lengths of the keys"
_DOCUMENTS = (
    ("documents are ignored: the mask is that of one long sequence", "one"),
    ("documents see each other: all keys of the sequence are visited", "ignored"),
    ("the diagonal is that of the packed sequence, not one of each document", "packed diagonal"),
    (
        "the diagonal's shift is that of the documents' places in the pack, not of their lengths",
        "diagonal of ends",
    ),
    ("documents end one key too late: the next one's first key is seen", "late"),
    ("documents begin one key too early: the last one's last key is seen", "begin early"),
    ("documents without keys see the first key after them", "empty"),
    ("keys are packed by the lengths of the queries", "by queries"),
    (BY_KEYS, "by keys"),
)
OTHER: dict[str, Alignment] = {"bottom-right": "top-left", "top-left": "bottom-right"}
AS_MANY = "keys from seqlen_q on are left out: seqlen_q stands where seqlen_k is due"
_BLOCKS = (64, 128)


def causes(problem: Problem) -> Iterator[Cause]:
    """What can go wrong with the documents, and with the gaps, of this mask."""
    mask = problem.mask
    if len(mask.documents) > 1:
        for sentence, kind in _DOCUMENTS:
            yield Cause(sentence, Knobs(documents=kind))
        yield Cause(AS_MANY, Knobs(documents="as many"), "as many keys as queries")
    if mask.documents and mask.banded:
        other = OTHER[mask.alignment]
        text = f"the mask is aligned {other} instead of {mask.alignment}"
        yield Cause(text, Knobs(documents="other alignment"), f"aligned {other}")
    if mask.pattern:
        text = "the mask's gaps are ignored: all of a row's band is seen"
        yield Cause(text, Knobs(gaps="ignored"))
        for block in _BLOCKS:
            text = f"partly hidden blocks (of {block}) are treated as wholly visible"
            yield Cause(text, Knobs(gaps="whole blocks", block_m=block, block_n=block))


def own_keys(problem: Problem, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each query's diagonal, and its document's first key and the one after its last, (rows, 1)."""
    mask, size = problem.mask, (problem.seqlen_q, problem.seqlen_k)
    diagonals, (first, end) = mask.diagonals(*size), mask.own_keys(*size)
    if kind in ("one", "packed diagonal"):
        diagonals = dataclasses.replace(mask, documents=()).diagonals(*size)
    if kind == "other alignment":
        diagonals = dataclasses.replace(mask, alignment=OTHER[mask.alignment]).diagonals(*size)
    if kind == "diagonal of ends":
        diagonals = diagonals + _moved(mask)
    if kind == "as many":
        lengths = np.array(mask.documents, dtype=np.int64)
        repeated = np.repeat(lengths, lengths[:, 0], axis=0)
        end = first + repeated[:, 0]
        if mask.alignment == "bottom-right":
            diagonals = diagonals - (repeated[:, 1] - repeated[:, 0])
    if kind in ("one", "ignored"):
        first, end = np.zeros_like(first), np.full_like(end, size[1])
    elif kind == "late":
        end = end + 1
    elif kind == "begin early":
        first = np.maximum(first - 1, 0)
    elif kind == "empty":
        end = np.maximum(end, first + 1)
    elif kind.startswith("by "):
        diagonals, first, end = _by_one_side(mask, size, 0 if kind == "by queries" else 1)
    found = (torch.from_numpy(x)[:, None] for x in (diagonals, first, end))
    return tuple(found)  # type: ignore[return-value]


def _moved(mask: Mask) -> np.ndarray:
    """How far a shift by documents' places is from that by their lengths, a row each."""
    lengths = np.array(mask.documents, dtype=np.int64)
    before = lengths.cumsum(0) - lengths
    moved = before[:, 1] - before[:, 0]
    return np.repeat(moved if mask.alignment == "bottom-right" else moved * 0, lengths[:, 0])


def _by_one_side(
    mask: Mask, size: tuple[int, int], side: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As if both queries and keys had one side's lengths; a query past them has no key."""
    lengths = tuple((pair[side], pair[side]) for pair in mask.documents)
    packed = Mask(documents=lengths)
    total = sum(length for length, _ in lengths)
    rows = min(size[0], total)
    diagonals, ends = packed.diagonals(total, total), packed.own_keys(total, total)
    beyond = np.zeros(size[0] - rows, dtype=np.int64)
    first, end = (np.concatenate([x[:rows], beyond]) for x in ends)
    return np.concatenate([diagonals[:rows], beyond]), first, end


def through_gaps(problem: Problem, knobs: Knobs, seen: torch.Tensor) -> torch.Tensor:
    """What the pattern leaves of what a row sees, (seqlen_q, keys); keys past the last stay."""
    mask, size = problem.mask, (problem.seqlen_q, problem.seqlen_k)
    if not mask.pattern or knobs.gaps == "ignored":
        return seen
    band = {"causal": False, "window_left": None, "window_right": None, "documents": ()}
    gaps = dataclasses.replace(mask, **band)  # type: ignore[arg-type]
    if mask.documents:  # for the diagonals that a rule goes by; they hide the others' keys too
        gaps = dataclasses.replace(gaps, documents=mask.documents)
    allowed = torch.from_numpy(gaps.allowed(*size))
    left = seen.clone()
    if knobs.gaps == "whole blocks":
        whole = torch.from_numpy(mask.allowed(*size))
        left[:, : size[1]] = _grown(whole, knobs.block_m, knobs.block_n)
        return left
    left[:, : size[1]] &= allowed
    return left


def _grown(seen: torch.Tensor, block_m: int, block_n: int) -> torch.Tensor:
    """Everything in a block of which anything is seen."""
    rows, keys = seen.shape
    padded = torch.nn.functional.pad(seen, (0, -keys % block_n, 0, -rows % block_m))
    blocks = padded.reshape(padded.shape[0] // block_m, block_m, -1, block_n)
    any_of = blocks.any(dim=3, keepdim=True).any(dim=1, keepdim=True)
    return any_of.expand(blocks.shape).reshape(padded.shape)[:rows, :keys]
