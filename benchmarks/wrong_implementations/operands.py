"""Defects of heads, sequences and terms: what is read."""
# ruff: noqa: D102 - a class says what is wrong

from __future__ import annotations

import dataclasses
import math

import torch

from .wrong import Wrong, defect, termed


@defect
class GroupOfThreeInABatch(Wrong):
    """Key heads of groups of three, from the second sequence on."""

    def given(self, p, q, k, v, terms):
        if p.group == 3 and p.batch > 1:
            k = torch.cat((k[:1], k[1:].roll(1, 1)))
        return p, q, k, v, terms


@defect
class BiasOfAllHeadsInABatch(Wrong):
    """A bias that heads share is the first sequence's."""

    def given(self, p, q, k, v, terms):
        if "b" in p.bias and "h" not in p.bias:
            terms = termed(terms, bias=terms.bias[:1].expand_as(terms.bias))
        return p, q, k, v, terms


@defect
class SlopesByKeyHead(Wrong):
    """ALiBi's slope is the key head's."""

    def given(self, p, q, k, v, terms):
        if terms.slopes is not None:
            at = torch.arange(p.heads_q) // p.group
            terms = termed(terms, slopes=terms.slopes[at])
        return p, q, k, v, terms


@defect
class SlopesScaled(Wrong):
    """ALiBi is scaled too where a scale is given."""

    def given(self, p, q, k, v, terms):
        if terms.slopes is not None and p.softmax_scale is not None:
            terms = termed(terms, slopes=terms.slopes * p.scale)
        return p, q, k, v, terms


@defect
class HeadsFromTheNinthOn(Wrong):
    """From the ninth head on keys are the first head's."""

    def given(self, p, q, k, v, terms):
        if p.heads_kv > 8:
            k = torch.cat((k[:, :8], k[:, :1].expand(-1, p.heads_kv - 8, -1, -1)), 1)
        return p, q, k, v, terms


@defect
class TF32OfDeepHeads(Wrong):
    """TF32 where ieee is asked for, above a head_dim of 128."""

    def given(self, p, q, k, v, terms):
        if p.dtype == "float32" and p.head_dim > 128 and p.dot_precision == "ieee":
            q, k = (
                (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (q, k)
            )
        return p, q, k, v, terms


@defect
class SingleQueryKeepsAll(Wrong):
    """Dropout does nothing where there is one query."""

    def given(self, p, q, k, v, terms):
        if p.seqlen_q == 1 and terms.keep is not None:
            terms = termed(terms, keep=torch.ones_like(terms.keep))
        return p, q, k, v, terms


@defect
class RowOfBiasAtOddLengths(Wrong):
    """A bias of keys alone is read one further at the last key, where their number is odd."""

    def given(self, p, q, k, v, terms):
        if p.bias and "k" in p.bias and "q" not in p.bias and p.seqlen_k % 2:
            bias = terms.bias.clone()
            bias[..., -1] = 0
            terms = termed(terms, bias=bias)
        return p, q, k, v, terms


@defect
class SinksByKeyHead(Wrong):
    """A sink is the key head's."""

    def given(self, p, q, k, v, terms):
        if terms.sinks is not None:
            terms = termed(terms, sinks=terms.sinks[torch.arange(p.heads_q) // p.group])
        return p, q, k, v, terms


@defect
class SinkOfMinusInfinity(Wrong):
    """A sink of -inf is taken for 0."""

    def given(self, p, q, k, v, terms):
        if terms.sinks is not None:
            terms = termed(terms, sinks=terms.sinks.nan_to_num(neginf=0.0))
        return p, q, k, v, terms


@defect
class BatchFromTheNinthOn(Wrong):
    """From the ninth sequence on keys are the first one's."""

    def given(self, p, q, k, v, terms):
        if p.batch > 8:
            k = torch.cat((k[:8], k[:1].expand(p.batch - 8, -1, -1, -1)))
        return p, q, k, v, terms


@defect
class GroupsOfMoreThanEight(Wrong):
    """From the ninth query head of a group on queries are the first one's."""

    def given(self, p, q, k, v, terms):
        if p.group > 8:
            at = torch.arange(p.heads_q)
            q = q[:, torch.where(at % p.group < 8, at, at // p.group * p.group)]
        return p, q, k, v, terms


@defect
class NegativeSlopes(Wrong):
    """Slopes below 0 are taken for 0."""

    def given(self, p, q, k, v, terms):
        if terms.slopes is not None:
            terms = termed(terms, slopes=terms.slopes.clamp(min=0))
        return p, q, k, v, terms


@defect
class BiasBelowMinus9000(Wrong):
    """A bias below -9000 is taken for -inf."""

    def given(self, p, q, k, v, terms):
        if terms.bias is not None:
            terms = termed(terms, bias=terms.bias.masked_fill(terms.bias < -9000, -math.inf))
        return p, q, k, v, terms


@defect
class ScaleOfZero(Wrong):
    """A scale of 0 is taken for none."""

    def given(self, p, *rest):
        return (dataclasses.replace(p, softmax_scale=p.softmax_scale or None), *rest)
