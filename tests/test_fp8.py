"""fp8 as part of a problem: what may be asked, inputs and their copies, what is drawn, verdicts."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from fa_verify import Capabilities, Kernel, Outputs, distribution, loader, reference
from fa_verify.aspects import aspects
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.capabilities import Capabilities as _Capabilities
from fa_verify.case import Case
from fa_verify.distribution import Space, sample
from fa_verify.distribution.scales import SCALE_CORNERS
from fa_verify.errors import InvalidInputError
from fa_verify.inputs import (
    among_others,
    materialise,
    modified,
    permute_batch_heads,
    permute_keys,
    perturb_hidden,
    select_sequence,
)
from fa_verify.inputs import fingerprint as before
from fa_verify.problem import Problem
from fa_verify.scales import SCALE_FAMILIES
from fa_verify.strategies import shrink
from fa_verify.terms import Terms
from fa_verify.verify import verify
from fa_verify.zoo.defects import KERNELS

E4M3 = torch.float8_e4m3fn
TAKES = Capabilities(
    dtypes=("bfloat16", "float16"), fp8=("tensor", "head", "block"), backward=False,
    head_dims_v=range(1, 257), window=True, softcap=True,
)  # fmt: skip
LINE = "pass=fwd b=2 h=4/2 s=33x70 d=20/12 dtype=bfloat16 fp8={} seed=3"


def case_of(fp8="block16", more=""):
    return Case.parse(LINE.format(fp8) + more)


def numbers(problem, x):
    """q, k and v as the problem's numbers."""
    terms = Terms(q_scale=x.q_scale, k_scale=x.k_scale, v_scale=x.v_scale)
    return terms.operands(problem, x.q, x.k, x.v)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"fp8": "block48"}, "fp8='block48': must be empty or one of tensor"),
        ({"fp8": "head", "dtype": "float32", "dot_precision": "tf32"}, "no other precision"),
        ({"fp8": "head", "lse_grad": True}, "no gradient is defined"),
    ],
)
def test_a_problem_rejects_what_means_nothing(fields, match):
    with pytest.raises(InvalidInputError, match=match):
        Problem(seqlen_q=1, seqlen_k=1, head_dim=8, head_dim_v=8, **fields)


def test_a_case_has_no_backward_and_its_line_is_read_back():
    case = case_of("block64", " scales.values=coarse")
    assert Case.parse(str(case)) == case
    assert case.problem.precision == "float8_e4m3fn/bfloat16"
    assert dict(aspects(case))["fp8"] == "block64"
    with pytest.raises(InvalidInputError, match="pass=bwd fp8=block64: of fp8 there is only"):
        Case.parse(str(case).replace("pass=fwd", "pass=bwd"))


def test_capabilities_say_which_scales():
    plain = dataclasses.replace(case_of().problem, fp8="")
    assert TAKES.reason_against(case_of().problem) is None
    assert TAKES.reason_against(plain) == "fp8=''"
    assert _Capabilities(head_dims_v=range(1, 257)).reason_against(case_of().problem)
    one = dataclasses.replace(TAKES, fp8=("", "block64"))
    assert one.takes_scales("block64")
    assert one.takes_scales("")
    assert not one.takes_scales("block16")
    with pytest.raises(InvalidInputError, match=r"fp8=\('rows',\): must be some of"):
        Capabilities(fp8=("rows",))


@pytest.mark.parametrize("family", SCALE_FAMILIES)
@pytest.mark.parametrize("fp8", ["tensor", "head", "block16", "block64"])
def test_inputs_are_finite_e4m3_near_the_numbers_of_the_family(fp8, family):
    case = case_of(fp8, f" scales.values={family}")
    x = materialise(case)
    for name in "qkv":
        stored, scale = getattr(x, name), getattr(x, f"{name}_scale")
        assert stored.dtype == E4M3
        assert torch.isfinite(stored.float()).all()
        assert scale.shape == case.problem.shape_scale(name)
        assert scale.dtype == torch.float32
        # Poison lies behind both.
        storage = torch.empty(0, dtype=E4M3).set_(stored.untyped_storage())
        assert torch.isnan(storage[-64:].float()).all()
    plain = dataclasses.replace(case, problem=dataclasses.replace(case.problem, fp8=""))
    wide = dataclasses.replace(plain, problem=dataclasses.replace(plain.problem, dtype="float32"))
    for got, want in zip(
        numbers(case.problem, x), (getattr(materialise(wide), name) for name in "qkv"), strict=True
    ):
        near = 0.6 if family == "coarse" else 2.0**-4  # of the largest: of an integer up to 3
        assert float((got - want).abs().max()) <= near * float(want.abs().max())


def test_scales_are_strided_where_what_they_scale_is():
    plain = materialise(case_of("block16", " k=bshd q=bhsd.s3 v=shbd.b1"))
    assert plain.k_scale.is_contiguous()
    assert plain.q_scale.stride() == (4 * 3 * 4, 3 * 4, 4)
    assert plain.v_scale.stride(2) > plain.v_scale.stride(0) > 1
    case = case_of("block16", " q=bhsd.s3")
    for got, want in zip(
        numbers(case.problem, materialise(case)),
        numbers(case.problem, materialise(case_of("block16"))),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_empty_sequences_have_scales_too():
    x = materialise(Case.parse("pass=fwd s=0x5 d=8 dtype=bfloat16 fp8=block16 seed=3"))
    assert x.q_scale.shape == (1, 1, 0)
    assert numbers(case_of().problem, x)[0].shape == (1, 1, 0, 8)


def test_the_reference_is_of_the_numbers_themselves():
    case = case_of()
    x, p = materialise(case), case.problem
    terms = Terms(q_scale=x.q_scale, k_scale=x.k_scale, v_scale=x.v_scale)
    q, k, v = (np.zeros(shape) for shape in (p.shape_q, p.shape_k, p.shape_v))
    for name, out in (("q", q), ("k", k), ("v", v)):
        for b, h, i in np.ndindex(out.shape[:3]):
            scale = float(getattr(x, f"{name}_scale")[b, h, i // 16])
            out[b, h, i] = getattr(x, name)[b, h, i].double().numpy() * scale
    q, k, v = map(torch.from_numpy, (q, k, v))
    plain = dataclasses.replace(p, fp8="")
    want, got = reference.forward(plain, q, k, v), reference.forward(p, x.q, x.k, x.v, terms)
    assert torch.equal(got.o, want.o)
    assert torch.equal(got.lse, want.lse)


def test_a_part_has_its_own_scales():
    case = case_of()
    x, p = materialise(case), case.problem
    terms = Terms(q_scale=x.q_scale, k_scale=x.k_scale, v_scale=x.v_scale)
    one, group, kv = slice(1, 2), slice(2, 4), slice(1, 2)
    part = terms.part(one, group, kv)
    small = dataclasses.replace(p, batch=1, heads_q=2, heads_kv=1)
    whole = terms.operands(p, x.q, x.k, x.v)
    some = part.operands(small, x.q[one, group], x.k[one, kv], x.v[one, kv])
    for got, of, heads in zip(some, whole, (group, kv, kv), strict=True):
        assert torch.equal(got, of[one, heads])


def test_copies_move_scales_with_what_they_scale():
    case = case_of("head")
    x, p = materialise(case), case.problem
    q, k, v = numbers(p, x)
    moved, heads = permute_batch_heads(x, (1, 0), (1, 0))
    other = numbers(p, moved)
    assert torch.equal(other[0], q[[1, 0]][:, list(heads)])
    assert torch.equal(other[1], k[[1, 0]][:, [1, 0]])
    order = list(reversed(range(p.seqlen_k)))
    assert torch.equal(numbers(p, permute_keys(x, order))[2], v[:, :, order])
    alone_case, alone = select_sequence(case, x, 1)
    assert torch.equal(numbers(alone_case.problem, alone)[1], k[1:])
    others_case, others = among_others(case, x, 1, batch=3, place=2)
    assert torch.equal(numbers(others_case.problem, others)[2][2], v[1])
    assert (others.k_scale > 0).all()
    assert torch.isfinite(numbers(others_case.problem, others)[1]).all()


def test_hidden_keys_become_other_finite_ones():
    case = case_of("block16", "")
    case = dataclasses.replace(
        case, problem=Case.parse(str(case).replace("fp8", "mask=causal fp8")).problem
    )
    x = materialise(case)
    changed, keeps = perturb_hidden(case, x, np.random.default_rng(0), row=3)
    assert keeps.any()
    assert (changed.k.float() != x.k.float()).any()
    assert torch.isfinite(changed.k.float()).all()
    assert torch.isfinite(changed.v.float()).all()


def test_a_write_to_a_scale_is_seen():
    x = materialise(case_of())
    was = before(x)
    x.k_scale[0, 1, 2] = 7.0
    x.k.view(torch.uint8)[0, 0, 0, 0] ^= 1
    assert [text.partition(",")[0] for text in modified(x, was)] == [
        "k: 1 elements changed", "k_scale: 1 elements changed",
    ]  # fmt: skip


def test_fp8_is_drawn_for_those_who_take_it_alone():
    drawn = distribution.draw(0, 120, TAKES)
    assert {case.problem.fp8 for case in drawn} >= {"tensor", "head", "block16", "block64"}
    assert all(TAKES.reason_against(case.problem) is None for case in drawn)
    assert not any(case.backward for case in drawn)
    plain = _Capabilities(head_dims_v=range(1, 257))
    both = dataclasses.replace(plain, fp8=("", "head"))
    rng = [random.Random(0), random.Random(0)]  # noqa: S311
    without = [sample(rng[0], Space.of(plain)) for _ in range(60)]
    some = [sample(rng[1], Space.of(both)) for _ in range(60)]
    assert not any(case.problem.fp8 for case in without)
    assert {case.problem.fp8 for case in some} == {"", "head"}
    kept = zip(without, some, strict=True)
    assert all(a == b for a, b in kept if not b.problem.fp8)


def test_fp8_may_be_all_that_is_drawn():
    both = _Capabilities(dtypes=("float16", "bfloat16"), fp8=("", "head", "block32"))
    for takes in (both, TAKES):
        drawn = distribution.draw(0, 60, takes, dtype="float8_e4m3fn")
        assert all(case.problem.storage == "float8_e4m3fn" for case in drawn)
        assert {case.problem.dtype for case in drawn} == set(takes.dtypes)
    assert any(not case.problem.fp8 for case in distribution.draw(0, 60, both))
    for none in (None, _Capabilities()):
        with pytest.raises(InvalidInputError, match="dtype='float8_e4m3fn': the capabilities"):
            distribution.draw(0, 1, none, dtype="float8_e4m3fn")


def test_each_corner_holds_what_it_says():
    drawn = distribution.draw(0, 140, TAKES)
    exact = [case for case in drawn if case.values.scales == "coarse"]
    assert len(SCALE_CORNERS) == 4
    assert {case.problem.fp8.rstrip("0123456789") for case in exact} == {"tensor", "head", "block"}


def test_a_case_shrinks_to_the_simplest_scales():
    start = case_of("block64", " scales.values=even")
    small = shrink(start, lambda case: case.problem.seqlen_k > 2, capabilities=TAKES)
    assert (small.problem.fp8, small.values.scales) == ("tensor", "uneven")
    both = dataclasses.replace(TAKES, fp8=("", "block"))
    small = shrink(start, lambda case: case.problem.seqlen_k > 2, capabilities=both)
    assert small.problem.fp8 == ""


def verdicts(kernel, lines):
    for line in lines:
        yield verify(Case.parse(line), kernel, Setup(), CpuBackend())


def plain_forward(wrong=""):
    """The formula in float32, with a fault if asked for."""

    def forward(problem, q, k, v, *, q_scale, k_scale, v_scale):
        k_scale = torch.ones_like(k_scale) if wrong == "no scale" else k_scale
        if wrong == "next block":
            k_scale = k_scale.roll(1, 2)
        terms = Terms(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        found = reference.forward(problem, q, k, v, terms)
        dtype = torch.float16 if wrong == "dtype" else torch.bfloat16
        return Outputs(found.o.to(dtype), found.lse.float())

    return Kernel(name="plain", forward=forward, capabilities=TAKES)


LINES = (LINE.format("block16"), LINE.format("head") + " scales.values=coarse",
         LINE.format("tensor") + " scales.values=ones")  # fmt: skip


def test_a_right_function_passes_and_a_wrong_one_fails():
    assert {record.verdict for record in verdicts(plain_forward(), LINES)} == {"pass"}
    (record,) = verdicts(plain_forward("no scale"), LINES[1:2])
    assert {f.check for f in record.failures} >= {"numerics"}
    (record,) = verdicts(plain_forward("next block"), LINES[:1])
    assert {f.check for f in record.failures} >= {"numerics"}
    (record,) = verdicts(plain_forward("dtype"), LINES[:1])
    assert {f.check for f in record.failures} == {"contract"}


def test_a_failure_says_which_declaration_would_mend_it():
    (right,) = loader.load(f"{KERNELS / 'launch_fp8.py'}:fp8")
    strict = dataclasses.replace(right.arithmetic, p_dtype="bfloat16")
    kernel = dataclasses.replace(right, arithmetic=strict)
    line = (
        "pass=fwd s=40x90 d=16 dtype=bfloat16 fp8=head v.values=offset scales.values=coarse seed=1"
    )
    record = verify(Case.parse(line), kernel, Setup(), CpuBackend(), explain=True)
    texts = " ".join(f.diagnosis for f in record.failures)
    assert "would pass if P in float8_e4m3fn were declared" in texts or "P in e4m3" in texts


def test_the_kernel_that_casts_p_to_e4m3_passes():
    (kernel,) = loader.load(f"{KERNELS / 'launch_fp8.py'}:fp8")
    drawn = distribution.draw(1, 8, kernel.takes, max_elements=20_000)
    records = [verify(case, kernel, Setup(), CpuBackend()) for case in drawn]
    assert {record.verdict for record in records} <= {"pass", "inconclusive"}
