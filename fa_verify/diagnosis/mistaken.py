"""Operands mistaken for one another, or read at another head while the others are not."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis import model, scales
from fa_verify.diagnosis.addressing import read_by
from fa_verify.diagnosis.knobs import Knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from fa_verify.diagnosis.evidence import Evidence
    from fa_verify.trial import Trial

__all__ = ["one_of_both", "operands", "packed", "rows_of_heads"]

Loaded = dict[str, "Callable[[], Tensor]"]


def operands(inputs: Mapping[str, Tensor]) -> Iterator[tuple[str, Loaded]]:
    """Sentences, and what is read where one input's pointer stands in for another's."""
    for name, others in (("v", "k"), ("k", "v"), ("do", "v")):
        for other in others:
            if name in inputs and inputs[name].shape == inputs[other].shape:
                text = f"{other} is read in the place of {name}"
                yield text, {name: functools.partial(_given, inputs[other])}
    width, v = inputs["k"].shape[-1], inputs["v"]
    if width < v.shape[-1]:
        text = f"v is masked by head_dim={width}: its columns from there on are taken for 0"
        yield text, {"v": functools.partial(_given, v * (torch.arange(v.shape[-1]) < width))}


def one_of_both(trial: Trial, evidence: Evidence) -> Iterator[tuple[str, Loaded]]:
    """Sentences, and what is read where k, or v, alone is that of another key head.

    Both are given a head for each query head.
    """
    problem = evidence.problem
    right = model.key_heads(problem, Knobs())
    for wrong, text in (
        ("same", "GQA: query head h reads key head h"),
        ("modulo", "GQA: query head h reads key head h % heads_kv"),
        ("floor", "GQA: query head h reads key head h // heads_kv"),
        ("zero", "every query head reads key head 0"),
    ):
        heads = model.key_heads(problem, Knobs(kv_head=wrong))  # type: ignore[arg-type]
        if torch.equal(heads, right):
            continue
        for name, other in (("k", "v"), ("v", "k")):
            yield (
                f"in {name} alone, {text}",
                {
                    name: functools.partial(_at_heads, trial, name, heads),
                    other: functools.partial(_at_heads, trial, other, right),
                },
            )


def packed(evidence: Evidence) -> Iterator[tuple[str, Loaded]]:
    """Sentences, and what is read where keys of packed sequences begin where their queries do."""
    problem = evidence.problem
    whole = ((problem.seqlen_q, problem.seqlen_k),) * problem.batch
    if problem.mask.documents and problem.batch > 1:
        return
    lengths = torch.tensor(problem.mask.documents or whole)
    ahead = (lengths.cumsum(0) - lengths).diff(dim=1).repeat_interleave(lengths[:, 1])
    if not bool(ahead.any()):
        return
    tokens = torch.arange(len(ahead)) - ahead
    text = "keys of a sequence begin where its queries do: cu_seqlens_q is in cu_seqlens_k's place"
    for names in (("k", "v"), ("k",), ("v",)):
        where = "" if len(names) > 1 else f"in {names[0]} alone, "
        yield where + text, {n: functools.partial(_tokens, evidence, n, tokens) for n in names}


def _tokens(evidence: Evidence, name: str, tokens: Tensor) -> Tensor:
    """These tokens of all sequences, one after the other; NaN where there is none."""
    given = evidence.k if name == "k" else evidence.v
    rows = given.transpose(1, 2).flatten(0, 1)
    found = rows[tokens.clamp(0, len(rows) - 1)]
    found = found.masked_fill(((tokens < 0) | (tokens >= len(rows)))[:, None, None], torch.nan)
    return found.reshape(given.shape[0], given.shape[2], *found.shape[1:]).transpose(1, 2)


def rows_of_heads(evidence: Evidence, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Whose rows stand in for a query head's own, and these rows, (batch, heads_q, seqlen_q)."""
    problem = evidence.problem
    batch, heads = problem.batch, problem.heads_q
    b, h = torch.arange(batch)[:, None], torch.arange(heads)
    own = b * heads + h
    of_key = h // problem.group
    found = (
        ("the first head of the group", b * heads + of_key * problem.group),
        ("the query head with the key head's number", b * heads + of_key),
        ("the key head's place among key heads", b * problem.heads_kv + of_key),
        (
            "its place if sequences had as many heads as there are key heads",
            b * problem.heads_kv + h,
        ),
        ("the query head h % heads_kv", b * heads + h % problem.heads_kv),
        ("the first sequence", 0 * b + h),
        ("the first head", b * heads + 0 * h),
        ("the next head", (own + 1) % (batch * heads)),
    )
    known = [own]
    for text, index in found:
        if not any(torch.equal(index, other) for other in known):
            known.append(index)
            yield text, rows.flatten(0, 1)[index]


def _given(tensor: Tensor) -> Tensor:
    return tensor


def _at_heads(trial: Trial, name: str, heads: Tensor) -> Tensor:
    """K or v of these key heads; NaN of those that lie outside the tensor."""
    stored = getattr(trial.pristine, name).cpu()
    count = max(int(heads.max()) + 1, stored.shape[1])
    loaded = scales.scaled(trial, name, read_by(stored, stored.stride(), heads=count))
    return loaded[:, heads]
