"""A failure that a looser declaration would explain says which."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

from fa_verify.arithmetic import DEFAULT, Arithmetic
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.checks import numerics
from fa_verify.diagnosis.looser import _of_fp8, _variants, looser
from fa_verify.kernel import Grads, Kernel, Outputs
from fa_verify.trial import Trial

_PATH = Path(__file__).with_name("emulator.py")
_SPEC = importlib.util.spec_from_file_location("fa_verify_tests_looser_emulator", _PATH)
emulator = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = emulator
_SPEC.loader.exec_module(emulator)
Emulator = emulator.Emulator

UNREAD = {"dq_atomics", "masked_logit"}  # by bounds: nothing to loosen


@pytest.mark.parametrize(
    ("kernel", "declared", "said", "how"),
    [
        (
            Emulator(ds_from_rounded_p=True),
            DEFAULT,
            "dS from the rounded P",
            "Arithmetic(ds_from_rounded_p=True)",
        ),
        (
            Emulator(l_from_rounded_p=True, block_n=16),
            DEFAULT,
            "l from the rounded P",
            "Arithmetic(l_from_rounded_p=True)",
        ),
        (
            Emulator(prescaled="q"),
            DEFAULT,
            (
                "q multiplied by softmax_scale in float16 or sums of q k^T in float16 "
                "or eager attention"
            ),
            "Arithmetic(prescaled='q') or Arithmetic(half_dots='qk') or Arithmetic(eager=True)",
        ),
        (Emulator(), DEFAULT, None, ""),
    ],
)
def test_the_tightest_declaration_that_explains_it_is_named(kernel, declared, said, how):
    case = Case.parse("pass=bwd h=2/2 s=64x200 d=32 dtype=float16 scale=0.3 logits=4.0 seed=4")
    subject = Kernel(
        name="k",
        forward=lambda p, q, k, v: Outputs(*kernel.forward(p, q, k, v)),
        backward=lambda p, q, k, v, outputs, do: Grads(
            *kernel.backward(p, q, k, v, outputs.o, outputs.lse, do)
        ),
        arithmetic=declared,
    )
    trial = Trial(subject, case, Setup(), CpuBackend())
    assert bool(list(numerics.check(trial))) == (said is not None)
    assert looser(trial) == (f"it would pass if {said} were declared: {how}" if said else "")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_field_that_a_bound_reads_is_tried(dtype):
    declared = Arithmetic(block_n=64, ds_scale="before", p_scale=2.0, promoted=32, fp8_dot_ulps=1.0)
    tried = [arithmetic for _, arithmetic in (*_variants(declared, dtype, ""), *_of_fp8(declared))]
    loosened = {
        field.name
        for field in dataclasses.fields(Arithmetic)
        for arithmetic in tried
        if getattr(arithmetic, field.name) != getattr(declared, field.name)
    }
    others = set() if dtype == "float16" else {"ds_dtype", "half_dots"}  # coarser, or not to be had
    assert loosened | others == {field.name for field in dataclasses.fields(Arithmetic)} - UNREAD
