import dataclasses

import pytest
from hypothesis import given

from fa_verify.case import Case, Values
from fa_verify.errors import InvalidInputError
from fa_verify.masks import Mask
from fa_verify.problem import Problem
from fa_verify.strategies import cases

LINE = "pass=bwd b=2 h=6/2 s=3x5 d=80/96 dtype=float32 dot=tf32 mask=causal.l4.topleft scale=-0.5"


@given(cases())
def test_a_line_reads_back_as_the_case(case):
    line = str(case)
    assert "\n" not in line
    assert Case.parse(line) == case
    assert Case.parse(line).id == case.id


def test_documents_read_back():
    mask = Mask(causal=True, documents=((3, 5), (0, 4), (0, 4), (2, 0)))
    problem = Problem(seqlen_q=5, seqlen_k=13, head_dim=8, head_dim_v=8, mask=mask)
    line = str(Case(problem=problem))
    assert "mask=causal.docs3x5-0x4*2-2x0 " in line
    assert Case.parse(line).problem == problem


def test_defaults_are_left_out():
    problem = Problem(seqlen_q=3, seqlen_k=5, head_dim=8, head_dim_v=8)
    assert str(Case(problem=problem)) == "pass=fwd s=3x5 d=8 dtype=float16 seed=0"


def test_the_id_is_stable_and_tells_cases_apart():
    case = Case.parse(f"{LINE} seed=7")
    assert len(case.id) == 12
    assert case.id == Case.parse(f"{LINE} seed=7").id
    assert case.id != dataclasses.replace(case, seed=8).id


def test_the_order_of_tokens_does_not_matter():
    tokens = f"{LINE} seed=7".split()
    assert Case.parse(" ".join(reversed(tokens))) == Case.parse(" ".join(tokens))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "pass, s, d, dtype, seed missing"),
        (LINE, "seed"),
        (f"{LINE} seed=x", "seed='x': must be an integer"),
        (f"{LINE} seed=7 seed=7", "token='seed=7'"),
        (f"{LINE} seed=7 colour=red", "token='colour=red'"),
        (f"{LINE} seed=7 seven", "token='seven'"),
        ("pass=both s=3x5 d=8 dtype=float16 seed=0", "pass='both'"),
        ("pass=fwd s=3x5 d=8 dtype=float64 seed=0", "dtype='float64'"),
        ("pass=fwd s=3x5 d=0 dtype=float16 seed=0", "head_dim=0"),
        ("pass=fwd s=-3x5 d=8 dtype=float16 seed=0", "seqlen_q=-3"),
        ("pass=fwd s=3x5x7 d=8 dtype=float16 seed=0", "3x5x7"),
        ("pass=fwd s=3x5 d=8 dtype=float16 mask=diagonal seed=0", "mask='diagonal'"),
        ("pass=fwd s=3x5 d=8 dtype=float16 mask=causal.r3 seed=0", "window_right=3"),
        ("pass=fwd s=3x5 d=8 dtype=float16 mask=l-1 seed=0", "window_left=-1"),
        ("pass=fwd s=3x5 d=8 dtype=float16 q=bhs seed=0", "layout='bhs'"),
        ("pass=fwd s=3x5 d=8 dtype=float16 scale=nan seed=0", "softmax_scale=nan"),
        ("pass=fwd s=3x5 d=8 dtype=float16 cap=-1 seed=0", "softcap=-1"),
        ("pass=fwd s=3x5 d=8 dtype=float16 dot=tf32 seed=0", "dot_precision='tf32'"),
        ("pass=fwd s=3x5 d=8 dtype=float16 qk.values=gauss seed=0", "qk='gauss'"),
        ("pass=fwd s=3x5 d=8 dtype=float16 logits=0 seed=0", "logits=0"),
        ("pass=fwd s=3x5 d=8 dtype=float16 mask=docs3x4 seed=0", "seqlen_k=5"),
        ("pass=fwd s=3x5 d=8 dtype=float16 mask=docs3-xy seed=0", "docs='xy'"),
        ("pass=fwd b=2 s=3x5 d=8 dtype=float16 mask=docs3x5 seed=0", "batch=2"),
        ("pass=fwd h=3/2 s=3x5 d=8 dtype=float16 seed=0", "heads_q=3"),
        ("pass=fwd b=two s=3x5 d=8 dtype=float16 seed=0", "b='two': must be an integer"),
        ("pass=fwd s=3x d=8 dtype=float16 seed=0", "s='3x': must be an integer, or two with 'x'"),
        ("pass=fwd s=3x5 d=a/8 dtype=float16 seed=0", "d='a/8'"),
        ("pass=fwd s=3x5 d=8 dtype=float16 mask=lx seed=0", "mask='lx': a window's side is lN"),
        ("pass=fwd s=3x5 d=8 dtype=float16 dropout=abc seed=0", "dropout='abc': must be a number"),
        ("pass=fwd s=3x5 d=8 dtype=float16 logits=big seed=0", "logits='big': must be a number"),
        ("pass=fwd s=3x5 d=8 dtype=float16 scale=x cap=y seed=0", "scale='x': must be a number"),
        # What else is wrong is not hidden by a seed that is missing.
        ("pass=fwd s=3x5 d=8 dtype=float16 dropout=abc", "dropout='abc'"),
        ("s=3x5 d=8 dtype=float64", "dtype='float64'"),
        # Nor is anything said of a term that is not there.
        ("pass=bwd s=3x5 d=8 dtype=float16 slopes.values=steep seed=0", "slopes.values='steep'"),
        ("pass=bwd s=3x5 d=8 dtype=float16 alibi=0 slopes.values=steep seed=0", "has no alibi"),
        ("pass=bwd s=3x5 d=8 dtype=float16 bias.values=large seed=0", "has no bias"),
        ("pass=bwd s=3x5 d=8 dtype=float16 bias.layout=bshd seed=0", "bias.layout='bshd'"),
        ("pass=bwd s=3x5 d=8 dtype=float16 sinks.values=large seed=0", "has no sinks"),
        ("pass=bwd s=3x5 d=8 dtype=float16 dlse.values=large seed=0", "has no dlse"),
        ("pass=fwd s=3x5 d=8 dtype=float16 dlse=1 seed=0", "only a backward pass"),
    ],
)
def test_malformed_lines_are_misuse(line, said):
    with pytest.raises(InvalidInputError) as error:
        Case.parse(line)
    assert said in str(error.value)


def test_what_a_case_does_not_use_is_not_in_its_line():
    problem = dataclasses.replace(Case.parse(f"{LINE} seed=7").problem, lse_grad=True)
    values = Values(bias="large", slopes="steep", sinks="high", dlse="spikes")
    text = str(Case(problem=problem, values=values, backward=False))
    assert "values" not in text.replace("qk.values", "").replace("v.values", "")
    assert "dlse" not in text
    assert str(Case.parse(text)) == text
    assert "dlse=1 dlse.values=spikes" in str(Case(problem=problem, values=values, backward=True))


def test_a_line_is_never_executed():
    with pytest.raises(InvalidInputError):
        Case.parse("pass=fwd s=3x5 d=8 dtype=float16 seed=__import__('os').getpid()")


@pytest.mark.parametrize("name", ["qk", "v", "do"])
def test_unknown_families_are_refused(name):
    with pytest.raises(InvalidInputError, match=f"{name}='gauss'"):
        Values(**{name: "gauss"})


@pytest.mark.parametrize("logits", [0.0, -1.0, float("inf"), float("nan")])
def test_the_logit_factor_is_finite_and_positive(logits):
    with pytest.raises(InvalidInputError, match="logits="):
        Values(logits=logits)
