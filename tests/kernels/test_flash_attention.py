"""The kernels against the formula in float64, on fa_verify's CPU backend."""

import math

import pytest
import torch

from fa_verify import Mask, Problem, ttir
from fa_verify.layouts import Layout

# Largest error over largest value: a smoke test. The bounds are the suite's business.
TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2, "float32": 1e-5}


def tensor(shape, layout, dtype, generator):
    """Normal values in a layout whose slack is NaN."""
    memory = torch.full((layout.offset + layout.span(shape),), math.nan, dtype=dtype)
    view = torch.as_strided(memory, shape, layout.strides(shape), layout.offset)
    source = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
    (view[:, :1] if layout.shared_heads else view).copy_(
        source[:, : 1 if layout.shared_heads else None]
    )
    return view


def tensors(problem, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    pairs = (
        (problem.shape_q, problem.layout_q),
        (problem.shape_k, problem.layout_k),
        (problem.shape_v, problem.layout_v),
        (problem.shape_o, problem.layout_do),
    )
    return [tensor(shape, layout, dtype, generator) for shape, layout in pairs]


def formula(problem, q, k, v, do):
    """o, lse, dq, dk, dv by torch's autograd in float64."""
    q, k, v = (x.double().clone().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(problem.group, 1) for x in (k, v))
    logits = problem.scale * q @ keys.transpose(-1, -2)
    if problem.softcap:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    hidden = ~torch.from_numpy(problem.mask.allowed(problem.seqlen_q, problem.seqlen_k))
    lse = torch.logsumexp(logits.masked_fill(hidden, -math.inf), -1)
    finite = torch.where(lse == -math.inf, 0.0, lse)
    p = torch.where(hidden, 0.0, torch.exp(torch.where(hidden, 0.0, logits - finite[..., None])))
    o = (p / p.sum(-1, keepdim=True).detach().clamp_min(1e-300)) @ values  # the sum is 1, or 0
    exact = torch.where(hidden.all(-1), -math.inf, finite.detach())
    grads = torch.autograd.grad(o, (q, k, v), do.double(), allow_unused=True)
    zeros = (torch.zeros_like(x) for x in (q, k, v))
    grads = [z if g is None else g for g, z in zip(grads, zeros, strict=True)]
    return [o.detach(), exact.expand(problem.shape_lse), *grads]


def worst(got, want):
    """Largest error over the largest value; infinities must agree."""
    assert got.shape == want.shape
    assert torch.equal(torch.isinf(got), torch.isinf(want))
    finite = ~torch.isinf(want)
    error = (got.double() - want)[finite].abs().sum()
    assert not torch.isnan(error)
    if not finite.any():
        return 0.0
    error = (got.double() - want)[finite].abs().max()
    return float(error / want[finite].abs().max().clamp_min(1.0))


def _packed(*documents, **fields):
    """A problem whose sequence is these (queries, keys)."""
    bands = ("causal", "window_left", "window_right", "alignment", "pattern")
    mask = Mask(documents=documents, **{name: fields.pop(name) for name in bands if name in fields})
    seqlen_q, seqlen_k = (sum(side) for side in zip(*documents, strict=True))
    return Problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask, **fields)


PROBLEMS = {
    "causal, 80 = 64 + 16, grouped": Problem(
        batch=2, heads_q=4, heads_kv=2, seqlen_q=70, seqlen_k=130, head_dim=80, head_dim_v=80,
        mask=Mask(causal=True),
    ),
    "top-left, rows longer than keys": Problem(
        seqlen_q=90, seqlen_k=40, head_dim=33, head_dim_v=96, dtype="bfloat16",
        mask=Mask(causal=True, alignment="top-left"),
    ),
    "fully masked rows": Problem(
        seqlen_q=75, seqlen_k=20, head_dim=16, head_dim_v=16, dtype="float32",
        mask=Mask(causal=True),
    ),
    "window, softcap, negative scale": Problem(
        heads_q=3, heads_kv=1, seqlen_q=100, seqlen_k=120, head_dim=20, head_dim_v=7,
        dtype="float32", mask=Mask(window_left=13, window_right=5), softcap=2.0, softmax_scale=-0.4,
    ),
    "strides": Problem(
        batch=2, heads_q=2, heads_kv=2, seqlen_q=17, seqlen_k=33, head_dim=24, head_dim_v=24,
        layout_q=Layout(order="bshd", pad=(0, 0, 8, 0)), layout_k=Layout(order="bhds", offset=3),
        layout_v=Layout(pad=(0, 0, 5, 0)), layout_do=Layout(order="sbhd", shared_heads=True),
    ),
    "documents: grouped, causal, some empty, lengths beside a block": _packed(
        (0, 0), (16, 16), (1, 7), (17, 40), (0, 9), (8, 0), (33, 15), (15, 31), (0, 3),
        heads_q=4, heads_kv=2, head_dim=80, head_dim_v=80, causal=True,
    ),
    "documents: a window, top-left, strides": _packed(
        (40, 25), (0, 5), (0, 5), (25, 70), (1, 1),
        heads_q=2, heads_kv=2, head_dim=24, head_dim_v=40, dtype="float32",
        window_left=9, window_right=2, alignment="top-left",
        layout_q=Layout(order="bshd", pad=(0, 0, 8, 0)), layout_k=Layout(order="bhds", offset=3),
    ),
    "documents: one, and no mask": _packed((21, 33), head_dim=16, head_dim_v=16, softcap=3.0),
    "documents: all empty of keys": _packed((3, 0), (4, 0), head_dim=16, head_dim_v=16),
    "blocks: some hidden, more queries than keys, grouped": Problem(
        batch=2, heads_q=4, heads_kv=2, seqlen_q=150, seqlen_k=90, head_dim=80, head_dim_v=80,
        mask=Mask(pattern="block-sparse:32:50:3"),
    ),
    "blocks: whole, partial and hidden under a band": Problem(
        heads_q=2, heads_kv=2, seqlen_q=70, seqlen_k=333, head_dim=20, head_dim_v=40,
        dtype="float32", softcap=2.0, mask=Mask(window_left=150, pattern="prefix:70"),
    ),
    "blocks: elements here and there, of documents too": _packed(
        (70, 65), (0, 9), (30, 100), head_dim=16, head_dim_v=16, causal=True, pattern="predicate:3",
    ),
    "blocks: none seen": Problem(
        seqlen_q=70, seqlen_k=70, head_dim=16, head_dim_v=16,
        mask=Mask(pattern="block-sparse:8:0:0"),
    ),
    "one key": Problem(seqlen_q=3, seqlen_k=1, head_dim=1, head_dim_v=1, dtype="float32"),
    "no keys": Problem(seqlen_q=5, seqlen_k=0, head_dim=8, head_dim_v=8),
    "no queries": Problem(seqlen_q=0, seqlen_k=5, head_dim=8, head_dim_v=8),
}  # fmt: skip


@pytest.mark.parametrize("name", ["flash", "flash_atomic"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_matches_the_formula(kernels, problem, name):
    kernel = getattr(kernels("flash_attention"), name)
    q, k, v, do = tensors(problem)
    with ttir.execute() as run:
        outputs = kernel.forward(problem, q, k, v)
        grads = kernel.backward(problem, q, k, v, outputs, do)
    assert run.incidents == []
    got = outputs.o, outputs.lse, grads.dq, grads.dk, grads.dv
    for one, exact in zip(got, formula(problem, q, k, v, do), strict=True):
        assert worst(one, exact) < TOLERANCE[problem.dtype]


@pytest.mark.parametrize("pattern", ["", "global-local:9:2"])
@pytest.mark.parametrize("documents", [(), ((5, 0), (0, 7), (19, 130), (0, 0), (16, 13))])
@pytest.mark.parametrize("config", range(4))
def test_every_configuration_of_half_precision(kernels, monkeypatch, config, documents, pattern):
    monkeypatch.setattr(kernels("hopper_backward"), "fits", lambda *_: False)
    mask = Mask(causal=True, documents=documents, pattern=pattern)
    problem = Problem(seqlen_q=40, seqlen_k=150, head_dim=16, head_dim_v=16, mask=mask)
    kernel = kernels("flash_attention").flash
    q, k, v, do = tensors(problem)
    with ttir.execute(ttir.Options(config=config)) as run:
        outputs = kernel.forward(problem, q, k, v)
        grads = kernel.backward(problem, q, k, v, outputs, do)
    assert run.incidents == []
    got = outputs.o, outputs.lse, grads.dq, grads.dk, grads.dv
    for one, exact in zip(got, formula(problem, q, k, v, do), strict=True):
        assert worst(one, exact) < TOLERANCE["float16"]


@pytest.mark.parametrize("scale", [1e4, -1e30, 0.0])
def test_extreme_scales_give_no_nan(kernels, scale):
    problem = Problem(
        seqlen_q=20, seqlen_k=50, head_dim=16, head_dim_v=16, dtype="float32", softmax_scale=scale,
        mask=Mask(causal=True),
    )  # fmt: skip
    kernel = kernels("flash_attention").flash
    q, k, v, do = tensors(problem)
    with ttir.execute():
        outputs = kernel.forward(problem, q, k, v)
        grads = kernel.backward(problem, q, k, v, outputs, do)
    for x in (outputs.o, outputs.lse, grads.dq, grads.dk, grads.dv):
        assert torch.isfinite(x).all()
    assert worst(outputs.o, formula(problem, q, k, v, do)[0]) < TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("head_dim", "tiles"),
    [
        (1, (16, 0, True)),
        (16, (16, 0, False)),
        (17, (32, 0, True)),
        (40, (32, 16, True)),
        (80, (64, 16, False)),
        (96, (64, 32, False)),
        (192, (128, 64, False)),
        (250, (256, 0, True)),
        (256, (256, 0, False)),
    ],
)
def test_head_dims_are_split(kernels, head_dim, tiles):
    assert kernels("arguments").split_columns(head_dim) == tiles
