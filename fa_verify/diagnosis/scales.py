"""Scales of fp8 operands that are not applied, or are another's: what q, k and v are read as."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from fa_verify.problem import Problem
    from fa_verify.trial import Trial

__all__ = ["scaled", "slips"]

Loaded = dict[str, "Callable[[], Tensor]"]


def scaled(trial: Trial, name: str, stored: Tensor) -> Tensor:
    """What was loaded as "q", "k" or "v", times its own scales; NaN for heads that have none."""
    scale = trial.terms.to("cpu").scales(name)
    if scale is None:
        return stored
    factors = _of_rows(trial.case.problem, scale, stored.shape[2])
    if 1 < factors.shape[1] < stored.shape[1]:
        none = (0, 0, 0, 0, 0, stored.shape[1] - factors.shape[1])
        factors = torch.nn.functional.pad(factors, none, value=torch.nan)
    return stored.double() * factors


def slips(trial: Trial) -> Iterator[tuple[str, Loaded]]:
    """Sentences, and what is taken for q, k or v then, on demand."""
    problem, x, terms = trial.case.problem, trial.pristine, trial.terms.to("cpu")
    names = ("q", "k", "v")
    stored = {name: getattr(x, name).cpu().double() for name in names}
    own = {name: terms.scales(name) for name in names}
    known = {name: scale for name, scale in own.items() if scale is not None and scale.numel()}

    def loaded(name: str, scale: Tensor) -> Loaded:
        return {name: functools.partial(_product, problem, stored[name], scale)}

    for name, scale in known.items():
        yield f"the scale of {name} is not applied", loaded(name, torch.ones_like(scale))
        yield f"the scale of {name} is applied twice", loaded(name, scale * scale)
        yield f"{name} is divided by its scale", loaded(name, 1.0 / scale)
        for other, theirs in known.items():
            if other != name and theirs.shape == scale.shape:
                yield f"{name} is multiplied by the scales of {other}", loaded(name, theirs)
        for wrong, text in _misread(scale):
            yield text.format(name), loaded(name, wrong)
    if len(known) == len(names):
        if known["k"].shape == known["v"].shape:
            crossed = loaded("k", known["v"]) | loaded("v", known["k"])
            yield "k and v are multiplied by each other's scales", crossed
        none = [loaded(name, torch.ones_like(scale)) for name, scale in known.items()]
        yield "no scales are applied", {name: one for part in none for name, one in part.items()}


def _misread(scale: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Scales read at a wrong index, and sentences with a place for the tensor's name."""
    batch, heads, blocks = scale.shape
    flat = torch.cat((scale.flatten(), scale.new_full((1,), torch.nan)))
    if blocks > 1:
        yield flat[1:].view(scale.shape), "the scales of {} are those of the next block"
        before = flat.roll(1)[:-1].view(scale.shape)
        yield before, "the scales of {} are those of the block before"
        yield scale[..., :1].expand_as(scale), "the first block's scale of {} serves every block"
    if heads > 1:
        yield scale[:, :1].expand_as(scale), "the first head's scales of {} serve every head"
    if batch > 1:
        yield scale[:1].expand_as(scale), "the first sequence's scales of {} serve every sequence"
    if batch > 1 and heads > 1:
        crossed = scale.reshape(heads, batch, blocks).transpose(0, 1)
        yield crossed, "the scales of {} are indexed by head and batch the wrong way round"


def _of_rows(problem: Problem, scale: Tensor, seqlen: int) -> Tensor:
    rows = problem.scaled_rows
    of_rows = scale.repeat_interleave(rows, 2)[:, :, :seqlen] if rows else scale
    return of_rows.double().unsqueeze(-1)


def _product(problem: Problem, stored: Tensor, scale: Tensor) -> Tensor:
    return stored * _of_rows(problem, scale, stored.shape[2])
