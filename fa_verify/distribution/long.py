"""Cases that take a card: lengths of 131,072, and tensors past 2^31 elements."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from fa_verify.case import Case
from fa_verify.distribution.space import Space
from fa_verify.distribution.tables import INT32
from fa_verify.masks import Mask
from fa_verify.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.capabilities import Capabilities

__all__ = ["long"]

LENGTH = 1 << 17
_CAUSAL = Mask(causal=True)
_WINDOW = Mask(causal=True, window_left=4095)
# seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, mask: a plain one, then what long lengths meet.
_SHAPES = (
    (LENGTH, LENGTH, 1, 1, 128, Mask()),
    (LENGTH, LENGTH, 2, 1, 64, _CAUSAL),
    (LENGTH - 1, LENGTH + 3, 1, 1, 80, _CAUSAL),
    (LENGTH, LENGTH, 4, 2, 128, _WINDOW),
)
# Heads of 128 rows of 128 columns: 2^21 elements a sequence. The next odd number of sequences past
# 2^31 elements, and of float32 as many forward only: its tensors are twice as large.
_HEADS, _ROWS = 128, 128


def long(
    capabilities: Capabilities | None, seed: int, *, dtype: str | None = None
) -> Iterator[Case]:
    """The long cases that a kernel takes, each dtype's first ones first.

    Args:
        capabilities: What the kernel takes; None: everything.
        seed: Of the elements.
        dtype: Only this one, if given; float8_e4m3fn: only with q, k and v in it.
    """
    space = Space.of(capabilities, dtype=dtype)
    forms = [
        (kind, dot)
        for kind, _ in space.dtypes
        for dot in ([d for d, _ in space.dot_precisions] if kind == "float32" else ["ieee"])
    ]
    backward = space.backward > 0
    for shape in _SHAPES:
        for kind, dot in forms:
            yield from _taken(space, _problem(space, kind, dot, shape), seed, backward=backward)
    wide = space.fit_head_dim(128)
    batch = INT32 // (_HEADS * _ROWS * wide) + 1
    for kind, dot in forms[:1]:
        shape = (_ROWS, _ROWS, _HEADS, _HEADS, wide, Mask())
        problem = dataclasses.replace(
            _problem(space, kind, dot, shape), batch=batch + 1 - batch % 2
        )
        both = backward and kind != "float32"
        yield from _taken(space, problem, seed, backward=both)


def _problem(
    space: Space, dtype: str, dot: str, shape: tuple[int, int, int, int, int, Mask]
) -> Problem:
    seqlen_q, seqlen_k, heads_q, heads_kv, wanted, mask = shape
    head_dim = space.fit_head_dim(wanted)
    known = space.capabilities.alignments if space.capabilities else ()
    if mask.hides_anything and known and mask.alignment not in known:
        mask = dataclasses.replace(mask, alignment=known[0])
    return Problem(
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,  # type: ignore[arg-type]  # of the space's
        dot_precision=dot,  # type: ignore[arg-type]
        mask=mask,
    )


def _taken(space: Space, problem: Problem, seed: int, *, backward: bool) -> Iterator[Case]:
    takes = space.capabilities
    if takes is None or takes.reason_against(problem) is None:
        yield Case(problem=problem, seed=seed, backward=backward)
