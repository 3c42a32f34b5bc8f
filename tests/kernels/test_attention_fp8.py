"""`attention_fp8`: the operator over the kernel that test_forward_fp8.py holds to the formula."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fa_verify import Mask, Problem, ttir

FP8 = torch.float8_e4m3fn


def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 40, 32), (2, 2, 50, 32), (2, 2, 50, 16)
    given = [torch.randn(shape, generator=generator).to(FP8) for shape in shapes]
    scales = [torch.rand(shape, generator=generator) for shape in ((2, 4, 1), (1, 2, 4), (1, 1, 1))]
    return *given, *scales


def test_it_is_the_kernel(kernels):
    q, k, v, *scales = tensors()
    problem = Problem(
        batch=2, heads_q=4, heads_kv=2, seqlen_q=40, seqlen_k=50, head_dim=32, head_dim_v=16,
        dtype="float16", mask=Mask(causal=True, window_left=9), softcap=2.0,
    )  # fmt: skip
    names = ("q_scale", "k_scale", "v_scale")
    with ttir.execute() as run:
        got = kernels("attention_fp8").attention_fp8(
            q, k, v, *scales, causal=True, window_size=(9, 3), softcap=2.0,
            out_dtype=torch.float16, return_lse=True,
        )  # fmt: skip
        expected = kernels("forward_fp8").attention_forward_fp8(
            problem, q, k, v, **dict(zip(names, scales, strict=True))
        )
    assert run.incidents == []
    assert torch.equal(got[0], expected.o)
    assert torch.equal(got[1], expected.lse)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_it_compiles_whole(kernels, on_the_cpu):
    attention = kernels("attention_fp8").attention_fp8
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors()), attention(*tensors()))
    assert on_the_cpu == ["forward_fp8_kernel"] * 2


def test_fake_tensors_run_no_kernel(kernels, on_the_cpu):
    with FakeTensorMode():
        o, lse = kernels("attention_fp8").attention_fp8(*tensors(), return_lse=True)
    assert (o.shape, o.dtype, lse.shape) == ((2, 4, 40, 16), torch.bfloat16, (2, 4, 40))
    assert on_the_cpu == []


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            1,
            torch.ones(2, 2, 40, 32).to(torch.float8_e5m2),
            "quantise again to torch.float8_e4m3fn",
        ),
        (0, torch.ones(2, 4, 40, 32), r"q: torch.float32 \(2, 4, 40, 32\)"),
        (1, torch.ones(2, 2, 50, 31).to(FP8), r"k.shape=\(2, 2, 50, 31\): must agree"),
        (3, torch.ones(2, 3, 1), r"q_descale: torch.float32 \(2, 3, 1\)"),
        (5, torch.ones(()), r"v_descale: torch.float32 \(\)"),
    ],
)
def test_what_does_not_fit_is_refused(kernels, place, value, message):
    given = list(tensors())
    given[place] = value
    with ttir.execute(), pytest.raises(ValueError, match=message):
        kernels("attention_fp8").attention_fp8(*given)


def test_results_in_other_dtypes_are_refused(kernels):
    with ttir.execute(), pytest.raises(ValueError, match=r"out_dtype=torch\.float32: must be"):
        kernels("attention_fp8").attention_fp8(*tensors(), out_dtype=torch.float32)
