"""Defects of harnesses, from public reports: each test shows that ours has not got it.

The rows tagged "meta" in fa_verify/zoo/rows name these tests.
"""

import dataclasses

import pytest
import torch

from fa_verify import Capabilities, Kernel, Mask, Outputs, reference
from fa_verify.backends.base import Execution, Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.errors import InvalidInputError
from fa_verify.verify import verify

CASE = "pass=fwd b=2 h=2 s=20x30 d=16 dtype=float16 seed=3"
CAUSAL = "pass=fwd h=2 s=20x9 d=16 dtype=float16 mask=causal seed=3"


def judged(forward, case=CASE, **promises):
    capabilities = Capabilities(window=True, softcap=True, backward=False, **promises)
    kernel = Kernel(name="meta", forward=forward, capabilities=capabilities)
    return verify(Case.parse(case), kernel, Setup(), CpuBackend())


def right(problem, q, k, v):
    exact = reference.forward(problem, q, k, v)
    return Outputs(exact.o.to(q.dtype), exact.lse.float())


def test_rows_that_see_no_key_have_one_right_answer():
    """causal-neg-bound (FA#1778): o = 0 and lse = -inf there are a contract, not an accident."""
    assert judged(right, CAUSAL).verdict == "pass"
    for index, value in (("o", 1.0), ("lse", 0.0), ("lse", float("inf"))):

        def wrong(problem, q, k, v, index=index, value=value):
            outputs = right(problem, q, k, v)
            getattr(outputs, index)[:, :, 0] = value
            return outputs

        record = judged(wrong, CAUSAL)
        assert [f.check for f in record.failures] == ["nonfinite"], (index, value)


@pytest.mark.parametrize("side", ["window_left", "window_right"])
def test_a_negative_window_is_refused(side):
    """window-negative-means-inf (FA#1116): only None means no limit."""
    with pytest.raises(InvalidInputError, match=f"{side}=-3"):
        Mask(**{side: -3})


@pytest.mark.parametrize("make", [torch.zeros_like, torch.ones_like, torch.rand_like])
def test_meaningless_outputs_fail(make):
    """causal-hidden-by-atol (mlir-air#1427): no limit is so wide that anything passes."""

    def meaningless(problem, q, k, v):
        outputs = right(problem, q, k, v)
        return dataclasses.replace(outputs, o=make(outputs.o))

    for family in ("normal", "ones", "offset", "zero-mean"):
        record = judged(meaningless, CASE.replace("seed", f"v.values={family} seed"))
        same = family == "ones" and make is torch.ones_like  # then 1 is the right answer
        assert record.verdict == ("pass" if same else "fail"), family


def test_nan_never_compares_equal():
    """ref-nan-hides-bug (cubecl#1070): a NaN is a failure beside a number and beside -inf."""

    def nan(problem, q, k, v):
        outputs = right(problem, q, k, v)
        outputs.o[0, 0, 0] = torch.nan
        outputs.lse[0, 0, 0] = torch.nan
        return outputs

    for case in (CASE, CAUSAL):  # row 0 of the second sees no key
        titles = {f.tensor for f in judged(nan, case).failures}
        assert titles == {"o", "lse"}, case


def test_nan_at_hidden_keys_is_judged_only_where_promised():
    """masked-nan-input (PT#101967): 0 times NaN is NaN by plain algebra, unless promised away."""

    def plain(problem, q, k, v):
        allowed = torch.from_numpy(problem.mask.allowed(problem.seqlen_q, problem.seqlen_k))
        scores = (q.double() @ k.double().mT * problem.scale).masked_fill(~allowed, -torch.inf)
        o = torch.softmax(scores, -1).masked_fill(~allowed.any(-1)[:, None], 0) @ v.double()
        return Outputs(o.to(q.dtype), scores.logsumexp(-1).float())

    record = verdict_of_every_rerun(plain, isolates_masked_nan=False)
    assert not record.failures
    record = verdict_of_every_rerun(plain, isolates_masked_nan=True)
    assert {f.check for f in record.failures} == {"masking"}


def verdict_of_every_rerun(forward, **promises):
    capabilities = Capabilities(backward=False, **promises)
    kernel = Kernel(name="meta", forward=forward, capabilities=capabilities)
    case = Case.parse(CAUSAL.replace("20x9", "9x20"))
    return verify(case, kernel, Setup(), CpuBackend(), independent=False)


def test_outputs_may_have_any_strides():
    """ref-stride-trap (PT#133671): results are compared by index, whatever their layout."""

    def transposed(problem, q, k, v):
        outputs = right(problem, q, k, v)
        o = outputs.o.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        assert o.stride() != outputs.o.stride()
        return dataclasses.replace(outputs, o=o)

    assert judged(transposed).verdict == "pass"


def test_a_run_that_returned_nothing_is_no_pass():
    """A backend that hands back neither result nor error must not count as verified."""

    class Silent(CpuBackend):
        def run(self, *_, **__):
            return Execution()

    kernel = Kernel(name="meta", forward=right, capabilities=Capabilities(backward=False))
    record = verify(Case.parse(CASE), kernel, Setup(), Silent())
    assert record.verdict == "error"
