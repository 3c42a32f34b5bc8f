"""Bias, ALiBi, sinks, dropout and lse's gradient: their problems, inputs and exact results."""

import dataclasses

import numpy as np
import pytest
import torch

from fa_verify import Capabilities, Grads, Kernel, Outputs, reference
from fa_verify.backends.base import Setup
from fa_verify.backends.call import call
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.errors import InvalidInputError
from fa_verify.inputs import (
    among_others,
    duplicate,
    fingerprint,
    materialise,
    modified,
    permute_batch_heads,
    permute_keys,
    select_sequence,
    with_slack,
)
from fa_verify.layouts import Layout
from fa_verify.problem import Problem
from fa_verify.terms import Terms
from fa_verify.values import TERM_FAMILIES
from fa_verify.verdict import Verdict
from fa_verify.verify import verify

WHOLE = (
    "pass=bwd b=2 h=4/2 s=7x9 d=8/16 dtype=float32 mask=causal cap=5.0 bias=hqk alibi=1 sinks=1 "
    "dlse=1 dropout=0.25 bias.layout=bshd.d2.at3 bias.values=hides slopes.values=signed "
    "sinks.values=off dlse.values=spikes seed=3"
)


def _case(extra="", size="b=2 h=4/2 s=7x9 d=8/16", mask="mask=causal"):
    return Case.parse(f"pass=bwd {size} dtype=float32 {mask} {extra} seed=3")


def _terms(case, inputs=None, keep=None):
    x = inputs or materialise(case)
    p = case.problem
    if keep is None and p.dropout:
        generator = torch.Generator().manual_seed(x.dropout_seed)
        shape = (p.batch, p.heads_q, p.seqlen_q, p.seqlen_k)
        keep = torch.rand(shape, generator=generator) >= p.dropout
    return Terms(bias=x.bias, slopes=x.alibi_slopes, sinks=x.sinks, dlse=x.dlse, keep=keep)


def _plain(problem, q, k, v, terms):
    """Attention as one would write it, in one piece: o and lse."""
    group = problem.group
    s = q @ k.repeat_interleave(group, 1).mT * problem.scale
    if problem.softcap:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    if terms.bias is not None:
        s = s + terms.bias
    shift = problem.mask.shift(problem.seqlen_q, problem.seqlen_k)
    i, j = torch.arange(problem.seqlen_q)[:, None], torch.arange(problem.seqlen_k)
    if terms.slopes is not None:
        s = s - terms.slopes.double()[:, None, None] * (i + shift - j).abs()
    allowed = torch.from_numpy(problem.mask.allowed(problem.seqlen_q, problem.seqlen_k))
    s = s.masked_fill(~allowed, -torch.inf)
    if terms.sinks is not None:
        sink = terms.sinks[None, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat((s, sink), -1)
    blind = torch.isneginf(s).all(-1)
    s = s.masked_fill(blind[..., None], 0.0)  # for autograd: no NaN on the way
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse[..., None])[..., : problem.seqlen_k].masked_fill(blind[..., None], 0.0)
    lse = lse.masked_fill(blind, -torch.inf)
    if terms.keep is not None:
        p = p * terms.keep / (1 - problem.dropout)
    return p @ v.repeat_interleave(group, 1), lse


def test_a_case_is_read_back_whole():
    case = Case.parse(WHOLE)
    assert Case.parse(str(case)) == case
    assert str(case) == WHOLE
    assert case.problem.terms == ("bias", "alibi", "sinks", "dropout", "lse_grad")
    assert not Case.parse("pass=fwd s=3x5 d=80 dtype=float16 seed=7").problem.terms


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bias": "kq"}, "bias='kq'"),
        ({"bias": "hx"}, "bias='hx'"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": float("nan")}, "dropout=nan"),
        ({"layout_bias": Layout(offset=3)}, "layout_bias="),
    ],
)  # fmt: skip
def test_problems_that_mean_nothing_are_refused(changes, said):
    with pytest.raises(InvalidInputError, match=said):
        Problem(seqlen_q=3, seqlen_k=4, head_dim=8, head_dim_v=8, **changes)


def test_a_flag_is_1_or_nothing():
    with pytest.raises(InvalidInputError, match="sinks='yes'"):
        Case.parse("pass=fwd s=3x5 d=80 dtype=float16 sinks=yes seed=7")


@pytest.mark.parametrize("name", ["bias", "alibi", "sinks", "dropout", "lse_grad"])
def test_nothing_is_taken_that_is_not_declared(name):
    value = {"bias": "hqk", "dropout": 0.5}.get(name, True)
    problem = Problem(seqlen_q=3, seqlen_k=4, head_dim=8, head_dim_v=8, **{name: value})
    assert name in Capabilities().reason_against(problem)
    taken = Capabilities(**{name: ("qk", "hqk") if name == "bias" else True})
    assert taken.reason_against(problem) is None
    assert Capabilities(bias=("qk",)).reason_against(problem) is not None


def test_dropout_is_not_declared_without_what_is_kept():
    with pytest.raises(InvalidInputError, match="dropout_keep"):
        Kernel(name="k", forward=lambda: None, capabilities=Capabilities(dropout=True))


@pytest.mark.parametrize("axes", ["bhqk", "hqk", "qk", "k", "h", "bk", "q"])
@pytest.mark.parametrize("mask", ["", "mask=causal", "mask=l2.r1"])
def test_hidden_keys_of_a_bias_leave_each_row_one(axes, mask):
    case = _case(f"bias={axes} bias.values=hides", size="b=2 h=4/2 s=40x33 d=8", mask=mask)
    p = case.problem
    bias = materialise(case).bias
    assert bias.shape == p.shape_bias
    assert bias.dtype == torch.float32
    assert bool(bias.isneginf().any()) == ("k" in axes)
    seen = torch.from_numpy(p.mask.allowed(p.seqlen_q, p.seqlen_k))
    open_ = (seen & ~bias.isneginf()).any(-1)
    assert bool((open_ | ~seen.any(-1)).all())


@pytest.mark.parametrize(
    "family", [(term, name) for term, names in TERM_FAMILIES.items() for name in names]
)
def test_families_are_numbers(family):
    term, name = family
    case = _case(f"bias=hqk alibi=1 sinks=1 dlse=1 {term}.values={name}")
    inputs = materialise(case)
    tensor = getattr(inputs, {"slopes": "alibi_slopes"}.get(term, term))
    assert not bool(torch.isnan(tensor).any())
    assert not bool(torch.isposinf(tensor).any())
    again = getattr(materialise(case), {"slopes": "alibi_slopes"}.get(term, term))
    assert torch.equal(tensor, again)


def test_other_tensors_do_not_depend_on_terms():
    plain, whole = materialise(_case()), materialise(Case.parse(WHOLE.replace("cap=5.0 ", "")))
    for name in ("q", "k", "v", "do"):
        assert torch.equal(getattr(plain, name), getattr(whole, name))


def test_copies_keep_every_term():
    case = Case.parse(WHOLE)
    inputs = materialise(case)
    assert [name for name, _ in inputs.named()] == [
        *("q", "k", "v", "do", "bias", "alibi_slopes", "sinks", "dlse")
    ]
    for copy in (duplicate(inputs), with_slack(inputs, 240.0)):
        assert copy.dropout_seed == inputs.dropout_seed
        for (name, a), (_, b) in zip(inputs.named(), copy.named(), strict=True):
            assert torch.equal(a, b), name
            assert a.stride() == b.stride()
    assert inputs.bias.stride() == case.problem.layout_bias.strides(case.problem.shape_bias)
    before = fingerprint(inputs)
    assert modified(inputs, before) == ()
    for name in ("bias", "alibi_slopes", "sinks", "dlse"):
        tensor = getattr(inputs, name)
        was = float(tensor.flatten()[0])
        tensor[(0,) * tensor.dim()] = 77.0
        assert len(modified(inputs, before)) == 1, name
        tensor[(0,) * tensor.dim()] = was


@pytest.mark.parametrize("axes", ["bhqk", "hqk", "bk", "q"])
def test_reordered_inputs_give_reordered_results(axes):
    case = _case(f"bias={axes} sinks=1 dlse=1", size="b=3 h=4/2 s=7x9 d=8", mask="")
    inputs, p = materialise(case), case.problem

    def result(x, problem=p):
        terms = Terms(bias=x.bias, slopes=x.alibi_slopes, sinks=x.sinks, dlse=x.dlse)
        found = reference.forward(problem, x.q, x.k, x.v, terms)
        return found.o, found.lse

    o, lse = result(inputs)
    permuted = permute_keys(inputs, [3, 1, 0, 2, 8, 7, 6, 5, 4])
    for a, b in zip((o, lse), result(permuted), strict=True):
        assert torch.allclose(a, b)
    moved, heads = permute_batch_heads(inputs, [2, 0, 1], [1, 0])
    for a, b in zip((o, lse), result(moved), strict=True):
        assert torch.allclose(a[[2, 0, 1]][:, heads], b)
    alone, one = select_sequence(case, inputs, 1)
    for a, b in zip((o, lse), result(one, alone.problem), strict=True):
        assert torch.allclose(a[1:2], b)
    other, many = among_others(case, inputs, 1, batch=2, place=0)
    for a, b in zip((o, lse), result(many, other.problem), strict=True):
        assert torch.allclose(a[1:2], b[:1])
        assert bool(b.isfinite().all())


def test_mates_are_finite_beside_hidden_keys():
    case = _case("bias=bhqk bias.values=hides", mask="")
    _, many = among_others(case, materialise(case), 1, batch=4, place=2)
    assert not bool(torch.isposinf(many.bias).any())


@pytest.mark.parametrize(
    "extra",
    [
        "bias=bhqk", "bias=hqk", "bias=qk", "bias=k", "bias=h", "bias=q", "bias=bk",
        "bias=hqk cap=3.0", "alibi=1", "alibi=1 slopes.values=signed", "sinks=1",
        "sinks=1 sinks.values=high", "sinks=1 sinks.values=off", "dlse=1", "dropout=0.3",
        "bias=bqk alibi=1 sinks=1 dlse=1 dropout=0.3 cap=4.0",
        "bias=hqk bias.values=hides sinks=1 dlse=1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("mask", ["", "mask=causal", "mask=l2.r1.topleft"])
def test_the_reference_is_autograd_s(extra, mask):
    for size in ("b=2 h=4/2 s=7x9 d=8/16", "h=3/1 s=9x5 d=8"):
        case = _case(extra, size=size, mask=mask)
        p, x = case.problem, materialise(case)
        terms = _terms(case, x)
        leaves = {
            name: tensor.double().requires_grad_()
            for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v))
        }
        leaves |= {
            name: tensor.double().requires_grad_()
            for name, tensor in (("bias", x.bias), ("sinks", x.sinks))
            if tensor is not None
        }
        given = dataclasses.replace(
            terms, **{name: leaves[name] for name in ("bias", "sinks") if name in leaves}
        )
        o, lse = _plain(p, leaves["q"], leaves["k"], leaves["v"], given)
        blind = torch.isneginf(lse)
        found = reference.forward(p, x.q, x.k, x.v, terms)
        assert torch.allclose(found.o, o)
        assert torch.equal(found.lse.isneginf(), blind)
        assert torch.allclose(found.lse[~blind], lse[~blind])
        loss = (o * x.do.double())[~blind].sum()
        if x.dlse is not None:
            loss = loss + (lse * x.dlse.double())[~blind].sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        exact = reference.backward(p, x.q, x.k, x.v, x.do, terms)
        for name, grad in zip(leaves, grads, strict=True):
            mine = getattr(exact, f"d{name}")
            assert mine.shape == grad.shape
            assert torch.allclose(mine, grad, atol=1e-9), name


def test_a_kernel_is_handed_what_the_problem_has():
    seen = {}

    def forward(problem, q, k, v, **terms):
        del problem, k
        seen["forward"] = set(terms)
        return Outputs(q.new_zeros(*q.shape[:3], v.shape[3]))

    def backward(problem, q, k, v, outputs, do, **terms):
        del problem, outputs, do
        seen["backward"] = set(terms)
        return Grads(q.clone(), k.clone(), v.clone(), terms["bias"].clone(), terms["sinks"].clone())

    case = Case.parse(WHOLE)
    kernel = Kernel(name="k", forward=forward, backward=backward)
    called = call(kernel, case.problem, materialise(case), backward=True)
    assert not called.error
    assert seen["forward"] == {"bias", "alibi_slopes", "sinks", "dropout_seed"}
    assert seen["backward"] == seen["forward"] | {"dlse"}
    assert set(called.grads.named()) == {"dq", "dk", "dv", "dbias", "dsinks"}


def test_autograd_gives_the_gradients_of_bias_and_sinks():
    case = _case("bias=hqk sinks=1 dlse=1", mask="")

    def forward(problem, q, k, v, bias, sinks):
        return Outputs(*_plain(problem, q, k, v, Terms(bias=bias, sinks=sinks)))

    x = materialise(case)
    kernel = Kernel(name="k", forward=forward, backward="autograd")
    called = call(kernel, case.problem, x, backward=True)
    assert not called.error
    exact = reference.backward(case.problem, x.q, x.k, x.v, x.do, _terms(case, x))
    for name, grad in called.grads.named().items():
        assert torch.allclose(grad.double(), getattr(exact, name), atol=1e-4), name


def test_what_a_function_cannot_be_asked_is_unsupported():
    kernel = Kernel(name="k", forward=lambda problem, q, k, v: Outputs(v), backward="autograd")
    record = verify(_case("alibi=1"), kernel, Setup(), CpuBackend())
    assert record.verdict == Verdict.UNSUPPORTED
    assert record.reason == "not declared: alibi"


def test_dropout_seeds_follow_the_case():
    seeds = {
        materialise(dataclasses.replace(Case.parse(WHOLE), seed=s)).dropout_seed for s in range(9)
    }
    assert len(seeds) == 9
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert materialise(_case()).dropout_seed is None
    assert isinstance(materialise(Case.parse(WHOLE)).dropout_seed, int)
    assert np.iinfo(np.int32).max >= max(seeds)


def test_in_documents_distances_are_those_of_each_document():
    extra = "alibi=1 sinks=1 dlse=1"
    case = _case(extra, size="h=4/2 s=7x9 d=8", mask="mask=causal.docs3x4-0x1-4x4")
    x, p = materialise(case), case.problem
    found = reference.forward(p, x.q, x.k, x.v, _terms(case, x))
    grads = reference.backward(p, x.q, x.k, x.v, x.do, _terms(case, x))
    dsinks = torch.zeros_like(grads.dsinks)
    for rows, keys in ((slice(0, 3), slice(0, 4)), (slice(3, 7), slice(5, 9))):
        lengths = {"seqlen_q": rows.stop - rows.start, "seqlen_k": keys.stop - keys.start}
        mask = dataclasses.replace(p.mask, documents=())
        alone = dataclasses.replace(p, mask=mask, **lengths)
        tensors = (x.q[:, :, rows], x.k[:, :, keys], x.v[:, :, keys])
        terms = Terms(slopes=x.alibi_slopes, sinks=x.sinks, dlse=x.dlse[:, :, rows])
        one = reference.forward(alone, *tensors, terms)
        assert torch.allclose(found.o[:, :, rows], one.o)
        assert torch.allclose(found.lse[:, :, rows], one.lse)
        part = reference.backward(alone, *tensors, x.do[:, :, rows], terms)
        assert torch.allclose(grads.dk[:, :, keys], part.dk)
        dsinks += part.dsinks
    assert torch.allclose(grads.dsinks, dsinks)
