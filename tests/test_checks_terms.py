"""Checks of problems with terms: a right kernel passes all of them, planted defects do not."""

import dataclasses
import functools
import math
from pathlib import Path

import pytest
import torch

from fa_verify import Capabilities, Kernel, Outputs, distribution, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.checks.reruns import RERUNS
from fa_verify.diagnosis import explain
from fa_verify.diagnosis.evidence import gather
from fa_verify.inputs import materialise
from fa_verify.record import CaseRecord
from fa_verify.trial import Trial
from fa_verify.verdict import Verdict
from fa_verify.verify import verify
from fa_verify.zoo.defects import planted, rows

TARGET = Path(__file__).parent / "targets" / "termed.py"
KERNELS = {kernel.name: kernel for kernel in loader.load(str(TARGET))}
ALL = (
    "pass=bwd b=2 h=4/2 s=37x45 d=16/24 dtype=float16 bias=hqk alibi=1 sinks=1 dlse=1 "
    "dropout=0.2 bias.layout=bhsd.s3 seed=5"
)


def _run(name, text, **options):
    return verify(Case.parse(text), KERNELS[name], Setup(), CpuBackend(), **options)


@pytest.mark.parametrize("start", [0, 1])
def test_a_right_kernel_passes_whatever_it_is_asked(start):
    kernel = KERNELS["right"]
    cases = distribution.draw(start, 120, kernel.capabilities, max_elements=20_000)
    for case in cases:
        if not case.problem.terms:
            continue
        record = verify(case, kernel, Setup(), CpuBackend())
        assert record.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE), record
        if case.backward and case.problem.bias:
            assert "dbias" in record.tensors
        if case.backward and case.problem.sinks:
            assert "dsinks" in record.tensors


@pytest.mark.parametrize(
    "text",
    [
        ALL,
        ALL.replace("dropout=0.2 ", ""),
        ALL.replace("dropout=0.2 ", "").replace("sinks=1 ", ""),
        "pass=bwd b=3 h=2/1 s=50x33 d=16 dtype=bfloat16 mask=causal sinks=1 dlse=1 seed=2",
        "pass=bwd b=3 h=2/1 s=50x33 d=16 dtype=float32 bias=bk bias.values=hides seed=2",
        "pass=bwd h=2/2 s=9x33 d=16 dtype=float32 mask=l4 sinks=1 sinks.values=off alibi=1 seed=2",
    ],
)  # fmt: skip
def test_a_right_kernel_passes_every_rerun(text):
    record = _run("right", text, independent=False)  # a case that is replayed gets all of them
    assert record.verdict == Verdict.PASS, record.failures


def _applying(text):
    trial = Trial(KERNELS["right"], Case.parse(text), Setup(), CpuBackend())
    return {name for name, applies, _ in RERUNS if applies(trial)}


def test_reruns_that_say_nothing_of_a_term_are_not_run():
    plain = "pass=bwd b=2 h=4/2 s=37x45 d=16 dtype=float16 {}seed=5"
    every = _applying(plain.format(""))
    assert {"key permutation", "V = 1", "row shift", "one sequence alone"} <= every
    assert every - _applying(plain.format("alibi=1 ")) == {"key permutation"}
    assert every - _applying(plain.format("sinks=1 ")) == {"V = 1", "row shift"}
    assert every - _applying(plain.format("dropout=0.1 ")) == {
        *("key permutation", "V = 1", "row shift", "batch and head permutation"),
        *("one sequence alone", "in another batch"),
    }
    assert every == _applying(plain.format("bias=bhqk dlse=1 "))


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("bias_ignored", {"o", "lse"}),
        ("slope_sign", {"o", "lse"}),
        ("no_sink", {"o", "lse"}),
        ("other_keep", {"o"}),
        ("dlse_ignored", {"dq", "dk"}),
    ],
)
def test_defects_are_seen(name, tensors):
    record = _run(name, ALL)
    assert record.verdict == Verdict.FAIL
    assert tensors <= {f.tensor for f in record.failures if f.check == "numerics"}


def test_a_gradient_of_a_bias_that_is_not_summed_is_seen():
    record = _run("half_dbias", "pass=bwd h=2/2 s=9x33 d=16 dtype=float32 bias=bk seed=2")
    assert [(f.check, f.tensor) for f in record.failures] == [("numerics", "dbias")]
    assert "dbias[0," in record.failures[0].message


def test_a_gradient_that_is_due_must_come():
    record = _run("no_dsinks", "pass=bwd h=2/2 s=9x33 d=16 dtype=float32 sinks=1 seed=2")
    assert [(f.check, f.title) for f in record.failures] == [("contract", "dsinks is no tensor")]


def test_a_kernel_that_changes_a_term_is_seen():
    right = KERNELS["right"]

    def forward(problem, q, k, v, **terms):
        outputs = right.forward(problem, q, k, v, **terms)
        terms["sinks"].add_(1)
        return outputs

    kernel = dataclasses.replace(right, forward=forward)
    case = Case.parse("pass=fwd h=2/2 s=9x33 d=16 dtype=float32 sinks=1 seed=2")
    record = verify(case, kernel, Setup(), CpuBackend())
    assert "sinks was modified" in [f.title for f in record.failures]


def test_the_lse_of_a_row_with_nothing_but_a_sink_is_judged():
    right = KERNELS["right"]

    def forward(problem, q, k, v, **terms):
        outputs = right.forward(problem, q, k, v, **terms)
        lse = outputs.lse.clone()
        lse[:, :, 0] = -torch.inf  # as if the row, which sees no key, had no sink
        return dataclasses.replace(outputs, lse=lse)

    case = Case.parse("pass=fwd h=2/2 s=40x33 d=16 dtype=float32 mask=causal sinks=1 seed=2")
    assert verify(case, right, Setup(), CpuBackend()).verdict == Verdict.PASS
    record = verify(case, dataclasses.replace(right, forward=forward), Setup(), CpuBackend())
    assert [(f.check, f.tensor) for f in record.failures] == [("nonfinite", "lse")]


def test_a_large_run_is_judged_in_parts():
    case = Case.parse(ALL)
    whole = Trial(KERNELS["right"], case, Setup(), CpuBackend())
    part = whole.part(slice(1, 2), slice(1, 2))
    assert part.terms.sinks.shape == (2,)
    assert torch.equal(part.terms.bias, materialise(case).bias[:, 2:])
    o, _ = part.forward_bounds
    exact, _ = whole.forward_bounds
    assert torch.allclose(o.reference, exact.reference[1:2, 2:])


def test_records_name_the_tensors_that_were_compared():
    record = _run("right", ALL)
    assert isinstance(record, CaseRecord)
    assert list(record.tensors) == ["o", "lse", "dq", "dk", "dv", "dbias", "dsinks"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bias_ignored", "the bias is ignored"),
        ("slope_sign", "ALiBi's slopes have the wrong sign"),
        ("no_sink", "the sink is missing"),
        ("dlse_ignored", "the gradient of lse is ignored"),
        ("other_keep", "enters its random numbers"),
        ("half_dbias", "dbias is 0.5 times what it should be"),
        ("negated_dsinks", "dsinks is negated"),
        ("zero_dsinks", "dsinks is 0: it is not computed"),
    ],
)
def test_causes_are_named(name, said):
    text = "pass=bwd b=2 h=4/2 s=70x90 d=32 dtype=float32 {}seed=4"
    terms = {"half_dbias": "bias=bk ", "other_keep": "dropout=0.2 "}
    given = terms.get(name, "bias=hqk alibi=1 sinks=1 dlse=1 ")
    record = _run(name, text.format(given), explain=True)
    assert record.verdict == Verdict.FAIL
    assert any(said in f.diagnosis for f in record.failures), record.failures


def test_a_gradient_of_a_bias_that_lacks_a_sum_is_named(tmp_path):
    row = next(row for row in rows() if row.name == "dbias-broadcast")
    (kernel,) = loader.load(planted([row], tmp_path)[row])
    said = "dbias is not summed over the queries: it is that of the last one"
    for axes, due in (("k", True), ("bk", True), ("hk", True), ("qk", False)):
        text = f"pass=bwd b=2 h=4/2 s=19x23 d=16 dtype=float16 bias={axes} seed=4"
        record = verify(Case.parse(text), kernel, Setup(), CpuBackend(), explain=True)
        found = [f.diagnosis for f in record.failures if f.tensor == "dbias"]
        assert (found != []) is due
        assert all(text.startswith(said) for text in found), found


@pytest.mark.parametrize(("early", "said"), [(True, True), (False, False)])
def test_a_bias_under_the_softcap_is_named(early, said):
    case = "pass=fwd b=2 h=4/2 s=37x45 d=16 dtype=float32 cap=2.0 bias=hqk seed=4"

    def forward(problem, q, k, v, bias=0.0):
        logits = q @ k.repeat_interleave(problem.group, 1).mT * problem.scale
        logits = logits + bias if early else logits
        cap = problem.softcap
        logits = cap * torch.tanh(logits / cap) if cap else logits
        logits = logits if early else logits + 2 * bias  # another defect
        o = logits.softmax(-1) @ v.repeat_interleave(problem.group, 1)
        return Outputs(o, logits.logsumexp(-1))

    declared = Capabilities(softcap=True, bias=("hqk",), backward=False)
    kernel = Kernel(name="capped", forward=forward, capabilities=declared)
    record = verify(Case.parse(case), kernel, Setup(), CpuBackend(), explain=True)
    assert record.verdict == Verdict.FAIL
    found = [
        f.diagnosis.startswith("the bias is added before the softcap") for f in record.failures
    ]
    assert any(found) is said, record.failures


@pytest.mark.parametrize(("term", "said"), [("alibi=1", True), ("sinks=1", False)])
def test_a_wrong_term_explains_no_case_without_it(term, said):
    wrong = KERNELS["slope_sign"]

    def forward(problem, q, k, v, **terms):
        outputs = wrong.forward(problem, q, k, v, **terms)
        o = outputs.o.clone()
        if problem.sinks:
            o[:, :, 0] = torch.nan  # another defect, of rows that see no key
        return dataclasses.replace(outputs, o=o)

    kernel = dataclasses.replace(wrong, forward=forward)
    first = f"pass=fwd h=2/2 s=3x2 d=16 dtype=float32 mask=causal {term} seed=4"
    slopes = "pass=fwd h=2/2 s=37x45 d=16 dtype=float32 alibi=1 seed=4"
    seen = [
        Trial(k, Case.parse(text), Setup(), CpuBackend())
        for k, text in ((kernel, first), (wrong, slopes))
    ]
    which = explain.Pass(names=("o", "lse"), backward=False)
    found = explain.explain(which, [explain.Witness(t, gather(t)) for t in seen], math.inf)
    assert (found is not None and found.text.startswith("ALiBi's slopes")) is said


def test_a_defect_that_terms_have_nothing_to_do_with_is_named_beside_them():
    right = KERNELS["right"]

    def forward(problem, q, k, v, **terms):
        wider = dataclasses.replace(problem, softmax_scale=2 * problem.scale)
        return right.forward(wider, q, k, v, **terms)

    kernel = dataclasses.replace(right, forward=forward)
    case = Case.parse("pass=fwd b=2 h=4/2 s=70x90 d=32 dtype=float32 alibi=1 sinks=1 seed=4")
    record = verify(case, kernel, Setup(), CpuBackend(), explain=True)
    assert record.verdict == Verdict.FAIL
    assert "softmax_scale" in record.failures[0].diagnosis


def _blockwise(problem, q, k, v, bias, *, guarded):
    """Softmax over blocks of 16 keys with a running maximum, which is -inf before it saw a key."""
    m = q.new_full((*q.shape[:3], 1), -math.inf, dtype=torch.float32)
    total, acc = torch.zeros_like(m), torch.zeros(q.shape, dtype=torch.float32)
    for at in range(0, problem.seqlen_k, 16):
        keys = slice(at, at + 16)
        logits = problem.scale * q.float() @ k[:, :, keys].float().mT + bias[..., keys]
        new = torch.maximum(m, logits.amax(-1, keepdim=True))
        shift = torch.where(new.isneginf(), 0.0, new) if guarded else new
        p, rescale = (logits - shift).exp(), (m - shift).exp()
        total, acc, m = total * rescale + p.sum(-1, keepdim=True), acc * rescale, new
        acc += p.to(v.dtype).float() @ v[:, :, keys].float()
    return Outputs((acc / total).to(q.dtype), (m + total.log()).squeeze(-1))


@pytest.mark.parametrize("guarded", [True, False])
def test_blocks_that_a_bias_hides_wholly_come_before_a_key_that_is_seen(guarded):
    kernel = Kernel(
        name="blockwise",
        forward=functools.partial(_blockwise, guarded=guarded),
        capabilities=Capabilities(bias=("bhqk",), backward=False),
    )
    text = "pass=fwd b=2 h=4/4 s=9x50 d=8 dtype=float16 bias=bhqk bias.values=hides seed=1"
    record = verify(Case.parse(text), kernel, Setup(), CpuBackend())
    assert record.verdict == (Verdict.PASS if guarded else Verdict.FAIL), record.failures
    assert guarded or "nonfinite" in {f.check for f in record.failures}
