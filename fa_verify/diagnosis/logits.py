"""Logits of the model: key heads, who sees whom, operands as a dot takes them; documents apart."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis.beside import NOTHING
from fa_verify.diagnosis.gaps import own_keys, through_gaps
from fa_verify.diagnosis.loops import visited

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.diagnosis.beside import Beside
    from fa_verify.diagnosis.knobs import Knobs
    from fa_verify.problem import Problem

__all__ = ["documents", "key_heads", "logits", "operand", "rounded", "summed", "visible"]

_TANH_OVERFLOW = 88.73  # exp overflows float32 from here on


def rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """The nearest numbers of a format; "" rounds nothing."""
    return x.to(getattr(torch, dtype)).to(torch.float64) if dtype else x


def summed(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Sums along the last axis of numbers that are rounded, as is each sum of two, in a tree."""
    x = rounded(x, dtype)
    while (size := x.shape[-1]) > 1:
        x = torch.nn.functional.pad(x, (0, size % 2))
        half = x.shape[-1] // 2
        x = rounded(x[..., :half] + x[..., half:], dtype)
    return x.sum(dim=-1)


def operand(x: torch.Tensor, knobs: Knobs, dtype: str = "") -> torch.Tensor:
    """An operand of a dot: 13 of float32's mantissa bits dropped under tf32."""
    x = rounded(x, dtype)
    if not knobs.tf32:
        return x
    bits = x.to(torch.float32).view(torch.int32)
    if knobs.tf32 == "nearest":
        bits = bits + (1 << 12)
    return (bits & ~((1 << 13) - 1)).view(torch.float32).to(torch.float64)


def key_heads(problem: Problem, knobs: Knobs) -> torch.Tensor:
    """The key head that each query head reads; it may not exist."""
    heads = torch.arange(problem.heads_q)
    if knobs.kv_head == "modulo":
        return heads % problem.heads_kv
    if knobs.kv_head == "floor":
        return heads // problem.heads_kv
    if knobs.kv_head == "same":
        return heads
    if knobs.kv_head == "before":
        return (heads // problem.group - 1) % problem.heads_kv
    if knobs.kv_head == "zero":
        return torch.zeros_like(heads)
    return heads // problem.group


def visible(problem: Problem, knobs: Knobs, keys: int) -> torch.Tensor:
    """Who sees whom, over keys that may reach past seqlen_k, shape (seqlen_q, keys)."""
    mask = problem.mask
    columns = torch.arange(keys)[None, :]
    diagonals, first, end = own_keys(problem, knobs.documents)
    distance = columns - diagonals - knobs.shift
    seen = torch.ones_like(distance, dtype=torch.bool)
    if knobs.masked:
        if mask.window_left is not None:
            seen &= distance >= -mask.window_left - knobs.left
        right = 0 if mask.causal else mask.window_right
        if right is not None:
            seen &= distance <= right + knobs.right
    if knobs.right_end is not None:
        seen &= distance <= knobs.right_end
    if knobs.loop:
        seen = visited(problem, seen, knobs.loop, knobs.block_m, knobs.block_n)
    if knobs.masked:
        seen = through_gaps(problem, knobs, seen)
    if mask.documents:
        seen &= (columns >= first) & (columns < end)
    if not knobs.padding:
        seen &= columns < problem.seqlen_k
    seen &= columns >= knobs.keys_begin
    if knobs.keys_end is not None:
        seen &= columns < knobs.keys_end
    seen &= _left(problem.seqlen_k, columns, knobs)
    return seen & ((columns < knobs.without[0]) | (columns >= knobs.without[1]))


def _left(keys: int, columns: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """Keys that are not lost, of all of one sequence or document."""
    block = knobs.block_n
    begins = {"first": 1, "first block": block}
    ends = {
        "last": keys - 1,
        "tail": keys // block * block,
        "last block": (keys - 1) // block * block,
    }
    return (columns >= begins.get(knobs.lost, 0)) & (
        columns < ends.get(knobs.lost, columns.numel())
    )


def logits(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, knobs: Knobs, beside: Beside = NOTHING
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, the bias included, and the softcap's slope."""
    bias = beside.bias
    if bias is not None and k.shape[-2] > bias.shape[-1] > 1:  # keys of padding have none
        bias = torch.nn.functional.pad(bias, (0, k.shape[-2] - bias.shape[-1]))
    width = knobs.head_dim
    scale = problem.scale if knobs.scale is None else knobs.scale
    before = 1.0 if knobs.scale_after_cap else scale
    if knobs.prescaled:
        q, before = rounded(q * scale, problem.dtype), 1.0
    q = operand(q[..., :width], knobs, knobs.q_dtype)
    k = operand(k[..., :width], knobs, knobs.k_dtype)
    found = rounded(rounded(q @ k.mT, knobs.products_dtype) * before, knobs.scores_dtype)
    slope = torch.ones_like(found)
    if bias is not None and knobs.bias_before_cap:
        found = found + bias
    if problem.softcap and knobs.softcap:
        x = found / problem.softcap if knobs.cap_divides else found
        tanh = torch.tanh(x)
        if knobs.tanh_overflows:
            tanh = tanh.masked_fill(x.abs() > _TANH_OVERFLOW, torch.nan)
        found = problem.softcap * tanh
        slope = 1 - (tanh.abs() if knobs.linear_slope else tanh * tanh)
        slope = 1 - tanh if knobs.signed_slope else slope
    found = found * scale if knobs.scale_after_cap else found
    return (found if bias is None or knobs.bias_before_cap else found + bias), slope


def documents(problem: Problem, beside: Beside) -> Iterator[tuple[Problem, slice, slice, Beside]]:
    """Each document as a sequence of its own, its rows and keys, and what it has beside them."""
    row = key = 0
    mask = dataclasses.replace(problem.mask, documents=())
    for seqlen_q, seqlen_k in problem.mask.documents:
        of_one = dataclasses.replace(problem, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask)
        rows, keys = slice(row, row + seqlen_q), slice(key, key + seqlen_k)
        yield of_one, rows, keys, beside.part(rows, keys)
        row, key = rows.stop, keys.stop
