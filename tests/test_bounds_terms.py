"""Bounds with bias, ALiBi, sinks, dropout and lse's gradient: right kernels, and defects."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_verify.arithmetic import DEFAULT
from fa_verify.bounds import bound_backward, bound_forward
from fa_verify.case import Case, Values
from fa_verify.inputs import materialise
from fa_verify.problem import Problem
from fa_verify.terms import Terms
from fa_verify.values import TERM_FAMILIES

_SPEC = importlib.util.spec_from_file_location(
    "fa_verify_tests_bounds", Path(__file__).with_name("test_bounds.py")
)
bounds = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = bounds
_SPEC.loader.exec_module(bounds)
Emulator, emulator, ratio, trials = bounds.Emulator, bounds.emulator, bounds.ratio, bounds.trials


def terms_of(problem, values, seed):
    x = materialise(Case(problem=problem, values=values, seed=seed, backward=True))
    keep = None
    if problem.dropout:
        generator = torch.Generator().manual_seed(seed)
        shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        keep = torch.rand(shape, generator=generator) >= problem.dropout
    return Terms(bias=x.bias, slopes=x.alibi_slopes, sinks=x.sinks, dlse=x.dlse, keep=keep)


def judged(problem, arithmetic, kernel, inputs, terms):
    """(what, got, bounded) for all that an emulator returns; "end" is the end-to-end backward."""
    q, k, v, do = inputs
    o, lse = kernel.forward(problem, q, k, v, terms)
    grads = kernel.backward(problem, q, k, v, o, lse, do, terms)
    forward = bound_forward(problem, arithmetic, q, k, v, terms=terms)
    for got, bounded in zip((o, lse), forward, strict=True):
        yield bounded.name, got, bounded
    conditional = bound_backward(problem, arithmetic, q, k, v, do, terms=terms, o=o, lse=lse)
    end_to_end = bound_backward(problem, arithmetic, q, k, v, do, terms=terms)
    for got, one, other in zip(grads, conditional, end_to_end, strict=True):
        yield one.name, got, one
        yield f"{one.name} end", got, other


@st.composite
def with_terms(draw):
    problem, kernel, arithmetic, family = draw(trials())
    axes = [axis for axis in "bhqk" if draw(st.booleans())]
    problem = dataclasses.replace(
        problem,
        bias="".join(axes) if draw(st.booleans()) else "",
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.1, 0.5, 0.9))),
        lse_grad=draw(st.booleans()),
    )
    kernel = dataclasses.replace(
        kernel,
        sink=draw(st.sampled_from(("first", "last"))),
        keep=draw(st.sampled_from(("before", "after"))),
    )
    families = {term: draw(st.sampled_from(sorted(names))) for term, names in TERM_FAMILIES.items()}
    return problem, kernel, arithmetic, family, Values(**families)


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(with_terms())
def test_a_right_kernel_keeps_its_bounds(trial):
    problem, kernel, arithmetic, family, values = trial
    inputs = emulator.values(family, problem, kernel.seed)
    terms = terms_of(problem, values, kernel.seed)
    for what, got, bounded in judged(problem, arithmetic, kernel, inputs, terms):
        assert not bounded.det.isnan().any(), what
        assert bounded.reference.isfinite().logical_or(bounded.reference == -torch.inf).all(), what
        assert ratio(got, bounded) <= 1, what
        prob = bounded.prob(got)
        assert ratio(got, bounded, prob) <= 1, f"{what} prob"


BASE = Problem(batch=2, heads_q=2, heads_kv=1, seqlen_q=33, seqlen_k=70, head_dim=32, head_dim_v=16)


def worst(kernel, seed=1, **fields):
    problem = dataclasses.replace(BASE, **fields)
    inputs = emulator.values("normal", problem, seed)
    terms = terms_of(problem, Values(sinks="high"), seed)
    return {
        what: max(ratio(got, bounded), ratio(got, bounded, bounded.prob(got)))
        for what, got, bounded in judged(problem, DEFAULT, kernel, inputs, terms)
    }


FORWARD = ("o", "lse", "dq end", "dk end", "dv end", "dq", "dk", "dv")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("bug", "fields", "seen_in"),
    [
        ("bias ignored", {"bias": "hqk"}, FORWARD[:5]),
        ("bias before softcap", {"bias": "hqk", "softcap": 2.0}, ("o", "lse")),
        ("slope sign", {"alibi": True}, FORWARD[:5]),
        ("slope of the next head", {"alibi": True}, FORWARD[:5]),
        ("no sink", {"sinks": True}, ("o", "lse")),
        ("no sink in lse", {"sinks": True}, ("lse", "dq end")),
        ("keep not scaled", {"dropout": 0.2}, ("o", "dv")),
        ("keep not scaled in dP", {"dropout": 0.2}, ("dq", "dk")),
        ("keep of the next row", {"dropout": 0.2}, ("o", "dq", "dk", "dv")),
        ("dlse ignored", {"lse_grad": True}, ("dq", "dk")),
        ("dlse sign", {"lse_grad": True}, ("dq", "dk")),
        ("dbias of one row", {"bias": "hqk"}, ("dbias",)),
        ("dbias of one row", {"bias": "bhk"}, ("dbias",)),
        ("dbias with slope", {"bias": "k", "softcap": 2.0}, ("dbias",)),
        ("dbias with scale", {"bias": "bhqk"}, ("dbias",)),
        ("dsinks without dlse", {"sinks": True, "lse_grad": True}, ("dsinks",)),
        ("dsinks sign", {"sinks": True}, ("dsinks",)),
    ],
)
def test_defects_leave_their_bounds(bug, fields, seen_in, dtype):
    right = Emulator(sink="last")
    assert max(worst(right, dtype=dtype, **fields).values()) <= 1
    found = worst(dataclasses.replace(right, bugs=frozenset({bug})), dtype=dtype, **fields)
    for what in seen_in:
        assert found[what] > 2, found


def test_a_row_that_sees_no_key_has_its_sink_for_lse():
    problem = dataclasses.replace(BASE, seqlen_q=70, seqlen_k=33, sinks=True, lse_grad=True)
    problem = dataclasses.replace(problem, mask=bounds.Mask(causal=True))
    terms = terms_of(problem, Values(), 1)
    q, k, v, do = emulator.values("normal", problem, 1)
    o, lse = bound_forward(problem, DEFAULT, q, k, v, terms=terms)
    blind = slice(0, 70 - 33)
    expected = terms.sinks[:, None].double().expand(2, 2, 37)
    assert torch.equal(lse.reference[:, :, blind], expected)
    assert float(lse.det[:, :, blind].max()) < 1e-4
    assert not o.reference[:, :, blind].any()
    got = Emulator().forward(problem, q, k, v, terms)
    grads = Emulator().backward(problem, q, k, v, *got, do, terms)
    exact = bound_backward(problem, DEFAULT, q, k, v, do, terms=terms, o=got[0], lse=got[1])
    assert ratio(grads[3], exact[3]) <= 1
    # Their weight is 1 and their delta 0, so that dlse alone is what they add.
    without = dataclasses.replace(terms, dlse=terms.dlse.clone())
    without.dlse[:, :, blind] = 0
    other = bound_backward(problem, DEFAULT, q, k, v, do, terms=without, o=got[0], lse=got[1])
    added = exact[3].reference - other[3].reference
    assert torch.allclose(added, terms.dlse[:, :, blind].double().sum((0, 2)), atol=1e-5)


def test_nothing_is_said_at_random_of_what_is_not_derived():
    values = emulator.values("normal", BASE, 1)
    for fields, without in (({"sinks": True}, {"o"}), ({"dropout": 0.2}, {"o", "dv"})):
        problem = dataclasses.replace(BASE, **fields)
        terms = terms_of(problem, Values(), 1)
        found = [
            *bound_forward(problem, DEFAULT, *values[:3], terms=terms),
            *bound_backward(problem, DEFAULT, *values, terms=terms),
        ]
        refined = {bounded.name for bounded in found if bounded.refiner is not None}
        assert refined == {"o", "dq", "dk", "dv"} - without


def test_an_o_that_dropout_makes_overflow_leaves_delta_unknown():
    problem = dataclasses.replace(BASE, dropout=0.9, lse_grad=False)
    terms = terms_of(problem, Values(), 1)
    q, k, v, do = emulator.values("normal", problem, 1)
    huge = torch.full_like(v, 30_000.0)
    o, lse = Emulator().forward(problem, q, k, huge, terms)
    assert o.isinf().any()
    dq, *_ = Emulator().backward(problem, q, k, huge, o, lse, do, terms)
    bounded = bound_backward(problem, DEFAULT, q, k, huge, do, terms=terms)[0]
    assert not bounded.det.isfinite()[~dq.isfinite()].any()
    mild = bound_backward(problem, DEFAULT, q, k, v, do, terms=terms)[0]
    assert mild.det.isfinite().all()
