"""Other projects' rules, on outputs whose errors are known."""

import pytest
import torch

from fa_verify import Capabilities, Kernel, Outputs, reference
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.trial import Trial
from fa_verify.zoo.oracles import ORACLES, flags

CASE = "pass=fwd h=2 s=40x50 d=16 dtype=float16 seed=3"


def flagged(change):
    def forward(problem, q, k, v):
        exact = reference.forward(problem, q, k, v)
        return Outputs(change(exact.o).to(q.dtype), exact.lse.float())

    kernel = Kernel(name="k", forward=forward, capabilities=Capabilities(backward=False))
    found = flags(Trial(kernel, Case.parse(CASE), Setup(), CpuBackend()))
    assert tuple(found) == ORACLES
    return {name for name, flag in found.items() if flag}


def one_nan(o):
    o[0, 1, 3, 2] = torch.nan
    return o


def test_a_right_kernel_is_flagged_by_the_rule_that_knows_no_scale():
    assert flagged(lambda o: o) <= {"torch.testing.assert_close"}


def test_a_wrong_kernel_is_flagged_by_all_that_look_at_o():
    assert flagged(lambda o: -3 * o) == set(ORACLES) - {"xformers (gradients)"}


@pytest.mark.parametrize(
    ("change", "blind"),
    [
        (one_nan, {"tilelang", "fla rms"}),
        (lambda o: o * 1.002, {"allclose 1e-2", "KernelBench", "FlagGems", "tilelang", "fla rms"}),
    ],
)
def test_what_they_let_through(change, blind):
    assert not flagged(change) & blind


def test_an_exception_is_seen_by_all():
    def forward(problem, q, k, v):
        raise ValueError

    kernel = Kernel(name="k", forward=forward, capabilities=Capabilities(backward=False))
    trial = Trial(kernel, Case.parse(CASE), Setup(), CpuBackend())
    assert all(flags(trial).values())
