"""Causes in the forward pass alone: the online softmax, its formats, its loop over keys, lse."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fa_verify.diagnosis.cause import Cause, blocks, sizes
from fa_verify.diagnosis.gaps import OTHER
from fa_verify.diagnosis.knobs import Knobs
from fa_verify.diagnosis.loops import forward_loops, row_loops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.problem import Problem

__all__ = ["digits", "formats", "loops", "loops_over_rows", "softmax"]

_LN2 = math.log(2.0)
_HIDDEN = (-1e4, -1e5, -3e4, -1e3, 0.0)  # numbers that kernels put where -inf is due


def softmax(config: str, problem: Problem) -> Iterator[Cause]:
    """Numbers of the online softmax that are wrong."""
    yield from _lse()
    yield Cause("exp2 is given natural logits: the factor log2(e) is missing", Knobs(exponent=_LN2))
    text = "exp is given base-2 logits: the factor log2(e) is one too many"
    yield Cause(text, Knobs(exponent=1 / _LN2))
    yield from digits()
    yield Cause("exp2 is a polynomial of degree 3", Knobs(polynomial=True))
    yield Cause("o is not divided by l", Knobs(normalise=False))
    yield Cause("the running maximum m starts at 0 instead of -inf", Knobs(start=0.0))
    text = "the running maximum m starts at 0 instead of -inf, so rows of low logits look empty"
    for flushes in (True, False):
        yield Cause(text, Knobs(start=0.0, empty_by_l=True, flushes=flushes))
    text = "exp is taken without subtracting the row's maximum, so that it overflows or vanishes"
    yield Cause(text, Knobs(no_maximum=True))
    yield from _hidden(config, problem)
    yield from _blockwise(config, problem)


def digits() -> Iterator[Cause]:
    """log2(e), in the exponent of P, cut off or rounded."""
    for number in (1.44, 1.442, 1.443, 1.4427, 1.44269):
        text = f"log2(e) has too few digits in the exponent of P: {number}"
        yield Cause(text, Knobs(exponent=number * _LN2))


def _lse() -> Iterator[Cause]:
    yield Cause("lse is in base 2, not natural", Knobs(lse_m=1 / _LN2, lse_l=1 / _LN2))
    yield Cause("lse adds log2(l) to a natural row maximum", Knobs(lse_l=1 / _LN2))
    yield Cause("lse adds log(l) to a row maximum in base 2", Knobs(lse_m=1 / _LN2))
    yield Cause("lse is the row maximum: log(l) is missing", Knobs(lse_l=0.0))
    yield Cause("lse is log(l): the row maximum is missing", Knobs(lse_m=0.0))
    yield Cause("lse subtracts log(l) instead of adding it", Knobs(lse_l=-1.0))


def _hidden(config: str, problem: Problem) -> Iterator[Cause]:
    if not problem.mask.hides_anything:
        return
    pairs = blocks(config) or [(64, 64), (128, 64), (128, 128)]
    tiled = [{"tiles": True, "block_m": m, "block_n": n} for m, n in pairs]
    for where in ({}, *tiled):
        text = "the denominator l counts hidden keys: the mask is applied after the sum of P"
        yield Cause(text, Knobs(hidden_counted=True, **where))  # type: ignore[arg-type]
        if problem.softcap:
            text = "the softcap comes after the mask: hidden keys enter with the logit -cap"
            yield Cause(text, Knobs(hidden_logit=-problem.softcap, **where))  # type: ignore[arg-type]
        for number in _HIDDEN:
            text = f"hidden keys have the logit {number:g} instead of -inf"
            yield Cause(text, Knobs(hidden_logit=number, **where))  # type: ignore[arg-type]


def _blockwise(config: str, problem: Problem) -> Iterator[Cause]:
    for block in sizes(config, problem.seqlen_k):
        of = f"(blocks of {block})"
        if problem.seqlen_k % block:
            text = f"zero-padded keys count in the softmax denominator {of}"
            yield Cause(text, Knobs(padding=True, block_n=block))
        if block < problem.seqlen_k:
            at = f"when the maximum moves {of}"
            for what, knobs in (
                ("l", {"rescale_l": False}),
                ("acc", {"rescale_acc": False}),
                ("both l and acc", {"rescale_l": False, "rescale_acc": False}),
            ):
                text = f"the rescale factor is omitted from {what} {at}"
                yield Cause(text, Knobs(block_n=block, **knobs))  # type: ignore[arg-type]
            text = f"the rescale factor is applied twice to acc {at}"
            yield Cause(text, Knobs(block_n=block, fades=2))
            for block_m in {m for m, n in blocks(config) if n == block} or {64}:
                lost = Knobs(lost_maximum=True, empty_by_l=True, block_m=block_m, block_n=block)
                text = f"the running maximum is not kept: only the last block of keys is left {of}"
                yield Cause(text, lost)
                text = f"the row's maximum forgets the blocks before: it is the last block's {of}"
                yield Cause(text, Knobs(block_maximum=True, block_m=block_m, block_n=block))
            text = f"a block is multiplied by the v of the block before {of}"
            yield Cause(text, Knobs(v_late=True, block_n=block))


def formats(config: str, problem: Problem) -> Iterator[Cause]:
    """Formats that the forward pass rounds to and should not."""
    if (form := problem.dtype) != "float32":
        yield Cause(
            f"q is multiplied by softmax_scale and rounded to {form}", Knobs(prescaled=True)
        )
        yield Cause(f"S = q k^T is rounded to {form}", Knobs(scores_dtype=form))
        text = f"S = q k^T is rounded to {form} before it is scaled"
        yield Cause(text, Knobs(products_dtype=form))
    for half in ("float16", "bfloat16"):
        for block in sizes(config, problem.seqlen_k):
            at = f"{half} (blocks of {block})"
            for sentence, knobs in (
                (f"the accumulator acc is kept in {at} instead of float32", {"acc_dtype": half}),
                (
                    f"the accumulator acc is kept in {at} and P V is rounded to it",
                    {"acc_dtype": half, "product_dtype": half},
                ),
                (f"the denominator l is summed in {at} instead of float32", {"l_dtype": half}),
                (
                    f"each block's part of the denominator l is rounded to {at}",
                    {"part_dtype": half},
                ),
                (
                    f"the denominator l is summed of P in {at}: the sum of a row, tl.sum, is in it",
                    {"sum_dtype": half},
                ),
            ):
                yield Cause(sentence, Knobs(block_n=block, **knobs))  # type: ignore[arg-type]
    for other in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        if other != problem.dtype:  # how P rounds depends on the maximum so far, hence on the block
            for block in sizes(config, problem.seqlen_k)[:2]:
                yield Cause(f"P is rounded to {other}", Knobs(p_dtype=other, block_n=block))


def loops(config: str, problem: Problem) -> Iterator[Cause]:
    """Loops over blocks of keys that begin or end wrongly."""
    for sentence, loop in forward_loops(problem):
        yield from _in_blocks(config, sentence, loop)
    yield from _aligned(config, problem)


def _aligned(config: str, problem: Problem) -> Iterator[Cause]:
    """A mask aligned the other way, in loops that are aligned as they should be."""
    mask, unequal = problem.mask, problem.seqlen_k - problem.seqlen_q
    if not mask.banded or mask.pattern or not (unequal or mask.documents):
        return
    other = OTHER[mask.alignment]
    text = f"the mask is aligned {other} instead of {mask.alignment}"
    shift = 0 if mask.documents else unequal if other == "bottom-right" else -unequal
    for block_m, block_n in blocks(config) or [(64, 64)]:
        known = Knobs(
            documents="other alignment" if mask.documents else "",
            shift=shift,
            loop="as due",
            block_m=block_m,
            block_n=block_n,
        )
        yield Cause(text, known, f"aligned {other}")


def loops_over_rows(config: str, problem: Problem) -> Iterator[Cause]:
    """The same of the loops over rows in dk and dv."""
    for sentence, loop in row_loops(problem):
        yield from _in_blocks(config, sentence, loop)


def _in_blocks(config: str, sentence: str, loop: str) -> Iterator[Cause]:
    for block_m, block_n in blocks(config) or [(64, 64), (128, 64), (128, 128), (64, 128)]:
        text = f"{sentence} (blocks of {block_m} rows and {block_n} keys)"
        yield Cause(text, Knobs(loop=loop, block_m=block_m, block_n=block_n))
