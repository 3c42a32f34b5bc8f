"""Bias, ALiBi, sinks, dropout and a gradient of lse, against the formula in float64."""

import math

import pytest
import torch

from fa_verify import Mask, Problem, loader, ttir
from fa_verify.case import Case
from fa_verify.layouts import Layout
from fa_verify.resources.launches import launched

# Largest error over largest value, as in test_flash_attention.py. Of fp16 and bf16, dbias sums what
# rounding o leaves of delta over all that a bias is shared by.
TOLERANCE = {"float16": 5e-3, "bfloat16": 4e-2, "float32": 2e-5}
SEED = 0x9E3779B97F4A7C15


def given(problem, *, hidden=0.0, sinks=None):
    """q, k, v, do and the problem's terms by name; a share of the bias is -inf."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, problem.dtype)

    def normal(shape, layout=None, dtype=dtype):
        layout = layout or Layout()
        memory = torch.full((layout.offset + layout.span(shape) + 9,), math.nan, dtype=dtype)
        view = memory.as_strided(shape, layout.strides(shape), layout.offset)
        return view.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))

    q, k, v, do = (
        normal(problem.shape_q), normal(problem.shape_k), normal(problem.shape_v),
        normal(problem.shape_o),
    )  # fmt: skip
    terms = {}
    if problem.bias:
        bias = normal(problem.shape_bias, problem.layout_bias)
        bias[torch.rand(bias.shape, generator=generator) < hidden] = -math.inf
        terms["bias"] = bias
    if problem.alibi:
        terms["alibi_slopes"] = torch.rand(problem.heads_q, generator=generator) - 0.2
    if problem.sinks:
        terms["sinks"] = torch.tensor(sinks or [0.5 * h for h in range(problem.heads_q)])
    if problem.dropout:
        terms["dropout_seed"] = SEED
    dlse = {}
    if problem.lse_grad:
        dlse["dlse"] = normal((*problem.shape_lse, 1), dtype=torch.float32)[..., 0]
    return (q, k, v, do), terms, dlse


def formula(problem, tensors, terms, dlse, keep=None):
    """o, lse and all gradients by torch's autograd in float64."""
    q, k, v, do = (x.double() for x in tensors)
    leaves = {"dq": q, "dk": k, "dv": v}
    if "bias" in terms:
        leaves["dbias"] = terms["bias"].double()
    if "sinks" in terms:
        leaves["dsinks"] = terms["sinks"].double()
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    keys, values = (leaves[name].repeat_interleave(problem.group, 1) for name in ("dk", "dv"))
    logits = problem.scale * leaves["dq"] @ keys.mT
    if problem.softcap:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    hidden = torch.from_numpy(~problem.mask.allowed(problem.seqlen_q, problem.seqlen_k))
    hidden = hidden.expand(logits.shape)
    if "bias" in terms:
        logits = logits + leaves["dbias"]
        hidden = hidden | (terms["bias"] == -math.inf)
    if "alibi_slopes" in terms:
        diagonal = problem.mask.diagonals(problem.seqlen_q, problem.seqlen_k)
        distance = (torch.from_numpy(diagonal)[:, None] - torch.arange(problem.seqlen_k)).abs()
        logits = logits - terms["alibi_slopes"].double()[:, None, None] * distance
    sink = logits.new_full((problem.heads_q,), -1e300)
    sink = leaves.get("dsinks", sink).clamp_min(-1e300)[:, None, None]
    logits = torch.cat([logits.masked_fill(hidden, -1e300), sink.expand(*problem.shape_lse, 1)], -1)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(logits - lse[..., None])[..., :-1].masked_fill(hidden, 0.0)
    if keep is not None:
        p = p * keep / (1 - problem.dropout)
    o = p @ values
    empty = lse < -1e299
    loss = (o * do).sum()
    if dlse:
        loss = loss + (lse.masked_fill(empty, 0.0) * dlse["dlse"].double()).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    zeros = (torch.zeros_like(x) for x in leaves.values())
    grads = [z if g is None else g for g, z in zip(grads, zeros, strict=True)]
    found = {"o": o.detach(), "lse": lse.detach().masked_fill(empty, -math.inf)}
    return found | dict(zip(leaves, grads, strict=True))


def run(kernel, problem, tensors, terms, dlse, config=0):
    """What the kernel makes of it."""
    q, k, v, do = tensors
    with ttir.execute(ttir.Options(config=config)) as execution:
        outputs = kernel.forward(problem, q, k, v, **terms)
        grads = kernel.backward(problem, q, k, v, outputs, do, **terms, **dlse)
    assert execution.incidents == []
    return {"o": outputs.o, "lse": outputs.lse, **grads.named()}


def assert_close(problem, got, want):
    assert got.keys() == want.keys()
    for name, exact in want.items():
        assert got[name].shape == exact.shape
        assert torch.equal(torch.isfinite(got[name]), torch.isfinite(exact)), name
        finite = torch.isfinite(exact)
        if finite.any():
            error = (got[name].double() - exact)[finite].abs().max()
            limit = TOLERANCE[problem.dtype] * exact[finite].abs().max().clamp_min(1.0)
            assert error < limit, name


def problem(**fields):
    """Two sequences of four heads in two groups, no length a multiple of a block."""
    return Problem(**{
        "batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 37, "seqlen_k": 70, "head_dim": 20,
        "head_dim_v": 20, "dtype": "float32", **fields,
    })  # fmt: skip


CAUSAL = Mask(causal=True)
WINDOW = Mask(window_left=9, window_right=3, alignment="top-left")
AXES = ("b", "h", "q", "k", "bh", "bq", "bk", "hq", "hk", "qk", "bhq", "bhk", "bqk", "hqk", "bhqk")
PROBLEMS = {
    **{f"bias {axes}": problem(bias=axes, mask=CAUSAL) for axes in AXES},
    "bias of any layout": problem(
        bias="bhqk", layout_bias=Layout(order="bshd", pad=(0, 0, 5, 0), offset=3), dtype="float16",
        head_dim=80, head_dim_v=48,
    ),
    **{
        f"bias {axes} in vectors": problem(bias=axes, dtype="float16", seqlen_k=136)
        for axes in ("k", "qk", "bhqk")
    },
    "bias under a softcap, in a window": problem(bias="hqk", softcap=2.0, mask=WINDOW),
    "alibi": problem(alibi=True),
    "alibi, causal": problem(alibi=True, mask=CAUSAL, dtype="bfloat16", head_dim_v=7),
    "sinks": problem(sinks=True),
    "sinks, rows without keys": problem(sinks=True, mask=CAUSAL, seqlen_q=90, softmax_scale=0.0),
    "sinks, no keys": problem(sinks=True, seqlen_k=0, lse_grad=True),
    "dropout": problem(dropout=0.3, mask=CAUSAL, dtype="float16", head_dim=80),
    "gradient of lse": problem(lse_grad=True, mask=CAUSAL),
    **{
        f"documents, all, bias {axes}": problem(
            batch=1, seqlen_q=80, seqlen_k=110, bias=axes, alibi=True, sinks=True, dropout=0.2,
            lse_grad=True, mask=Mask(causal=True, documents=((5, 70), (0, 3), (40, 0), (35, 37))),
        )
        for axes in ("q", "k", "h", "qk", "hqk")
    },
    "documents, top-left": problem(
        batch=1, seqlen_q=37, seqlen_k=70, alibi=True, dropout=0.5,
        mask=Mask(window_left=7, alignment="top-left", documents=((20, 40), (17, 30))),
    ),
    **{
        f"blocks, all, bias {axes}": problem(
            seqlen_q=150, seqlen_k=90, bias=axes, alibi=True, sinks=True, dropout=0.2,
            lse_grad=True, mask=Mask(causal=True, pattern="block-sparse:32:60:1"),
        )
        for axes in ("q", "k", "h", "bhqk")
    },
    "blocks, documents": problem(
        batch=1, seqlen_q=80, seqlen_k=110, bias="hqk", sinks=True,
        mask=Mask(pattern="dilated:2", documents=((5, 70), (0, 3), (40, 0), (35, 37))),
    ),
    "all": problem(
        bias="bqk", alibi=True, sinks=True, dropout=0.2, lse_grad=True, softcap=3.0, mask=CAUSAL,
        softmax_scale=-0.3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["flash", "flash_atomic"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_matches_the_formula(kernels, problem, name):
    kernel = getattr(kernels("flash_attention"), name)
    given_ = given(problem, hidden=0.2)
    keep = kernels("dropout").keep(problem, SEED, "cpu") if problem.dropout else None
    got = run(kernel, problem, *given_)
    assert_close(problem, got, formula(problem, *given_, keep))
    if problem.bias:
        assert got["dbias"].dtype == given_[1]["bias"].dtype


def test_a_bias_is_read_in_vectors_where_it_may_be(kernels):
    bias_vector = kernels("arguments")._bias_vector
    whole = torch.zeros(1, 4, 37, 136, dtype=torch.float16)
    documents = Mask(documents=((37, 136),))
    assert bias_vector(problem(seqlen_k=136), whole) == 8
    assert bias_vector(problem(seqlen_k=136), whole.float()) == 4
    assert bias_vector(problem(seqlen_k=128), whole[..., 1:129]) == 1
    assert bias_vector(problem(seqlen_k=68), whole[..., ::2]) == 1
    assert bias_vector(problem(seqlen_k=135), whole[..., :135]) == 1
    assert bias_vector(problem(batch=1, seqlen_k=136, mask=documents), whole) == 1


def test_the_compiler_knows_that_a_bias_is_aligned(kernels):
    """What `tl.multiple_of` says of an argument is lost when the function is inlined."""

    def hints(seqlen_k):
        p = problem(bias="hqk", dtype="float16", head_dim=32, head_dim_v=32, seqlen_k=seqlen_k)
        (q, k, v, _), terms, _ = given(p)
        function = kernels("forward").forward_kernel
        with ttir.execute():
            function.device_caches.clear()
            kernels("flash_attention").flash.forward(p, q, k, v, **terms)
            (compiled,) = (
                x for cache in function.device_caches.values() for x in cache[0].values()
            )
        return compiled.asm["ttir"].count("tt.divisibility = dense<16>")

    # Of the loads with masks and those without.
    assert hints(136) == hints(137) + 2


def test_rows_that_a_bias_hides_wholly_are_empty(kernels):
    p = problem(bias="hqk", lse_grad=True, dropout=0.5)
    tensors, terms, dlse = given(p)
    terms["bias"][0, 1, 5] = -math.inf
    terms["bias"][0, :, 20:] = -math.inf
    terms["bias"][0, :, :, 60:] = -math.inf
    tensors[2][:, :, 60:] = 3e38  # of keys that no query sees; dP overflows there
    got = run(kernels("flash_attention").flash, p, tensors, terms, dlse)
    for x in (got["o"][:, 1, 5], got["o"][:, :, 20:], got["dq"][:, :, 20:], got["dk"][:, :, 60:],
              got["dv"][:, :, 60:], got["dbias"][:, :, 20:], got["dbias"][..., 60:]):  # fmt: skip
        assert (x == 0).all()
    assert (got["lse"][:, :, 20:] == -math.inf).all()
    assert all(torch.isfinite(x).all() for name, x in got.items() if name != "lse")


@pytest.mark.parametrize("sinks", [[-math.inf, 1e30, -1e30, 80.0]])
def test_extreme_sinks(kernels, sinks):
    p = problem(sinks=True, mask=CAUSAL, seqlen_q=90, lse_grad=True)
    given_ = given(p, sinks=sinks)
    got = run(kernels("flash_attention").flash, p, *given_)
    assert_close(p, got, formula(p, *given_))
    assert (got["lse"][:, 0, :20] == -math.inf).all()
    assert (got["lse"][:, 1] == torch.tensor(1e30)).all()
    assert (got["o"][:, 1] == 0).all()


@pytest.mark.parametrize("axes", ["q", "k", "qk", "h"])
def test_many_sequences_share_a_bias_in_several_programs(kernels, axes):
    p = problem(batch=37, heads_q=2, heads_kv=1, seqlen_q=5, seqlen_k=6, bias=axes)
    given_ = given(p)
    got = run(kernels("flash_attention").flash, p, *given_)
    assert_close(p, got, formula(p, *given_))


@pytest.mark.parametrize("config", range(1, 3))
def test_dropout_does_not_depend_on_blocks(kernels, config):
    p = problem(dropout=0.4, dtype="float16", head_dim=16, head_dim_v=16, seqlen_k=150)
    given_ = given(p)
    keep = kernels("dropout").keep(p, SEED, "cpu")
    got = run(kernels("flash_attention").flash_atomic, p, *given_, config=config)
    assert_close(p, got, formula(p, *given_, keep))


def test_philox_gives_its_known_answers(kernels):
    # kat_vectors of Random123: philox4x32 of 7 rounds.
    philox = kernels("dropout").philox
    for counter, seed, words in (
        ([0] * 4, 0, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        ([2**32 - 1] * 4, 2**64 - 1, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], 0x299F31D0A4093822,
         [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]),
    ):  # fmt: skip
        found = philox([torch.tensor(c) for c in counter], seed)
        assert [int(x) & 0xFFFFFFFF for x in found] == words


def test_kept_elements_are_where_they_are(kernels):
    """An element's fate is its place's and the seed's; a share p is dropped."""
    keep = kernels("dropout").keep
    whole = keep(problem(dropout=0.3, seqlen_q=200, seqlen_k=203), SEED, "cpu")
    part = keep(problem(dropout=0.3, batch=1, seqlen_q=90, seqlen_k=77), SEED, "cpu")
    assert torch.equal(whole[:1, :, :90, :77], part)
    other = keep(problem(dropout=0.3, seqlen_q=200, seqlen_k=203), SEED + 1, "cpu")
    # 324,800 draws: five standard deviations of a share are 0.004.
    for kept in (whole, other):
        assert abs(kept.double().mean() - 0.7) < 0.004
    assert abs((whole == other).double().mean() - 0.58) < 0.0044
    for axis in range(4):  # no axis repeats
        a, b = whole.narrow(axis, 0, 1), whole.narrow(axis, 1, 1)
        assert not torch.equal(a, b)
    assert keep(problem(dropout=1e-12), SEED, "cpu").all()
    assert not keep(problem(dropout=1 - 1e-12), SEED, "cpu").any()


@pytest.mark.parametrize("name", ["flash", "flash_atomic"])
def test_plain_attention_is_handed_nothing_of_the_terms(name):
    (kernel,) = loader.load(f"kernels/flash_attention.py:{name}")
    plain = launched(kernel, Case.parse("pass=bwd s=9x9 d=16 dtype=float16 mask=causal seed=0"), 0)
    assert plain.kernels
    for kernel_ in plain.kernels:
        handed = {argument.partition(".")[0] for argument in kernel_.arguments}
        assert not handed & {"bias", "stride_bias_q", "alibi_slopes", "dropout_seed", "sinks"}
        assert "dlse" not in handed


@pytest.mark.parametrize("lengths", ["s=9x10", "s=16x32", "s=33x130"])
def test_lengths_compile_nothing_anew(lengths):
    """Diagonals and strides of a bias of 1, of multiples of 16 and of neither."""
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    found = []
    for text in ("s=33x66", lengths):
        case = f"pass=bwd h=2 {text} d=16 dtype=float16 mask=causal bias=hq alibi=1 seed=0"
        found.append(launched(kernel, Case.parse(case), 0).kernels)
    assert [(k.arguments, k.constants) for k in found[0]] == [
        (k.arguments, k.constants) for k in found[1]
    ]
    assert [k.source.hash() for k in found[0]] == [k.source.hash() for k in found[1]]
