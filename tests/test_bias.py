"""Errors that lean one way: seen in defects, never in right kernels, however they round."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_verify import loader
from fa_verify.arithmetic import DEFAULT, Arithmetic
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.bounds import bound_backward, bound_forward, self_normalised
from fa_verify.bounds.bias import Phases
from fa_verify.case import Case
from fa_verify.checks import comparisons
from fa_verify.checks.bias import lean
from fa_verify.checks.comparison import Comparison
from fa_verify.checks.noise import noisy
from fa_verify.checks.rounding import strays
from fa_verify.masks import Mask
from fa_verify.problem import Problem
from fa_verify.trial import Trial

_PATH = Path(__file__).with_name("emulator.py")
_SPEC = importlib.util.spec_from_file_location("fa_verify_tests_bias_emulator", _PATH)
emulator = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = emulator
_SPEC.loader.exec_module(emulator)
Emulator = emulator.Emulator

PROBLEM = Problem(
    heads_q=2, heads_kv=2, seqlen_q=200, seqlen_k=64, head_dim=64, head_dim_v=64, dtype="bfloat16"
)


def compared(bounded, got, dtype):
    due = bounded.reference.isfinite() & got.isfinite()
    return Comparison(
        name=bounded.name,
        got=got.double(),
        dtype="float32" if bounded.name == "lse" else dtype,
        bounded=bounded,
        written=due,
        due=due,
        conditional=bounded.name in ("dq", "dk", "dv"),
    )


def judged(problem, kernel, inputs, arithmetic=DEFAULT):
    """A Comparison for every tensor that an emulator returns."""
    q, k, v, do = inputs
    o, lse = kernel.forward(problem, q, k, v)
    grads = kernel.backward(problem, q, k, v, o, lse, do)
    bounds = (
        *bound_forward(problem, arithmetic, q, k, v),
        *bound_backward(problem, arithmetic, q, k, v, do, o=o, lse=lse),
    )
    pairs = zip(bounds, (o, lse, *grads), strict=True)
    return [compared(b, got, problem.dtype) for b, got in pairs]


def leans(problem, kernel, inputs):
    """Name -> Lean of every tensor that does."""
    found = {part.name: lean(part) for part in judged(problem, kernel, inputs)}
    return {name: one for name, one in found.items() if one is not None}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_thousandth_too_much_is_seen_and_measured(dtype):
    problem = dataclasses.replace(PROBLEM, dtype=dtype)
    inputs = emulator.values("normal", problem, 1)
    seen = leans(problem, Emulator(bugs=frozenset({"0.1% too much"})), inputs)
    assert {"o", "dq"} <= set(seen)
    for found in seen.values():
        assert found.size == pytest.approx(1e-3, abs=1.5e-4)
        assert found.allowed < found.size
    assert leans(problem, Emulator(), inputs) == {}


@pytest.mark.parametrize("seqlen_k", [64, 300])
def test_too_few_digits_of_log2_e_are_seen_in_float32(seqlen_k):
    problem = dataclasses.replace(PROBLEM, dtype="float32", seqlen_k=seqlen_k)
    inputs = emulator.values("normal", problem, 1)
    seen = leans(problem, Emulator(bugs=frozenset({"log2e of five digits"})), inputs)
    assert -1e-5 < seen["lse"].size < -seen["lse"].allowed < 0
    assert leans(problem, Emulator(), inputs) == {}


MASKS = (Mask(), Mask(causal=True), Mask(window_left=9))


@st.composite
def right_kernels(draw):
    dtype = draw(st.sampled_from(("float16", "bfloat16", "float32")))
    heads = draw(st.sampled_from((1, 2)))
    problem = Problem(
        heads_q=heads * draw(st.sampled_from((1, 3))),
        heads_kv=heads,
        seqlen_q=draw(st.sampled_from((64, 100, 200))),
        seqlen_k=draw(st.sampled_from((2, 5, 16, 17, 33, 64, 100, 200))),
        head_dim=draw(st.sampled_from((1, 8, 16, 40, 80))),
        head_dim_v=draw(st.sampled_from((1, 8, 40))),
        dtype=dtype,
        mask=draw(st.sampled_from(MASKS)),
        softmax_scale=draw(st.sampled_from((None, 0.5, 0.01, 1e-4, 3.0, -0.3))),
        softcap=draw(st.sampled_from((0.0, 0.0, 2.0))),
    )
    kernel = Emulator(
        block_n=draw(st.sampled_from((16, 32, 64, 128))),
        reverse=draw(st.booleans()),
        exponent=draw(st.sampled_from(("exp2", "exp", "fma"))),
        noise=draw(st.sampled_from((0.0, 4.0))),
        ds_scale=draw(st.sampled_from(("before", "after"))),
        threshold=draw(st.sampled_from((0.0, 8.0))),
        seed=draw(st.integers(0, 2**20)),
    )
    arithmetic = Arithmetic(block_n=draw(st.sampled_from((None, kernel.block_n))))
    return problem, kernel, arithmetic, draw(st.sampled_from(emulator.FAMILIES))


@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(right_kernels())
def test_a_right_kernel_does_not_lean_nor_stray_and_is_not_noisy(trial):
    problem, kernel, arithmetic, family = trial
    inputs = emulator.values(family, problem, kernel.seed)
    for part in judged(problem, kernel, inputs, arithmetic):
        assert lean(part) is None, part.name
        assert part.name != "o" or noisy(part) is None
        assert part.name in ("o", "lse") or not strays(part), part.name


@pytest.mark.parametrize("family", ["constant", "two-level", "equal keys", "tiny"])
def test_roundings_that_go_alike_in_every_row_are_no_lean(family):
    """P is rounded after it is normalised: o is off by a common factor, and rightly so."""
    problem = dataclasses.replace(PROBLEM, seqlen_k=100, softmax_scale=0.013)
    q, k, v, _ = emulator.values(family, problem, 5)
    p = torch.softmax((q.float() @ k.float().mT) * problem.scale, -1)
    o = (p.bfloat16().float() @ v.float()).bfloat16()
    bounded, _ = bound_forward(problem, DEFAULT, q, k, v)
    error = (o.double() - bounded.reference) * bounded.reference
    independent = self_normalised(error.sum(-1).flatten(), torch.zeros(()), 7.8)
    assert independent > 0, "the rows agree by more than chance allows"
    assert lean(compared(bounded, o, problem.dtype)) is None


def test_one_factor_times_numbers_that_were_cast_rounds_alike():
    """Equal queries with equal dO: dk is 255.5 dS, 511 equal terms times 0.5.

    Of each bfloat16 that is 2^8 of it less a 512th, which rounds back up.
    """
    problem = dataclasses.replace(
        PROBLEM, heads_q=1, heads_kv=1, seqlen_q=511, seqlen_k=200, head_dim=16, head_dim_v=16
    )
    random = torch.Generator().manual_seed(0)
    q = torch.full(problem.shape_q, 0.5, dtype=torch.bfloat16)
    k = torch.full(problem.shape_k, -0.75, dtype=torch.bfloat16)
    v = torch.randn(problem.shape_v, generator=random).bfloat16()
    do = torch.ones(problem.shape_o, dtype=torch.bfloat16)
    kernel = Emulator()
    o, lse = kernel.forward(problem, q, k, v)
    _, dk, _ = kernel.backward(problem, q, k, v, o, lse, do)
    bounds = bound_backward(problem, DEFAULT, q, k, v, do, o=o, lse=lse)
    (bounded,) = (x for x in bounds if x.name == "dk")
    part = compared(bounded, dk, problem.dtype)
    factor = (part.difference * part.reference).sum() / part.reference.square().sum()
    assert factor > 1.5e-3  # it does lean
    assert lean(part) is None
    assert lean(compared(bounded, dk * 1.03, problem.dtype)) is not None


def test_sums_of_few_cast_numbers_round_alike():
    """ALiBi of slope 2^-8 and dO of ones: sums of 16 neighbours of a geometric series."""
    (kernel,) = loader.load(f"{_PATH.parents[1] / 'kernels/flash_attention.py'}:flash")
    case = Case.parse(
        "pass=bwd h=2/1 s=16x3521 d=80/64 dtype=bfloat16 mask=r1279.pattern:block-sparse:16:50:647 "
        "cap=50.0 alibi=1 qk.values=constant do.values=ones seed=2713535241"
    )
    part = comparisons(Trial(kernel, case, Setup(), CpuBackend(), independent=True))["dv"]
    seen = part.reference != 0
    assert (part.difference / part.reference)[seen].mean() < -4e-4
    assert lean(part) is None


def test_a_row_next_to_one_value_of_v_rounds_back_to_it_and_does_not_lean():
    """O = V (1 - 0.001): the error has one sign in every row, and nothing is wrong."""
    problem = dataclasses.replace(PROBLEM, seqlen_k=2, head_dim=1, softmax_scale=1.0)
    q, k, v, _ = emulator.values("normal", problem, 5)
    q = torch.ones_like(q)
    k[..., 0, :], k[..., 1, :] = 0.0, -6.9
    v[..., 1, :] = 0.0
    o, _ = Emulator(noise=0.0).forward(problem, q, k, v)
    assert torch.equal(o, v[:, :, :1].expand_as(o))
    bounded, _ = bound_forward(problem, DEFAULT, q, k, v)
    assert lean(compared(bounded, o, problem.dtype)) is None


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(0, 1)), min_size=2, max_size=7),
    st.sampled_from((0.5, 1.0, 2.0)),
)
def test_no_part_within_what_is_fixed_explains_a_sum_that_has_left_it(rows, factor):
    """Every corner of the box is tried: a convex function has its largest value at one."""
    x, fixed = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    excess = self_normalised(x, fixed, factor)
    least = math.inf
    for signs in itertools.product((-1, 1), repeat=len(rows)):
        rest = x - fixed * torch.tensor(signs)
        least = min(least, float(rest.sum().abs() - factor * rest.norm()))
    assert excess <= max(least, 0.0) + 1e-9


def test_a_sum_of_signs_leaves_chance_no_more_often_than_stated():
    generator = torch.Generator().manual_seed(1)
    signs = 2.0 * torch.randint(0, 2, (20_000, 200), generator=generator) - 1
    rows = signs * torch.rand(200, generator=generator) ** 8  # a few rows carry most of it
    outside = sum(self_normalised(x, torch.zeros(()), 2.5) > 0 for x in rows)
    assert 0 < outside <= 20_000 * 2 * math.exp(-(2.5**2) / 2)


def phases(values, errors, parts=16):
    found = Phases(torch.zeros(()), 128, parts)
    found.add(torch.as_tensor(values).double().log(), torch.as_tensor(errors).double())
    return found.variance()


def test_values_that_are_equal_round_alike_and_others_do_not():
    ones = torch.ones(1000)
    assert phases(1.37 * ones, ones) == pytest.approx(1000**2 / 3, rel=0.01)
    spread = 1 + torch.rand(1000, generator=torch.Generator().manual_seed(2))
    assert 1000 / 3 <= phases(spread, ones) < 5 * 1000 / 3
    assert phases(1.37 * ones, torch.arange(1000) % 2 * 2.0 - 1) == pytest.approx(1000 / 3)
    # The same place in many cells: what is cast may be multiples of one number.
    lattice = 1 + (torch.arange(1000) % 100 + 0.3) / 128
    assert phases(lattice, ones) == pytest.approx(1000**2 / 3, rel=0.2)


def test_the_variance_of_phases_is_that_over_an_unknown_scale():
    """Values of one cell, rounded after scaling: mean square over the scale, by simulation."""
    generator = torch.Generator().manual_seed(3)
    values = 1.5 + torch.rand(40, generator=generator, dtype=torch.float64) ** 2 / 128
    weights = torch.randn(40, generator=generator, dtype=torch.float64)
    scales = 1 + torch.rand(4000, generator=generator, dtype=torch.float64) / 8
    scaled = values * scales[:, None] * 128
    errors = ((scaled.round() - scaled) * 2 * weights).sum(-1)  # within [-1, 1]
    seen, bound = float(errors.square().mean()), phases(values, weights)
    assert seen <= bound <= 3 * (seen + float(weights.square().sum()) / 3)
