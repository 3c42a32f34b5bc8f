"""Causes in the backward pass alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fa_verify.diagnosis.cause import Cause
from fa_verify.diagnosis.knobs import Knobs
from fa_verify.diagnosis.softmax import digits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.problem import Problem

__all__ = ["gradients"]

_LN2 = math.log(2.0)


def gradients(problem: Problem) -> Iterator[Cause]:
    """Every cause of this module that has an effect on the problem."""
    yield from _factors(problem)
    yield from _caps(problem)
    yield from _lengths(problem)
    yield from _formats(problem)


def _factors(problem: Problem) -> Iterator[Cause]:
    if problem.scale != 1.0:
        for what, names in (("dq", ("dq",)), ("dk", ("dk",)), ("dq and dk", ("dq", "dk"))):
            verb = "lack" if len(names) == 2 else "lacks"
            none = Knobs(**{f"{name}_scale": 0 for name in names})  # type: ignore[arg-type]
            yield Cause(f"{what} {verb} the factor softmax_scale", none)
        for what, names in (("dq", ("dq",)), ("dk", ("dk",)), ("dq and dk", ("dq", "dk"))):
            verb = "are" if len(names) == 2 else "is"
            twice = Knobs(**{f"{name}_scale": 2 for name in names})  # type: ignore[arg-type]
            yield Cause(f"{what} {verb} scaled twice by softmax_scale", twice)
    yield Cause("delta = sum(do * o) is omitted from dS = P (dP - delta)", Knobs(delta=0.0))
    yield Cause("delta is added to dP instead of subtracted", Knobs(delta=-1.0))
    if problem.scale != 1.0:
        yield Cause("delta is multiplied by softmax_scale", Knobs(delta=problem.scale))
    text = "exp2 is given natural logits: the factor log2(e) is missing"
    yield Cause(text, Knobs(exponent=_LN2))
    text = "exp is given base-2 logits: the factor log2(e) is one too many"
    yield Cause(text, Knobs(exponent=1 / _LN2))
    yield from digits()
    text = "lse is taken to be in base 2, and is natural"
    yield Cause(text, Knobs(lse_read=_LN2))
    text = "lse is taken to be natural, and is in base 2"
    yield Cause(text, Knobs(lse_read=1 / _LN2))
    yield Cause("lse is not subtracted: P is exp(S)", Knobs(lse_read=0.0))
    if problem.group > 1:
        for which in ("last", "first"):
            text = f"GQA: dk and dv hold only the group's {which} query head"
            yield Cause(text, Knobs(group_heads=which))
            text = f"GQA: only the group's {which} query head enters: dq of the others is 0"
            yield Cause(text, Knobs(group_heads=which, group_dq=True))


def _caps(problem: Problem) -> Iterator[Cause]:
    if problem.softcap:
        text = "the softcap's derivative 1 - tanh^2 is missing from dS"
        yield Cause(text, Knobs(softcap_slope=False))
        text = "the softcap's derivative is wrong: 1 - |tanh|, not 1 - tanh^2"
        yield Cause(text, Knobs(linear_slope=True))
        text = "the softcap's derivative is wrong: 1 - tanh, not 1 - tanh^2"
        yield Cause(text, Knobs(signed_slope=True))


def _lengths(problem: Problem) -> Iterator[Cause]:
    if problem.head_dim < problem.head_dim_v:
        of = f"head_dim={problem.head_dim} of head_dim_v={problem.head_dim_v}"
        text = f"only the first {of} columns of v and do enter dP"
        yield Cause(text, Knobs(dp_columns=problem.head_dim), "dP over head_dim columns")
    for tile in (16, 32, 64, 128):
        if tile < problem.head_dim_v:
            cut = f"a tile of {tile} cuts head_dim_v={problem.head_dim_v} off"
            text = f"only the first {tile} columns of v and do enter dP: {cut}"
            yield Cause(text, Knobs(dp_columns=tile), f"dP over {tile} columns")
    for block in (16, 32, 64, 128):
        if problem.seqlen_q % block:
            rows = problem.seqlen_q // block * block
            text = f"the last, partial block of rows (of {block}) does not reach dk and dv"
            yield Cause(text, Knobs(dkdv_rows_end=rows))
        if problem.seqlen_k % block:
            keys = problem.seqlen_k // block * block
            text = f"the last, partial block of keys (of {block}) does not reach dq"
            yield Cause(text, Knobs(dq_keys_end=keys))


def _formats(problem: Problem) -> Iterator[Cause]:
    if problem.dtype != "float32":
        form = problem.dtype
        yield Cause(f"dP is rounded to {form}", Knobs(dp_dtype=form))
        text = f"the products of delta = sum(do * o) are rounded to {form}"
        yield Cause(text, Knobs(delta_dtype=form))
        yield Cause(f"S = q k^T is rounded to {form}", Knobs(scores_dtype=form))
        text = f"S = q k^T is rounded to {form} before it is scaled"
        yield Cause(text, Knobs(products_dtype=form))
        yield Cause(
            f"q is multiplied by softmax_scale and rounded to {form}", Knobs(prescaled=True)
        )
    for form in ("float16", "bfloat16"):
        if form != problem.dtype:
            yield Cause(f"dS is rounded to {form}", Knobs(ds_dtype=form))
            yield Cause(f"P is rounded to {form} before P^T dO", Knobs(p_dtype=form))
