"""What is rounded on the way to o and the gradients is declared; (B72) to (B74).

Each emulator passes as it is declared and fails where it is not, or the failure says what explains
it; defects that are planted beside what is declared are still found.
"""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import torch

from fa_verify import Arithmetic, Outputs, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.bounds import bound_forward
from fa_verify.case import Case
from fa_verify.inputs import materialise
from fa_verify.verify import verify

HERE = pathlib.Path(__file__).parents[1] / "benchmarks" / "right_implementations"
HALF = ("float16", "bfloat16")
ONE = "h=2/2 s=30x60 d=16"
UNDECLARED = [
    ("eager.py:eager", HALF, "h=2/2 s=20x60 d=32 logits=4.0", "eager attention"),
    ("eager.py:eager_sinks", HALF, "h=2/2 s=20x60 d=32 sinks=1 logits=4.0", "eager attention"),
    ("eager.py:sdpa_math_reduced", HALF, "h=2/2 s=20x60 d=32 logits=10.0", "eager attention"),
    ("gradients.py:both_prescaled", HALF, "h=2/2 s=20x60 d=32 logits=4.0", "multiplied by"),
    ("gradients.py:heads_stored", HALF, "h=8/2 s=30x40 d=32", "dv of each head rounded"),
    ("gradients.py:blocks_stored", HALF, "h=1/1 s=150x150 d=16", "would pass if"),
    (
        "sdpa.py:sdpa_math_gqa_gradients",
        ("bfloat16",),
        (
            "h=3/3 s=127x129 d=128 mask=causal bias=hk v=bshd qk.values=decreasing "
            "v.values=zero-mean do.values=near-max seed=613446962"
        ),
        "dbias outside its bound",
    ),
    ("sdpa.py:sdpa_flash_cpu_gradients", ("bfloat16",), "h=2/2 s=300x40 d=32", ""),
    ("parts.py:chunks_in_turn", ("bfloat16",), "h=2/2 s=30x200 d=16", ""),
    (
        "parts.py:sigmoid_ring",
        (*HALF, "float32"),
        "h=2/2 s=60x90 d=16 logits=30.0 v.values=mixed",
        "by a sigmoid were declared: Arithmetic(merged_by_sigmoid=True)",
    ),
    ("parts.py:ring", ("float32",), "h=2/2 s=60x90 d=16 logits=300.0 v.values=ones", ""),
    ("algorithms.py:tanh_approx", (*HALF, "float32"), f"{ONE} cap=20.0 logits=10.0", "tanh.approx"),
    ("algorithms.py:above", ("float16",), ONE, ""),
]
OTHERWISE = {  # what else is declared
    "parts.py:chunks_in_turn": Arithmetic(merges=24),
    "parts.py:sigmoid_ring": Arithmetic(merges=8),
    "sdpa.py:sdpa_math_gqa_gradients": Arithmetic(
        p_dtype="float32", ds_dtype="float32", delta_from_p_dp=True
    ),
    "sdpa.py:sdpa_flash_cpu_gradients": Arithmetic(exp2_ulps=2048),
}


def _judged(kernel, text, *, explain=False):
    case = Case.parse(f"pass=bwd {text}" if "seed=" in text else f"pass=bwd {text} seed=3")
    return verify(case, kernel, Setup(), CpuBackend(), explain=explain)


def _loaded(name):
    (kernel,) = loader.load(str(HERE / name))
    return kernel


@pytest.mark.parametrize(
    ("name", "dtype", "text", "said"),
    [(name, dtype, text, said) for name, dtypes, text, said in UNDECLARED for dtype in dtypes],
)
def test_what_is_stored_passes_declared_and_fails_undeclared(name, dtype, text, said):
    kernel = _loaded(name)
    declared = _judged(kernel, f"{text} dtype={dtype}")
    assert declared.verdict == "pass", (declared.reason, declared.failures)
    plain = dataclasses.replace(kernel, arithmetic=OTHERWISE.get(name, Arithmetic()))
    undeclared = _judged(plain, f"{text} dtype={dtype}", explain=True)
    assert undeclared.verdict == "fail"
    assert said in str(undeclared.failures)


def _without_the_last_key(problem, q, k, v):
    k = torch.cat((k[:, :, :-1], k[:, :, -1:] - 30.0), 2)
    return _loaded("eager.py:eager").forward(problem, q, k, v)


def _other_scale(problem, q, k, v):
    return _loaded("eager.py:eager").forward(problem, q * 1.05, k, v)


def _two_percent(problem, q, k, v):
    return Outputs(_loaded("eager.py:eager").forward(problem, q, k, v).o * 1.02)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("wrong", [_without_the_last_key, _other_scale, _two_percent])
def test_a_defect_of_eager_attention_is_found(wrong, dtype):
    kernel = dataclasses.replace(_loaded("eager.py:eager"), forward=wrong)
    assert _judged(kernel, f"h=2/2 s=20x60 d=32 dtype={dtype} logits=1.0").verdict == "fail"


def _scaled_by_head(problem, q, k, v, outputs, do, *, factor):
    kernel = _loaded("gradients.py:heads_stored")
    found = kernel.backward(problem, q, k, v, outputs, do)
    dk = found.dk.clone()
    dk[:, 1] *= factor
    return dataclasses.replace(found, dk=dk)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "pass"), (0.9, "fail"), (1.03, "fail")])
def test_a_wrong_gradient_of_a_stored_head_is_found(factor, verdict, dtype):
    kernel = _loaded("gradients.py:heads_stored")
    kernel = dataclasses.replace(
        kernel, backward=lambda *operands: _scaled_by_head(*operands, factor=factor)
    )
    assert _judged(kernel, f"h=8/2 s=30x40 d=32 dtype={dtype}").verdict == verdict


@pytest.mark.parametrize("name", ["chunks_in_turn", "sigmoid_ring", "two_stored_parts"])
def test_a_part_that_is_merged_wrongly_is_found(name):
    kernel = _loaded(f"parts.py:{name}")

    def twice(problem, q, k, v):
        """The first part once more."""
        size = problem.seqlen_k // 8
        more = [torch.cat((x, x[:, :, :size]), 2) for x in (k, v)]
        longer = dataclasses.replace(problem, seqlen_k=problem.seqlen_k + size)
        outputs = kernel.forward(longer, q, *more)
        return Outputs(outputs.o, outputs.lse)

    wrong = dataclasses.replace(kernel, forward=twice)
    assert _judged(wrong, "h=2/2 s=30x160 d=16 dtype=bfloat16").verdict == "fail"


def test_a_dp_that_overflows_says_nothing():
    """P dP of a hidden key is 0 times infinity where dP is stored in float16; (B9)."""
    kernel = _loaded("eager.py:eager")
    text = "h=2/1 s=20x30 d=64 mask=causal dtype=float16 v.values=near-max do.values=near-max"
    judged = _judged(kernel, text)
    assert judged.verdict == "inconclusive", judged.failures


def test_a_product_of_p_and_dp_may_be_stored_before_delta_is_subtracted():
    """As on a GPU, where an element of dbias was one subnormal step off that is none of dS's."""
    text = (
        "h=2/2 s=189x59 d=19 dtype=float16 bias=hqk q=bhsd.shared k=bshd do=bhsd.at3 "
        "bias.layout=bhsd.s1 qk.values=heavy-tails seed=1420953260"
    )
    judged = _judged(_loaded("eager.py:eager_stored"), text)
    assert judged.verdict == "pass", judged.failures
    assert judged.tensors["dbias"].ratio > 0.6


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("sinks", ["low", "normal"])
def test_what_ds_misses_zero_by_goes_to_the_maximum_beside_a_sink(sinks, dtype):
    """Here dP is nearly the same for all keys, so that P's roundings are most of what dS is off."""
    text = (
        f"h=20/1 s=13x13 d=112 dtype={dtype} mask=causal sinks=1 qk.values=zeros v.values=offset "
        f"do.values=ones sinks.values={sinks} seed=700166724"
    )
    judged = _judged(_loaded("eager.py:eager_sinks"), text)
    assert judged.verdict == "pass", judged.failures


@pytest.mark.parametrize(
    ("of", "factor", "verdict"),
    [("q", 1.0, "pass"), ("q", 0.9, "fail"), ("sinks", 1.0, "pass"), ("sinks", 0.2, "fail")],
)
def test_a_wrong_gradient_beside_a_sink_is_found(of, factor, verdict):
    kernel = _loaded("eager.py:eager_sinks")

    def forward(problem, q, k, v, sinks):
        x = {"q": q, "sinks": sinks}[of]
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * factor)
        return kernel.forward(problem, q, k, v, sinks=sinks)

    wrong = dataclasses.replace(kernel, forward=forward)
    judged = _judged(wrong, "h=2/2 s=20x60 d=32 sinks=1 dtype=float16 logits=0.3")
    assert judged.verdict == verdict
    assert all(x.title.startswith(f"d{of} outside") for x in judged.failures)


@pytest.mark.parametrize("wrong", [False, True])
def test_what_is_prescaled_is_read_in_tf32_by_the_backward_pass(wrong):
    """Not what tf32 makes of q and k, times the root of the scale; (B5)."""
    kernel = _loaded("gradients.py:both_prescaled")

    def backward(*operands):
        found = kernel.backward(*operands)
        return dataclasses.replace(found, dk=found.dk * 1.01)

    kernel = dataclasses.replace(kernel, backward=backward) if wrong else kernel
    text = (
        "h=3/3 s=1x16 d=16 dtype=float32 dot=tf32 mask=causal scale=-20.0 qk.values=zeros "
        "v.values=zero-mean seed=610563421"
    )
    assert _judged(kernel, text).verdict == ("fail" if wrong else "pass")


def test_a_hidden_key_that_is_prescaled_stays_finite():
    """It is changed for another, and 0 times infinity would be NaN in dq; (B5)."""
    text = (
        "h=2/1 s=3x3 d=64 dtype=float16 mask=causal.docs1x1*3 scale=3000.0 "
        "qk.values=subnormal-p v.values=zero-mean seed=1029699358"
    )
    judged = _judged(_loaded("gradients.py:both_prescaled"), text)
    assert judged.verdict == "pass", judged.failures


def test_sums_in_half_may_overflow_before_a_scale_of_zero():
    """And infinity times 0 is NaN; (B9), (B73)."""
    text = "s=1x101 d=16 dtype=float16 scale=0.0 qk.values=row-shift-far v.values=heavy-tails"
    judged = _judged(_loaded("gradients.py:blocks_stored"), text)
    assert judged.verdict == "inconclusive", judged.failures


@pytest.mark.parametrize(("merges", "inside"), [(1, False), (2000, True)])
def test_merges_that_follow_one_another_add_up(merges, inside):
    """Keys with one logit of thousands, one key a part: each merge rounds lse once more."""
    case = Case.parse(
        "pass=fwd s=4x2000 d=16 dtype=float32 qk.values=equal-keys logits=3000.0 seed=3"
    )
    x = materialise(case)
    problem = case.problem
    v = torch.ones_like(x.v)
    o = _one_by_one(problem, x.q, x.k)
    arithmetic = Arithmetic(merged_by_lse=True, merges=merges)
    bounded, _ = bound_forward(problem, arithmetic, x.q, x.k, v)
    error = (o.double() - bounded.reference).abs()
    assert bool((error <= bounded.det).all()) == inside


def _one_by_one(problem, q, k):
    """O of values of one, as a ring of as many devices as keys has it."""
    s = (q @ k.mT) * problem.scale
    o, lse = torch.ones_like(s[..., :1]), s[..., :1]
    for own in s[..., 1:].split(1, -1):
        top = torch.maximum(lse, own)
        both = top + ((lse - top).exp() + (own - top).exp()).log()
        o, lse = (lse - both).exp() * o + (own - both).exp(), both
    return o
