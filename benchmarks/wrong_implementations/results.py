"""Defects of what is rounded, stored and summed."""
# ruff: noqa: D102 - a class says what is wrong

from __future__ import annotations

import math

import torch

from .wrong import Wrong, defect, termed

BLOCK = 64


@defect
class LastColumnOfDkAt80(Wrong):
    """dk's last column is lost where head_dim is 80."""

    def gradients(self, p, _redo, grads, **_):
        if p.head_dim == 80:
            grads[1][..., -1] = 0
        return grads


@defect
class BlindRowsInDv(Wrong):
    """Rows that see no key add do to the first key's dv."""

    def gradients(self, p, _redo, grads, do, **_):
        if p.seqlen_k:
            blind = ~torch.from_numpy(p.mask.allowed(p.seqlen_q, p.seqlen_k)).any(1)
            lost = do[:, :, blind].float().sum(2)
            lost = lost.reshape(p.batch, p.heads_kv, p.group, -1).sum(2)
            grads[2] = grads[2].clone()
            grads[2][:, :, 0] += lost.to(grads[2].dtype)
        return grads


@defect
class DropoutAlikeInKeyBlocks(Wrong):
    """The backward pass draws the second block of keys anew."""

    def given_back(self, p, q, k, v, terms):
        if terms.keep is not None:
            keep = terms.keep.clone()
            keep[..., 128:] = keep[..., 128:].roll(1, -1)
            terms = termed(terms, keep=keep)
        return p, q, k, v, terms


@defect
class FewQueriesInDk(Wrong):
    """dk lacks the last query where there are fewer than 16."""

    def gradients(self, p, redo, grads, do, **_):
        if 1 < p.seqlen_q < 16:
            cut = do.clone()
            cut[:, :, -1] = 0
            grads[1] = redo(do=cut)[1]
        return grads


@defect
class TruncatedO(Wrong):
    """o is rounded toward zero when it is stored."""

    def _stored(self, native, o):
        near = o.to(native)
        return torch.where(near.float().abs() > o.abs(), _toward_zero(near), near)


@defect
class SubnormalOFlushed(Wrong):
    """o below the smallest normal number becomes 0."""

    def _stored(self, native, o):
        near = super()._stored(native, o)
        return torch.where(near.abs() < torch.finfo(native).tiny, torch.zeros_like(near), near)


@defect
class SubnormalGradientsFlushed(Wrong):
    """dq, dk, dv below the smallest normal number become 0."""

    def gradients(self, _p, _redo, grads, **_):
        cut = [
            torch.where(x.abs() < torch.finfo(x.dtype).tiny, torch.zeros_like(x), x)
            for x in grads[:3]
        ]
        return [*cut, *grads[3:]]


@defect
class DsinksOfOneSequence(Wrong):
    """dsinks are those of the first sequence."""

    def gradients(self, p, redo, grads, do, **_):
        if p.sinks and p.batch > 1:
            cut = do.clone()
            cut[1:] = 0
            grads[-1] = redo(do=cut)[-1]
        return grads


@defect
class DbiasOfOneSequence(Wrong):
    """A bias that sequences share gets the last one's gradient."""

    def gradients(self, p, redo, grads, do, **_):
        if p.bias and "b" not in p.bias and p.batch > 1:
            cut = do.clone()
            cut[:-1] = 0
            grads[3] = redo(do=cut)[3]
        return grads


@defect
class HiddenPartsWeigh(Wrong):
    """A part of 256 keys that a row does not see counts with lse = 0 when parts are merged."""

    def out(self, p, o, lse):
        allowed = torch.from_numpy(p.mask.allowed(p.seqlen_q, p.seqlen_k))
        hidden = sum((~allowed[:, c : c + 256].any(1)).float() for c in range(0, p.seqlen_k, 256))
        if not isinstance(hidden, torch.Tensor) or not hidden.any():
            return o, lse
        factor = 1 / (1 + hidden * (-lse).exp())
        return (o.float() * factor.unsqueeze(-1).nan_to_num()).to(o.dtype), lse


@defect
class DeltaOfFirstColumns(Wrong):
    """delta sums the first head_dim columns where head_dim_v is larger."""

    def backward(self, problem, q, k, v, o, lse, do, terms):
        object.__setattr__(self, "_columns", problem.head_dim)
        return super().backward(problem, q, k, v, o, lse, do, terms)

    def _delta(self, do, o):
        return super()._delta(do[..., : self._columns], o[..., : self._columns])


@defect
class DlseInDqAlone(Wrong):
    """dk lacks what lse's gradient adds."""

    def gradients(self, _p, redo, grads, terms, **_):
        if terms.dlse is not None:
            grads[1] = redo(terms=termed(terms, dlse=None))[1]
        return grads


@defect
class BFloatPOfManyKeys(Wrong):
    """P is rounded to bfloat16 in a float16 kernel, where there are more than 512 keys."""

    def forward(self, problem, *rest):
        object.__setattr__(self, "_many", problem.seqlen_k > 512)
        return super().forward(problem, *rest)

    def _cast_p(self, native, p):
        return p.bfloat16().float() if self._many else super()._cast_p(native, p)


@defect
class BlindRowsWithoutSink(Wrong):
    """lse of a row that sees no key is -inf, whatever its sink."""

    def out(self, p, o, lse):
        blind = ~torch.from_numpy(p.mask.allowed(p.seqlen_q, p.seqlen_k)).any(1)
        return o, lse.masked_fill(blind, -math.inf)


@defect
class GroupOfFourInDv(Wrong):
    """dv lacks the last query head of groups of four under a causal mask."""

    def gradients(self, p, redo, grads, do, **_):
        if p.group == 4 and p.mask.causal:
            cut = do.clone()
            cut[:, 3::4] = 0
            grads[2] = redo(do=cut)[2]
        return grads


@defect
class SlopeOfSoftcapUnderCausal(Wrong):
    """Gradients lack the softcap's slope under a causal mask: as if the cap were far away."""

    def given_back(self, p, q, k, v, terms):
        if p.softcap and p.mask.causal:
            object.__setattr__(self, "_flat", True)
        return p, q, k, v, terms

    def _logits(self, *args):
        s, factor, t = super()._logits(*args)
        return (s, factor, torch.zeros_like(t)) if getattr(self, "_flat", False) else (s, factor, t)


@defect
class DbiasThroughSoftcap(Wrong):
    """dbias has the softcap's slope."""

    def __init__(self, **options):
        super().__init__(**{"bugs": frozenset({"dbias with slope"}), **options})


@defect
class GroupsGradientsRounded(Wrong):
    """dk of a group's query heads are rounded before they are added."""

    def gradients(self, p, redo, grads, do, **_):
        if p.group > 1:
            total = torch.zeros_like(grads[1])
            for member in range(p.group):
                cut = torch.zeros_like(do)
                cut[:, member :: p.group] = do[:, member :: p.group]
                total = total + redo(do=cut)[1]
            grads[1] = total
        return grads


@defect
class ShortTailInDq(Wrong):
    """dq lacks a last block of up to 8 keys, where head_dim is above 64."""

    def gradients(self, p, redo, grads, **_):
        tail = p.seqlen_k % BLOCK
        if 0 < tail <= 8 and p.seqlen_k > BLOCK and p.head_dim > 64:
            object.__setattr__(self, "_short", p.seqlen_k - tail)
            grads[0] = redo()[0]
            object.__setattr__(self, "_short", 0)
        return grads

    def _blocks(self, length):
        cut = getattr(self, "_short", 0)
        return [x for x in super()._blocks(length) if not cut or x.stop <= cut]


@defect
class LseInBFloat(Wrong):
    """lse is stored as bfloat16 where it is below 1."""

    def out(self, _p, o, lse):
        return o, torch.where(lse.abs() < 1, lse.bfloat16().float(), lse)


@defect
class DeltaInHalf(Wrong):
    """delta is stored in the inputs' dtype."""

    def backward(self, problem, *rest):
        object.__setattr__(self, "_native", getattr(torch, problem.dtype))
        return super().backward(problem, *rest)

    def _delta(self, do, o):
        return super()._delta(do, o).to(self._native).float()


@defect
class DlseOfLaterRows(Wrong):
    """lse's gradient is left out from row 128 on."""

    def given_back(self, p, q, k, v, terms):
        if terms.dlse is not None:
            dlse = terms.dlse.clone()
            dlse[..., 128:] = 0
            terms = termed(terms, dlse=dlse)
        return p, q, k, v, terms


@defect
class DropoutOfTheSecondSequence(Wrong):
    """Every sequence drops what the first drops, in the backward pass alone."""

    def given_back(self, p, q, k, v, terms):
        if terms.keep is not None and p.batch > 1:
            terms = termed(terms, keep=terms.keep[:1].expand_as(terms.keep))
        return p, q, k, v, terms


@defect
class LastColumnOfV(Wrong):
    """The last column of o is the one before it where head_dim_v is odd and above 64."""

    def out(self, p, o, lse):
        if p.head_dim_v % 2 and p.head_dim_v > 64:
            o = torch.cat((o[..., :-1], o[..., -2:-1]), -1)
        return o, lse


def _toward_zero(x):
    """The next number of its format, one less as an integer: whatever the sign."""
    whole = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return (x.contiguous().view(whole) - 1).view(x.dtype)
