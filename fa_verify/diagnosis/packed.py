"""Rows of all heads of a group packed together, as decoding does: a diagonal by those rows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis.knobs import Knobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.diagnosis.beside import Beside
    from fa_verify.problem import Problem

__all__ = ["diagonals"]


def diagonals(problem: Problem, right: Beside) -> Iterator[tuple[str, Knobs, Beside]]:
    """Sentences, and the mask that each head has then: as a bias, for heads differ."""
    mask, group = problem.mask, problem.group
    edge = 0 if mask.causal else mask.window_right
    if group == 1 or edge is None or mask.documents or mask.pattern:
        return
    rows, keys = torch.arange(problem.seqlen_q)[:, None], torch.arange(problem.seqlen_k)
    member = (torch.arange(problem.heads_q) % group)[:, None, None]
    shift = mask.shift(problem.seqlen_q, problem.seqlen_k)
    for text, packed in (
        ("row * group + head", rows * group + member),
        ("head * seqlen_q + row", member * problem.seqlen_q + rows),
    ):
        distance = keys - packed - shift
        seen = distance <= edge
        if mask.window_left is not None:
            seen &= distance >= -mask.window_left
        hidden = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)[None]
        bias = hidden if right.bias is None else right.bias + hidden
        sentence = f"the mask's diagonal is that of packed rows of a group, {text}, not of queries"
        yield sentence, Knobs(masked=False), dataclasses.replace(right, bias=bias)
