"""Scales of fp8 operands that are not applied, or are another's: what q, k and v are read as."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis.cause import Cause
from fa_verify.diagnosis.knobs import Knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from fa_verify.problem import Problem
    from fa_verify.trial import Trial

__all__ = ["lifts", "scaled", "slips"]

Loaded = dict[str, "Callable[[], Tensor]"]
_TILES = (16, 32, 64, 128)  # rows of a tile, for what may be one


def scaled(trial: Trial, name: str, stored: Tensor) -> Tensor:
    """What was loaded as "q", "k" or "v", times its own scales; NaN for heads that have none."""
    scale = trial.terms.to("cpu").scales(name)
    if scale is None:
        return stored
    factors = _of_rows(trial.case.problem, scale, stored.shape[2])
    if 1 < factors.shape[1] < stored.shape[1]:
        none = (0, 0, 0, stored.shape[1] - factors.shape[1])
        factors = torch.nn.functional.pad(factors, none, value=torch.nan)
    return stored.double() * factors.unsqueeze(-1)


def slips(trial: Trial) -> Iterator[tuple[str, Loaded]]:
    """Sentences, and what is taken for q, k or v then, on demand."""
    problem, x, terms = trial.case.problem, trial.pristine, trial.terms.to("cpu")
    stored = {name: getattr(x, name).cpu().double() for name in ("q", "k", "v")}
    known = {name: scale for name in stored if (scale := terms.scales(name)) is not None}
    if not all(scale.numel() for scale in known.values()):
        return
    of_rows = {name: _of_rows(problem, s, stored[name].shape[2]) for name, s in known.items()}

    def loaded(name: str, factors: Tensor) -> Loaded:
        return {name: functools.partial(torch.mul, stored[name], factors.unsqueeze(-1))}

    for name, right in of_rows.items():
        other_format = getattr(x, name).cpu().view(torch.float8_e5m2).double()
        misread = functools.partial(torch.mul, other_format, right.unsqueeze(-1))
        yield f"{name} is read as e5m2, which it is not", {name: misread}
        yield f"{name}_scale is not applied", loaded(name, torch.ones_like(right))
        yield f"{name}_scale is applied twice", loaded(name, right * right)
        yield f"{name} is divided by its scale", loaded(name, 1.0 / right)
        for other, theirs in of_rows.items():
            if other != name and theirs.shape == right.shape:
                yield f"{name} is multiplied by {other}_scale", loaded(name, theirs)
        for text, factors in _misread(problem, known[name], stored[name].shape[2]):
            yield f"{name}_scale {text}", loaded(name, factors)
    of_k, of_v = (_misread(problem, known[name], problem.seqlen_k) for name in "kv")
    for (text, in_k), (_, in_v) in zip(of_k, of_v, strict=True):
        yield f"k_scale {text} (v_scale likewise)", loaded("k", in_k) | loaded("v", in_v)
    if of_rows["k"].shape == of_rows["v"].shape:
        crossed = loaded("k", of_rows["v"]) | loaded("v", of_rows["k"])
        yield "k and v are multiplied by each other's scales", crossed
    none = [loaded(name, torch.ones_like(right)) for name, right in of_rows.items()]
    yield "no scales are applied", {name: one for part in none for name, one in part.items()}
    if problem.group > 1 and problem.fp8 != "tensor":
        yield from _by_query_head(problem, stored, known)


def _misread(problem: Problem, scale: Tensor, seqlen: int) -> Iterator[tuple[str, Tensor]]:
    """How a scale may be read at a wrong place, and what is read: (batch, heads, rows)."""
    batch, heads, blocks = scale.shape
    rows, row = problem.scaled_rows, torch.arange(seqlen)
    for text, index in _indices(rows, row) if rows else ():
        yield text, _read(scale, index)
        if blocks == 1:  # an axis of one entry may have the stride 0
            yield text, _read(scale, row * 0)
    first = row // rows if rows else torch.zeros(1, dtype=torch.int64)
    if heads > 1:
        own = scale[:, :1].expand_as(scale).contiguous()
        yield "of the first head serves every head", _read(own, first)
    if batch > 1:
        own = scale[:1].expand_as(scale).contiguous()
        yield "of the first sequence serves every sequence", _read(own, first)
    if batch > 1 and heads > 1:
        own = scale.reshape(heads, batch, blocks).transpose(0, 1).contiguous()
        yield "is indexed by head and batch the wrong way round", _read(own, first)


def _indices(rows: int, row: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Which block's scale a row may be given by mistake."""
    yield "is that of the next block", row // rows + 1
    yield "is that of the block before", row // rows - 1
    yield "of the first block serves every block", row * 0
    for tile in _TILES:
        if tile < rows:
            early = (row // tile * tile + tile) // rows
            yield f"of the next block is taken {tile} rows early", early
        if tile != rows:
            yield f"is taken to be of {tile} rows", row // tile


def _by_query_head(
    problem: Problem, stored: dict[str, Tensor], known: dict[str, Tensor]
) -> Iterator[tuple[str, Loaded]]:
    """K and v as each query head has them, the scales of one being read at the query's head."""
    own = torch.arange(problem.heads_q) // problem.group
    for name, other in (("k", "v"), ("v", "k")):
        scale, seqlen = known[name], stored[name].shape[2]
        batch, heads, blocks = scale.shape
        rows = problem.scaled_rows or seqlen
        index = torch.arange(seqlen) // rows
        start = (torch.arange(batch)[:, None] * heads + torch.arange(problem.heads_q)) * blocks
        wrong = _flat(scale, start[..., None] + index)
        right = _of_rows(problem, known[other], seqlen)[:, own]
        yield (
            f"{name}_scale is read at the query's head",
            {
                name: functools.partial(torch.mul, stored[name][:, own], wrong.unsqueeze(-1)),
                other: functools.partial(torch.mul, stored[other][:, own], right.unsqueeze(-1)),
            },
        )


def lifts(trial: Trial) -> Iterator[Cause]:
    """What P may be multiplied by before it is cast to e4m3, and should not."""
    declared = trial.kernel.arithmetic
    if trial.case.problem.storage != "float8_e4m3fn" or declared.p_dtype not in (
        *("input", "float8_e4m3fn"),
    ):
        return
    for lift in (512.0, 1024.0):
        yield Cause(f"P times {lift:g} saturates at e4m3's largest number, 448", Knobs(p_lift=lift))
    if declared.p_scale != 1.0:
        yield Cause(
            "P is cast to e4m3 without its scale: small weights are lost", Knobs(p_lift=1.0)
        )


def _read(scale: Tensor, blocks: Tensor) -> Tensor:
    """Scales of each head at these blocks, counted from its first, wherever in memory that is."""
    batch, heads, count = scale.shape
    starts = torch.arange(batch * heads).view(batch, heads, 1) * count
    return _flat(scale, starts + blocks)


def _flat(scale: Tensor, index: Tensor) -> Tensor:
    """Scales by their place in memory; NaN outside."""
    flat = scale.double().flatten()
    inside = (index >= 0) & (index < len(flat))
    return torch.where(inside, flat[index.clamp(0, len(flat) - 1)], torch.nan)


def _of_rows(problem: Problem, scale: Tensor, seqlen: int) -> Tensor:
    """The scale of each row, (batch, heads, rows), axes that share it of size 1."""
    rows = problem.scaled_rows
    of_rows = scale.repeat_interleave(rows, 2)[:, :, :seqlen] if rows else scale
    return of_rows.double()
