"""The forward pass for Hopper: right where it is taken, and taken only where it fits."""

import dataclasses

import pytest
import torch

from fa_verify import Mask, Problem, loader, ttir
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.layouts import Layout
from fa_verify.resources.chips import CHIPS
from fa_verify.resources.compiled import compiled
from fa_verify.resources.launches import launched
from fa_verify.verify import verify

FAST, GENERAL = "hopper_forward_kernel", "forward_kernel"
FULL, CAUSAL = Mask(), Mask(causal=True)


def problem(**fields):
    defaults = {
        "batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 150, "seqlen_k": 200, "head_dim": 64,
    }  # fmt: skip
    fields = defaults | fields
    return Problem(head_dim_v=fields.pop("head_dim_v", fields["head_dim"]), **fields)


def tensors(of, seed=0):
    """q, k, v in their layouts; what lies between is NaN."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((of.shape_q, of.layout_q), (of.shape_k, of.layout_k), (of.shape_v, of.layout_v))
    for shape, layout in shapes:
        dtype = getattr(torch, of.dtype)
        memory = torch.full((layout.offset + layout.span(shape),), torch.nan, dtype=dtype)
        view = torch.as_strided(memory, shape, layout.strides(shape), layout.offset)
        own = (shape[0], 1, *shape[2:]) if layout.shared_heads else shape
        view[:, : own[1]] = torch.randn(own, generator=generator).to(dtype)
        yield view


def run(kernels, of, config=0, **terms):
    """o, lse, and the kernel that computed them."""
    flash = kernels("flash_attention").flash
    q, k, v = tensors(of)
    with ttir.execute(ttir.Options(config=config)) as execution:
        outputs = flash.forward(of, q, k, v, **terms)
    assert not execution.incidents
    (launch,) = execution.launches
    return outputs, launch.kernel, (q, k, v)


def formula(of, q, k, v):
    """o and lse in float64."""
    keys, values = (x.double().repeat_interleave(of.group, 1) for x in (k, v))
    logits = of.scale * q.double() @ keys.transpose(-1, -2)
    if of.softcap:
        logits = of.softcap * torch.tanh(logits / of.softcap)
    hidden = ~torch.from_numpy(of.mask.allowed(of.seqlen_q, of.seqlen_k))
    logits = logits.masked_fill(hidden, -torch.inf)
    return torch.nan_to_num(logits.softmax(-1)) @ values, logits.logsumexp(-1)


def agree(outputs, want, of):
    o, lse = want
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}[of.dtype]
    assert torch.equal(outputs.lse == -torch.inf, lse == -torch.inf)
    seen = lse != -torch.inf
    assert (outputs.lse.double() - lse)[seen].abs().max() < 1e-4
    assert (outputs.o.double() - o).abs().max() < tolerance
    assert not outputs.o[~seen].any()


def configs(kernels, head_dim, mask=FULL):
    """Numbers of all that is offered: under a lower limit, what has one loop."""
    table = kernels("configs").HOPPER_FORWARD[head_dim]
    return range(sum(mask.window_left is None or one_loop for *_, one_loop, _ in table))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mask", [Mask(), CAUSAL], ids=["full", "causal"])
def test_head_dims(kernels, head_dim, dtype, mask):
    of = problem(head_dim=head_dim, dtype=dtype, mask=mask)
    for config in configs(kernels, head_dim):
        outputs, kernel, given = run(kernels, of, config)
        assert kernel == FAST
        agree(outputs, formula(of, *given), of)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    "case",
    [
        "h=2/1 s=100x230 dtype=float16 mask=causal",  # the edge lies within a block, and moves
        "h=2 s=192x70 dtype=bfloat16 mask=causal",  # rows that see nothing, one block
        "s=70x256 dtype=bfloat16",  # blocks of keys are whole
        "s=70x257 dtype=float16",  # and one key more
        "h=2 s=200x230 dtype=float16 mask=causal.l70 sinks=1",  # blocks hidden, in part and wholly
        "h=2 s=150x300 dtype=bfloat16 mask=l20.r90.topleft",  # and keys that no query sees
        "h=2 s=300x60 dtype=float16 mask=causal.l9 sinks=1",  # rows that see a sink alone
    ],
)
def test_each_configuration_passes_every_check(kernels, head_dim, case):
    """Also those of one loop over masked and whole blocks."""
    (flash,) = loader.load("kernels/flash_attention.py:flash")
    of = Case.parse(f"pass=fwd {case} d={head_dim} seed=1")
    offered = configs(kernels, head_dim, of.problem.mask)
    for config in offered:
        record = verify(of, flash, Setup(config=config), CpuBackend())
        assert record.verdict == "pass", record.failures
        assert record.configs == len(offered)  # of the kernel for Hopper


@pytest.mark.parametrize("mask", ["causal", "causal.l100"])
@pytest.mark.parametrize("head_dim", [64, 80, 96])
def test_what_products_read_stays_while_they_run(kernels, head_dim, mask):
    """P V goes on beside the next softmax: on a card a kernel that computed P first gave NaN."""
    (flash,) = loader.load("kernels/flash_attention.py:flash")
    of = Case.parse(f"pass=fwd s=512x512 d={head_dim} dtype=float16 mask={mask} seed=1")
    for config in configs(kernels, head_dim, of.problem.mask):
        (kernel,) = launched(flash, of, config).kernels
        usage = compiled(kernel, CHIPS["sm_90"])
        assert not usage.error
        assert usage.matrix["wgmma"]
        assert not usage.rewritten
        assert not usage.lost


@pytest.mark.parametrize(
    "of",
    [
        problem(seqlen_q=300, seqlen_k=70, mask=CAUSAL),  # rows that see nothing
        problem(seqlen_q=70, seqlen_k=300, mask=Mask(causal=True, alignment="top-left")),
        problem(seqlen_q=1, seqlen_k=1, head_dim=80, heads_kv=1),
        problem(seqlen_q=130, seqlen_k=129, mask=Mask(window_right=40)),
        problem(seqlen_q=128, seqlen_k=256, head_dim=96, mask=CAUSAL, softmax_scale=1.5),
        problem(
            layout_q=Layout(order="bshd"), layout_k=Layout(order="sbhd", pad=(0, 8, 16, 0)),
            layout_v=Layout(pad=(16, 0, 64, 0), offset=8), mask=CAUSAL,
        ),
    ],
)  # fmt: skip
def test_lengths_masks_and_strides(kernels, of):
    for config in configs(kernels, of.head_dim):
        outputs, kernel, given = run(kernels, of, config)
        assert kernel == FAST
        agree(outputs, formula(of, *given), of)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float32"},
        {"head_dim": 72},
        {"head_dim_v": 128},
        {"softcap": 3.0},
        {"softmax_scale": -0.2},
        {"softmax_scale": 0.0},
        {"softmax_scale": 2.0**21},
        {"mask": Mask(pattern="prefix:20")},
        {"batch": 1, "mask": Mask(documents=((100, 150), (50, 50)))},
        {"layout_k": Layout(pad=(0, 0, 4, 0))},  # rows at 8 bytes
        {"layout_q": Layout(offset=3)},
        {"layout_v": Layout(order="bhds")},
        {"layout_k": Layout(shared_heads=True)},  # a stride of 0
    ],
    ids=str,
)
def test_what_does_not_fit_goes_to_the_general_kernel(kernels, fields):
    of = problem(**fields)
    outputs, kernel, given = run(kernels, of)
    assert kernel == GENERAL
    if abs(of.scale) < 100:
        agree(outputs, formula(of, *given), of)


def test_further_terms_go_to_the_general_kernel(kernels):
    of = problem(alibi=True)
    assert run(kernels, of, alibi_slopes=torch.zeros(of.heads_q))[1] == GENERAL
    of = problem(dropout=0.5)
    assert run(kernels, of, dropout_seed=1)[1] == GENERAL
    of = problem(bias="qk")
    bias = torch.zeros(1, 1, of.seqlen_q, of.seqlen_k, dtype=torch.float16)
    assert run(kernels, of, bias=bias)[1] == GENERAL


def test_other_chips_take_the_general_kernel(kernels, monkeypatch):
    monkeypatch.setattr(kernels("hopper_forward"), "hopper", lambda: False)
    of = problem()
    outputs, kernel, given = run(kernels, of)
    assert kernel == GENERAL
    agree(outputs, formula(of, *given), of)


def test_a_sequence_has_the_same_bits_in_any_batch(kernels):
    of = problem(mask=CAUSAL, batch=3)
    q, k, v = tensors(of)
    flash = kernels("flash_attention").flash
    with ttir.execute():
        together = flash.forward(of, q, k, v)
        alone = flash.forward(dataclasses.replace(of, batch=1), q[1:2], k[1:2], v[1:2])
    assert torch.equal(together.o[1:2], alone.o)
    assert torch.equal(together.lse[1:2], alone.lse)


@pytest.mark.parametrize("together", [1, 2, 3])
def test_every_row_is_computed_whichever_heads_run_together(kernels, monkeypatch, together):
    """Programs of a causal problem are interleaved over heads: 3 heads do not divide by 2."""
    of = problem(heads_q=3, heads_kv=3, batch=1, mask=CAUSAL)
    keys = 2 * of.seqlen_k * of.head_dim * 2
    monkeypatch.setattr(kernels("hopper_forward"), "_L2_SHARE", together * keys)
    outputs, kernel, given = run(kernels, of)
    assert kernel == FAST
    agree(outputs, formula(of, *given), of)
