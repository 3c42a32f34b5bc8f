"""The defects that are known: a sentence for the kernel's author, and the model's knob.

The order is that of preference: of two that fit equally well, the earlier is named.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from fa_verify.diagnosis.loops import blocks, forward_loops
from fa_verify.diagnosis.loops import row_loops as rows_of
from fa_verify.diagnosis.model import Knobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.problem import Problem
    from fa_verify.trial import Trial

__all__ = ["gradients", "loops", "online", "row_loops", "shared", "skips"]

_TILES = (16, 32, 64, 128)
_LN2 = math.log(2.0)


def _blocks(trial: Trial, keys: int) -> list[int]:
    """Block sizes to try: first those that the launches name, then the usual ones."""
    named = [int(n) for n in re.findall(r"BLOCK_N\w*=(\d+)", trial.execution.config)]
    usual = [16, 32, 64, 128, 256]
    tried = [n for n in dict.fromkeys(named + usual) if n in named or n < 2 * keys or n == 16]
    return [n for n in tried if n > 0]


def shared(problem: Problem) -> Iterator[tuple[str, Knobs]]:
    """Causes that the forward and the backward pass can have alike."""
    scale, default = problem.scale, 1.0 / math.sqrt(problem.head_dim)
    padded = 1.0 / math.sqrt(2.0 ** math.ceil(math.log2(problem.head_dim)))
    yield "softmax_scale is missing: the logits are q k^T", Knobs(scale=1.0)
    yield "softmax_scale is applied twice", Knobs(scale=scale * scale)
    yield (
        "exp2 is given natural logits: the factor log2(e) is missing from the scale",
        Knobs(scale=scale * _LN2),
    )
    yield (
        "exp is given base-2 logits: the factor log2(e) is one too many in the scale",
        Knobs(scale=scale / _LN2),
    )
    yield "softmax_scale is ignored: 1/sqrt(head_dim) is used", Knobs(scale=default)
    yield "the scale is 1/sqrt of the padded head_dim", Knobs(scale=padded)
    yield "the sign of softmax_scale is lost", Knobs(scale=abs(scale))
    if problem.dtype == "float32" and problem.dot_precision == "ieee":
        yield (
            (
                "the dots are in TF32, Triton's default for float32: pass input_precision='ieee', "
                "or declare dot_precisions=('tf32',)"
            ),
            Knobs(tf32="truncate"),
        )
    if problem.softcap:
        yield "the softcap is missing", Knobs(softcap=False)
    yield from _masks(problem)
    right = "query head h must read key head h // (heads_q // heads_kv)"
    if problem.heads_kv > 1:
        yield f"every query head reads key head 0; {right}", Knobs(kv_head="zero")
        if problem.group > 1:
            text = f"GQA: query head h reads key head h // heads_kv; {right}"
            yield text, Knobs(kv_head="floor")
    if problem.group > 1:
        yield f"GQA: query head h reads key head h % heads_kv; {right}", Knobs(kv_head="modulo")
        yield f"GQA: query head h reads key head h; {right}", Knobs(kv_head="same")
    yield from _columns(problem)


def _masks(problem: Problem) -> Iterator[tuple[str, Knobs]]:
    mask, unequal = problem.mask, problem.seqlen_k - problem.seqlen_q
    if mask.causal:
        yield (
            "the causal mask is off by one: query i also sees the key after its diagonal",
            Knobs(right=1),
        )
        yield (
            "the causal mask is off by one: query i does not see the key on its diagonal",
            Knobs(right=-1),
        )
    if mask.hides_anything and unequal:
        other, shift = (
            ("top-left", -unequal)
            if mask.alignment == "bottom-right"
            else ("bottom-right", unequal)
        )
        yield (
            f"the mask is aligned {other} instead of {mask.alignment}",
            Knobs(shift=shift),
        )
        yield (
            "the mask's diagonal is off by seqlen_k - seqlen_q, the wrong way",
            Knobs(shift=-shift),
        )
    if mask.window_left is not None:
        yield "the window is off by one on the left: one key too many", Knobs(left=1)
        yield "the window is off by one on the left: one key too few", Knobs(left=-1)
        yield "the window's left end is ignored", Knobs(left=problem.seqlen_k + problem.seqlen_q)
    if mask.window_right is not None:
        yield "the window is off by one on the right: one key too many", Knobs(right=1)
        yield "the window is off by one on the right: one key too few", Knobs(right=-1)
    if mask.causal or mask.window_right is not None:
        whole = problem.seqlen_k + problem.seqlen_q
        name = "causal mask" if mask.causal else "window's right end"
        yield f"the {name} is ignored", Knobs(right=whole)
    else:
        yield "keys are hidden as if the mask were causal, which was not asked", Knobs(right_end=0)
        yield "the band ends one key before the diagonal, which was not asked", Knobs(right_end=-1)
    if mask.hides_anything:
        yield "the mask is ignored", Knobs(masked=False)


def _columns(problem: Problem) -> Iterator[tuple[str, Knobs]]:
    for tile in _TILES:
        if tile < problem.head_dim:
            cut = f"BLOCK_D={tile} cuts head_dim={problem.head_dim} off"
            yield (
                f"only the first {tile} columns of q and k enter the logits: {cut}",
                Knobs(head_dim=tile, head_dim_v=tile),
            )


def skips(trial: Trial, problem: Problem) -> Iterator[tuple[str, Knobs]]:
    """Keys that a loop leaves out."""
    keys = problem.seqlen_k
    yield "the last key is skipped", Knobs(keys_end=keys - 1)
    yield "the first key is skipped", Knobs(keys_begin=1)
    for block in _blocks(trial, keys):
        if keys % block and keys > block:
            yield (
                f"the last, partial block of keys is skipped (blocks of {block})",
                Knobs(keys_end=keys // block * block),
            )
        if keys > block:
            last = (keys - 1) // block * block
            yield f"the last block of keys is skipped (blocks of {block})", Knobs(keys_end=last)
            yield f"the first block of keys is skipped (blocks of {block})", Knobs(keys_begin=block)


def loops(trial: Trial, problem: Problem) -> Iterator[tuple[str, Knobs]]:
    """Loops over blocks of keys that begin or end wrongly."""
    sizes = blocks(trial.execution.config) or [(64, 64), (128, 64), (128, 128)]
    for sentence, loop in forward_loops(problem):
        for block_m, block_n in sizes:
            text = f"{sentence} (blocks of {block_m} rows and {block_n} keys)"
            yield text, Knobs(loop=loop, block_m=block_m, block_n=block_n)


def row_loops(trial: Trial, problem: Problem) -> Iterator[tuple[str, Knobs]]:
    """The same of the loops over rows in dk and dv."""
    sizes = blocks(trial.execution.config) or [(64, 64), (64, 128), (128, 128)]
    for sentence, loop in rows_of(problem):
        for block_m, block_n in sizes:
            text = f"{sentence} (blocks of {block_m} rows and {block_n} keys)"
            yield text, Knobs(loop=loop, block_m=block_m, block_n=block_n)


def online(trial: Trial, problem: Problem) -> Iterator[tuple[str, Knobs]]:
    """Causes in the online softmax, which depend on the block size."""
    yield "lse is in base 2, not natural", Knobs(lse_m=1 / _LN2, lse_l=1 / _LN2)
    yield "lse adds log2(l) to a natural row maximum", Knobs(lse_l=1 / _LN2)
    yield "lse adds log(l) to a row maximum in base 2", Knobs(lse_m=1 / _LN2)
    yield "lse is the row maximum: log(l) is missing", Knobs(lse_l=0.0)
    yield "lse is log(l): the row maximum is missing", Knobs(lse_m=0.0)
    yield "exp2 is given natural logits: the factor log2(e) is missing", Knobs(exponent=_LN2)
    yield "exp is given base-2 logits: the factor log2(e) is one too many", Knobs(exponent=1 / _LN2)
    for digits in (1.44, 1.442, 1.443, 1.4427, 1.44269):
        text = f"log2(e) has too few digits in the exponent of P: {digits}"
        yield text, Knobs(exponent=digits * _LN2)
    yield "o is not divided by l", Knobs(normalise=False)
    yield "the running maximum m starts at 0 instead of -inf", Knobs(start=0.0)
    yield (
        "the running maximum m starts at 0 instead of -inf, so rows of low logits look empty",
        Knobs(start=0.0, empty_by_l=True),
    )
    sizes = _blocks(trial, problem.seqlen_k)
    for block in sizes:
        if problem.seqlen_k % block:
            yield (
                f"zero-padded keys count in the softmax denominator (blocks of {block})",
                Knobs(padding=True, block_n=block),
            )
    for block in sizes:
        if block < problem.seqlen_k:
            at = f"when the maximum moves (blocks of {block})"
            yield (
                f"the rescale factor is omitted from l {at}",
                Knobs(rescale_l=False, block_n=block),
            )
            yield (
                f"the rescale factor is omitted from acc {at}",
                Knobs(rescale_acc=False, block_n=block),
            )
            yield (
                f"the rescale factor is omitted from both l and acc {at}",
                Knobs(rescale_l=False, rescale_acc=False, block_n=block),
            )
    if problem.dtype != "float32":
        form = problem.dtype
        yield f"q is multiplied by softmax_scale and rounded to {form}", Knobs(prescaled=True)
        yield f"S = q k^T is rounded to {form}", Knobs(scores_dtype=form)
    for form in ("float16", "bfloat16"):
        for block in sizes:
            at = f"{form} (blocks of {block})"
            yield (
                f"the accumulator acc is kept in {at} instead of float32",
                Knobs(acc_dtype=form, block_n=block),
            )
            yield (
                f"the accumulator acc is kept in {at} and P V is rounded to it",
                Knobs(acc_dtype=form, product_dtype=form, block_n=block),
            )
            yield (
                f"the denominator l is summed in {at} instead of float32",
                Knobs(l_dtype=form, block_n=block),
            )
        if form != problem.dtype:
            yield f"P is rounded to {form}", Knobs(p_dtype=form, block_n=sizes[0])


def gradients(problem: Problem) -> Iterator[tuple[str, Knobs]]:
    """Causes that only the backward pass can have."""
    yield "dq lacks the factor softmax_scale", Knobs(dq_scale=0)
    yield "dk lacks the factor softmax_scale", Knobs(dk_scale=0)
    yield "dq and dk lack the factor softmax_scale", Knobs(dq_scale=0, dk_scale=0)
    yield "dq is scaled twice by softmax_scale", Knobs(dq_scale=2)
    yield "dk is scaled twice by softmax_scale", Knobs(dk_scale=2)
    yield "dq and dk are scaled twice by softmax_scale", Knobs(dq_scale=2, dk_scale=2)
    yield "delta = sum(do * o) is omitted from dS = P (dP - delta)", Knobs(delta=False)
    if problem.softcap:
        yield "the softcap's derivative 1 - tanh^2 is missing from dS", Knobs(softcap_slope=False)
        yield (
            "the softcap's derivative is wrong: 1 - |tanh|, not 1 - tanh^2",
            Knobs(linear_slope=True),
        )
    if problem.head_dim < problem.head_dim_v:
        of = f"head_dim={problem.head_dim} of head_dim_v={problem.head_dim_v}"
        text = f"only the first {of} columns of v and do enter dP"
        yield text, Knobs(dp_columns=problem.head_dim)
    if problem.dtype != "float32":
        form = problem.dtype
        yield f"dP is rounded to {form}", Knobs(dp_dtype=form)
        text = f"the products of delta = sum(do * o) are rounded to {form}"
        yield text, Knobs(delta_dtype=form)
    if problem.group > 1:
        yield "GQA: dk and dv hold only the group's last query head", Knobs(group_heads="last")
        yield "GQA: dk and dv hold only the group's first query head", Knobs(group_heads="first")
    for block in (16, 32, 64, 128):
        if problem.seqlen_q % block:
            rows = problem.seqlen_q // block * block
            text = f"the last, partial block of rows (of {block}) does not reach dk and dv"
            yield text, Knobs(dkdv_rows_end=rows)
        if problem.seqlen_k % block:
            keys = problem.seqlen_k // block * block
            yield (
                f"the last, partial block of keys (of {block}) does not reach dq",
                Knobs(dq_keys_end=keys),
            )
    for form in ("float16", "bfloat16"):
        if form != problem.dtype:
            yield f"dS is rounded to {form}", Knobs(ds_dtype=form)
            yield f"P is rounded to {form} before P^T dO", Knobs(p_dtype=form)
