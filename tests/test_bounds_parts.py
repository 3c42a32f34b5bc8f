"""Formats, elementary models and the pieces of the bounds, each against something simpler."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa_verify.arithmetic import DEFAULT, Arithmetic
from fa_verify.bounds import bound_backward, bound_forward
from fa_verify.bounds.backward import backward_det
from fa_verify.bounds.formats import FORMATS, TF32, Cast, floor_power_of_two, tf32_operands
from fa_verify.bounds.gradients import backward_tile
from fa_verify.bounds.inputs import expm1_bound, inputs, spread
from fa_verify.bounds.model import Model, U
from fa_verify.bounds.outputs import forward_tile
from fa_verify.bounds.probabilistic import blockings, lambda_factor, multiplicity
from fa_verify.bounds.rows import Seen, row_statistics
from fa_verify.masks import Mask
from fa_verify.problem import Problem
from fa_verify.reference import Tile, by_kv_head, tiles

NORMAL = math.log(2.0**-126)  # far below what these tests cast
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
PROBLEM = Problem(heads_q=2, seqlen_q=24, seqlen_k=40, head_dim=16, head_dim_v=8)


def draw(problem, scale=1.0):
    generator = torch.Generator().manual_seed(7)
    shapes = (problem.shape_q, problem.shape_k, problem.shape_v, problem.shape_o)
    drawn = (scale * torch.randn(s, generator=generator) for s in shapes)
    return [x.to(DTYPES[problem.dtype]) for x in drawn]


@pytest.mark.parametrize("name", FORMATS)
@given(x=st.floats(allow_nan=False, allow_infinity=False))
def test_rounding_never_loses_more_than_half_an_ulp(name, x):
    value = torch.tensor([x], dtype=torch.float64)
    whole = name == "int8"  # torch's conversion cuts, and wraps
    rounded = value.round() if whole else value.to(getattr(torch, name)).double()
    bound = FORMATS[name].half_ulp(value)
    if abs(x) >= FORMATS[name].overflow:
        largest = name == "float8_e4m3fn" and abs(rounded) == FORMATS[name].largest
        assert largest or (whole and abs(rounded) >= 127) or not rounded.isfinite()
    else:
        assert (rounded - value).abs() <= bound


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_an_ulp_is_reached_everywhere(name):
    """Half way between two neighbours of the format, subnormals included, the bound is tight."""
    bits = torch.arange(0, 0x7BFF if name == "float16" else 0x7F7F, dtype=torch.int16)
    numbers = bits.view(DTYPES[name]).double()
    middle = (numbers[1:] + numbers[:-1]) / 2
    assert torch.equal(FORMATS[name].half_ulp(middle), (numbers[1:] - numbers[:-1]) / 2)


@given(x=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_the_power_of_two_below_is_exact_in_float32(x):
    power = float(floor_power_of_two(torch.tensor([abs(x)])))
    assert power == (2.0 ** (math.frexp(x)[1] - 1) if abs(x) >= 2.0**-126 else 0.0)


@given(x=st.floats(-(2.0**100), 2.0**100, width=32))
def test_tf32_operands_are_neighbours_of_the_number(x):
    value = torch.tensor([x])
    truncated, even, away = (t.double() for t in tf32_operands(value))
    assert (truncated - value).abs() <= Cast(TF32, truncates=True).error(value.double())
    assert truncated.abs() <= value.abs()
    for nearest in (even, away):
        assert (nearest - value).abs() <= TF32.half_ulp(value.double()).clamp(min=2.0**-136)


def test_tf32_ties_go_to_even_and_away():
    one, tie = 1 + 2.0**-10, 1 + 2.0**-11
    truncated, even, away = tf32_operands(torch.tensor([tie, one + 2.0**-11]))
    assert truncated.tolist() == [1.0, one]
    assert even.tolist() == [1.0, 1 + 2.0**-9]
    assert away.tolist() == [one, 1 + 2.0**-9]


def test_the_exponential_bound_is_above_and_close():
    h = torch.linspace(0, 0.25, 10_001, dtype=torch.float64)
    assert (expm1_bound(h) >= h.expm1()).all()
    assert (expm1_bound(h) <= 1.01 * h.expm1()).all()


def test_a_spread_is_not_clamped():
    x, h = torch.tensor([-45.0, -800.0, 0.0]).double(), torch.tensor([60.0, 5.0, 800.0]).double()
    assert spread(x, h, None).tolist() == [math.exp(15) - math.exp(-45), 0.0, math.inf]


@pytest.mark.parametrize(
    ("k", "steps"), [(1, 1), (16, 1), (17, 2), (64, 4), (72, 5), (80, 5), (256, 16)]
)
def test_a_dot_is_counted_in_whole_steps_of_a_matrix_unit(k, steps):
    """Ten and a half roundings a step of 16: what aligning and truncating 17 terms may lose."""
    assert Model(PROBLEM, DEFAULT).dot(k) >= max(10.5 * steps, k) * U


def test_looser_arithmetic_gives_larger_bounds():
    q, k, v, do = draw(PROBLEM)
    plain = (
        *bound_forward(PROBLEM, DEFAULT, q, k, v),
        *bound_backward(PROBLEM, DEFAULT, q, k, v, do),
    )
    for looser in (
        Arithmetic(dot_ulps=3.0),
        Arithmetic(exp2_ulps=1472.0),
        Arithmetic(p_dtype="bfloat16"),
        Arithmetic(ds_dtype="bfloat16"),
        Arithmetic(prescaled="q"),
        Arithmetic(prescaled="k"),
    ):
        wider = (
            *bound_forward(PROBLEM, looser, q, k, v),
            *bound_backward(PROBLEM, looser, q, k, v, do),
        )
        grew = [float((w.det / p.det).max()) for w, p in zip(wider, plain, strict=True)]
        assert max(grew) > 1.0001, looser
        shrank = [float((w.det / p.det).min()) for w, p in zip(wider, plain, strict=True)]
        assert min(shrank) > 0.999, looser


def test_a_delta_of_the_unrounded_o_is_less_certain_given_the_stored_one():
    q, k, v, do = draw(PROBLEM)
    o, lse = bound_forward(PROBLEM, DEFAULT, q, k, v)
    seen = {"o": o.reference.half(), "lse": lse.reference.float()}
    stored = bound_backward(PROBLEM, DEFAULT, q, k, v, do, **seen)
    unrounded = Arithmetic(delta_from_stored_o=False)
    for name, one, other in zip(
        ("dq", "dk", "dv"),
        stored,
        bound_backward(PROBLEM, unrounded, q, k, v, do, **seen),
        strict=True,
    ):
        gain = float((other.det / one.det).median())
        assert gain == 1 if name == "dv" else gain > 1.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True)], ids=str)
def test_both_ways_of_evaluating_a_bound_agree(mask, dtype):
    """float32 where every h is small, float64 without that assumption."""
    problem = dataclasses.replace(PROBLEM, mask=mask, dtype=dtype, softcap=5.0)
    q, k, v, do = draw(problem)
    model, given_ = Model(problem, DEFAULT), inputs(problem, q, k, v, do)
    (tile,) = tiles(problem, q.device)
    block = given_.block(tile)
    fast, slow = (forward_tile(model, given_, block, top) for top in (1e-3, math.inf))
    torch.testing.assert_close(fast.o, slow.o, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(fast.o_bound, slow.o_bound, rtol=0.02, atol=0)
    torch.testing.assert_close(fast.lse_bound, slow.lse_bound, rtol=0.02, atol=0)
    o, lse = (Seen(by_kv_head(problem, x), None) for x in (do, q[..., 0].double() * 0 + 3.0))
    rows = row_statistics(problem, DEFAULT, do, o, lse).part(tile.heads, tile.rows)
    near, far = (backward_tile(model, given_, rows, block, top) for top in (1e-3, math.inf))
    for name in ("v", "q", "k", "size"):
        ours, theirs = (getattr(x, name).double() for x in (near, far))
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=1e-30)


def test_bounds_do_not_depend_on_the_tiles(monkeypatch):
    problem = dataclasses.replace(PROBLEM, seqlen_q=200, mask=Mask(causal=True, window_left=17))
    q, k, v, do = draw(problem)
    whole = bound_backward(problem, DEFAULT, q, k, v, do)
    monkeypatch.setattr("fa_verify.reference._TILE", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr("fa_verify.reference._LEAST_ROWS", 8)
    for cut, one in zip(bound_backward(problem, DEFAULT, q, k, v, do), whole, strict=True):
        torch.testing.assert_close(cut.reference, one.reference, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(
            cut.det, one.det, rtol=0.05, atol=0
        )  # a tile's hull of V is its own


def blocked_multiplicity(x, block_n, width):
    counts = [multiplicity(cast, width, NORMAL) for cast in blockings(x, block_n)]
    return torch.stack(counts).amax(0)


@given(st.lists(st.sampled_from([0.0, 1.0, 1.0005, 1.002, 5.0]), min_size=1, max_size=9))
def test_multiplicity_counts_neighbours(logs):
    width = 1e-3
    counted = multiplicity(torch.tensor([logs], dtype=torch.float64), width, NORMAL)[0].tolist()
    assert counted == [sum(abs(x - y) <= width for y in logs) for x in logs]


def test_keys_that_drift_by_blocks_are_counted_together():
    """exp(S - m_block) repeats every 16 keys, exp(S - m) never."""
    index = torch.arange(256, dtype=torch.float64)
    x = ((index % 16) * 0.3 + (index // 16) * 0.011)[None]
    width = 2.0**-8 / 4
    assert int(multiplicity(x, width, NORMAL).max()) < 4
    assert int(blocked_multiplicity(x, 16, width).min()) == 16
    assert int(blocked_multiplicity(x, None, width).min()) == 16
    assert int(blocked_multiplicity(x, 64, width).max()) < 8


def test_the_factor_is_the_union_bound_over_the_tensor():
    lam = lambda_factor(1000, 1e-6) * math.sqrt(3)
    assert 2 * 1000 * math.exp(-lam * lam / 2) == pytest.approx(1e-6)


@pytest.mark.parametrize("name", ["o", "dq", "dk", "dv"])
def test_prob_is_between_its_least_and_det_and_decides_as_if_always_looked_at(name):
    """Looked at everywhere or for one error, it is the same bound."""
    problem = dataclasses.replace(PROBLEM, seqlen_q=300, seqlen_k=300, dtype="bfloat16", heads_q=1)
    q, k, v, do = draw(problem)
    o, lse = bound_forward(problem, DEFAULT, q, k, v)
    seen = {"o": o.reference.bfloat16(), "lse": lse.reference.float()}
    grads = bound_backward(problem, DEFAULT, q, k, v, do, **seen)
    bounded = {b.name: b for b in (o, *grads)}[name]
    everywhere = bounded.prob(bounded.reference + 0.99 * bounded.det)
    assert (everywhere <= bounded.det).all()
    assert float((bounded.det / everywhere).median()) > 1.3
    index = (0, 0, 150, 3)
    for factor in (0.9, 1.01):
        observed = bounded.reference.clone()
        observed[index] += factor * everywhere[index]
        alone = bounded.prob(observed)
        broken = (observed - bounded.reference).abs() > alone
        assert broken.sum() == (factor > 1)
        assert not broken.any() or bool(broken[index])


def test_an_exact_output_needs_no_look():
    q, k, v, _ = draw(PROBLEM)
    o, lse = bound_forward(PROBLEM, DEFAULT, q, k, v)
    assert o.prob(o.reference) is o.det
    assert lse.prob(lse.reference) is lse.det


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 0), (0, 3), (3, 0), (3, 3)])
def test_empty_sequences_have_bounds(seqlen_q, seqlen_k):
    problem = dataclasses.replace(PROBLEM, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    q, k, v, do = draw(problem)
    for bounded in (
        *bound_forward(problem, DEFAULT, q, k, v),
        *bound_backward(problem, DEFAULT, q, k, v, do),
        *bound_backward(problem, DEFAULT, q, k, v, do, o=do, lse=do[..., 0].float()),
    ):
        assert bounded.det.shape == bounded.reference.shape
        if 0 in (seqlen_q, seqlen_k):
            assert (bounded.det == 0).all()
        assert bounded.prob(bounded.reference).shape == bounded.det.shape


def test_the_group_shares_its_gradient_of_k_and_v():
    """GQA: dk and dv of a group, and their errors, are sums over its heads."""
    problem = dataclasses.replace(PROBLEM, heads_q=3, heads_kv=1)
    q, k, v, do = draw(problem)
    _, dk, dv = bound_backward(problem, DEFAULT, q, k, v, do)
    single = dataclasses.replace(problem, heads_q=1)
    model = Model(single, DEFAULT)
    parts = []
    for head in range(3):
        one = slice(head, head + 1)
        o, lse = bound_forward(single, DEFAULT, q[:, one], k, v)
        seen = Seen(o.reference[0][:, None], o.det[0][:, None]), Seen(lse.reference, lse.det)
        rows = row_statistics(single, DEFAULT, do[:, one], *seen)
        parts.append(backward_det(model, inputs(single, q[:, one], k, v, do[:, one]), rows))
    total = sum(x.dk for x in parts), sum(x.dv for x in parts)
    for bounded, expected in zip((dk, dv), total, strict=True):
        torch.testing.assert_close(bounded.reference[0], expected, rtol=1e-11, atol=1e-13)
    assert (dv.det[0] <= 1.3 * sum(x.dv_bound for x in parts) + dv.reference[0].abs() / 1024).all()


def test_multiplicity_counts_by_the_uniform_grid_below_the_smallest_normal_number():
    # 9.5 to 9.66 units of 2^-24 all round to 10; relatively they are far apart.
    values = torch.linspace(9.5, 9.66, 30, dtype=torch.float64) * 2.0**-24
    counted = multiplicity(values.log()[None], 2.0**-11 / 4, math.log(2.0**-14))
    assert int(counted.min()) > 15
    far = multiplicity(values.log()[None], 2.0**-11 / 4, NORMAL)
    assert int(far.max()) < 3


@pytest.mark.parametrize("masked", [Mask(causal=True), Mask(window_left=9), Mask()])
@pytest.mark.parametrize("name", ["o", "dq", "dk", "dv"])
def test_a_look_at_a_kept_tile_sees_what_one_that_computes_it_sees(name, masked, monkeypatch):
    problem = dataclasses.replace(
        PROBLEM, dtype="float16", batch=2, heads_q=4, heads_kv=2, mask=masked, softcap=3.0
    )
    q, k, v = draw(problem)[:3]
    do = v.new_ones(problem.shape_o)

    def looks():
        o, _ = bound_forward(problem, DEFAULT, q, k, v)
        bounded = {b.name: b for b in (o, *bound_backward(problem, DEFAULT, q, k, v, do))}[name]
        some = bounded.refiner.looks(slice(0, 4, 3), torch.tensor([1, 5, 6]))
        one = bounded.refiner.look(3, torch.tensor([5]))
        torch.testing.assert_close(one.errors[0], some.errors[1, 1], rtol=1e-5, atol=1e-12)
        return some, bounded.refiner.looks(*bounded.refiner.sample(200, 2))

    kept = looks()
    monkeypatch.setattr(Tile, "holds_all", lambda *_: False)
    for one, other in zip(kept, looks(), strict=True):
        for field in dataclasses.fields(one):
            got, expected = getattr(one, field.name), getattr(other, field.name)
            if expected is not None:
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-12)
