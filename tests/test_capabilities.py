import dataclasses

import pytest

from fa_verify import distribution
from fa_verify.arithmetic import Arithmetic
from fa_verify.capabilities import Capabilities
from fa_verify.distribution import Space
from fa_verify.errors import InvalidInputError
from fa_verify.kernel import Kernel
from fa_verify.layouts import BSHD, Layout
from fa_verify.masks import Mask
from fa_verify.problem import Problem

EVERYTHING = Capabilities(
    dot_precisions=("ieee", "tf32", "tf32x3"),
    head_dims_v=range(1, 257),
    window=True,
    softcap=True,
    documents=True,
)
FIELDS = {"seqlen_q": 3, "seqlen_k": 5, "head_dim": 80, "head_dim_v": 80}


def _problem(**fields):
    return Problem(**{**FIELDS, **fields})


CASES = [
    ({"dtypes": ("float16",)}, {"dtype": "bfloat16"}, "dtype=bfloat16"),
    ({"dot_precisions": ("ieee",)}, {"dtype": "float32", "dot_precision": "tf32"}, "=tf32"),
    ({"head_dims": (64, 128)}, {}, "head_dim=80"),
    ({"head_dims_v": (64,)}, {}, "head_dim_v=80"),
    ({"head_dims_v": None}, {"head_dim_v": 64}, "head_dim_v=64"),
    ({"alignments": ("bottom-right",)}, {"mask": Mask(causal=True, alignment="top-left")}, "top-"),
    ({"alignments": ()}, {"mask": Mask(causal=True)}, "bottom-right"),
    ({"window": False}, {"mask": Mask(causal=True, window_left=3)}, "sliding window"),
    ({"window": False}, {"mask": Mask(window_right=3)}, "sliding window"),
    ({"softcap": False}, {"softcap": 30.0}, "softcap"),
    ({"documents": False}, {"mask": Mask(documents=((1, 1), (2, 4)))}, "packed documents"),
    ({"gqa": False}, {"heads_q": 4, "heads_kv": 2}, "group=2"),
    ({"empty": False}, {"seqlen_q": 0}, "an empty sequence"),
    ({"empty": False}, {"seqlen_k": 0}, "an empty sequence"),
    ({"layouts": False}, {"layout_k": Layout(pad=(0, 0, 8, 0))}, "strided layouts"),
    ({"layouts": False}, {"layout_v": Layout(shared_heads=True)}, "strided layouts"),
    ({"int64_offsets": False}, {"layout_v": Layout(pad=(0, 0, 1 << 29, 0))}, "past 2^31"),
    ({"accepts": lambda p: f"seqlen_q={p.seqlen_q}"}, {}, "seqlen_q=3"),
]


@pytest.mark.parametrize(("declared", "fields", "said"), CASES)
def test_what_is_not_declared_is_refused_with_its_reason(declared, fields, said):
    problem = _problem(**fields)
    assert EVERYTHING.reason_against(problem) is None
    narrow = Capabilities(**{**_as_dict(EVERYTHING), **declared})
    reason = narrow.reason_against(problem)
    assert reason is not None
    assert said in reason


def _as_dict(c):
    return {name: getattr(c, name) for name in Capabilities.__dataclass_fields__}


def test_a_full_mask_needs_no_alignment():
    assert Capabilities(alignments=()).reason_against(_problem()) is None
    apart = _problem(mask=Mask(documents=((1, 1), (2, 4))))
    assert Capabilities(alignments=(), documents=True).reason_against(apart) is None


def test_plain_layouts_are_always_taken():
    problem = _problem(layout_q=BSHD, layout_k=BSHD)
    assert Capabilities(layouts=False).reason_against(problem) is None


def test_the_dot_precision_matters_to_float32_alone():
    assert Capabilities(dot_precisions=("tf32",)).reason_against(_problem()) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dtypes": ("fp16",)}, r"dtypes=\('fp16',\): 'fp16' is none of float16, bfloat16"),
        ({"dtypes": "float16"}, r"dtypes='float16': must be a tuple, such as \('float16',\)"),
        ({"alignments": "bottom-right"}, "alignments='bottom-right': must be a tuple"),
        ({"alignments": ("left",)}, "'left' is none of bottom-right, top-left"),
        ({"dot_precisions": ("fp32",)}, "'fp32' is none of ieee, tf32, tf32x3"),
        ({"bias": "hqk"}, "bias='hqk': must be a tuple"),
        ({"bias": ("qh",)}, "'qh' is none of b, h, q, k, bh"),
        ({"bias": True}, "bias=True: must be a tuple"),
        ({"patterns": ("prefix", "moon")}, "'moon' is none of block-sparse"),
        ({"head_dims": 64}, "head_dims=64: must be a tuple or range of integers"),
        ({"head_dims_v": "64"}, "head_dims_v='64': must be a tuple or range"),
        ({"window": (128, 0)}, r"window=\(128, 0\): must be True or False"),
        ({"sinks": "yes"}, "sinks='yes': must be True or False"),
    ],
)
def test_what_would_declare_something_else_is_refused(fields, said):
    with pytest.raises(InvalidInputError, match=said):
        Capabilities(**fields)


def raises(problem):
    raise KeyError(problem.seqlen_q)


@pytest.mark.parametrize(
    ("accepts", "said"),
    [
        (lambda p: p.seqlen_q == p.seqlen_k, "returned False; it must return None where"),
        (lambda _: True, "returned True; it must return None where"),
        (raises, "raises at .*: raised KeyError: 3, for .*; it must return None where"),
    ],
)
def test_a_last_word_that_is_no_answer_is_refused(accepts, said):
    problem = Problem(seqlen_q=3, seqlen_k=5, head_dim=8, head_dim_v=8)
    with pytest.raises(InvalidInputError, match=said):
        Capabilities(accepts=accepts).reason_against(problem)
    assert Capabilities(accepts=lambda _: None).reason_against(problem) is None


def test_any_container_of_head_dims_will_do():
    for head_dims in ((), (64,), [64, 128], {64}, frozenset({64}), range(8, 257, 8)):
        assert Capabilities(head_dims=head_dims, head_dims_v=head_dims).head_dims is head_dims


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"p_dtype": "fp16"}, "p_dtype='fp16': must be one of input, float16"),
        ({"ds_scale": True}, "ds_scale=True: must be one of before, after, None"),
        ({"prescaled": "v"}, "prescaled='v': must be one of q, k, qk, None"),
        ({"half_dots": "o"}, "half_dots='o': must be one of qk, pv, all, None"),
        ({"exp2_ulps": float("inf")}, "exp2_ulps=inf: must be a finite number"),
        ({"dot_ulps": "2"}, "dot_ulps='2': must be a finite number"),
        ({"tanh_ulps": -1}, "tanh_ulps=-1: must be a finite number, at least 0"),
        ({"block_n": 0}, "block_n=0: must be an integer above 0"),
        ({"merges": 0}, "merges=0: must be an integer above 0"),
        ({"p_scale": 0.0}, "p_scale=0.0: must be a number from 2"),
        ({"part_dtype": "float16"}, "part_dtype='float16': must be one of float32, input"),
        ({"block_n": 64.0}, "block_n=64.0: must be an integer above 0"),
    ],
)
def test_arithmetic_that_no_bound_is_derived_from_is_refused(fields, said):
    with pytest.raises(InvalidInputError, match=said):
        Arithmetic(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"forward": None}, "forward=None: must be a function"),
        ({"capabilities": {"backward": False}}, "capabilities={'backward': False}: must be Cap"),
        ({"arithmetic": "float32"}, r"arithmetic='float32': must be Arithmetic\(...\)"),
    ],
)
def test_a_kernel_of_other_things_is_refused(fields, said):
    with pytest.raises(InvalidInputError, match=said):
        Kernel(**{"name": "k", "forward": print} | fields)


@pytest.mark.parametrize("declared", [None, Capabilities(window=True)])
def test_a_kernel_without_a_backward_pass_is_asked_for_none(declared):
    """And for all else that it would be asked for with one."""
    without, with_one = (
        Kernel(name="k", forward=print, backward=backward, capabilities=declared)
        for backward in (None, "autograd")
    )
    cases, others = (distribution.draw(2, 200, kernel.takes) for kernel in (without, with_one))
    assert not any(case.backward for case in cases)
    assert sum(case.backward for case in others) > 50
    spaces = Space.of(without.takes), Space.of(with_one.takes, backward=False)
    for field in dataclasses.fields(Space):
        if field.name != "capabilities":
            assert getattr(spaces[0], field.name) == getattr(spaces[1], field.name), field.name
