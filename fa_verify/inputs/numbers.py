"""`elements`: the numbers of a case's tensors, before they are rounded and laid out."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from fa_verify.scales import scaled
from fa_verify.values import (
    DO_FAMILIES,
    QK_FAMILIES,
    SEED_BITS,
    TERM_FAMILIES,
    V_FAMILIES,
    Facts,
    stream,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from fa_verify.case import Case
    from fa_verify.problem import Problem

__all__ = ["REPEATS", "dropout_seed", "elements", "period"]

REPEATS = 1 << 27
"""Elements of a tensor from which on its sequences repeat: making all would take minutes."""


def elements(case: Case) -> dict[str, npt.NDArray[np.float64]]:
    """The float64 elements of each tensor, before rounding; finite as they are stored.

    But for -inf in a bias and among sinks. Of a case whose sequences repeat, only those of one
    `period`.
    """
    p, values = dataclasses.replace(case.problem, batch=period(case)), case.values
    facts = Facts.of(p.storage, p.scale)
    q, k = QK_FAMILIES[values.qk](stream(case.seed, "qk"), p.shape_q, p.shape_k, facts)
    arrays = {
        "q": q if values.logits == 1.0 else q * values.logits,
        "k": k,
        "v": V_FAMILIES[values.v](stream(case.seed, "v"), p.shape_v, facts),
    }
    if case.backward:
        arrays["do"] = DO_FAMILIES[values.do](stream(case.seed, "do"), p.shape_o, facts)
    if p.fp8:
        rng = stream(case.seed, "scales")
        for name in "qkv":
            stored = scaled(p, name, arrays[name], values.scales, rng)
            arrays[name], arrays[f"{name}_scale"] = stored
        return arrays | _terms(case, p, facts)
    if facts.top * max(1.0, values.logits) >= facts.largest:  # else no family reaches it
        for array in arrays.values():
            np.clip(array, -facts.largest, facts.largest, out=array)
    return arrays | _terms(case, p, facts)


def _terms(case: Case, p: Problem, facts: Facts) -> dict[str, npt.NDArray[np.float64]]:
    """The elements of what the problem has beside q, k, v and do."""
    due = {
        "bias": ("bias", bool(p.bias), p.shape_bias),
        "alibi_slopes": ("slopes", p.alibi, (p.heads_q,)),
        "sinks": ("sinks", p.sinks, (p.heads_q,)),
        "dlse": ("dlse", p.lse_grad and case.backward, p.shape_lse),
    }
    arrays = {
        name: TERM_FAMILIES[family][getattr(case.values, family)](
            stream(case.seed, family), shape, facts
        )
        for name, (family, there, shape) in due.items()
        if there
    }
    if case.values.bias == "hides" and "bias" in arrays and np.isneginf(arrays["bias"]).any():
        _leave_a_key(p, arrays["bias"], case.seed)
    return arrays


def _leave_a_key(p: Problem, bias: npt.NDArray[np.float64], seed: int) -> None:
    """Make -inf 0 at one key of those that a row sees, where it hides all of them.

    Of a bias with rows it is one of the last, behind blocks that are hidden wholly.
    """
    order = stream(seed, "bias").spawn(1)[0].random(p.seqlen_k)
    if bias.shape[2] > 1:
        order += np.arange(p.seqlen_k)
    step = max(1, (1 << 22) // max(1, p.seqlen_k))
    for start in range(0, p.seqlen_q, step):
        seen = p.mask.allowed(p.seqlen_q, p.seqlen_k, slice(start, start + step))
        key = (seen * (1.0 + order)).argmax(1)
        for head in bias.reshape(-1, *bias.shape[2:]):
            mine = head[start : start + step] if bias.shape[2] > 1 else head
            (shut,) = (~(seen & ~np.isneginf(mine)).any(1)).nonzero()
            at = (shut if bias.shape[2] > 1 else np.zeros_like(shut), key[shut])
            mine[at] = np.where(np.isneginf(mine[at]), 0.0, mine[at])


def dropout_seed(case: Case) -> int | None:
    """What the kernel's random numbers come from; None where none are needed."""
    if not case.problem.dropout:
        return None
    return int(stream(case.seed, "dropout").integers(1 << SEED_BITS[case.values.seeds]))


def period(case: Case) -> int:
    """After how many sequences their elements repeat; the batch itself, but for huge tensors.

    It is odd: an offset that wraps at a power of two then finds other elements, not the same ones.
    """
    p = case.problem
    sequence = max(math.prod(s[1:]) for s in (p.shape_q, p.shape_k, p.shape_v, p.shape_o))
    if p.batch * sequence < REPEATS:
        return p.batch
    fit = REPEATS // 2 // max(1, sequence)
    return min(p.batch, max(1, fit - 1 + fit % 2))
