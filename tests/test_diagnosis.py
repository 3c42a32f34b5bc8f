"""Each known defect, seeded in a plain float32 kernel, is named; an unknown fault is placed."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs, checks
from fa_verify.backends.base import Incident, Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.diagnosis import diagnose
from fa_verify.diagnosis.addressing import read_by, written_by
from fa_verify.diagnosis.incidents import explain
from fa_verify.diagnosis.patterns import pattern, unwritten
from fa_verify.pages import NOWHERE
from fa_verify.trial import Trial

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other

BLOCK = 16
FULL = "pass=bwd b=1 h=2 s=40x70 d=80 dtype=float16 logits=2.0 seed=5"
CAUSAL = "pass=bwd b=1 h=2 s=40x70 d=32 dtype=bfloat16 mask=causal seed=5"
WINDOW = "pass=bwd h=2 s=60x50 d=32 dtype=float16 mask=l9.r4 seed=6"
GQA = "pass=bwd b=2 h=6/2 s=20x30 d=32 dtype=float16 seed=7"
CAP = "pass=bwd h=2 s=20x30 d=32 dtype=float16 cap=2.0 logits=4.0 seed=8"
LOW = "pass=fwd h=2 s=20x30 d=32 dtype=float16 qk.values=row-shift seed=9"
BFLOAT16 = "pass=fwd h=1 s=16x200 d=80 dtype=bfloat16 logits=4.0 seed=3"
TALL = "pass=fwd h=1 s=40x20 d=32 dtype=float16 mask=causal seed=9"
ONES = "pass=fwd h=1 s=16x128 d=32 dtype=float16 v.values=ones seed=9"
LONG = "pass=fwd h=1 s=16x1500 d=32 dtype=float16 v.values=offset seed=9"


class Plain:
    """A blockwise kernel in float32, as its author would write it; `defect` names what is wrong."""

    def __init__(self, defect=""):
        self.defect = defect

    def has(self, name):
        return self.defect == name

    def heads(self, problem, x):
        h = torch.arange(problem.heads_q)
        modulo = self.has("modulo heads")
        return x[:, h % problem.heads_kv if modulo else h // problem.group].float()

    def visible(self, problem, keys):
        i, j = torch.arange(problem.seqlen_q)[:, None], torch.arange(keys)[None]
        mask, shift = problem.mask, problem.mask.shift(problem.seqlen_q, problem.seqlen_k)
        if self.has("other alignment"):
            shift = problem.seqlen_k - problem.seqlen_q - shift
        seen = (j < problem.seqlen_k) | self.has("padded keys")
        right = 0 if mask.causal else mask.window_right
        if right is not None:
            seen = seen & (j - i - shift <= right + self.has("one more right"))
        if mask.window_left is not None:
            seen = seen & (j - i - shift >= -mask.window_left + self.has("one less left"))
        if self.has("first block late"):
            first = (i // BLOCK * BLOCK + shift - mask.window_left).clamp(min=0)
            seen = seen & (j >= -(-first // BLOCK) * BLOCK)
        if self.has("causal unasked"):
            seen = seen & (j - i - shift <= 0)
        return seen

    def logits(self, problem, q, k):
        d = 64 if self.has("64 columns") else problem.head_dim
        scale = {"no scale": 1.0, "scale twice": problem.scale**2, "scale 0.3": 0.3}.get(
            self.defect, problem.scale
        )
        if self.has("q prescaled"):
            q, scale = (q.float() * scale).to(q.dtype), 1.0
        s = q.float()[..., :d] @ k[..., :d].mT * scale
        t = torch.tanh(s / problem.softcap) if problem.softcap else s
        if not problem.softcap or self.has("no softcap"):
            return s, torch.ones_like(s)
        return problem.softcap * t, 1 - (t.abs() if self.has("slope of |tanh|") else t * t)

    def forward(self, problem, q, k, v):
        k, v = self.heads(problem, k), self.heads(problem, v)
        keys = -(-problem.seqlen_k // BLOCK) * BLOCK
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, keys - problem.seqlen_k)) for x in (k, v))
        s, _ = self.logits(problem, q, k)
        s = torch.where(self.visible(problem, keys), s, -torch.inf)
        start = 0.0 if self.has("m from 0") else -torch.inf
        m = torch.full(problem.shape_lse, start)
        l, acc = torch.zeros(problem.shape_lse), torch.zeros(problem.shape_o)  # noqa: E741
        for first in range(0, keys, BLOCK):
            if self.has("last block skipped") and first + BLOCK > problem.seqlen_k:
                continue
            block = slice(first, first + BLOCK)
            m_new = torch.maximum(m, s[..., block].amax(-1))
            origin = torch.where(torch.isinf(m_new), 0.0, m_new)
            exp = torch.exp2 if self.has("no log2e") else torch.exp
            p, alpha = exp(s[..., block] - origin[..., None]), exp(m - origin)
            l = l * (1 if self.has("no alpha in l") else alpha) + p.sum(-1)  # noqa: E741
            acc = acc * (1 if self.has("no alpha in acc") else alpha[..., None])
            p = p.bfloat16() if self.has("P in bf16") else p
            acc = acc + p.to(q.dtype).float() @ v[:, :, block]
            if self.has("acc in fp16"):
                acc = acc.half().float()
            if self.has("l in bf16"):
                l = l.bfloat16().float()  # noqa: E741
            m = m_new
        empty = torch.isinf(m)
        divisor = torch.where(empty, 1.0, l)
        lse = torch.where(empty, m, m + torch.log(divisor))
        if self.has("lse mixes bases"):
            lse = m + torch.log2(divisor)
        if self.has("lse in base 2"):
            lse = lse / math.log(2)
        if self.has("ln 2 of four digits"):
            lse = lse * (0.6931 / math.log(2))
        if self.has("o of empty rows"):
            acc = torch.where(empty[..., None], 1.0, acc)
        o = (acc / divisor[..., None] * (1.001 if self.has("o by 1.001") else 1)).to(q.dtype)
        return Outputs(o, lse)

    def backward(self, problem, q, k, v, outputs, do):
        do, keys, values = do.float(), self.heads(problem, k), self.heads(problem, v)
        s, slope = self.logits(problem, q, keys)
        if self.has("mask ignored in backward"):
            seen = torch.ones(problem.seqlen_q, problem.seqlen_k, dtype=torch.bool)
        else:
            seen = self.visible(problem, problem.seqlen_k)
        p = torch.exp(s - outputs.lse[..., None])
        p = torch.where(seen & ~torch.isinf(outputs.lse)[..., None], p, 0.0)
        delta = 0 if self.has("no delta") else (do * outputs.o.float()).sum(-1, keepdim=True)
        ds = p * (do @ values.mT - delta)
        ds = ds if self.has("no slope") else ds * slope
        ds, p = ds.to(q.dtype).float(), p.to(q.dtype).float()
        dq = ds @ keys * (1 if self.has("dq unscaled") else problem.scale)
        dk = ds.mT @ q.float() * (1 if self.has("dk unscaled") else problem.scale)
        dv = p.mT @ do
        grouped = (problem.batch, problem.heads_kv, problem.group, problem.seqlen_k, -1)
        dk, dv = (x.reshape(grouped) for x in (dk, dv))
        if self.has("last head of the group"):
            dk, dv = dk[:, :, -1:], dv[:, :, -1:]
        if self.has("dq negated"):
            dq = -dq
        if self.has("dk tail unscaled"):
            dk[..., 64:] /= problem.scale
        if self.has("dk and dv swapped"):
            dk, dv = dv, dk
        return Grads(*(x.to(q.dtype) for x in (dq, dk.sum(2), dv.sum(2))))


def explained(case, defect="", kernel=None, **attributes):
    plain = kernel or Plain(defect)
    kernel = Kernel(
        name="plain",
        forward=plain.forward,
        backward=plain.backward,
        capabilities=Capabilities(window=True, softcap=True, head_dims_v=range(1, 257)),
        arithmetic=attributes.pop("arithmetic", Arithmetic()),
    )
    trial = Trial(kernel, Case.parse(case), Setup(), CpuBackend(), **attributes)
    return diagnose(trial, [f for check in checks.ALL[:-1] for f in check(trial)])


DEFECTS = (
    (FULL, "64 columns", "only the first 64 columns of q and k enter the logits"),
    (FULL, "no scale", "softmax_scale is missing"),
    (FULL, "scale twice", "softmax_scale is applied twice"),
    (FULL, "padded keys", "zero-padded keys count in the softmax denominator (blocks of 16)"),
    (FULL, "no alpha in l", "the rescale factor is omitted from l when"),
    (FULL, "no alpha in acc", "the rescale factor is omitted from acc when"),
    (FULL, "last block skipped", "the last, partial block of keys is skipped"),
    (FULL, "lse in base 2", "lse is in base 2"),
    (FULL, "lse mixes bases", "lse adds log2(l) to a natural row maximum"),
    (FULL, "no log2e", "exp2 is given natural logits"),
    (LOW, "m from 0", "the running maximum m starts at 0"),
    (LONG, "acc in fp16", "the accumulator acc is kept in float16"),
    (LONG, "l in bf16", "the denominator l is summed in bfloat16"),
    (CAUSAL, "one more right", "the causal mask is off by one: query i also sees"),
    (CAUSAL, "other alignment", "the mask is aligned top-left instead of bottom-right"),
    (WINDOW, "one more right", "the window is off by one on the right: one key too many"),
    (WINDOW, "one less left", "the window is off by one on the left: one key too few"),
    (CAP, "no softcap", "the softcap is missing"),
    (GQA, "modulo heads", "query head h reads key head h % heads_kv"),
    (FULL, "scale 0.3", "softmax_scale is 0.3 instead of 0.1118"),
    (FULL, "ln 2 of four digits", "lse is 0.99993 times what is due"),
    (ONES, "o by 1.001", "o is 1.001 times what is due"),
    (FULL, "causal unasked", "keys are hidden as if the mask were causal"),
    (TALL, "o of empty rows", "rows that see no key are not treated apart"),
    (BFLOAT16, "q prescaled", "q is multiplied by softmax_scale and rounded to bfloat16"),
)
BACKWARD_DEFECTS = (
    (FULL, "dq unscaled", "dq lacks the factor softmax_scale"),
    (FULL, "dk unscaled", "dk lacks the factor softmax_scale"),
    (FULL, "no delta", "delta = sum(do * o) is omitted"),
    (CAUSAL, "mask ignored in backward", "in the backward pass, the causal mask is ignored"),
    (GQA, "last head of the group", "dk and dv hold only the group's last query head"),
    (CAP, "no slope", "the softcap's derivative 1 - tanh^2 is missing"),
    (CAP, "slope of |tanh|", "the softcap's derivative is wrong"),
    (FULL, "dq negated", "dq is negated: the sign is wrong"),
    (FULL, "dk tail unscaled", "columns 64..79 of dk alone are lacking the factor softmax_scale"),
    (FULL, "dk and dv swapped", "dk and dv are returned in each other's place"),
)


@pytest.mark.parametrize("case", [FULL, CAUSAL, WINDOW, GQA, CAP, LOW, LONG])
def test_the_plain_kernel_is_right(case):
    assert explained(case) == []


@pytest.mark.parametrize(("case", "defect", "said"), DEFECTS, ids=lambda x: x.replace(" ", "-"))
def test_a_forward_defect_is_named(case, defect, said):
    failures = explained(case, defect)
    about = [f for f in failures if f.tensor in ("o", "lse")]
    assert about
    assert all(said in f.diagnosis for f in about), [(f.title, f.diagnosis) for f in about]


@pytest.mark.parametrize(
    ("case", "defect", "said"), BACKWARD_DEFECTS, ids=lambda x: x.replace(" ", "-")
)
def test_a_backward_defect_is_named(case, defect, said):
    failures = explained(case, defect)
    assert failures
    assert {f.tensor for f in failures} <= {"dq", "dk", "dv"}
    assert all(said in f.diagnosis for f in failures), [(f.title, f.diagnosis) for f in failures]


def test_an_unknown_fault_is_placed_not_guessed():
    class Odd(Plain):
        def forward(self, problem, q, k, v):
            outputs = super().forward(problem, q, k, v)
            outputs.o[:, 1, 32:, 64:] *= -3
            return outputs

    (failure, *_) = explained(FULL.replace("bwd", "fwd"), kernel=Odd())
    assert failure.diagnosis == (
        "no known defect explains it; only columns 64..79 of 80 are wrong, the tail past a tile of "
        "64 (BLOCK_D=64); only the last, partial block of rows (32..39 of 40) is wrong; "
        "only heads 1 of 2"
    )


def test_a_looser_declaration_is_named():
    case = "pass=fwd h=1 s=16x200 d=32 dtype=float32 seed=3"
    (failure,) = explained(case, "P in bf16")
    assert "P is rounded to bfloat16" in failure.diagnosis
    assert "it would pass if P in bfloat16 were declared" in failure.diagnosis


def incident(**changes):
    fields = {
        "kind": "out-of-bounds-read", "kernel": "fwd", "file": "k.py", "line": 7,
        "source": "x = tl.load(p)", "argument": "k", "program_id": (1, 0, 0),
        "coordinates": (0, 0, 70, 3), "offset": 99, "count": 5, "detail": "past the end",
    }  # fmt: skip
    return Incident(**(fields | changes))


def test_incidents_name_the_axis_whose_bound_is_missing():
    problem = Case.parse(FULL).problem
    assert explain(incident(), (), problem) == (
        "no known defect explains it: the load of k reads key 70 of 70, so its mask does not stop "
        "at seqlen_k, or an index or a stride is wrong"
    )
    write = incident(kind="out-of-bounds-write", argument="lse", coordinates=(0, 1, 40))
    assert "the store of lse writes row 40 of 40" in explain(write, (), problem)
    neighbour = incident(kind="neighbour-read", coordinates=(0, 1, 0, 0))
    said = explain(neighbour, (), problem)
    assert said.startswith("no known defect explains it: the load of k reaches another head's")
    paged = incident(argument="k_pages", coordinates=(NOWHERE, 0, 0, 0))
    assert "stands in the block table past a sequence's last page" in explain(paged, (), problem)
    race = incident(kind="race", argument="lse", coordinates=(0, 1, 0))
    assert "the store of lse is not masked" in explain(race, (race, write), problem)
    read = incident(kind="race", argument="dq", detail="reads what another program writes")
    assert "by load, add and store" in explain(read, (read,), problem)
    before = incident(offset=-4, coordinates=None)
    assert "or has wrapped in too few bits" in explain(before, (), problem)
    empty = Case.parse("pass=fwd s=0x3 d=8 dtype=float16 seed=1").problem
    assert "as a length of 0 less one is" in explain(before, (), empty)
    wrapped = incident(kind="integer-overflow", line=6)
    assert "to(tl.int64)" in explain(wrapped, (), problem)
    assert explain(incident(), (wrapped,), problem) == (
        "follows from the integer-overflow at k.py:6"
    )


def test_a_tensor_read_by_anothers_strides_is_named():
    class Strided(Plain):
        def backward(self, problem, q, k, v, outputs, do):
            wrong = read_by(do, outputs.o.stride()).to(do.dtype)
            return super().backward(problem, q, k, v, outputs, wrong)

    case = FULL.replace("seed", "do=bhds seed")
    failures = explained(case, kernel=Strided())
    assert {f.tensor for f in failures} == {"dq", "dk", "dv"}
    assert all("do is addressed with o's strides" in f.diagnosis for f in failures)


def test_incidents_reach_the_failures_that_follow_from_them():
    plain = Plain("no scale")
    kernel = Kernel(name="plain", forward=plain.forward, backward=plain.backward)
    trial = Trial(kernel, Case.parse(FULL), Setup(), CpuBackend())
    trial.execution = dataclasses.replace(trial.execution, incidents=(incident(),))
    (memory, *_) = diagnose(trial, [f for check in checks.ALL[:2] for f in check(trial)])
    assert memory.location == "k.py:7"
    assert "the load of k reads key 70 of 70" in memory.diagnosis


def test_addresses():
    values = torch.arange(6.0, dtype=torch.float64).reshape(1, 1, 2, 3)
    read, free, holes = written_by(values, (6, 6, 1, 2), (6, 6, 3, 1))
    assert read.flatten().tolist() == [0, 3, 1, 4, 2, 5]
    assert not free.any()
    assert not holes.any()
    assert read_by(values, (6, 6, 1, 2)).flatten().tolist() == [0, 2, 4, 1, 3, 5]
    assert torch.isnan(read_by(values, (6, 6, 3, 3))).sum() == 3


def test_places():
    problem = SimpleNamespace(
        seqlen_q=40, seqlen_k=24, mask=Case.parse(FULL).problem.mask.__class__(causal=True)
    )
    wrong = torch.zeros(1, 1, 40, 8, dtype=torch.bool)
    wrong[:, :, 3:9] = True
    assert pattern("o", wrong, problem) == "only rows that see no key are wrong (rows 3..8)"
    assert pattern("o", torch.zeros_like(wrong), problem) == ""
    holes = torch.zeros(1, 1, 40, 80, dtype=torch.bool)
    holes[:, :, 32:] = True
    assert "rows 32..39 of 40 of o are never written" in unwritten("o", holes, [])
    assert unwritten("o", torch.ones_like(holes), []) == "no program writes o"
