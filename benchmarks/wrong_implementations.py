"""Wrong in one condition only: how many cases until the default suite notices?

    python benchmarks/wrong_implementations.py [--seeds 1 2 3] [NAME...]

Each is an emulator of tests/emulator.py with one defect of a kind that nothing here was made for.
A case counts as looked at where the defect changes a bit of the result; all others pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from right_implementations.emulation import Emulator, emulated

from fa_verify import distribution
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.inputs import materialise
from fa_verify.verify import verify

CASES = 200  # of `fa-verify check`, by default
WORK = 2e7
_BLOCK = 64


class Wrong(Emulator):
    """What a defect may change: who sees whom, what is handed in, what comes out."""

    def seen(self, _problem, allowed):
        return allowed

    def given(self, problem, q, k, v, terms):
        return problem, q, k, v, terms

    def given_back(self, problem, q, k, v, terms):
        return self.given(problem, q, k, v, terms)

    def out(self, _problem, o, lse):
        return o, lse

    def gradients(self, _problem, _redo, grads, **_):
        return grads

    def _mask(self, problem):
        allowed = torch.from_numpy(problem.mask.allowed(problem.seqlen_q, problem.seqlen_k).copy())
        return self.seen(problem, allowed).repeat(problem.group, 1)

    def forward(self, problem, q, k, v, terms):
        given = self.given(problem, q, k, v, terms)
        return self.out(problem, *super().forward(*given))

    def backward(self, problem, q, k, v, o, lse, do, terms):
        problem_, q_, k_, v_, terms_ = self.given_back(problem, q, k, v, terms)

        def redo(**other):
            used = {"q": q_, "k": k_, "v": v_, "o": o, "lse": lse, "do": do, "terms": terms_}
            return Emulator.backward(self, problem_, *{**used, **other}.values())

        return self.gradients(problem, redo, list(redo()), do=do, terms=terms)


DEFECTS = {}


def defect(cls):
    DEFECTS[cls.__name__] = cls
    return cls


def _masked(problem, **changes):
    return dataclasses.replace(problem, mask=dataclasses.replace(problem.mask, **changes))


def _termed(terms, **changes):
    return dataclasses.replace(terms, **changes)


@defect
class DiagonalOfMoreQueries(Wrong):
    """The diagonal's shift is cut at 0: wrong where queries outnumber keys."""

    def given(self, p, *rest):
        cut = p.seqlen_q > p.seqlen_k and p.mask.banded and not p.mask.documents
        return (_masked(p, alignment="top-left") if cut else p, *rest)


@defect
class GroupOfThreeInABatch(Wrong):
    """Key heads of groups of three, from the second sequence on."""

    def given(self, p, q, k, v, terms):
        if p.group == 3 and p.batch > 1:
            k = torch.cat((k[:1], k[1:].roll(1, 1)))
        return p, q, k, v, terms


@defect
class LastColumnOfDkAt80(Wrong):
    """dk's last column is lost where head_dim is 80."""

    def gradients(self, p, _redo, grads, **_):
        if p.head_dim == 80:
            grads[1][..., -1] = 0
        return grads


@defect
class BlockAfterAHiddenOne(Wrong):
    """The first key after a block that a block of rows does not see at all is lost."""

    def seen(self, p, allowed):
        whole = allowed.clone()
        for r in range(0, p.seqlen_q, _BLOCK):
            rows = whole[r : r + _BLOCK]
            for c in range(_BLOCK, p.seqlen_k, _BLOCK):
                before = rows[:, c - _BLOCK : c].any()
                if not before and rows[:, : c - _BLOCK].any():
                    allowed[r : r + _BLOCK, c] = False
        return allowed


@defect
class WindowLeftOfZero(Wrong):
    """A left window of 0 is taken for none."""

    def given(self, p, *rest):
        return (_masked(p, window_left=None) if p.mask.window_left == 0 else p, *rest)


@defect
class WindowRightOfZero(Wrong):
    """A right window of 0 is taken for none."""

    def given(self, p, *rest):
        return (_masked(p, window_right=None) if p.mask.window_right == 0 else p, *rest)


@defect
class BiasOfAllHeadsInABatch(Wrong):
    """A bias that heads share is the first sequence's."""

    def given(self, p, q, k, v, terms):
        if "b" in p.bias and "h" not in p.bias:
            terms = _termed(terms, bias=terms.bias[:1].expand_as(terms.bias))
        return p, q, k, v, terms


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
class DropoutAlikeInKeyBlocks(Wrong):
    """The backward pass draws the second block of keys anew."""

    def given_back(self, p, q, k, v, terms):
        if terms.keep is not None:
            keep = terms.keep.clone()
            keep[..., 128:] = keep[..., 128:].roll(1, -1)
            terms = _termed(terms, keep=keep)
        return p, q, k, v, terms


@defect
class SlopesByKeyHead(Wrong):
    """ALiBi's slope is the key head's."""

    def given(self, p, q, k, v, terms):
        if terms.slopes is not None:
            at = torch.arange(p.heads_q) // p.group
            terms = _termed(terms, slopes=terms.slopes[at])
        return p, q, k, v, terms


@defect
class DocumentAfterAnEmptyOne(Wrong):
    """The last document loses its last key if the one before it is empty."""

    def seen(self, p, allowed):
        d = p.mask.documents
        if len(d) > 1 and 0 in d[-2] and d[-1][1]:
            allowed[p.seqlen_q - d[-1][0] :, -1] = False
        return allowed


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
class WindowsFirstKeyOnABlock(Wrong):
    """A window that begins where a block does loses that key, in each block's first row."""

    def seen(self, p, allowed):
        if p.mask.window_left is None or p.mask.documents:
            return allowed
        lo, hi = p.mask.intervals(p.seqlen_q, p.seqlen_k)
        for r in range(0, p.seqlen_q, _BLOCK):
            if 0 < lo[r] < hi[r] and lo[r] % _BLOCK == 0:
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
            grads[1] = redo(terms=_termed(terms, dlse=None))[1]
        return grads


@defect
class SlopesScaled(Wrong):
    """ALiBi is scaled too where a scale is given."""

    def given(self, p, q, k, v, terms):
        if terms.slopes is not None and p.softmax_scale is not None:
            terms = _termed(terms, slopes=terms.slopes * p.scale)
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
class SingleQueryKeepsAll(Wrong):
    """Dropout does nothing where there is one query."""

    def given(self, p, q, k, v, terms):
        if p.seqlen_q == 1 and terms.keep is not None:
            terms = _termed(terms, keep=torch.ones_like(terms.keep))
        return p, q, k, v, terms


@defect
class SlopesFromTheFirstKey(Wrong):
    """Under a window ALiBi's diagonal begins at the first key."""

    def _beside(self, problem, terms):
        if problem.mask.window_left is not None and terms.slopes is not None:
            problem = _masked(problem, alignment="top-left")
        return super()._beside(problem, terms)


@defect
class RowOfBiasAtOddLengths(Wrong):
    """A bias of keys alone is read one further at the last key, where their number is odd."""

    def given(self, p, q, k, v, terms):
        if p.bias and "k" in p.bias and "q" not in p.bias and p.seqlen_k % 2:
            bias = terms.bias.clone()
            bias[..., -1] = 0
            terms = _termed(terms, bias=bias)
        return p, q, k, v, terms


@defect
class SinksByKeyHead(Wrong):
    """A sink is the key head's."""

    def given(self, p, q, k, v, terms):
        if terms.sinks is not None:
            terms = _termed(terms, sinks=terms.sinks[torch.arange(p.heads_q) // p.group])
        return p, q, k, v, terms


@defect
class SinkOfMinusInfinity(Wrong):
    """A sink of -inf is taken for 0."""

    def given(self, p, q, k, v, terms):
        if terms.sinks is not None:
            terms = _termed(terms, sinks=terms.sinks.nan_to_num(neginf=0.0))
        return p, q, k, v, terms


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
class TailBlockOfAPattern(Wrong):
    """Under a pattern the last, partial block of keys is seen in full."""

    def seen(self, p, allowed):
        tail = p.seqlen_k % _BLOCK
        if p.mask.pattern and tail and not p.mask.banded and not p.mask.documents:
            allowed[:, -tail:] = True
        return allowed


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
class OneQueryTopLeft(Wrong):
    """A single query sees all keys, causal or not."""

    def seen(self, p, allowed):
        if p.seqlen_q == 1 and p.mask.causal and not p.mask.documents and not p.mask.pattern:
            allowed[:] = True
        return allowed


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
        tail = p.seqlen_k % _BLOCK
        if 0 < tail <= 8 and p.seqlen_k > _BLOCK and p.head_dim > 64:
            object.__setattr__(self, "_short", p.seqlen_k - tail)
            grads[0] = redo()[0]
            object.__setattr__(self, "_short", 0)
        return grads

    def _blocks(self, length):
        cut = getattr(self, "_short", 0)
        return [x for x in super()._blocks(length) if not cut or x.stop <= cut]


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
class NegativeSlopes(Wrong):
    """Slopes below 0 are taken for 0."""

    def given(self, p, q, k, v, terms):
        if terms.slopes is not None:
            terms = _termed(terms, slopes=terms.slopes.clamp(min=0))
        return p, q, k, v, terms


@defect
class BiasBelowMinus9000(Wrong):
    """A bias below -9000 is taken for -inf."""

    def given(self, p, q, k, v, terms):
        if terms.bias is not None:
            terms = _termed(terms, bias=terms.bias.masked_fill(terms.bias < -9000, -math.inf))
        return p, q, k, v, terms


@defect
class DlseOfLaterRows(Wrong):
    """lse's gradient is left out from row 128 on."""

    def given_back(self, p, q, k, v, terms):
        if terms.dlse is not None:
            dlse = terms.dlse.clone()
            dlse[..., 128:] = 0
            terms = _termed(terms, dlse=dlse)
        return p, q, k, v, terms


@defect
class DropoutOfTheSecondSequence(Wrong):
    """Every sequence drops what the first drops, in the backward pass alone."""

    def given_back(self, p, q, k, v, terms):
        if terms.keep is not None and p.batch > 1:
            terms = _termed(terms, keep=terms.keep[:1].expand_as(terms.keep))
        return p, q, k, v, terms


@defect
class ScaleOfZero(Wrong):
    """A scale of 0 is taken for none."""

    def given(self, p, *rest):
        return (dataclasses.replace(p, softmax_scale=p.softmax_scale or None), *rest)


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
class LastColumnOfV(Wrong):
    """The last column of o is the one before it where head_dim_v is odd and above 64."""

    def out(self, p, o, lse):
        if p.head_dim_v % 2 and p.head_dim_v > 64:
            o = torch.cat((o[..., :-1], o[..., -2:-1]), -1)
        return o, lse


@defect
class KeysFromAPowerOfTwo(Wrong):
    """The key at 1024 is lost, under a mask alone."""

    def seen(self, p, allowed):
        if p.mask.hides_anything and p.seqlen_k > 1024:
            allowed[:, 1024] = False
        return allowed


def _toward_zero(x):
    """The next number of its format, one less as an integer: whatever the sign."""
    whole = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return (x.contiguous().view(whole) - 1).view(x.dtype)


def _same(one, other):
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in pairs)


def _results(kernel, case, x):
    out = kernel.forward(case.problem, x.q, x.k, x.v, **x.terms(backward=False))
    if not case.backward:
        return [out.o, out.lse]
    grads = kernel.backward(case.problem, x.q, x.k, x.v, out, x.do, **x.terms(backward=True))
    return [out.o, out.lse, *grads.named().values()]


def hunt(name, seed, right):
    """Cases until the first failure, and it; how many cases the defect changed."""
    kernel = emulated(name, lambda _p: DEFECTS[name](), work=WORK)
    backend, touched = CpuBackend(seconds=120.0), 0
    for index, case in enumerate(distribution.draw(seed, CASES, kernel.takes)):
        x = materialise(case)
        if _same(_results(kernel, case, x), _results(right, case, x)):
            continue
        touched += 1
        record = verify(case, kernel, Setup(), backend)
        if record.verdict == "fail":
            return index + 1, touched, record
    return None, touched, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    right = emulated("right", lambda _p: Emulator(), work=WORK)
    print("| defect | cases to the first failure | cases that it changed before | caught by |")
    print("| :-- | --: | --: | :-- |")
    for name in options.names or DEFECTS:
        found = [hunt(name, seed, right) for seed in options.seeds]
        cases = ", ".join(str(at or "missed") for at, _, _ in found)
        before = ", ".join(str(touched) for _, touched, _ in found)
        titles = {record.failures[0].title for *_, record in found if record}
        print(f"| {DEFECTS[name].__doc__} | {cases} | {before} | {'; '.join(titles)} |", flush=True)


if __name__ == "__main__":
    main()
