"""The right implementations of `benchmarks/` run, and take what is drawn."""

import dataclasses
import pathlib

import pytest
import torch

from fa_verify import Arithmetic, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.bounds import bound_forward
from fa_verify.case import Case
from fa_verify.verify import verify

HERE = pathlib.Path(__file__).parents[1] / "benchmarks" / "right_implementations"
ALL = "bias=hqk alibi=1 sinks=1 dropout=0.2 dlse=1"
CASES = {
    "emulated.py": f"b=2 h=4/2 s=20x35 d=16 dtype=float16 mask=causal {ALL}",
    "varied.py": f"h=2/1 s=33x50 d=8 dtype=bfloat16 mask=causal.docs20x30-0x4-13x16 cap=5.0 {ALL}",
    "algorithms.py": f"h=2/1 s=33x50 d=8 dtype=float32 mask=causal cap=5.0 {ALL}",
    "gradients.py": f"b=2 h=4/2 s=20x35 d=16 dtype=bfloat16 mask=causal {ALL}",
    "halves.py": f"b=2 h=4/2 s=20x35 d=16 dtype=float16 mask=causal {ALL}",
    "parts.py": f"h=2/1 s=33x50 d=8 dtype=float32 mask=causal cap=5.0 {ALL}",
    "eager.py": "b=2 h=4/2 s=20x35 d=16 dtype=bfloat16 mask=causal",
    "fp8.py": "h=4/2 s=20x90 d=48 dtype=bfloat16 fp8=block32 mask=causal cap=5.0",
    "ways_launch.py": "b=2 h=4/2 s=40x70 d=20/24 dtype=float16 mask=causal",
    "sdpa.py:sdpa_math": "b=2 h=2/2 s=40x70 d=16 dtype=bfloat16 mask=l9.pattern:dilated:3",
    "sdpa.py:sdpa_math_gqa_gradients": "b=2 h=4/2 s=40x70 d=16 dtype=float16 mask=causal bias=hk",
    "sdpa.py:sdpa_flash_cpu_gradients": "b=2 h=2/2 s=70x70 d=16 dtype=bfloat16 mask=causal",
    "sdpa.py:sdpa_flash_cpu": "b=2 h=2/2 s=40x70 d=16 dtype=float16 mask=l20 bias=hqk",
    "flex.py:flex_uncompiled": "b=2 h=4/2 s=40x70 d=16 dtype=float32 mask=causal alibi=1 dlse=1",
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", CASES)
def test_a_right_implementation_passes(name):
    for kernel in loader.load(str(HERE / name)):
        backward = "bwd" if kernel.backward is not None else "fwd"
        text = CASES[name] if kernel.takes.sinks else CASES[name].replace("sinks=1 ", "")
        text = text if kernel.takes.lse_grad else text.replace(" dlse=1", "")
        case = Case.parse(f"pass={backward} {text} seed=1")
        record = verify(case, kernel, Setup(), CpuBackend())
        assert record.verdict == "pass", (kernel.name, record.reason, record.failures)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_alibi_of_large_numbers_must_be_declared(dtype):
    """Slope times key rounds more than times distance; a forgotten correction is no rounding."""
    (kernel,) = loader.load(str(HERE / "algorithms.py:by_key"))
    text = "h=4/2 s=20x50 d=16 mask=causal alibi=1 slopes.values=steep seed=3"
    case = Case.parse(f"pass=bwd {text} dtype={dtype}")
    plain = dataclasses.replace(kernel, arithmetic=Arithmetic())

    def uncorrected(problem, q, k, v, alibi_slopes):
        outputs = kernel.forward(problem, q, k, v, alibi_slopes=alibi_slopes)
        return dataclasses.replace(outputs, lse=outputs.lse + 30 * alibi_slopes[:, None])

    wrong = dataclasses.replace(kernel, forward=uncorrected)
    judged = [verify(case, each, Setup(), CpuBackend()) for each in (kernel, plain, wrong)]
    assert [record.verdict for record in judged] == ["pass", "fail", "fail"]
    assert {f.title for f in judged[1].failures} == {"lse outside its bound"}
    explained = verify(case, plain, Setup(), CpuBackend(), explain=True)
    assert "ALiBi as slope times key" in str(explained.failures)


def test_a_p_that_is_divided_before_its_cast_must_be_declared():
    """Beside 50 keys with the weight it is subnormal in float16, where exp(S - m) is not."""
    (kernel,) = loader.load(str(HERE / "algorithms.py:normalised"))
    problem = Case.parse("pass=fwd s=4x200 d=1 dtype=float16 seed=1").problem
    tiny = torch.arange(200) >= 50
    q, k, v = torch.ones(4), torch.where(tiny, -9.0, 0.0), tiny.float()  # 41.4 steps of subnormals
    q, k, v = (x.half().view(1, 1, -1, 1) for x in (q, k, v))
    o = kernel.forward(problem, q, k, v).o.double()
    ratios = []
    for arithmetic in (kernel.arithmetic, Arithmetic()):
        bounded, _ = bound_forward(problem, arithmetic, q, k, v)
        ratios.append(float(((o - bounded.reference).abs() / bounded.det).max()))
    assert 0.1 < ratios[0] <= 1 < ratios[1]
