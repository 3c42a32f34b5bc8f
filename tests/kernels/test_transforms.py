"""`attention` under `torch.func`, batched gradients and forward mode: right, or refused by name."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

SHAPE = 1, 2, 6, 4


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def attention(kernels, on_the_cpu):
    function = kernels("attention").attention
    return lambda x, bias=None: function(x, 2 * x, x + 1, bias=bias)


def exactly(x, bias=0.0):
    return (2 * x @ x.mT * x.shape[-1] ** -0.5 + bias).softmax(-1) @ (x + 1)


def loss(function, *further):
    return lambda x: function(x, *further).square().sum()


TRANSFORMS = {
    "vmap": lambda f: torch.vmap(f)(random(3, *SHAPE)),
    "vmap of rows": lambda f: torch.vmap(f, in_dims=2)(random(1, 2, 3, 6, 4)),
    "grad": lambda f: torch.func.grad(loss(f))(random(*SHAPE)),
    "grad with bias": lambda f: torch.func.grad(loss(f, random(6, 6)))(random(*SHAPE)),
    "grad of bias": lambda f: torch.func.grad(
        lambda bias: loss(f, bias)(random(*SHAPE))
    )(random(2, 1, 6)),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(loss(f)))(random(3, *SHAPE)),
    "grad of vmap": lambda f: torch.func.grad(loss(torch.vmap(f)))(random(3, *SHAPE)),
    "jacrev": lambda f: torch.func.jacrev(f)(random(*SHAPE)),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_are_right(attention, on_the_cpu, name):
    found, due = (TRANSFORMS[name](function) for function in (attention, exactly))
    assert "forward_kernel" in on_the_cpu
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-5)


def test_batched_gradients_are_right(attention):
    x = random(*SHAPE).requires_grad_()
    found, due = (
        torch.autograd.grad(function(x), x, random(3, *SHAPE), is_grads_batched=True)[0]
        for function in (attention, exactly)
    )
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_right(attention, reentrant):
    gradients = []
    for call in (attention, lambda x: checkpoint(attention, x, use_reentrant=reentrant)):
        x = random(*SHAPE).requires_grad_()
        call(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
def test_forward_mode_is_refused(attention):
    x = random(*SHAPE)
    with pytest.raises(NotImplementedError, match="no forward-mode gradients"):
        torch.func.jvp(attention, (x,), (x,))
    with pytest.raises(NotImplementedError, match="no forward-mode gradients"):
        torch.func.hessian(loss(attention))(x)
    with forward_ad.dual_level():
        attention(x)  # nothing of it moves
        with pytest.raises(NotImplementedError, match="no forward-mode gradients"):
            attention(forward_ad.make_dual(x, x))


def test_the_operator_loses_no_tangent(attention, kernels, monkeypatch):
    monkeypatch.setattr(kernels("operators"), "eager", lambda *_: False)
    x = random(*SHAPE)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode"):
        attention(forward_ad.make_dual(x, x))


def test_gradients_of_gradients_are_refused(attention):
    x = random(*SHAPE)
    with pytest.raises(NotImplementedError, match="its gradients have no gradients"):
        torch.func.grad(lambda y: torch.func.grad(loss(attention))(y).sum())(x)
