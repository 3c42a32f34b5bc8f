"""`attention`, the module and the drop-in for PyTorch's SDPA."""

import pytest
import torch
from torch.nn import functional

from fa_verify import Mask, ttir


def leaves(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def grads(o, inputs):
    return torch.autograd.grad(o, inputs, torch.linspace(-1, 1, o.numel()).reshape(o.shape))


@pytest.mark.parametrize("deterministic", [True, False])
def test_module_and_its_gradients(kernels, deterministic):
    module = kernels("attention").FlashAttention(causal=True, deterministic=deterministic)
    inputs = leaves((2, 4, 20, 16), (2, 2, 40, 16), (2, 2, 40, 8))
    with ttir.execute() as run:
        o = module(*inputs)
        got = grads(o, inputs)
    assert run.incidents == []
    mask = torch.from_numpy(Mask(causal=True).allowed(20, 40))
    exact = functional.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(o, exact)
    torch.testing.assert_close(got, grads(exact, inputs), atol=1e-5, rtol=1e-5)


def test_module_shows_its_options(kernels):
    assert "window_size=(3, 0)" in repr(kernels("attention").FlashAttention(window_size=(3, 0)))


@pytest.mark.parametrize("is_causal", [True, False])
def test_drop_in_is_top_left_as_in_torch(kernels, is_causal):
    inputs = leaves((1, 2, 30, 16), (1, 1, 150, 16), (1, 1, 150, 16))
    sdpa = kernels("attention").scaled_dot_product_attention
    with ttir.execute() as run:
        o = sdpa(*inputs, is_causal=is_causal, scale=0.5, enable_gqa=True)
    assert [launch.kernel for launch in run.launches] == ["forward_kernel"]
    exact = functional.scaled_dot_product_attention(
        *inputs, is_causal=is_causal, scale=0.5, enable_gqa=True
    )
    torch.testing.assert_close(o, exact)


def test_drop_in_takes_the_plain_path_for_short_lengths(kernels):
    inputs = leaves((1, 1, 30, 16), (1, 1, 40, 16), (1, 1, 40, 16))
    with ttir.execute() as run:
        o = kernels("attention").scaled_dot_product_attention(*inputs)
    assert run.launches == []
    torch.testing.assert_close(o, functional.scaled_dot_product_attention(*inputs))


def test_drop_in_takes_the_plain_path_where_triton_does_not_run(kernels):
    inputs = leaves((1, 1, 150, 16), (1, 1, 150, 16), (1, 1, 150, 16))
    o = kernels("attention").scaled_dot_product_attention(*inputs)
    torch.testing.assert_close(o, functional.scaled_dot_product_attention(*inputs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": torch.ones(1)}, "attn_mask=Tensor: arbitrary masks are not supported"),
        ({"dropout_p": 0.1}, "dropout_p=0.1: dropout is not supported"),
    ],
)
def test_drop_in_names_what_it_lacks(kernels, options, message):
    inputs = leaves((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16))
    with pytest.raises(NotImplementedError, match=message):
        kernels("attention").scaled_dot_product_attention(*inputs, **options)


def test_drop_in_wants_enable_gqa(kernels):
    inputs = leaves((1, 2, 150, 16), (1, 1, 150, 16), (1, 1, 150, 16))
    with ttir.execute(), pytest.raises(ValueError, match="enable_gqa=False: key has 1 heads"):
        kernels("attention").scaled_dot_product_attention(*inputs)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 1, 8), (1, 1, 8, 16), (1, 1, 8, 16)), r"q.shape=\(1, 1, 8\): must be"),
        (((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 9, 16)), r"v.shape=\(1, 1, 9, 16\): must agree"),
        (((1, 1, 8, 16), (2, 1, 8, 16), (2, 1, 8, 16)), r"k.shape=\(2, 1, 8, 16\): batch and"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(kernels, shapes, message):
    with pytest.raises(ValueError, match=message):
        kernels("attention").attention(*leaves(*shapes))


def test_other_dtypes_are_refused(kernels):
    inputs = leaves((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16), dtype=torch.float64)
    with pytest.raises(ValueError, match=r"q.dtype=torch.float64: must be float16"):
        kernels("attention").attention(*inputs)
