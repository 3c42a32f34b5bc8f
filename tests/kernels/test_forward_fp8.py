"""The forward pass in fp8, against the formula in float64 of the rounded inputs."""

import math

import pytest
import torch

from fa_verify import Mask, Problem, loader, ttir
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.verify import verify

# Hopper's sums of fp8 products keep 13 bits: of a sum of up to 96 of one sign, 2^-13 a product in
# the worst case, and a quarter of its 3 steps of 32 in the mean.
SUM = 2.0**-11
# P is rounded to bfloat16, and so is o: 2^-9 of the largest value each.
ROUNDING = 2.0**-8


def quantised(shape, blocks, generator):
    """Rows of very unlike sizes as e4m3, and the scale of each block of them (batch, heads, n)."""
    batch, heads, seqlen, _ = shape
    x = torch.randn(shape, generator=generator)
    x *= 2.0 ** torch.randint(-6, 3, (batch, heads, seqlen, 1), generator=generator)
    rows = 1 << max(0, math.ceil(math.log2(max(1, -(-seqlen // blocks[2])))))
    most = x.abs().amax(-1)
    padded = torch.nn.functional.pad(most, (0, blocks[2] * rows - seqlen))
    by_block = padded.reshape(batch, heads, blocks[2], rows).amax(-1)
    for axis in (0, 1):
        if blocks[axis] == 1:
            by_block = by_block.amax(axis, keepdim=True)
    scale = by_block.clamp_min(1e-20) / 448.0
    whole = scale.repeat_interleave(rows, 2)[..., :seqlen, None]
    small = (x / whole).to(torch.float8_e4m3fn)
    return small, scale, small.double() * whole


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 64, "head_dim_v": 64, "mask": Mask(causal=True)},
        {"head_dim": 80, "head_dim_v": 48, "dtype": "float16", "softcap": 5.0},
        {"head_dim": 5, "head_dim_v": 7, "mask": Mask(window_left=20, window_right=4)},
        {"head_dim": 96, "head_dim_v": 96, "seqlen_q": 150, "mask": Mask(causal=True)},
    ],
    ids=["causal", "softcap", "window", "rows without keys"],
)
def test_matches_the_formula(kernels, scales, fields):
    p = Problem(**{"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 70, "seqlen_k": 90,
                   "dtype": "bfloat16", "softmax_scale": 0.05, **fields})  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    inputs, scaled, exact = {}, {}, {}
    for name, shape in (("q", p.shape_q), ("k", p.shape_k), ("v", p.shape_v)):
        blocks = {"tensor": (1, 1, 1), "head": (p.batch, shape[1], 1),
                  "block": (p.batch, shape[1], -(-shape[2] // 32))}[scales]  # fmt: skip
        inputs[name], scaled[f"{name}_scale"], exact[name] = quantised(shape, blocks, generator)
    inputs["k"] = inputs["k"].transpose(1, 2).contiguous().transpose(1, 2)
    with ttir.execute() as run:
        got = kernels("forward_fp8").attention_forward_fp8(p, **inputs, **scaled)
    assert run.incidents == []
    k, v = (exact[name].repeat_interleave(p.group, 1) for name in ("k", "v"))
    logits = p.scale * exact["q"] @ k.mT
    if p.softcap:
        logits = p.softcap * torch.tanh(logits / p.softcap)
    hidden = torch.from_numpy(~p.mask.allowed(p.seqlen_q, p.seqlen_k))
    logits = logits.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(logits, -1)
    o = torch.softmax(logits, -1).nan_to_num(0.0) @ v
    assert got.o.dtype == getattr(torch, p.dtype)
    assert torch.equal(got.lse == -math.inf, lse == -math.inf)
    logit = SUM * p.scale * (exact["q"].abs() @ k.mT.abs()).max()
    assert (got.lse - lse).nan_to_num(0.0).abs().max() < logit
    assert (got.o - o).abs().max() < (2 * logit + ROUNDING) * v.abs().max()


def test_empty_sequences_have_no_blocks_of_scales(kernels):
    p = Problem(seqlen_q=3, seqlen_k=0, head_dim=8, head_dim_v=8, dtype="bfloat16", fp8="block32")
    x = {name: torch.zeros(getattr(p, f"shape_{name}")).to(torch.float8_e4m3fn) for name in "qkv"}
    scales = {f"{name}_scale": torch.ones(p.shape_scale(name)) for name in "qkv"}
    assert scales["k_scale"].shape == (1, 1, 0)
    with ttir.execute() as run:
        got = kernels("forward_fp8").attention_forward_fp8(p, **x, **scales)
    assert run.incidents == []
    assert (got.o == 0).all()
    assert got.lse.isneginf().all()


FAST, GENERAL = "hopper_forward_kernel", "forward_fp8_kernel"


def launches(kernels, p, blocks=(1, 1, 1), factor=1.0):
    """o, lse and the kernel's name, for random inputs with scales of these shapes."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": p.shape_q, "k": p.shape_k, "v": p.shape_v}
    inputs = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    inputs = {name: x.to(torch.float8_e4m3fn) for name, x in inputs.items()}
    scales = {f"{name}_scale": torch.rand(blocks, generator=generator) for name in shapes}
    scales["q_scale"] *= factor
    with ttir.execute() as run:
        got = kernels("forward_fp8").attention_forward_fp8(p, **inputs, **scales)
    assert run.incidents == []
    (launch,) = run.launches
    return got, launch.kernel


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "case",
    [
        "b=2 h=4/2 s=100x230 fp8=head mask=causal",
        "h=2 s=192x70 fp8=tensor mask=causal",  # rows that see nothing
        "b=2 h=2 s=70x256 fp8=head",
        "h=2 s=150x230 fp8=head mask=causal.l70",
    ],
)
def test_each_configuration_for_hopper_passes_every_check(kernels, head_dim, case):
    (flash,) = loader.load("kernels/attention_fp8.py:flash_fp8")
    of = Case.parse(f"pass=fwd {case} d={head_dim} dtype=bfloat16 seed=1")
    lower = of.problem.mask.window_left is not None
    table = kernels("configs").HOPPER_FORWARD_FP8[head_dim]
    offered = sum(one_loop or not lower for *_, one_loop, _ in table)
    for config in range(offered):
        record = verify(of, flash, Setup(config=config), CpuBackend())
        assert record.verdict == "pass", record.failures
        assert record.configs == offered


@pytest.mark.parametrize(
    ("fields", "blocks", "kernel"),
    [
        ({}, (1, 1, 1), FAST),
        ({"mask": Mask(causal=True)}, (2, 2, 1), FAST),
        ({}, (2, 2, 3), GENERAL),
        ({"head_dim": 80, "head_dim_v": 80}, (1, 1, 1), GENERAL),
        ({"head_dim_v": 96}, (1, 1, 1), GENERAL),
        ({"softcap": 3.0}, (1, 1, 1), GENERAL),
        ({"mask": Mask(window_left=3)}, (1, 1, 1), FAST),
    ],
)
def test_hopper_takes_what_it_has_a_path_for(kernels, fields, blocks, kernel):
    p = Problem(**{"batch": 2, "heads_q": 2, "heads_kv": 2, "seqlen_q": 70, "seqlen_k": 90,
                   "head_dim": 64, "head_dim_v": 64, "dtype": "float16", **fields})  # fmt: skip
    assert launches(kernels, p, blocks)[1] == kernel


def test_a_scale_of_zero_makes_all_keys_alike_and_one_below_zero_is_no_number(kernels, monkeypatch):
    p = Problem(batch=2, heads_q=2, heads_kv=2, seqlen_q=70, seqlen_k=90, head_dim=64,
                head_dim_v=64, dtype="float16", mask=Mask(causal=True))  # fmt: skip
    zero, kernel = launches(kernels, p, factor=0.0)
    assert kernel == FAST
    assert launches(kernels, p, factor=-1.0)[0].lse.isnan().all()
    monkeypatch.setattr(kernels("hopper_forward"), "fits", lambda *_: False)
    want, kernel = launches(kernels, p, factor=0.0)
    assert kernel == GENERAL
    assert torch.equal(zero.lse == -torch.inf, want.lse == -torch.inf)
    assert (zero.lse - want.lse).nan_to_num(0.0).abs().max() < 1e-6
    assert (zero.o - want.o).abs().max() < 1e-3
