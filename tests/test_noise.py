"""Errors that are too large together, each within its bound; roundings that are not by chance."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

from fa_verify.arithmetic import DEFAULT, Arithmetic
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.bounds import bound_backward, bound_forward
from fa_verify.bounds.noise import _together
from fa_verify.case import Case
from fa_verify.checks.comparison import Comparison
from fa_verify.checks.noise import noisy
from fa_verify.kernel import Kernel, Outputs
from fa_verify.masks import Mask
from fa_verify.problem import Problem
from fa_verify.verify import verify

_PATH = Path(__file__).with_name("emulator.py")
_SPEC = importlib.util.spec_from_file_location("fa_verify_tests_noise_emulator", _PATH)
emulator = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = emulator
_SPEC.loader.exec_module(emulator)
Emulator = emulator.Emulator


class Stochastic(Emulator):
    """P is rounded up or down at random, on a grid 1.2 times coarser than its format's."""

    def _cast_p(self, native, p):
        step = 1.2 * {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[native]
        mantissa, exponent = torch.frexp(p)
        chance = torch.rand(p.shape, generator=torch.Generator().manual_seed(self.seed))
        return torch.ldexp((mantissa / step + chance).floor() * step, exponent)


def compared(bounded, got, dtype):
    due = bounded.reference.isfinite() & got.isfinite()
    return Comparison(
        name=bounded.name, got=got.double(), dtype=dtype, bounded=bounded, written=due, due=due
    )


@pytest.mark.parametrize(("dtype", "seqlen_k"), [("float16", 64), ("bfloat16", 100)])
def test_a_noisy_p_is_seen_though_no_element_is_outside_its_bound(dtype, seqlen_k):
    problem = Problem(
        heads_q=2, heads_kv=2, seqlen_q=2000, seqlen_k=seqlen_k, head_dim=64, head_dim_v=64,
        dtype=dtype,
    )  # fmt: skip
    q, k, v, _ = emulator.values("normal", problem, 2)
    bounded, _ = bound_forward(problem, DEFAULT, q, k, v, d=1e-13)
    rough, fine = (
        compared(bounded, kernel.forward(problem, q, k, v)[0], dtype)
        for kernel in (Stochastic(block_n=32), Emulator(block_n=32))
    )
    assert rough.most_prob < 1
    found = noisy(rough)
    assert found is not None
    assert found.size > found.allowed > 1
    assert noisy(fine) is None


def _kernel(kernel):
    return Kernel(name="k", forward=lambda p, q, k, v: Outputs(*kernel.forward(p, q, k, v)))


def test_a_noisy_kernel_fails_and_a_search_does_not_count():
    case = Case.parse("pass=fwd h=2/2 s=2000x100 d=64 dtype=bfloat16 seed=3")
    bad, backend = _kernel(Stochastic()), CpuBackend()
    (failure,) = verify(case, bad, Setup(), backend).failures
    assert failure.title == "o is too noisy"
    assert "1e-06 in a run of 1000000 cases" in failure.message
    assert verify(case, bad, Setup(), backend, independent=False).verdict == "pass"
    assert verify(case, _kernel(Emulator()), Setup(), backend).verdict == "pass"


def test_values_that_lie_together_are_told_from_those_that_chance_put_there():
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(100, 500, generator=generator, dtype=torch.float64).log()
    ones = torch.ones_like(spread)
    assert _together(spread, ones, 128, -math.inf) < 0.1
    few = spread.clone()
    few[:30] = few[0]  # thirty rows alike
    assert _together(few, ones, 128, -math.inf) > 1
    assert _together(spread * 0 + 0.3, ones, 128, -math.inf) > 1000


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_multiples_of_nearly_a_spacing_lean_one_way_and_rightly_so(dtype):
    """P is constant and o one-dimensional: dS = c v - b, c nearly a power of two."""
    problem = Problem(
        heads_q=6, heads_kv=2, seqlen_q=100, seqlen_k=400, head_dim=1, head_dim_v=1, dtype=dtype,
        mask=Mask(causal=True), softmax_scale=0.01,
    )  # fmt: skip
    arithmetic, kernel = Arithmetic(ds_scale="before"), Emulator(ds_scale="before", seed=907298)
    q, k, v, do = emulator.values("equal keys", problem, 907298)
    o, lse = kernel.forward(problem, q, k, v)
    dq, _, _ = kernel.backward(problem, q, k, v, o, lse, do)
    bounded, _, _ = bound_backward(problem, arithmetic, q, k, v, do, o=o, lse=lse, d=6e-14)
    refiner = bounded.refiner
    if dtype == "bfloat16":
        look = refiner.look(0, torch.tensor([159]))
        assert look.added(refiner.cast, refiner.divisors, torch.tensor([0])) > 0.4 * (
            look.errors @ look.weight.abs()
        ), "as good as the worst case"
    assert compared(bounded, dq, dtype).most_prob < 1
