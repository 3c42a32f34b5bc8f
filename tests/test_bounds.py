"""The bounds against an emulator of right kernels and of wrong ones."""

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

from fa_verify import reference
from fa_verify.arithmetic import DEFAULT, Arithmetic
from fa_verify.bounds import bound_backward, bound_forward
from fa_verify.masks import Mask
from fa_verify.problem import Problem


def _load(name):
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"fa_verify_tests_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


emulator = _load("emulator")
Emulator = emulator.Emulator


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ratio(got, bounded, bound=None):
    """Worst err/bound; 0/0 is 0, inconclusive elements and right overflows do not count."""
    bound = bounded.det if bound is None else bound
    wrong = (got.double() != bounded.reference) & bound.isfinite()
    if bounded.overflow_ok is not None:
        wrong &= ~(bounded.overflow_ok & got.isinf())
    worst = torch.where(wrong, (got.double() - bounded.reference).abs() / bound, 0.0)
    return float(worst.nan_to_num(nan=math.inf).max()) if worst.numel() else 0.0


def judged(problem, arithmetic, kernel, inputs):
    """(what, got, bounded) for all that an emulator returns; "end" is the end-to-end backward."""
    q, k, v, do = inputs
    o, lse = kernel.forward(problem, q, k, v)
    grads = kernel.backward(problem, q, k, v, o, lse, do)
    for got, bounded in zip((o, lse), bound_forward(problem, arithmetic, q, k, v), strict=True):
        yield bounded.name, got, bounded
    conditional = bound_backward(problem, arithmetic, q, k, v, do, o=o, lse=lse)
    end_to_end = bound_backward(problem, arithmetic, q, k, v, do)
    for got, one, other in zip(grads, conditional, end_to_end, strict=True):
        yield one.name, got, one
        yield f"{one.name} end", got, other


MASKS = st.one_of(
    st.just(Mask()),
    st.builds(Mask, causal=st.just(True), alignment=st.sampled_from(("bottom-right", "top-left"))),
    st.builds(
        Mask,
        window_left=st.sampled_from((None, 0, 3, 40)),
        window_right=st.sampled_from((None, 0, 2, 30)),
        alignment=st.sampled_from(("bottom-right", "top-left")),
    ),
)


@st.composite
def trials(draw):
    dtype, precision = draw(
        st.sampled_from(
            (
                ("float16", "ieee"),
                ("bfloat16", "ieee"),
                ("float32", "ieee"),
                ("float32", "tf32"),
                ("float32", "tf32x3"),
            )
        )
    )
    heads_kv = draw(st.sampled_from((1, 2)))
    lengths = st.sampled_from((1, 2, 15, 16, 17, 33, 64, 65, 100, 129))
    problem = Problem(
        batch=draw(st.sampled_from((1, 2))),
        heads_q=heads_kv * draw(st.sampled_from((1, 3))),
        heads_kv=heads_kv,
        seqlen_q=draw(lengths),
        seqlen_k=draw(st.one_of(lengths, st.sampled_from((0, 257, 500)))),
        head_dim=draw(st.sampled_from((1, 8, 17, 40, 80))),
        head_dim_v=draw(st.sampled_from((1, 16, 33))),
        dtype=dtype,
        dot_precision=precision,
        mask=draw(MASKS),
        softmax_scale=draw(st.sampled_from((None, None, None, 0.5, -0.3, 0.0, 3.0, 1e-3))),
        softcap=draw(st.sampled_from((0.0, 0.0, 0.0, 2.0, 30.0))),
    )
    work = problem.seqlen_q * problem.seqlen_k * problem.head_dim * problem.heads_q
    kernel = Emulator(
        block_n=draw(st.sampled_from((16, 32, 64, 128))),
        reverse=draw(st.booleans()),
        exponent=draw(st.sampled_from(("exp2", "exp", "fma"))),
        dot=draw(st.sampled_from(("fma", "mma"))) if work < 500_000 else "fma",
        tf32=draw(st.sampled_from(("truncate", "even", "exact"))),
        chain=draw(st.booleans()),
        noise=draw(st.sampled_from((0.0, 4.0))),
        ds_scale=draw(st.sampled_from(("before", "after"))),
        threshold=draw(st.sampled_from((0.0, 0.0, 8.0))),
        l_from_rounded_p=draw(st.sampled_from((False, False, True))),
        ds_from_rounded_p=draw(st.sampled_from((False, False, True))),
        prescaled=draw(st.sampled_from((None, None, None, "q", "k"))),
        seed=draw(st.integers(0, 2**20)),
    )
    arithmetic = Arithmetic(
        block_n=draw(st.sampled_from((None, kernel.block_n))),
        ds_scale=draw(st.sampled_from((None, kernel.ds_scale))),
        l_from_rounded_p=kernel.l_from_rounded_p,
        ds_from_rounded_p=kernel.ds_from_rounded_p,
        prescaled=kernel.prescaled,
    )
    return problem, kernel, arithmetic, draw(st.sampled_from(emulator.FAMILIES))


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(trials())
def test_a_right_kernel_keeps_its_bounds(trial):
    problem, kernel, arithmetic, family = trial
    inputs = emulator.values(family, problem, kernel.seed)
    for what, got, bounded in judged(problem, arithmetic, kernel, inputs):
        assert not bounded.det.isnan().any(), what
        assert bounded.reference.isfinite().logical_or(bounded.reference == -torch.inf).all(), what
        assert ratio(got, bounded) <= 1, what
        prob = bounded.prob(got)
        assert (prob <= bounded.det).all(), what
        assert ratio(got, bounded, prob) <= 1, f"{what} prob"


LONG = Problem(seqlen_q=33, seqlen_k=1000, head_dim=64, head_dim_v=64)


def worst(problem, kernel, family="normal", seed=1, q_factor=1.0):
    q, k, v, do = emulator.values(family, problem, seed)
    rows = judged(problem, DEFAULT, kernel, (q * q_factor, k, v, do))
    return {
        what: max(ratio(got, bounded), ratio(got, bounded, bounded.prob(got)))
        for what, got, bounded in rows
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("bug", "seen_in"),
    [
        ("missing tail key", ("o", "lse", "dq", "dk", "dv", "dv end")),
        ("padded keys", ("o", "lse", "dv end")),
        ("no alpha in l", ("o", "lse", "dq end", "dv end")),
        ("no alpha in acc", ("o", "dq end", "dk end")),
        ("P in fp8", ("o",)),
        ("l in fp16", ("lse",)),
        ("lse in base 2", ("lse", "dv end")),
        ("acc rounded each block", ("o",)),
        ("no delta", ("dq", "dk", "dq end", "dk end")),
        ("dq without scale", ("dq", "dq end")),
        ("dk without scale", ("dk", "dk end")),
        ("no scale", ("o", "lse", "dq end", "dk end", "dv end")),
        ("mask off by one", ("o", "lse", "dq", "dk", "dv")),
    ],
)
def test_a_known_bug_breaks_a_bound(bug, seen_in, dtype):
    mask = Mask(causal=True) if bug == "mask off by one" else Mask()
    problem = dataclasses.replace(LONG, dtype=dtype, mask=mask)
    kernel = Emulator(block_n=16 if bug.startswith("acc") else 64, bugs=frozenset({bug}))
    seen = worst(problem, kernel, q_factor=3.0 if bug.startswith("no alpha") else 1.0)
    assert {what: r for what, r in seen.items() if what in seen_in and r <= 1} == {}


@pytest.mark.parametrize("bug", ["acc in fp16", "P in bf16"])
def test_a_bug_of_float16_breaks_a_bound(bug):
    assert worst(LONG, Emulator(block_n=16, bugs=frozenset({bug})))["o"] > 1


def test_the_same_case_without_a_bug_keeps_them():
    assert max(worst(LONG, Emulator(block_n=16)).values()) <= 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("what", ["random", "constant", "zero"])
def test_nonsense_breaks_every_bound(what, dtype):
    problem = dataclasses.replace(LONG, dtype=dtype)
    q, k, v, do = emulator.values("normal", problem, 3)
    bounds = (
        *bound_forward(problem, DEFAULT, q, k, v),
        *bound_backward(problem, DEFAULT, q, k, v, do),
    )
    for bounded in bounds:
        size = bounded.reference.std()
        nonsense = {
            "random": torch.randn(bounded.reference.shape, dtype=torch.float64) * size,
            "constant": torch.full_like(bounded.reference, float(size)),
            "zero": torch.zeros_like(bounded.reference),
        }[what]
        assert ratio(nonsense, bounded) > 1, bounded.name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_v_of_one_pins_o_whatever_the_logits(dtype):
    """The hull bound: logits too uncertain for any other bound, yet 1% off is wrong."""
    problem = dataclasses.replace(LONG, dtype=dtype, softmax_scale=1e3)
    q, k, v, _ = emulator.values("V = 1", problem, 1)
    o, _ = bound_forward(problem, DEFAULT, q * 100, k, v)
    assert ratio(torch.ones_like(o.reference), o) <= 1
    assert ratio(torch.full_like(o.reference, 1.01), o) > 1


def test_rows_that_see_nothing_are_exact():
    problem = Problem(seqlen_q=9, seqlen_k=4, head_dim=8, head_dim_v=8, mask=Mask(causal=True))
    q, k, v, do = emulator.values("normal", problem, 1)
    o, lse = bound_forward(problem, DEFAULT, q, k, v)
    dq, _, _ = bound_backward(problem, DEFAULT, q, k, v, do)
    for bounded in (o, dq):
        assert (bounded.reference[:, :, :5] == 0).all()
        assert (bounded.det[:, :, :5] == 0).all()
        assert (bounded.det[:, :, 5:] > 0).all()
    assert (lse.reference[:, :, :5] == -torch.inf).all()
    assert (lse.det[:, :, :5] == 0).all()


def test_keys_that_nobody_sees_have_no_gradient():
    mask = Mask(causal=True, alignment="top-left")
    problem = Problem(seqlen_q=3, seqlen_k=40, head_dim=8, head_dim_v=8, mask=mask)
    for bounded in bound_backward(problem, DEFAULT, *emulator.values("normal", problem, 1))[1:]:
        assert (bounded.reference[:, :, 3:] == 0).all()
        assert (bounded.det[:, :, 3:] == 0).all()
        assert (bounded.det[:, :, :3] > 0).all()


def test_an_infinity_is_right_where_float16_may_overflow():
    problem = Problem(seqlen_q=4, seqlen_k=4, head_dim=8, head_dim_v=3, mask=Mask(causal=True))
    q, k, v, do = emulator.values("normal", problem, 1)
    do = torch.tensor([60000.0, 60000.0, 1.0]).half().expand_as(do)
    _, _, dv = bound_backward(problem, DEFAULT, q, k, v, do)
    assert dv.overflow_ok[..., 0, :2].all()
    assert not dv.overflow_ok[..., 2].any()
    assert dv.det.isfinite().all()


def test_logits_that_may_overflow_are_inconclusive_and_others_not():
    problem = dataclasses.replace(LONG, dtype="bfloat16", seqlen_k=7, head_dim=2)
    q, k, v, _ = emulator.values("normal", problem, 1)
    q[..., 0, :] = 3e38
    o, lse = bound_forward(problem, DEFAULT, q, k, v)
    assert o.det[..., 0, :].isinf().all()
    assert lse.det[..., 0].isinf().all()
    assert o.det[..., 1:, :].isfinite().all()


def test_a_dominant_key_is_conclusive_however_large_the_logits():
    """Errors are measured against the largest key's, so a clear winner leaves none."""
    problem = Problem(seqlen_q=3, seqlen_k=5, head_dim=16, head_dim_v=4, softmax_scale=1.0)
    q, k, v, _ = emulator.values("normal", problem, 1)
    q = torch.full_like(q, 1000.0)
    k = torch.full_like(k, 100.0)
    k[:, :, 2] = 200.0  # logits 1.6e6 and 3.2e6: h is about 3
    o, _ = bound_forward(problem, DEFAULT, q, k, v)
    assert torch.equal(o.reference, v[:, :, 2:3].double().expand_as(o.reference))
    assert (o.det <= 2**-10 * o.reference.abs() + 1e-30).all()


def test_a_far_key_with_a_large_error_is_not_clamped():
    """S - L = -45 with h = 60: exp(S - L + h), not exp(S - L) times a clamped factor."""
    problem = Problem(seqlen_q=1, seqlen_k=2, head_dim=2, head_dim_v=1, softmax_scale=1.0)
    large, shape = 30_000.0, problem.shape_k
    q = torch.full(problem.shape_q, large).half()
    k = torch.tensor([[0.0, 0.0], [large, -large]]).reshape(shape).half()  # cancels: S = 0, G huge
    k[..., 0, 0] = 45 / large
    v = torch.tensor([1.0, 2.0]).reshape(problem.shape_v).half()
    o, _ = bound_forward(problem, dataclasses.replace(DEFAULT, dot_ulps=1.0), q, k, v)
    assert float(o.reference) == pytest.approx(1.0, abs=1e-6)
    assert float(o.det) > 0.9


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "block_n", "reverse"),
    [
        ("drifting-periodic", 16, False),
        ("two-level", 64, True),
        ("integers", 32, False),
        ("equal keys", 64, False),
    ],
)
def test_values_that_round_alike_keep_the_probabilistic_bound(family, block_n, reverse, dtype):
    problem = Problem(seqlen_q=17, seqlen_k=2048, head_dim=16, head_dim_v=8, dtype=dtype)
    kernel = Emulator(block_n=block_n, reverse=reverse, exponent="exp")
    for seed in (5, 10):  # multiples of 5: V of one sign
        assert max(worst(problem, kernel, family, seed).values()) <= 1


def test_the_probabilistic_bound_is_several_times_tighter():
    problem = dataclasses.replace(LONG, dtype="bfloat16")
    q, k, v, do = emulator.values("normal", problem, 2)
    o, lse = bound_forward(problem, DEFAULT, q, k, v)
    seen = {"o": o.reference.bfloat16(), "lse": lse.reference.float()}
    dq, _, _ = bound_backward(problem, DEFAULT, q, k, v, do, **seen)
    for bounded in (o, dq):
        nearly = bounded.reference + 0.9 * bounded.det
        gain = bounded.det / bounded.prob(nearly)
        assert float(gain.median()) > 2, bounded.name


@pytest.mark.parametrize("tf32", ["truncate", "even", "exact"])
def test_every_admitted_reading_of_tf32_operands_passes(tf32):
    problem = Problem(
        heads_q=2, seqlen_q=40, seqlen_k=90, head_dim=32, head_dim_v=16, dtype="float32",
        dot_precision="tf32",
    )  # fmt: skip
    assert max(worst(problem, Emulator(tf32=tf32)).values()) <= 1


def test_tf32_breaks_the_bounds_of_ieee_and_of_tf32x3():
    problem = Problem(seqlen_q=40, seqlen_k=90, head_dim=32, head_dim_v=16, dtype="float32")
    q, k, v, _ = emulator.values("normal", problem, 1)
    sloppy = dataclasses.replace(problem, dot_precision="tf32")
    o, lse = Emulator().forward(sloppy, q, k, v)
    for precision in ("ieee", "tf32x3"):
        asked = dataclasses.replace(problem, dot_precision=precision)
        bound_o, bound_lse = bound_forward(asked, DEFAULT, q, k, v)
        assert ratio(o, bound_o) > 1
        assert ratio(lse, bound_lse) > 1


def test_a_prescaled_operand_must_be_declared():
    problem = dataclasses.replace(LONG, dtype="bfloat16", softmax_scale=0.3)
    q, k, v, do = emulator.values("normal", problem, 1)
    kernel = Emulator(prescaled="q")
    undeclared = {w: ratio(g, b) for w, g, b in judged(problem, DEFAULT, kernel, (q, k, v, do))}
    assert undeclared["lse"] > 1
    declared = judged(problem, Arithmetic(prescaled="q"), kernel, (q, k, v, do))
    assert all(ratio(got, bounded) <= 1 for _, got, bounded in declared)


def test_the_conditional_reference_is_the_gradient_for_the_observed_o_and_lse():
    problem = Problem(heads_q=2, seqlen_q=20, seqlen_k=30, head_dim=8, head_dim_v=8, softcap=3.0)
    q, k, v, do = emulator.values("normal", problem, 1)
    o, lse = bound_forward(problem, DEFAULT, q, k, v)
    same = bound_backward(problem, DEFAULT, q, k, v, do, o=o.reference, lse=lse.reference)
    exact = reference.backward(problem, q, k, v, do)
    for bounded, expected in zip(same, (exact.dq, exact.dk, exact.dv), strict=True):
        torch.testing.assert_close(bounded.reference, expected, rtol=1e-11, atol=1e-12)
    shifted = bound_backward(problem, DEFAULT, q, k, v, do, o=o.reference, lse=lse.reference + 1)
    torch.testing.assert_close(shifted[2].reference, exact.dv / math.e, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_observed_row_that_is_not_finite_makes_what_it_reaches_inconclusive(bad):
    problem = Problem(heads_q=2, heads_kv=2, seqlen_q=6, seqlen_k=9, head_dim=8, head_dim_v=8)
    q, k, v, do = emulator.values("normal", problem, 1)
    o, lse = (x.reference.clone() for x in bound_forward(problem, DEFAULT, q, k, v))
    lse[0, 1, 4] = bad
    dq, dk, dv = bound_backward(problem, DEFAULT, q, k, v, do, o=o, lse=lse)
    for bounded in (dq, dk, dv):
        assert bounded.reference.isfinite().all()
        assert bounded.det[:, 0].isfinite().all()
    assert dq.det[0, 1, 4].isinf().all()
    assert dq.det[0, 1, 5].isfinite().all()
    assert dk.det[:, 1].isinf().all()
    assert dv.det[:, 1].isinf().all()


def test_expanded_heads_and_transposed_views_are_read_as_they_are():
    problem = Problem(
        batch=2, heads_q=4, heads_kv=4, seqlen_q=9, seqlen_k=9, head_dim=8, head_dim_v=8
    )
    q, k, v, do = emulator.values("normal", problem, 1)
    q = q[:, :1].expand_as(q)
    k = k.mT.contiguous().mT
    copies = bound_backward(problem, DEFAULT, q.contiguous(), k.contiguous(), v, do)
    views = bound_backward(problem, DEFAULT, q, k, v, do)
    for one, other in zip(views, copies, strict=True):
        torch.testing.assert_close(one.reference, other.reference, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(one.det, other.det, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_adversary_comes_close_to_det_and_not_above(dtype):
    """All keys but the largest share one p, just off a rounding boundary or below half a step."""
    close = 0.0
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    for seqlen_k, exponent, offset in itertools.product(
        (33, 500), (1, 3, 14, 24, 25), (unit * 0.97, unit * 1.03, 0.499, 0.999)
    ):
        p = 2.0**-exponent * (1 + offset)
        problem = Problem(
            seqlen_q=1, seqlen_k=seqlen_k, head_dim=16, head_dim_v=2, dtype=dtype,
            softmax_scale=math.log(p),
        )  # fmt: skip
        q, k, v, do = (torch.zeros_like(x) for x in emulator.values("normal", problem, 1))
        q[..., 0], k[..., 1:, 0] = 1, 1
        v[..., 1:, 0], v[..., 1:, 1], do[..., 0], do[..., 1] = 1, -1, 1, 0.5
        for _, got, bounded in judged(problem, DEFAULT, Emulator(), (q, k, v, do)):
            close = max(close, ratio(got, bounded))
            assert ratio(got, bounded) <= 1
            assert ratio(got, bounded, bounded.prob(got)) <= 1
    assert close > 0.9


@pytest.mark.parametrize("side", ["q", "k"])
def test_an_operand_prescaled_in_fp16_may_be_subnormal_or_overflow(side):
    problem = Problem(seqlen_q=24, seqlen_k=40, head_dim=16, head_dim_v=16, dtype="float16")
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, n, 16, generator=generator) for n in (24, 40, 40, 24))
    far, near = (q, k) if side == "k" else (k, q)
    kernel, arithmetic = Emulator(prescaled=side), Arithmetic(prescaled=side)
    far.mul_(3e4).clamp_(-6e4, 6e4)
    near.mul_(2.0**-20)  # times the scale: a few of fp16's smallest steps
    inputs = tuple(x.half() for x in (q, k, v, do))
    rows = list(judged(problem, arithmetic, kernel, inputs))
    assert all(ratio(got, bounded) <= 1 for _, got, bounded in rows)
    exact = list(judged(problem, DEFAULT, kernel, inputs))
    assert any(ratio(got, bounded) > 1 for _, got, bounded in exact)

    steep = dataclasses.replace(problem, softmax_scale=3e4)
    inputs = tuple(torch.randn(x.shape, generator=generator).half() * 4 for x in (q, k, v, do))
    rows = list(judged(steep, arithmetic, kernel, inputs))
    assert any(bool(got.isnan().any()) for _, got, _ in rows)
    assert all(ratio(got, bounded) <= 1 for _, got, bounded in rows)


def test_an_o_that_was_rounded_to_0_leaves_delta_unknown():
    """Of a kernel whose delta is of the unrounded o, which was anything below half a subnormal."""
    problem = Problem(seqlen_q=1, seqlen_k=2, head_dim=1, head_dim_v=1)
    q, k = torch.ones(1, 1, 1, 1).half(), torch.tensor([10.0, -10.0]).half().view(1, 1, 2, 1)
    v, do = (
        torch.tensor([0.0, 1.0]).half().view(1, 1, 2, 1),
        torch.full((1, 1, 1, 1), 1024.0).half(),
    )
    exact = reference.backward(problem, q, k, v, do)
    o, lse = (x.reference for x in bound_forward(problem, DEFAULT, q, k, v))
    assert 0 < float(o) < 2**-25
    seen = {"o": o.half(), "lse": lse.float()}
    assert not seen["o"].any()
    unrounded = dataclasses.replace(DEFAULT, delta_from_stored_o=False)
    _, loose, _ = bound_backward(problem, unrounded, q, k, v, do, **seen)
    _, sharp, _ = bound_backward(problem, DEFAULT, q, k, v, do, **seen)
    assert ratio(exact.dk.half(), loose) <= 1
    assert ratio(exact.dk.half(), sharp) > 1


def test_a_row_whose_delta_is_unknown_still_has_its_p():
    """An o whose sum may overflow says nothing of delta, but dv needs none."""
    problem = Problem(seqlen_q=5, seqlen_k=7, head_dim=8, head_dim_v=3, dtype="float32")
    q, k, _, do = emulator.values("logits x10", problem, 1)
    v = torch.full(problem.shape_v, 3e38)
    o, _ = bound_forward(problem, DEFAULT, q, k, v)
    assert not o.det.isfinite().any()
    exact = reference.backward(problem, q, k, torch.ones_like(v), do)
    dq, _, dv = bound_backward(problem, DEFAULT, q, k, v, do)
    assert not dq.det.isfinite().any()
    assert torch.allclose(dv.reference, exact.dv)
    assert ratio(exact.dv.float(), dv) <= 1
