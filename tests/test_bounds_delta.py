"""The bound of a kernel whose delta is the sum of P dP."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_verify.arithmetic import DEFAULT, Arithmetic
from fa_verify.bounds import bound_backward
from fa_verify.problem import Problem

_SPEC = importlib.util.spec_from_file_location(
    "fa_verify_tests_bounds_of_delta", Path(__file__).with_name("test_bounds.py")
)
bounds = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = bounds
_SPEC.loader.exec_module(bounds)
emulator, ratio = bounds.emulator, bounds.ratio
DECLARED = Arithmetic(delta_from_p_dp=True)
PROBLEM = Problem(heads_q=2, heads_kv=1, seqlen_q=30, seqlen_k=70, head_dim=16, head_dim_v=16)


@dataclasses.dataclass(frozen=True)
class Softmax(bounds.Emulator):
    """Delta is the sum of P dP; "rounded": it is kept in the inputs' dtype."""

    rounded: bool = False

    def backward(self, problem, q, k, v, o, lse, do, terms=None):
        heads = (self._fold(problem, x) for x in (q, k, v, do, lse.unsqueeze(-1)))
        qf, kf, vf, dof, lsef = heads
        s, factor, _ = self._logits(problem, qf, kf)
        p = self._exp_difference(s, torch.where(lsef.isinf(), 0.0, lsef), factor)
        products = torch.where(self._mask(problem), p * self._mm(problem, dof, vf.mT), 0.0)
        row = products.sum(-1, keepdim=True)
        row = row.to(q.dtype).float() if self.rounded else row
        given = type("Given", (bounds.Emulator,), {"_delta": lambda *_: row})
        own = given(exponent=self.exponent, seed=self.seed)
        return own.backward(problem, q, k, v, o, lse, do)


def gradients(problem, kernel, arithmetic, family="normal", seed=1):
    q, k, v, do = emulator.values(family, problem, seed)
    o, lse = kernel.forward(problem, q, k, v)
    got = kernel.backward(problem, q, k, v, o, lse, do)
    for seen in ({"o": o, "lse": lse}, {}):
        found = bound_backward(problem, arithmetic, q, k, v, do, **seen)
        yield [ratio(x, bounded) for x, bounded in zip(got, found, strict=True)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    dot=st.sampled_from(["ieee", "tf32", "tf32x3"]),
    family=st.sampled_from(emulator.FAMILIES),
    keys=st.sampled_from([1, 2, 17, 70, 300]),
    head_dim=st.sampled_from([1, 16, 80]),
    seed=st.integers(0, 1000),
)
def test_no_element_of_a_right_kernel_is_outside(dtype, dot, family, keys, head_dim, seed):
    problem = dataclasses.replace(
        PROBLEM,
        dtype=dtype,
        dot_precision=dot if dtype == "float32" else "ieee",
        seqlen_k=keys,
        head_dim=head_dim,
        head_dim_v=head_dim,
    )
    kernel = Softmax(exponent="exp", seed=seed)
    for ratios in gradients(problem, kernel, DECLARED, family, seed):
        assert max(ratios) <= 1, ratios


def test_undeclared_it_is_outside_where_o_was_rounded():
    problem = dataclasses.replace(PROBLEM, dtype="bfloat16", seqlen_k=300)
    kernel = Softmax(exponent="exp")
    for _, dk, _ in gradients(problem, kernel, DECLARED, "uniform"):
        assert dk <= 1
    conditional, _ = gradients(problem, kernel, DEFAULT, "uniform")
    assert max(conditional) > 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_that_is_kept_in_half_precision_is_outside(dtype):
    problem = dataclasses.replace(PROBLEM, dtype=dtype, seqlen_k=300)
    conditional, _ = gradients(problem, Softmax(exponent="exp", rounded=True), DECLARED, "uniform")
    assert max(conditional) > 1


def test_it_is_of_no_stored_o():
    assert not DECLARED.delta_from_stored_o
