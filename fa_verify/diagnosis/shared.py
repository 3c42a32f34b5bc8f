"""Causes that the forward and the backward pass can have alike: scale, softcap, mask, heads, keys.

The order is that of preference: of two that fit equally well, the earlier is named.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fa_verify.diagnosis import gaps
from fa_verify.diagnosis.cause import Cause, sizes
from fa_verify.diagnosis.knobs import Knobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.problem import Problem

__all__ = ["operands", "shared", "skips"]

_TILES = (16, 32, 64, 128)
_LN2 = math.log(2.0)


def shared(problem: Problem, *, whole: bool) -> Iterator[Cause]:
    """Every cause of this module that has an effect on the problem, but lost keys and formats.

    Args:
        problem: What was computed.
        whole: Every head of it is there, to be mistaken for another.
    """
    yield from _scales(problem)
    yield from _caps(problem)
    yield from _bands(problem)
    yield from gaps.causes(problem)
    if whole:
        yield from _heads(problem)
    yield from _columns(problem)


def _scales(problem: Problem) -> Iterator[Cause]:
    scale, default = problem.scale, 1.0 / math.sqrt(problem.head_dim)
    padded = 1.0 / math.sqrt(max(16, 2.0 ** math.ceil(math.log2(problem.head_dim))))
    for sentence, value in (
        ("softmax_scale is missing: the logits are q k^T", 1.0),
        ("softmax_scale is ignored: 1/sqrt(head_dim) is used", default),
        ("the sign of softmax_scale is lost", abs(scale)),
        ("softmax_scale is applied twice", scale * scale),
        (
            "exp2 is given natural logits: the factor log2(e) is missing from the scale",
            scale * _LN2,
        ),
        (
            "exp is given base-2 logits: the factor log2(e) is one too many in the scale",
            scale / _LN2,
        ),
        ("the scale is 1/sqrt of the padded head_dim", padded),
        ("the scale is 1/sqrt(head_dim_v)", 1.0 / math.sqrt(problem.head_dim_v)),
    ):
        if value != scale:
            yield Cause(sentence, Knobs(scale=value))


def _caps(problem: Problem) -> Iterator[Cause]:
    if problem.softcap:
        yield Cause("the softcap is missing", Knobs(softcap=False))
        text = "the softcap's argument is not divided by the cap"
        yield Cause(text, Knobs(cap_divides=False))
        if problem.scale != 1.0:
            text = "the scale is applied after the softcap, not before"
            yield Cause(text, Knobs(scale_after_cap=True))
        text = "the softcap's tanh overflows: inf / inf of its exponentials is NaN"
        yield Cause(text, Knobs(tanh_overflows=True))


def _bands(problem: Problem) -> Iterator[Cause]:
    mask, unequal = problem.mask, problem.seqlen_k - problem.seqlen_q
    whole = problem.seqlen_k + problem.seqlen_q
    right = mask.causal or mask.window_right is not None
    for keys, causal, window in (
        (1, "query i also sees the key after its diagonal", "one key too many"),
        (-1, "query i does not see the key on its diagonal", "one key too few"),
    ):
        text = f"the causal mask is off by one: {causal}"
        if not mask.causal:
            text = f"the window is off by one on the right: {window}"
        if right:
            yield Cause(text, Knobs(right=keys), f"right end {keys:+d}")
        if mask.window_left is not None:
            text = f"the window is off by one on the left: {window}"
            yield Cause(text, Knobs(left=keys))
    if mask.banded and unequal and not mask.documents:
        top, other = mask.alignment == "top-left", gaps.OTHER[mask.alignment]
        shift = unequal if top else -unequal
        text = f"the mask is aligned {other} instead of {mask.alignment}"
        yield Cause(text, Knobs(shift=shift), f"aligned {other}")
        yield Cause(text, Knobs(shift=shift), "the other alignment")
        if not top:
            text = "the mask's diagonal is at seqlen_q - seqlen_k, the wrong way round"
            yield Cause(text, Knobs(shift=-2 * unequal))
            if problem.batch == 1:  # one sequence of as many queries as there are keys
                yield Cause(gaps.BY_KEYS, Knobs(shift=shift))
        text = "the mask's diagonal is off by seqlen_k - seqlen_q"
        yield Cause(text, Knobs(shift=-shift))
    if right:
        name = "causal mask" if mask.causal else "window's right end"
        yield Cause(f"the {name} is ignored", Knobs(right=whole), "right end ignored")
    else:
        text = "keys are hidden as if the mask were causal, which was not asked"
        yield Cause(text, Knobs(right_end=0))
        before = "the band ends one key before the diagonal, which was not asked"
        yield Cause(before, Knobs(right_end=-1))
        if mask.window_left is not None:
            yield Cause(text, Knobs(right_end=0), "causal windows")
            yield Cause(before, Knobs(right_end=-1), "windows end before the diagonal")
    if mask.window_left is not None:
        yield Cause("the window's left end is ignored", Knobs(left=whole))
    if mask.hides_anything:
        yield Cause("the mask is ignored", Knobs(masked=False))


def _heads(problem: Problem) -> Iterator[Cause]:
    right = "query head h must read key head h // (heads_q // heads_kv)"
    if problem.heads_kv > 1:
        text = f"GQA: query head h reads key head h // heads_kv; {right}"
        yield Cause(text, Knobs(kv_head="floor"))
        yield Cause(f"every query head reads key head 0; {right}", Knobs(kv_head="zero"))
    if problem.group > 1:
        text = f"GQA: query head h reads key head h % heads_kv; {right}"
        yield Cause(text, Knobs(kv_head="modulo"))
        text = f"GQA: query head h reads key head h; {right}"
        yield Cause(text, Knobs(kv_head="same"))
    if problem.heads_kv > 1:
        text = f"query heads read the key head before their own; {right}"
        yield Cause(text, Knobs(kv_head="before"))


def _columns(problem: Problem) -> Iterator[Cause]:
    for tile in _TILES:
        if tile < problem.head_dim:
            cut = f"BLOCK_D={tile} cuts head_dim={problem.head_dim} off"
            text = f"only the first {tile} columns of q and k enter the logits: {cut}"
            yield Cause(text, Knobs(head_dim=tile, head_dim_v=tile), f"columns {tile} of o too")
            yield Cause(text, Knobs(head_dim=tile), f"columns {tile}")


def skips(config: str, problem: Problem) -> Iterator[Cause]:
    """Keys that a loop leaves out."""
    keys = problem.seqlen_k
    yield Cause("the last key is skipped", Knobs(lost="last"))
    yield Cause("the first key is skipped", Knobs(lost="first"))
    if 0 < problem.seqlen_q < keys:
        yield Cause(gaps.AS_MANY, Knobs(keys_end=problem.seqlen_q))
        if not problem.mask.documents:  # their diagonal may be by that length too
            for shift in (0, -problem.mask.shift(problem.seqlen_q, keys)):
                knobs = Knobs(keys_end=problem.seqlen_q, shift=shift)
                yield Cause(gaps.AS_MANY, knobs, "as many keys as queries")
    lengths = [length for _, length in problem.mask.documents] or [keys]
    for block in sizes(config, max(lengths)):
        of = f"(blocks of {block})"
        if max(lengths) > block or (problem.mask.documents and max(lengths) % block):
            if any(length % block for length in lengths):
                text = f"the last, partial block of keys is skipped {of}"
                yield Cause(text, Knobs(lost="tail", block_n=block))
            yield Cause(
                f"the last block of keys is skipped {of}", Knobs(lost="last block", block_n=block)
            )
            text = f"the first block of keys is skipped {of}"
            yield Cause(text, Knobs(lost="first block", block_n=block))


def operands(problem: Problem) -> Iterator[Cause]:
    """Operands of dots in another format than the inputs'."""
    if problem.dtype == "float32" and problem.dot_precision != "tf32":
        text = (
            "the dots are in TF32, Triton's default for float32: pass input_precision="
            f"'{problem.dot_precision}', or declare dot_precisions=('tf32',)"
        )
        yield Cause(text, Knobs(tf32="truncate"), "dots in TF32")
    for form in ("bfloat16", "float16"):
        if form == problem.dtype:
            continue
        for names in (("q",), ("k",), ("v",), ("q", "k"), ("q", "k", "v")):
            what = " and ".join(", ".join(names).rsplit(", ", 1))
            verb = "is" if len(names) == 1 else "are"
            text = f"{what} {verb} rounded to {form} before the dots"
            yield Cause(text, Knobs(**dict.fromkeys((f"{name}_dtype" for name in names), form)))  # type: ignore[arg-type]
