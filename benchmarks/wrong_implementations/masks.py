"""Defects of who sees whom."""
# ruff: noqa: D102 - a class says what is wrong

from __future__ import annotations

import math

import torch

from .wrong import Wrong, defect, masked

BLOCK = 64


@defect
class DiagonalOfMoreQueries(Wrong):
    """The diagonal's shift is cut at 0: wrong where queries outnumber keys."""

    def given(self, p, *rest):
        cut = p.seqlen_q > p.seqlen_k and p.mask.banded and not p.mask.documents
        return (masked(p, alignment="top-left") if cut else p, *rest)


@defect
class BlockAfterAHiddenOne(Wrong):
    """The first key after a block that a block of rows does not see at all is lost."""

    def seen(self, p, allowed):
        whole = allowed.clone()
        for r in range(0, p.seqlen_q, BLOCK):
            rows = whole[r : r + BLOCK]
            for c in range(BLOCK, p.seqlen_k, BLOCK):
                before = rows[:, c - BLOCK : c].any()
                if not before and rows[:, : c - BLOCK].any():
                    allowed[r : r + BLOCK, c] = False
        return allowed


@defect
class WindowLeftOfZero(Wrong):
    """A left window of 0 is taken for none."""

    def given(self, p, *rest):
        return (masked(p, window_left=None) if p.mask.window_left == 0 else p, *rest)


@defect
class WindowRightOfZero(Wrong):
    """A right window of 0 is taken for none."""

    def given(self, p, *rest):
        return (masked(p, window_right=None) if p.mask.window_right == 0 else p, *rest)


@defect
class MaskBeforeSoftcap(Wrong):
    """Hidden logits meet the softcap and become -softcap."""

    def forward(self, p, q, k, v, terms):
        o, lse = super().forward(p, q, k, v, terms)
        if not (p.softcap and p.mask.hides_anything) or p.terms or not p.seqlen_k:
            return o, lse
        kk, vv = (x.repeat_interleave(p.group, 1).double() for x in (k, v))
        s = (q.double() @ kk.mT * p.scale / p.softcap).tanh() * p.softcap
        allowed = torch.from_numpy(p.mask.allowed(p.seqlen_q, p.seqlen_k))
        s = s.masked_fill(~allowed, -p.softcap)
        return (s.softmax(-1) @ vv).to(o.dtype), s.logsumexp(-1).float()


@defect
class DocumentAfterAnEmptyOne(Wrong):
    """The last document loses its last key if the one before it is empty."""

    def seen(self, p, allowed):
        d = p.mask.documents
        if len(d) > 1 and 0 in d[-2] and d[-1][1]:
            allowed[p.seqlen_q - d[-1][0] :, -1] = False
        return allowed


@defect
class MaximumOfNegativeScale(Wrong):
    """The maximum is taken before a negative scale turns the order round."""

    def forward(self, p, q, k, v, terms):
        o, lse = super().forward(p, q, k, v, terms)
        if p.scale >= 0 or p.softcap or p.terms or not p.seqlen_k:
            return o, lse
        kk, vv = (x.repeat_interleave(p.group, 1).float() for x in (k, v))
        s = q.float() @ kk.mT * p.scale
        allowed = torch.from_numpy(p.mask.allowed(p.seqlen_q, p.seqlen_k))
        low = s.masked_fill(~allowed, math.inf).amin(-1, keepdim=True)
        weights = (s - low.nan_to_num(posinf=0.0)).exp().masked_fill(~allowed, 0)
        total = weights.sum(-1, keepdim=True)
        found = weights.to(q.dtype).float() @ vv / total
        return found.nan_to_num(nan=0.0).to(q.dtype) if not allowed.all() else found.to(
            q.dtype
        ), lse


@defect
class WindowsFirstKeyOnABlock(Wrong):
    """A window that begins where a block does loses that key, in each block's first row."""

    def seen(self, p, allowed):
        if p.mask.window_left is None or p.mask.documents:
            return allowed
        lo, hi = p.mask.intervals(p.seqlen_q, p.seqlen_k)
        for r in range(0, p.seqlen_q, BLOCK):
            if 0 < lo[r] < hi[r] and lo[r] % BLOCK == 0:
                allowed[r, lo[r]] = False
        return allowed


@defect
class LastOfManyKeys(Wrong):
    """Of more than 2048 keys the last is lost, where head_dim is above 64."""

    def seen(self, p, allowed):
        if p.seqlen_k > 2048 and p.head_dim > 64:
            allowed[:, -1] = False
        return allowed


@defect
class SlopesFromTheFirstKey(Wrong):
    """Under a window ALiBi's diagonal begins at the first key."""

    def _beside(self, problem, terms):
        if problem.mask.window_left is not None and terms.slopes is not None:
            problem = masked(problem, alignment="top-left")
        return super()._beside(problem, terms)


@defect
class WindowFromTheSequencesStart(Wrong):
    """In documents after the first a window is cut where it would end in the first."""

    def seen(self, p, allowed):
        d = p.mask.documents
        if len(d) > 1 and p.mask.window_left is not None:
            last = d[-1]
            rows, keys = slice(p.seqlen_q - last[0], None), slice(p.seqlen_k - last[1], None)
            if last[1] > p.mask.window_left + 1:
                allowed[rows, keys][:, 0] = False
        return allowed


@defect
class CausalByBlocksOf16(Wrong):
    """The diagonal's shift is rounded down to a multiple of 16, where head_dim_v differs."""

    def seen(self, p, allowed):
        if p.mask.causal and not p.mask.documents and p.head_dim_v != p.head_dim:
            shift = p.mask.shift(p.seqlen_q, p.seqlen_k)
            limit = torch.arange(p.seqlen_q)[:, None] + shift // 16 * 16
            allowed &= torch.arange(p.seqlen_k) <= limit
        return allowed


@defect
class TailBlockOfAPattern(Wrong):
    """Under a pattern the last, partial block of keys is seen in full."""

    def seen(self, p, allowed):
        tail = p.seqlen_k % BLOCK
        if p.mask.pattern and tail and not p.mask.banded and not p.mask.documents:
            allowed[:, -tail:] = True
        return allowed


@defect
class OneQueryTopLeft(Wrong):
    """A single query sees all keys, causal or not."""

    def seen(self, p, allowed):
        if p.seqlen_q == 1 and p.mask.causal and not p.mask.documents and not p.mask.pattern:
            allowed[:] = True
        return allowed


@defect
class DocumentsOfFewKeys(Wrong):
    """Documents of one key are taken for empty."""

    def seen(self, p, allowed):
        at = 0
        for _, keys in p.mask.documents:
            if keys == 1:
                allowed[:, at] = False
            at += keys
        return allowed


@defect
class DiagonalOfLastDocument(Wrong):
    """A causal document of more queries than keys is aligned at its first key."""

    def seen(self, p, allowed):
        at = [0, 0]
        for queries, keys in p.mask.documents:
            if p.mask.causal and p.mask.alignment == "bottom-right" and 0 < keys < queries:
                rows = slice(at[0], at[0] + queries)
                own = torch.ones(queries, keys, dtype=torch.bool).tril()
                allowed[rows, at[1] : at[1] + keys] = own
            at = [at[0] + queries, at[1] + keys]
        return allowed


@defect
class KeysFromAPowerOfTwo(Wrong):
    """The key at 1024 is lost, under a mask alone."""

    def seen(self, p, allowed):
        if p.mask.hides_anything and p.seqlen_k > 1024:
            allowed[:, 1024] = False
        return allowed
