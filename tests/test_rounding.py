"""Gradients beside those of P and dS that are rounded as declared."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fa_verify.arithmetic import Arithmetic
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.bounds import bound_backward, rounded_models
from fa_verify.case import Case
from fa_verify.checks.comparison import Comparison
from fa_verify.checks.rounding import strays
from fa_verify.kernel import Grads, Kernel, Outputs
from fa_verify.problem import Problem
from fa_verify.verify import verify

_PATH = Path(__file__).with_name("emulator.py")
_SPEC = importlib.util.spec_from_file_location("fa_verify_tests_rounding_emulator", _PATH)
emulator = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = emulator
_SPEC.loader.exec_module(emulator)
Emulator = emulator.Emulator


class Stochastic(Emulator):
    """P and dS of the backward are rounded up or down at random: off by a spacing, not by half."""

    def _cast_in_backward(self, native, x):
        step = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[native]
        mantissa, exponent = torch.frexp(x)
        chance = torch.rand(x.shape, generator=torch.Generator().manual_seed(self.seed))
        return torch.ldexp((mantissa / step + chance).floor() * step, exponent)


PROBLEM = Problem(heads_q=4, heads_kv=2, seqlen_q=150, seqlen_k=300, head_dim=64, head_dim_v=32)


def compared(problem, kernel, arithmetic, family="normal"):
    q, k, v, do = emulator.values(family, problem, 1)
    o, lse = Emulator().forward(problem, q, k, v)
    found = bound_backward(problem, arithmetic, q, k, v, do, o=o, lse=lse, d=6e-14)
    for bounded, got in zip(found, kernel.backward(problem, q, k, v, o, lse, do), strict=True):
        all_due = torch.ones((), dtype=torch.bool).expand(got.shape)
        yield Comparison(
            name=bounded.name, got=got.double(), dtype=problem.dtype, bounded=bounded,
            written=all_due, due=all_due, conditional=True,
        )  # fmt: skip


@pytest.mark.parametrize("ds_scale", ["before", "after"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_casts_that_round_otherwise_stray_though_no_element_is_outside(dtype, ds_scale):
    problem = dataclasses.replace(PROBLEM, dtype=dtype, softmax_scale=0.1)
    arithmetic = Arithmetic(ds_scale=ds_scale)
    for part in compared(problem, Emulator(ds_scale=ds_scale), arithmetic):
        assert not strays(part), part.name
    rough = Stochastic(ds_scale=ds_scale)
    strayed = [part for part in compared(problem, rough, arithmetic) if strays(part)]
    assert {"dq", "dv"} <= {part.name for part in strayed}
    assert all(part.most_prob < 1 for part in strayed)
    assert "elements that were looked at are outside" in strays(strayed[0])


class Finer(Emulator):
    """P and dS of the backward are more accurate than declared."""

    form = None

    def _cast_in_backward(self, native, x):
        if self.form == "truncated":
            return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
        return x if self.form is None else x.to(getattr(torch, self.form)).float()


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        ("float16", None),
        ("bfloat16", None),
        ("bfloat16", "float16"),
        ("bfloat16", "truncated"),
    ],
)
def test_a_more_accurate_kernel_does_not_stray(dtype, form, monkeypatch):
    monkeypatch.setattr(Finer, "form", form)
    problem = dataclasses.replace(PROBLEM, dtype=dtype)
    parts = list(compared(problem, Finer(), Arithmetic(ds_scale="after")))
    assert [strays(part) for part in parts] == ["", "", ""]


class Lifted(Emulator):
    """P of the backward is multiplied by a power of two before its cast, or flushed instead."""

    power = 0
    flush = False

    def _cast_in_backward(self, native, x):
        if bool((x < 0).any()):  # dS
            return x.to(native).float()
        cast = (x * 2.0**self.power).to(native).float() * 2.0**-self.power
        return torch.where(x < 2.0**-14, 0.0, cast) if self.flush else cast


@pytest.mark.parametrize(("power", "flush"), [(0, False), (3, False), (15, False), (0, True)])
def test_a_p_times_a_power_of_two_does_not_stray_but_one_that_is_flushed_does(
    power, flush, monkeypatch
):
    """In float16 it saves what would be subnormal."""
    monkeypatch.setattr(Lifted, "power", power)
    monkeypatch.setattr(Lifted, "flush", flush)
    problem = dataclasses.replace(PROBLEM, seqlen_q=2, dtype="float16")
    *_, dv = compared(problem, Lifted(), Arithmetic(), "logits x10")
    assert bool(strays(dv)) == flush


def test_without_a_declared_moment_dq_and_dk_are_not_known():
    problem = dataclasses.replace(PROBLEM, dtype="bfloat16")
    parts = list(compared(problem, Stochastic(), Arithmetic()))
    assert [bool(strays(part)) for part in parts] == [False, False, True]


def test_a_moment_that_is_not_the_declared_one_strays():
    problem = dataclasses.replace(PROBLEM, dtype="bfloat16", softmax_scale=0.1)
    parts = list(compared(problem, Emulator(ds_scale="before"), Arithmetic(ds_scale="after")))
    assert [bool(strays(part)) for part in parts] == [True, True, False]
    assert all(part.most_prob < 1 for part in parts)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_bound_is_several_times_sharper(dtype):
    problem = dataclasses.replace(PROBLEM, dtype=dtype)
    for part in compared(problem, Emulator(), Arithmetic(ds_scale="after")):
        model = next(rounded_models(part.bounded.refiner))
        det = part.bounded.refiner.linear[model.place]
        gain = float((det / model.bound).median())
        assert gain > (10 if dtype == "bfloat16" else 2)


def test_it_counts_where_something_searched_too():
    case = Case.parse("pass=bwd h=2/2 s=64x128 d=64 dtype=bfloat16 seed=3")

    def kernel(own):
        return Kernel(
            name="k",
            forward=lambda p, q, k, v: Outputs(*own.forward(p, q, k, v)),
            backward=lambda p, q, k, v, outputs, do: Grads(
                *own.backward(p, q, k, v, outputs.o, outputs.lse, do)
            ),
        )

    for independent in (True, False):
        record = verify(case, kernel(Stochastic()), Setup(), CpuBackend(), independent=independent)
        titles = [failure.title for failure in record.failures]
        assert "dv is not what its roundings give" in titles
    assert verify(case, kernel(Emulator()), Setup(), CpuBackend()).verdict == "pass"
