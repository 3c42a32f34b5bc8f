"""`attention` and its module against float64."""

import pytest
import torch

from fa_verify import Mask, Problem, ttir


def leaves(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def grads(o, inputs):
    """Gradients of a loss that weighs every element of o differently."""
    weights = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).reshape(o.shape)
    return torch.autograd.grad(o, inputs, weights)


def exactly(
    inputs, mask, *, scale=None, softcap=0.0, bias=None, slopes=None, sinks=None, keep=None
):
    """o and lse by the formula in float64; `keep` is 0, or the factor of what dropout keeps."""
    q, k, v = (x.double() for x in inputs)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.double()
    if slopes is not None:
        diagonal = torch.arange(seqlen_q)[:, None] + mask.shift(seqlen_q, seqlen_k)
        distance = (diagonal - torch.arange(seqlen_k)).abs()
        logits = logits - torch.atleast_2d(slopes.double())[..., None, None] * distance
    seen = torch.from_numpy(mask.allowed(seqlen_q, seqlen_k))
    logits = logits.masked_fill(~seen, float("-inf"))
    lse = logits.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None].expand_as(lse))
    p = (logits - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    return (p if keep is None else p * keep) @ v, lse


OPTIONS = {
    "plain": ({}, Mask()),
    "causal": ({"causal": True}, Mask(causal=True)),
    "causal window": (
        {"causal": True, "window_size": (3, 5)},
        Mask(causal=True, window_left=3),
    ),
    "window": ({"window_size": (3, 5)}, Mask(window_left=3, window_right=5)),
    "left window": ({"window_size": (3, -1)}, Mask(window_left=3)),
    "top-left": (
        {"causal": True, "alignment": "top-left"}, Mask(causal=True, alignment="top-left"),
    ),
    "scale": ({"softmax_scale": -0.3}, Mask()),
    "softcap": ({"softcap": 0.7}, Mask()),
    "atomics": ({"deterministic": False}, Mask()),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_float64(kernels, name):
    options, mask = OPTIONS[name]
    inputs = leaves((2, 4, 20, 16), (2, 2, 40, 16), (2, 2, 40, 8))
    with ttir.execute() as run:
        o, lse = kernels("attention").attention(*inputs, return_lse=True, **options)
        got = grads(o, inputs)
    assert run.incidents == []
    exact, exact_lse = exactly(
        inputs, mask, scale=options.get("softmax_scale"), softcap=options.get("softcap")
    )
    torch.testing.assert_close(o, exact.float())
    torch.testing.assert_close(lse, exact_lse.float())
    torch.testing.assert_close(got, grads(exact, inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Input #")  # that it is float32
@pytest.mark.parametrize("deterministic", [True, False])
def test_numerical_derivatives_agree(kernels, deterministic):
    inputs = leaves((1, 2, 3, 4), (1, 1, 5, 4), (1, 1, 5, 3))

    def function(*inputs):
        return kernels("attention").attention(*inputs, causal=True, deterministic=deterministic)

    # eps and atol of float32: central differences are off by eps^2, and by 2^-24 / eps.
    with ttir.execute():
        assert torch.autograd.gradcheck(
            function, inputs, eps=1e-2, atol=2e-3, rtol=2e-3, nondet_tol=1e-6, fast_mode=True
        )


BIASES = [(40,), (20, 40), (4, 20, 40), (2, 1, 20, 1), (1, 4, 1, 1), (2, 4, 20, 40), (1, 1, 1, 1)]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_bias_broadcasts_and_has_a_gradient(kernels, shape, deterministic):
    inputs = leaves((2, 4, 20, 16), (2, 2, 40, 16), (2, 2, 40, 8), shape)
    *tensors, bias = inputs
    with ttir.execute() as run:
        o = kernels("attention").attention(*tensors, bias=bias, deterministic=deterministic)
        got = grads(o, inputs)
    assert run.incidents == []
    exact, _ = exactly(tensors, Mask(), bias=bias)
    torch.testing.assert_close(o, exact.float())
    torch.testing.assert_close(got, grads(exact, inputs), atol=3e-5, rtol=1e-4)


def test_a_bias_without_gradient_costs_none(kernels):
    *tensors, bias = leaves((1, 2, 20, 16), (1, 2, 40, 16), (1, 2, 40, 8), (20, 40))
    with ttir.execute() as run:
        o = kernels("attention").attention(*tensors, bias=bias.detach())
        grads(o, tensors)
    assert "dbias_kernel" not in {launch.kernel for launch in run.launches}


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_alibi_is_of_heads_or_of_each_sequence(kernels, shape):
    inputs = leaves((2, 4, 20, 16), (2, 2, 40, 16), (2, 2, 40, 8))
    slopes = torch.linspace(0.01, 0.3, 8)[: 2 ** len(shape) * 2].reshape(shape)
    with ttir.execute() as run:
        o = kernels("attention").attention(*inputs, causal=True, alibi_slopes=slopes)
        got = grads(o, inputs)
    assert run.incidents == []
    exact, _ = exactly(inputs, Mask(causal=True), slopes=slopes)
    torch.testing.assert_close(o, exact.float())
    torch.testing.assert_close(got, grads(exact, inputs), atol=1e-5, rtol=1e-5)


def test_sinks_and_lse_have_gradients(kernels):
    inputs = leaves((2, 4, 20, 16), (2, 2, 40, 16), (2, 2, 40, 8), (4,))
    *tensors, sinks = inputs
    with ttir.execute() as run:
        o, lse = kernels("attention").attention(*tensors, sinks=sinks, return_lse=True)
        got = grads(torch.cat((o, lse[..., None]), -1), inputs)
        got_of_lse = torch.autograd.grad(
            kernels("attention").attention(*tensors, return_lse=True)[1].sum(), tensors[:2]
        )
    assert run.incidents == []
    exact, exact_lse = exactly(tensors, Mask(), sinks=sinks)
    expected = grads(torch.cat((exact, exact_lse[..., None]), -1), inputs)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    expected = torch.autograd.grad(exactly(tensors, Mask())[1].sum(), tensors[:2])
    torch.testing.assert_close(got_of_lse, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("deterministic", [True, False])
def test_dropout_drops_the_same_forward_and_backward(kernels, deterministic):
    inputs = leaves((2, 4, 20, 16), (2, 2, 40, 16), (2, 2, 40, 8))
    attention = kernels("attention").attention
    problem = Problem(
        batch=2, heads_q=4, heads_kv=2, seqlen_q=20, seqlen_k=40, head_dim=16, head_dim_v=8,
        dropout=0.3,
    )  # fmt: skip
    keep = kernels("dropout").keep(problem, 123, "cpu")
    with ttir.execute() as run:
        o, lse = attention(
            *inputs,
            dropout_p=0.3,
            dropout_seed=123,
            return_lse=True,
            deterministic=deterministic,
        )
        got = grads(o, inputs)
    assert run.incidents == []
    assert 0.25 < 1 - keep.double().mean() < 0.35  # of 6,400 elements
    exact, exact_lse = exactly(inputs, Mask(), keep=keep / 0.7)
    torch.testing.assert_close(o, exact.float())
    torch.testing.assert_close(lse, exact_lse.float())
    torch.testing.assert_close(got, grads(exact, inputs), atol=1e-5, rtol=1e-5)


def test_dropout_follows_the_generator(kernels):
    inputs = leaves((1, 2, 20, 16), (1, 2, 40, 16), (1, 2, 40, 8))
    attention = kernels("attention").attention
    with ttir.execute():
        torch.manual_seed(5)
        first, second = (attention(*inputs, dropout_p=0.5) for _ in range(2))
        torch.manual_seed(5)
        again = attention(*inputs, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_module_drops_in_training_only(kernels):
    module = kernels("attention").FlashAttention(dropout_p=0.5)
    inputs = leaves((1, 2, 20, 16), (1, 2, 40, 16), (1, 2, 40, 8))
    with ttir.execute():
        trained, evaluated = module(*inputs), module.eval()(*inputs)
    exact = exactly(inputs, Mask())[0].float()
    torch.testing.assert_close(evaluated, exact)
    assert (trained - exact).abs().max() > 0.1


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_are_attended_one_by_one(kernels, causal):
    lengths = ((7, 3), (0, 4), (20, 20), (5, 0), (1, 30))
    q, k, v = inputs = leaves((33, 4, 16), (57, 2, 16), (57, 2, 8))
    starts = [
        torch.tensor([0, *(part[i] for part in lengths)], dtype=torch.int32)
        .cumsum(0)
        .to(torch.int32)
        for i in (0, 1)
    ]
    slopes = torch.rand(len(lengths), 4)
    with ttir.execute() as run:
        o, lse = kernels("attention").attention_varlen(
            *inputs, *starts, causal=causal, alibi_slopes=slopes, return_lse=True
        )
        got = grads(o, inputs)
    assert run.incidents == []
    parts = [
        [x[None].transpose(1, 2) for x in one]
        for one in zip(
            q.split([n for n, _ in lengths]),
            k.split([n for _, n in lengths]),
            v.split([n for _, n in lengths]),
            strict=True,
        )
    ]
    exact = [
        exactly(part, Mask(causal=causal), slopes=slope)
        for part, slope in zip(parts, slopes, strict=True)
    ]
    exact_o = torch.cat([o[0].transpose(0, 1) for o, _ in exact])
    torch.testing.assert_close(o, exact_o.float())
    torch.testing.assert_close(lse, torch.cat([lse[0] for _, lse in exact], -1).float())
    torch.testing.assert_close(got, grads(exact_o, inputs), atol=1e-5, rtol=1e-5)


def packed(module, q, k, v, **options):
    """q, k, v of a batch of 1 as two packed sequences."""
    starts = (torch.tensor(x, dtype=torch.int32) for x in ([0, 50, 130], [0, 90, 130]))
    return module.attention_varlen(
        *(x.squeeze(0).transpose(0, 1) for x in (q, k, v)), *starts, **options
    ).transpose(0, 1)[None]


def gapped(module, q, k, v):
    mask = module.create_block_mask(lambda query, key: (query + key) % 3 > 0, 130, 130, "cpu")
    return module.attention(q, k, v, block_mask=mask)


QUERY, KEY = torch.arange(130)[:, None], torch.arange(130)
TERMS = {  # how to ask, and what `exactly` takes
    "bias": (
        lambda module, *x: module.attention(*x, bias=torch.sin(QUERY + 2.0 * KEY)),
        {"bias": torch.sin(QUERY + 2.0 * KEY)},
    ),
    "alibi": (
        lambda module, *x: module.attention(*x, alibi_slopes=torch.tensor([0.1, 0.2])),
        {"slopes": torch.tensor([0.1, 0.2])},
    ),
    "sinks": (
        lambda module, *x: module.attention(*x, sinks=torch.tensor([1.0, -2.0])),
        {"sinks": torch.tensor([1.0, -2.0])},
    ),
    "packed": (
        packed,
        {"bias": torch.zeros(130, 130).masked_fill((QUERY < 50) != (KEY < 90), -torch.inf)},
    ),
    "gaps": (
        gapped,
        {"bias": torch.zeros(130, 130).masked_fill((QUERY + KEY) % 3 == 0, -torch.inf)},
    ),
    "lse": (
        lambda module, *x: torch.cat(
            [part.reshape(1, 2, 130, -1) for part in module.attention(*x, return_lse=True)], -1
        ),
        {},
    ),
}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", TERMS)
def test_no_fast_path_forgets_what_it_lacks(kernels, monkeypatch, name, deterministic):
    """bfloat16 and a head_dim of 64: what kernels of their own for a chip take first."""
    ask, given = TERMS[name]
    module = kernels("attention")
    whole = module.Options
    monkeypatch.setattr(
        module, "Options", lambda **x: whole(**{**x, "deterministic": deterministic})
    )
    inputs = leaves(*((1, 2, 130, 64),) * 3, dtype=torch.bfloat16)
    with ttir.execute() as run:
        o = ask(module, *inputs)
        got = grads(o.float(), inputs)
    assert run.incidents == []
    exact = exactly(inputs, Mask(), **given)
    exact = torch.cat((exact[0], exact[1][..., None]), -1) if name == "lse" else exact[0]
    torch.testing.assert_close(o.float(), exact.float(), atol=0.02, rtol=0.02)
    for one, due in zip(got, grads(exact, inputs), strict=True):
        error = (one.double() - due.double()).abs().max() / due.double().abs().max()
        assert error < 0.03  # forgetting any of these terms gives at least 0.1


def test_an_arbitrary_mask_is_a_function_of_places(kernels):
    inputs = leaves((2, 4, 100, 16), (2, 2, 150, 16), (2, 2, 150, 8), (4,))
    *tensors, sinks = inputs
    mask = kernels("attention").create_block_mask(
        lambda query, key: ((query + key) % 7 < 3) & (query % 10 > 0) | (key < 70), 100, 150, "cpu"
    )
    with ttir.execute() as run:
        o = kernels("attention").attention(*tensors, sinks=sinks, block_mask=mask)
        got = grads(o, inputs)
    assert run.incidents == []
    query, key = torch.arange(100)[:, None], torch.arange(150)[None]
    hidden = ~(((query + key) % 7 < 3) & (query % 10 > 0) | (key < 70))
    bias = torch.zeros(100, 150).masked_fill(hidden, float("-inf"))
    exact, _ = exactly(tensors, Mask(), sinks=sinks, bias=bias)
    torch.testing.assert_close(o, exact.float())
    torch.testing.assert_close(got, grads(exact, inputs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lengths", [(100, 50), (100, 149)])  # 149 keys are as many blocks as 150
def test_a_mask_of_other_lengths_is_refused(kernels, lengths):
    inputs = leaves((1, 1, 100, 16), (1, 1, 150, 16), (1, 1, 150, 16))
    mask = kernels("attention").create_block_mask(lambda query, key: key <= query, *lengths, "cpu")
    with ttir.execute(), pytest.raises(ValueError, match=r"must be \(100, 150\)"):
        kernels("attention").attention(*inputs, block_mask=mask)
    mask = kernels("attention").create_block_mask(lambda query, key: key <= query, 100, 150, "cpu")
    with ttir.execute(), pytest.raises(ValueError, match="block_mask: says all that is hidden"):
        kernels("attention").attention(*inputs, block_mask=mask, causal=True)


def test_module_and_its_gradients(kernels):
    module = kernels("attention").FlashAttention(causal=True, softcap=3.0)
    inputs = leaves((1, 2, 20, 16), (1, 1, 40, 16), (1, 1, 40, 8))
    with ttir.execute():
        o = module(*inputs)
        got = grads(o, inputs)
    exact, _ = exactly(inputs, Mask(causal=True), softcap=3.0)
    torch.testing.assert_close(got, grads(exact, inputs), atol=1e-5, rtol=1e-5)


def test_module_shows_its_options(kernels):
    assert "window_size=(3, 0)" in repr(kernels("attention").FlashAttention(window_size=(3, 0)))


def test_autocast_is_followed(kernels):
    inputs = leaves((1, 2, 20, 16), (1, 2, 20, 16), (1, 2, 20, 16))
    with ttir.execute(), torch.autocast("cpu", torch.bfloat16):
        o = kernels("attention").attention(*inputs)
        got = grads(o, inputs)
    assert o.dtype == torch.bfloat16
    assert [x.dtype for x in got] == [torch.float32] * 3
    torch.testing.assert_close(o.float(), exactly(inputs, Mask())[0].float(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 1, 8), (1, 1, 8, 16), (1, 1, 8, 16)), r"q.shape=\(1, 1, 8\): must be"),
        (((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 9, 16)), r"v.shape=\(1, 1, 9, 16\): must agree"),
        (((1, 1, 8, 16), (2, 1, 8, 16), (2, 1, 8, 16)), r"k.shape=\(2, 1, 8, 16\): batch and"),
        (((1, 3, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16)), r"heads_q=3: must be a multiple"),
        (((1, 1, 8, 257), (1, 1, 8, 257), (1, 1, 8, 16)), r"head_dim=257: must be 1 to 256"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(kernels, shapes, message):
    with ttir.execute(), pytest.raises(ValueError, match=message):
        kernels("attention").attention(*leaves(*shapes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": -1.0}, "softcap=-1.0: must be finite and at least 0"),
        ({"alignment": "left"}, "alignment='left': must be"),
        ({"alibi_slopes": torch.ones(1, requires_grad=True)}, "slopes get no gradient"),
        ({"dropout_p": 0.5, "dropout_seed": 1 << 63}, "dropout_seed=9223372036854775808: must fit"),
        ({"bias": torch.ones(8, 8).bool()}, "a mask goes in as 0 and -inf"),
        ({"dot_precision": "tf16"}, "dot_precision='tf16': must be one of"),
        ({"softmax_scale": float("inf")}, "softmax_scale=inf: must be finite"),
        ({"dropout_p": 1.0}, "dropout_p=1.0: must be"),
        ({"alibi_slopes": 0.5}, "alibi_slopes: float: must be a tensor"),
        ({"window_size": (-5, 0)}, r"window_size=\(-5, 0\): must be \(left, right\)"),
        ({"bias": torch.zeros(3, 8)}, r"bias: torch.float32 \(1, 1, 3, 8\): must be"),
        ({"bias": torch.zeros(8, dtype=torch.int32)}, "bias: torch.int32"),
        ({"alibi_slopes": torch.ones(2)}, r"alibi_slopes: torch.float32 \(2,\): must be float32"),
        ({"window_size": (3,)}, r"window_size=\(3,\): must be \(left, right\)"),
        ({"window_size": 3}, r"window_size=3: must be \(left, right\)"),
        ({"block_mask": torch.ones(8, 8).bool()}, "block_mask: Tensor: must be made by create_"),
        ({"sinks": torch.ones(1).half()}, r"sinks: torch.float16 \(1,\): must be float32"),
    ],
)
def test_options_that_break_their_rule_are_refused(kernels, options, message):
    inputs = leaves((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16))
    with ttir.execute(), pytest.raises(ValueError, match=message):
        kernels("attention").attention(*inputs, **options)


def test_a_precision_that_is_none_is_refused_whatever_the_dtype(kernels):
    inputs = leaves((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16), dtype=torch.float16)
    with ttir.execute(), pytest.raises(ValueError, match="dot_precision='tf16': must be one of"):
        kernels("attention").attention(*inputs, dot_precision="tf16")


def test_other_dtypes_are_refused(kernels):
    inputs = leaves((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16), dtype=torch.float64)
    with ttir.execute(), pytest.raises(ValueError, match=r"q.dtype=torch.float64: must be float16"):
        kernels("attention").attention(*inputs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's driver may then be CUDA's")
def test_tensors_where_triton_does_not_run_are_refused(kernels):
    inputs = leaves((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16))
    with pytest.raises(ValueError, match=r"q.device=cpu: Triton runs no kernel there"):
        kernels("attention").attention(*inputs)


@pytest.mark.parametrize("heads_within_rows", [True, False])
def test_o_is_in_memory_as_q(kernels, heads_within_rows):
    q, k, v = leaves((2, 4, 24, 16), (2, 2, 20, 16), (2, 2, 20, 8))
    if heads_within_rows:
        q = q.detach().transpose(1, 2).contiguous().transpose(1, 2)
    with ttir.execute() as run:
        o = kernels("attention").attention(q, k, v)
    assert run.incidents == []
    assert o.transpose(1, 2).is_contiguous() == heads_within_rows
    assert o.is_contiguous() != heads_within_rows
    assert torch.allclose(o.double(), exactly((q, k, v), Mask())[0], atol=1e-5)


def test_what_was_asked_before_lets_nothing_else_through(kernels):
    """Options are remembered; numbers that are equal are not the same."""
    inputs = leaves((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16))
    attention = kernels("attention").attention
    with ttir.execute():
        due = attention(*inputs, causal=True, window_size=(1, 0), softcap=1.0)
        again = attention(*inputs, causal=1, window_size=[1, 0], softcap=1)
        assert torch.equal(due, again)
        for wrong in ({"causal": 1.0}, {"causal": torch.tensor(1)}, {"window_size": (1.0, 0)}):
            options = {"causal": True, "window_size": (1, 0), "softcap": 1.0} | wrong
            for _ in range(2):
                with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
                    attention(*inputs, **options)
