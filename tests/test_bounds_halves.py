"""What is kept in half, or in int8, passes as it is declared, and nothing coarser.

Equations (B60), (B61) and (B75) to (B78) of docs/bounds.md.
"""

from __future__ import annotations

import dataclasses
import functools
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
PLAIN = "h=2/2 s=30x60 d=64"
POSITIVE = f"{PLAIN} qk.values=uniform-positive"
ONES = "s=30x150 d=16 v.values=ones"


@functools.cache
def _loaded(name):
    (kernel,) = loader.load(str(HERE / name))
    return kernel


def _judged(kernel, text, *, explain=False):
    case = Case.parse(f"pass={'fwd' if kernel.backward is None else 'bwd'} {text} seed=3")
    return verify(case, kernel, Setup(), CpuBackend(), explain=explain)


@pytest.mark.parametrize(
    ("name", "dtypes", "text", "said"),
    [
        ("halves.py:half_qk", HALF[:1], PLAIN, "sums of q k^T in float16"),
        ("halves.py:half_pv", HALF[:1], "s=4x300 d=16", "would pass if"),
        ("halves.py:half_pv_promoted", HALF[:1], "h=2/2 s=30x200 d=16", "would pass if"),
        ("halves.py:half_sums", HALF[:1], PLAIN, "half_dots="),
        ("halves.py:int8_p", (*HALF, "float32"), PLAIN, "would pass if"),
        ("halves.py:half_lse", HALF, PLAIN, "lse in "),
        ("halves.py:half_bias", HALF, "h=2/2 s=30x60 d=16 bias=hqk", "a bias times log2(e)"),
    ],
)
def test_it_passes_declared_and_fails_undeclared(name, dtypes, text, said):
    for dtype in dtypes:
        kernel = _loaded(name)
        declared = _judged(kernel, f"{text} dtype={dtype}")
        assert declared.verdict == "pass", (declared.reason, declared.failures)
        plain = dataclasses.replace(kernel, arithmetic=Arithmetic())
        undeclared = _judged(plain, f"{text} dtype={dtype}", explain=True)
        assert undeclared.verdict == "fail"
        assert said in str(undeclared.failures)


def _cut_sums(a, b):
    total = torch.zeros(*a.shape[:-1], b.shape[-1])
    for at in range(a.shape[-1]):
        total = total + a[..., at : at + 1] @ b[..., at : at + 1, :]
        total = (total.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return total


class _Defects:
    """Forward passes of kernels that declare half, and are coarser, or wrong by as little."""

    @staticmethod
    def sums_of_logits(problem, q, k, v):
        """Every product is added in bfloat16, toward zero."""
        return _attended(_cut_sums(q.float(), k.float().mT) * problem.scale, v)

    @staticmethod
    def sums_of_p_v(problem, q, k, v):
        """The same of P V."""
        s = (q.float() @ k.float().mT) * problem.scale
        p = (s - s.amax(-1, keepdim=True)).exp()
        o = _cut_sums(p, v.float()) / p.sum(-1, keepdim=True)
        return Outputs(o.to(v.dtype), s.logsumexp(-1))

    @staticmethod
    def logits_without_a_column(problem, q, k, v):
        """Head_dim is truncated by one."""
        return _attended((q[..., 1:].float() @ k[..., 1:].float().mT) * problem.scale, v)

    @staticmethod
    def forty(problem, q, k, v):
        """P in 40ths, cut, where 127ths are declared."""
        return _attended((q.float() @ k.float().mT) * problem.scale, v, 40)

    @staticmethod
    def lse_of_the_maximum(problem, q, k, v):
        """Lse in the inputs' dtype, 1% too large."""
        s = (q.float() @ k.float().mT) * problem.scale
        return Outputs(_attended(s, v).o, (s.logsumexp(-1) * 1.01).to(q.dtype))

    @staticmethod
    def bias_of_three_digits(problem, q, k, v, bias):
        """The bias times log2 e of three digits."""
        return _attended((q.float() @ k.float().mT) * problem.scale + bias.float() * 0.99, v)


def _attended(s, v, steps=0):
    p = (s - s.amax(-1, keepdim=True)).exp()
    cast = torch.trunc(p * steps) / steps if steps else p.to(v.dtype).float()
    return Outputs((cast @ v.float() / p.sum(-1, keepdim=True)).to(v.dtype), s.logsumexp(-1))


@pytest.mark.parametrize(
    ("arithmetic", "forward", "text"),
    [
        (Arithmetic(half_dots="qk"), _Defects.sums_of_logits, POSITIVE),
        (Arithmetic(half_dots="qk"), _Defects.logits_without_a_column, PLAIN),
        (Arithmetic(half_dots="pv"), _Defects.sums_of_logits, POSITIVE),
        (Arithmetic(half_dots="pv"), _Defects.sums_of_p_v, ONES),
        (Arithmetic(half_dots="all"), _Defects.sums_of_logits, POSITIVE),
        (Arithmetic(p_dtype="int8", p_scale=127.0), _Defects.forty, ONES),
        (Arithmetic(lse_dtype="input"), _Defects.lse_of_the_maximum, PLAIN),
        (Arithmetic(bias_dtype="input"), _Defects.bias_of_three_digits, f"{PLAIN} bias=hqk"),
    ],
)
def test_a_defect_beyond_it_is_found(arithmetic, forward, text):
    kernel = dataclasses.replace(
        _loaded("halves.py:int8_p"), forward=forward, arithmetic=arithmetic
    )
    assert _judged(kernel, f"{text} dtype=float16").verdict == "fail"


@pytest.mark.parametrize(
    ("half", "text", "unknown"),
    [
        ("qk", "s=4x40 d=64 qk.values=huge", {"o", "lse"}),
        ("pv", "s=4x40 d=64 v.values=near-max", {"o"}),
    ],
)
def test_a_sum_that_may_overflow_float16_says_nothing(half, text, unknown):
    """(B9): float32 sums of the same values are judged."""
    case = Case.parse(f"pass=fwd {text} dtype=float16 seed=3")
    x = materialise(case)
    for arithmetic in (Arithmetic(half_dots=half), Arithmetic()):
        both = bound_forward(case.problem, arithmetic, x.q, x.k, x.v)
        found = {bounded.name for bounded in both if bounded.det.isinf().any()}
        assert found == (unknown if arithmetic.half_dots else set())


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "pass"), (1.5, "fail")])
def test_what_sums_lose_to_subnormals_is_multiplied_by_dropouts_factor(factor, verdict):
    kernel = _loaded("halves.py:half_sums")

    def backward(*operands, **terms):
        found = kernel.backward(*operands, **terms)
        return dataclasses.replace(found, dv=found.dv * factor)

    text = (
        "b=2 s=15x44 d=80/112 dtype=float16 mask=causal scale=-0.1 bias=bhk dropout=0.9 k=bshd "
        "v=bhsd.d1 do=bhsd.s8 qk.values=near-max v.values=indicator do.values=small"
    )
    case = Case.parse(f"pass=bwd {text} seed=676797791")
    changed = dataclasses.replace(kernel, backward=backward)
    assert verify(case, changed, Setup(), CpuBackend()).verdict == verdict


@pytest.mark.parametrize("passes", ["fwd", "bwd"])
def test_infinity_less_infinity_of_a_hidden_logit_says_nothing(passes):
    case = Case.parse(
        f"pass={passes} b=2 s=17x17 d=80 dtype=float16 bias=bhqk qk.values=heavy-tails "
        "bias.values=hides logits=100.0 seed=1359901711"
    )
    record = verify(case, _loaded("halves.py:half_sums"), Setup(), CpuBackend())
    assert record.verdict in ("pass", "inconclusive"), record.failures
    assert record.tensors["lse"].inconclusive


@pytest.mark.parametrize("moved", [True, False])
def test_a_sink_is_moved_along_with_alibi_by_key(moved):
    kernel = _loaded("algorithms.py:by_key")

    def forward(problem, q, k, v, *, sinks, alibi_slopes):
        if not moved:  # what the row's logits are moved by is missing in the sink
            shift = alibi_slopes * (problem.seqlen_k - problem.seqlen_q)
            sinks = sinks - shift
        return kernel.forward(problem, q, k, v, sinks=sinks, alibi_slopes=alibi_slopes)

    changed = dataclasses.replace(kernel, forward=forward)
    judged = _judged(changed, "h=4/2 s=20x50 d=16 mask=causal alibi=1 sinks=1 dtype=float16")
    assert judged.verdict == ("pass" if moved else "fail")


def test_alibi_by_key_beside_large_sinks_must_be_declared():
    kernel = _loaded("algorithms.py:by_key")
    text = "h=4/2 s=20x50 d=16 mask=causal alibi=1 sinks=1 slopes.values=steep dtype=float32"
    assert _judged(kernel, text).verdict == "pass"
    plain = dataclasses.replace(kernel, arithmetic=Arithmetic())
    assert _judged(plain, text).verdict == "fail"
