"""`attention` and its module against float64."""

import pytest
import torch

from fa_verify import Mask, ttir


def leaves(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def grads(o, inputs):
    """Gradients of a loss that weighs every element of o differently."""
    weights = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).reshape(o.shape)
    return torch.autograd.grad(o, inputs, weights)


def exactly(inputs, mask, scale=None, softcap=0.0):
    """o and lse by the formula in float64."""
    q, k, v = (x.double() for x in inputs)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    seen = torch.from_numpy(mask.allowed(q.shape[2], k.shape[2]))
    logits = logits.masked_fill(~seen, float("-inf"))
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


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
    exact, exact_lse = exactly(inputs, mask, options.get("softmax_scale"), options.get("softcap"))
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
        ({"dot_precision": "tf16"}, "dot_precision='tf16': must be one of"),
        ({"softmax_scale": float("inf")}, "softmax_scale=inf: must be finite"),
    ],
)
def test_options_that_break_their_rule_are_refused(kernels, options, message):
    inputs = leaves((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16))
    with ttir.execute(), pytest.raises(ValueError, match=message):
        kernels("attention").attention(*inputs, **options)


def test_other_dtypes_are_refused(kernels):
    inputs = leaves((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16), dtype=torch.float64)
    with ttir.execute(), pytest.raises(ValueError, match=r"q.dtype=torch.float64: must be float16"):
        kernels("attention").attention(*inputs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's driver may then be CUDA's")
def test_tensors_where_triton_does_not_run_are_refused(kernels):
    inputs = leaves((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16))
    with pytest.raises(ValueError, match=r"q.device=cpu: Triton runs no kernel there"):
        kernels("attention").attention(*inputs)
