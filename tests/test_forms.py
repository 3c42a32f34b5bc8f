"""Forms that a card compiles: few, and together all that a kernel takes."""

import itertools

import pytest

from fa_verify import distribution, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.campaign.cases import CUDA_FORMS
from fa_verify.capabilities import Capabilities
from fa_verify.distribution import work
from fa_verify.distribution.forms import forms
from fa_verify.inputs import materialise

VARIANTS = (
    *("plain", "causal", "window", "documents", "pattern", "softcap", "head_dim_v"),
    *("bias", "alibi", "sinks", "dropout", "lse_grad"),
)
PRECISIONS = ("float16", "bfloat16", "float32/ieee", "float32/tf32", "float32/tf32x3")
EVERY = set(itertools.product(PRECISIONS, VARIANTS))


@pytest.fixture(scope="module")
def flash():
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    return kernel.takes


def met(cases):
    """Precisions and variants that cases have, told apart here once more."""
    found = set()
    for case in cases:
        p = case.problem
        there = {
            "causal": p.mask.causal,
            "window": windowed(p),
            "documents": p.mask.documents,
            "pattern": p.mask.pattern,
            "softcap": p.softcap,
            "head_dim_v": p.head_dim != p.head_dim_v,
            "bias": p.bias,
            "alibi": p.alibi,
            "sinks": p.sinks,
            "dropout": p.dropout,
            "lse_grad": p.lse_grad,
        }
        names = [name for name, value in there.items() if value] or ["plain"]
        found |= {(p.precision, name) for name in names}
    return found


def windowed(problem):
    return (problem.mask.window_left, problem.mask.window_right) != (None, None)


@pytest.mark.parametrize("seed", range(3))
def test_a_few_forms_have_every_variant_in_every_precision(flash, seed):
    chosen = distribution.draw(seed, 400, flash, forms=forms(seed, CUDA_FORMS, flash))
    assert len(EVERY - met(chosen)) <= 2
    first = range(seed * CUDA_FORMS, (seed + 1) * CUDA_FORMS)
    assert len(EVERY - met(distribution.draw(seed, 400, flash, forms=first))) > 15


@pytest.mark.parametrize("seed", range(4))
def test_the_first_forms_are_those_that_fast_paths_are_made_for(flash, seed):
    chosen = distribution.draw(seed, 400, flash, forms=forms(seed, CUDA_FORMS, flash))
    problems = [case.problem for form in range(4) for case in chosen[form::CUDA_FORMS]]
    bare = [case.problem for form in range(3) for case in chosen[form::CUDA_FORMS]]
    assert {p.dtype for p in bare} == {"float16", "bfloat16"}
    assert {p.mask.causal for p in bare} == {True, False}
    assert len({p.head_dim for p in bare}) >= 2
    assert not any(p.terms or windowed(p) for p in bare)
    assert all(p.sinks or windowed(p) for p in (case.problem for case in chosen[3::CUDA_FORMS]))
    for p in problems:
        assert p.head_dim in {64, 80, 96, 128, 256}
        assert not any((p.softcap, p.mask.documents, p.mask.pattern, set(p.terms) - {"sinks"}))
        for layout in (p.layout_q, p.layout_k, p.layout_v):
            assert layout.order.endswith("d")
            assert not any(elements % 8 for elements in (*layout.pad, layout.offset))


@pytest.mark.parametrize("name", ["flash_attention.py:flash", "attention_fp8.py:flash_fp8"])
@pytest.mark.parametrize("seed", range(2))
def test_usual_forms_reach_the_kernels_for_hopper(name, seed):
    (kernel,) = loader.load(f"kernels/{name}")
    chosen = distribution.draw(
        seed, 10 * CUDA_FORMS, kernel.takes, forms=forms(seed, CUDA_FORMS, kernel.takes)
    )
    reached = set()
    for form in range(4):
        case = min(
            (c for c in chosen[form::CUDA_FORMS] if c.problem.seqlen_q * c.problem.seqlen_k),
            key=lambda c: work(c.problem),
        )
        ran = CpuBackend().run(kernel, case.problem, materialise(case), Setup(), backward=False)
        reached |= {form} if "hopper_forward_kernel" in ran.config else set()
    assert len(reached) >= 3, reached


def test_what_a_kernel_is_compiled_for_is_the_forms_alone(flash):
    drawn = distribution.draw(3, 300, flash, forms=forms(3, 10, flash))
    for form in range(10):
        cases = drawn[form::10]
        fixed = {
            (
                *(p.precision, p.head_dim, p.head_dim_v, p.softcap > 0, p.mask.causal, p.bias),
                *(p.alibi, p.sinks, p.dropout > 0, bool(p.mask.documents)),
                p.mask.pattern.partition(":")[0],
            )
            for p in (case.problem for case in cases)
        }
        assert len(fixed) == 1


def test_forms_of_another_seed_are_others_and_a_dtype_holds(flash):
    assert forms(0, 4, flash) == forms(0, 4, flash)
    assert forms(0, 4, flash) != forms(1, 4, flash)
    chosen = forms(0, 4, flash, dtype="float32")
    cases = distribution.draw(0, 40, flash, dtype="float32", forms=chosen)
    assert {case.problem.dot_precision for case in cases} == {"ieee", "tf32", "tf32x3"}


def test_a_form_that_a_kernel_refuses_takes_no_place():
    def wide(problem):
        return None if problem.head_dim > 128 else "head_dim"

    takes = Capabilities(accepts=wide)
    drawn = distribution.draw(0, 60, takes, forms=forms(0, 6, takes))
    assert all(case.problem.head_dim > 128 for case in drawn)
    assert len({case.problem.head_dim for case in drawn}) <= 6
    never = Capabilities(accepts=lambda _: "nothing")
    assert len(forms(0, 3, never)) == 3  # and `draw` says what is refused
