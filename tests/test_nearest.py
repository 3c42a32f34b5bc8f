"""The search for what P is rounded to, and relative to what: it finds it, and says how well."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from fa_verify.arithmetic import DEFAULT
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.bounds import bound_forward, nearest
from fa_verify.case import Case
from fa_verify.kernel import Kernel, Outputs
from fa_verify.masks import Mask
from fa_verify.problem import Problem
from fa_verify.verify import verify

_PATH = Path(__file__).with_name("emulator.py")
_SPEC = importlib.util.spec_from_file_location("fa_verify_tests_nearest_emulator", _PATH)
emulator = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = emulator
_SPEC.loader.exec_module(emulator)
Emulator = emulator.Emulator


def found(kernel, dtype, mask=None):
    problem = Problem(
        heads_q=2, heads_kv=2, seqlen_q=200, seqlen_k=400, head_dim=64, head_dim_v=64, dtype=dtype,
        mask=mask or Mask(),
    )  # fmt: skip
    q, k, v, _ = emulator.values("normal", problem, 2)
    bounded, _ = bound_forward(problem, DEFAULT, q, k, v)
    o, _ = kernel.forward(problem, q, k, v)
    return nearest(bounded.refiner, o.double(), o.dtype)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("block", "reverse"), [(16, False), (32, True), (128, False)])
def test_the_block_and_the_order_of_keys_are_found(block, reverse, dtype, mask):
    best = found(Emulator(block_n=block, reverse=reverse), dtype, mask)
    assert best.form == dtype
    end = ", from the last key on" if reverse else ""
    assert best.relative_to == f"the maximum up to its block of {block} keys{end}"
    assert best.equal > 0.97


@pytest.mark.parametrize(
    ("bug", "dtype", "equal"),
    [
        ("P in bf16", "float16", (0.97, 1.0)),
        ("acc rounded each block", "float16", (0.0, 0.6)),
        ("acc rounded each block", "bfloat16", (0.0, 0.6)),
        ("0.1% too much", "float16", (0.0, 0.3)),
    ],
)
def test_what_is_rounded_otherwise_shows(bug, dtype, equal):
    best = found(Emulator(block_n=32, bugs=frozenset({bug})), dtype)
    assert equal[0] <= best.equal <= equal[1]
    assert bug != "P in bf16" or best.form == "bfloat16"


def test_a_right_kernel_may_be_far_from_every_model():
    """So it is evidence, and no verdict."""
    assert found(Emulator(block_n=48), "float16").equal < 0.9
    assert found(Emulator(block_n=32, threshold=8.0), "float16").equal < 0.7


def test_a_failure_of_the_size_of_roundings_says_what_comes_nearest():
    kernel = Emulator(block_n=32, bugs=frozenset({"P in bf16"}))
    subject = Kernel(name="k", forward=lambda p, q, k, v: Outputs(*kernel.forward(p, q, k, v)))
    case = Case.parse("pass=fwd h=2/2 s=200x100 d=64 dtype=float16 seed=3")
    (failure, *_) = verify(case, subject, Setup(), CpuBackend()).failures
    assert "P rounded to bfloat16 relative to the maximum up to its block of 32" in failure.message
