"""Runs too large to be judged at once, and the cases that ask for them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fa_verify import Capabilities, Kernel, Outputs, distribution, loader, slices
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.checks import bias, comparisons
from fa_verify.cli import main
from fa_verify.inputs import materialise, period
from fa_verify.trial import Trial
from fa_verify.verify import verify

CASE = Case.parse("pass=bwd b=5 h=4/2 s=24x40 d=16 dtype=float16 mask=causal seed=3")
FAR = "pass=bwd b=1025 h=128 s=128x128 d=128 dtype=float16 seed=0"


def flash():
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    return kernel


@pytest.fixture(params=[2 * 4 * 24 * 16 + 1, 2 * 24 * 16 + 1, 1])
def sliced(monkeypatch, request):
    """Two sequences at once; one; one head."""
    monkeypatch.setattr(slices, "MOST", request.param)


def test_parts_cover_every_head_once(sliced):
    p = CASE.problem
    assert slices.needed(p)
    seen = torch.zeros(p.batch, p.heads_kv)
    for batch, heads in slices.places(p):
        seen[batch, heads] += 1
    assert (seen == 1).all()


def test_a_part_is_judged_as_it_is_in_the_whole(sliced):
    whole = Trial(flash(), CASE, Setup(), CpuBackend(), independent=False)
    parts = comparisons(whole)
    for batch, heads in slices.places(CASE.problem):
        rows = slice(heads.start * 2, heads.stop * 2)
        for name, part in comparisons(whole.part(batch, heads)).items():
            key = batch, heads if name in ("dk", "dv") else rows
            torch.testing.assert_close(
                part.reference, parts[name].reference[key], rtol=1e-12, atol=1e-12
            )
            torch.testing.assert_close(
                part.bounded.det, parts[name].bounded.det[key], rtol=0.02, atol=1e-9
            )


def test_the_record_of_parts_is_that_of_the_whole(sliced, monkeypatch):
    record = verify(CASE, flash(), Setup(), CpuBackend(), independent=False)
    monkeypatch.setattr(slices, "MOST", 1 << 26)
    plain = verify(CASE, flash(), Setup(), CpuBackend(), independent=False)
    assert record.verdict == plain.verdict == "pass"
    for name, stats in plain.tensors.items():
        mine = record.tensors[name]
        assert mine.elements == stats.elements
        assert mine.worst == stats.worst
        assert mine.ratio == pytest.approx(stats.ratio, rel=0.03)
        assert mine.bias == pytest.approx(stats.bias, rel=0.03, abs=1e-3)


def test_a_fault_far_into_the_batch_is_seen_with_its_place(sliced):
    right = flash()

    def fwd(problem, q, k, v):
        outputs = right.forward(problem, q, k, v)
        outputs.o[4, 3] = outputs.o[0, 3]  # as an offset that wrapped would do
        return outputs

    wrong = dataclasses.replace(right, forward=fwd, capabilities=right.capabilities)
    record = verify(CASE, wrong, Setup(), CpuBackend(), explain=True)
    assert record.verdict == "fail"
    failure = next(f for f in record.failures if f.title == "o outside its bound")
    assert "in sequences 4..4, key heads" in failure.message
    assert record.tensors["o"].worst[:2] == (4, 3)


def test_a_result_of_the_wrong_kind_is_said_of_the_whole(sliced):
    kernel = Kernel(
        name="short",
        forward=lambda _p, q, _k, _v: Outputs(q[:1].clone()),
        capabilities=Capabilities(),
    )
    forward = dataclasses.replace(CASE, backward=False)
    record = verify(forward, kernel, Setup(), CpuBackend())
    assert [f.title for f in record.failures] == ["o has the wrong shape"]


def test_sequences_of_huge_cases_repeat_after_an_odd_number(monkeypatch):
    assert period(CASE) == 5
    assert period(Case.parse(FAR)) == 31
    assert period(Case.parse("pass=fwd h=8 s=131072x131072 d=256 dtype=float16 seed=0")) == 1
    monkeypatch.setattr("fa_verify.inputs.numbers.REPEATS", 8 * 4 * 24 * 16)
    case = Case.parse(str(CASE).replace("b=5", "b=9").replace(" seed", " q=bshd.s8 seed"))
    assert period(case) == 3
    x = materialise(case)
    for tensor in (x.q, x.k, x.v, x.do):
        assert torch.equal(tensor[3:6], tensor[:3])
        assert torch.equal(tensor[6:9], tensor[:3])
        assert not torch.equal(tensor[4], tensor[0])
    assert x.q.stride() == case.problem.layout_q.strides(case.problem.shape_q)


def test_long_cases_are_long_and_taken():
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    cases = list(distribution.long(kernel.takes, 7))
    sizes = [max(c.problem.seqlen_q, c.problem.seqlen_k) for c in cases]
    elements = [torch.Size(c.problem.shape_o).numel() for c in cases]
    assert sizes.count(1 << 17) >= 10
    assert max(elements) > 1 << 31
    assert all(kernel.takes.reason_against(c.problem) is None and c.seed == 7 for c in cases)
    assert {c.problem.dtype for c in cases} == {"float16", "bfloat16", "float32"}
    assert len({str(c) for c in cases}) == len(cases)
    first = Capabilities(dtypes=("float16",), alignments=("top-left",))
    aligned = {
        c.problem.mask.alignment for c in distribution.long(first, 0) if c.problem.mask.causal
    }
    assert aligned == {"top-left"}
    narrow = Capabilities(dtypes=("bfloat16",), head_dims=(32,), alignments=(), backward=False)
    (plain, far) = distribution.long(narrow, 0)
    assert (plain.problem.head_dim, plain.problem.dtype, plain.backward) == (32, "bfloat16", False)
    assert torch.Size(far.problem.shape_o).numel() > 1 << 31


def test_long_cases_need_a_card(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "kernels", "--backend", "cpu", "--long"])
    assert ended.value.code == 2
    assert "--long with backend='cpu'" in capsys.readouterr().err


def test_of_many_rows_some_tell_whether_a_tensor_leans(monkeypatch):
    case = Case.parse("pass=fwd h=2 s=900x64 d=64 dtype=bfloat16 seed=3")
    right = flash()

    def fwd(problem, q, k, v):
        outputs = right.forward(problem, q, k, v)
        return Outputs((outputs.o.float() * 1.004).to(q.dtype), outputs.lse)

    monkeypatch.setattr(bias, "_MOST_LOGITS", 400 * 64)
    leaning = dataclasses.replace(right, forward=fwd)
    found = bias.lean(comparisons(Trial(leaning, case, Setup(), CpuBackend()))["o"])
    assert found.size == pytest.approx(0.005, abs=0.001)
    assert 300 < found.rows <= 400
    parts = comparisons(Trial(right, case, Setup(), CpuBackend()))
    assert [bias.lean(part) for part in parts.values()] == [None, None]


def test_only_rows_that_count_are_looked_at_for_lse():
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    case = Case.parse("pass=fwd h=2/1 s=300x40 d=32 dtype=float32 mask=causal seed=3")
    lse = comparisons(Trial(kernel, case, Setup(), CpuBackend()))["lse"]
    weights = torch.zeros(1, 2, 300, dtype=torch.float64)
    weights[0, 1, 1::7] = 1.0
    every, some = (lse.bounded.bias(w) for w in (torch.ones_like(weights), weights))
    chosen = weights.flatten() > 0
    torch.testing.assert_close(some.fixed.flatten()[chosen], every.fixed.flatten()[chosen])
    assert (some.fixed.flatten()[~chosen] == 0).all()
    assert 0 < some.variance() < every.variance()
