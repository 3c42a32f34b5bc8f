"""The operators under fake tensors, torch.compile and torch's own checks."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

SHAPES = (1, 2, 20, 16), (1, 1, 24, 16), (1, 1, 24, 8)


def leaves(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(x, generator=generator).to(dtype).requires_grad_() for x in SHAPES]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_torch_finds_nothing_wrong(kernels, on_the_cpu, causal, deterministic):
    operators = kernels("operators")
    inputs = kernels("inputs")
    options = inputs.Options(causal=causal, deterministic=deterministic)
    torch.library.opcheck(operators.attention_forward_op, (*inputs.Inputs(*leaves()), *options))
    assert "dkdv_kernel" in on_the_cpu


def test_torch_finds_nothing_wrong_with_terms(kernels, on_the_cpu):
    inputs = kernels("inputs")
    bias, slopes, sinks = (torch.randn(shape) for shape in ((1, 2, 20, 1), (2,), (2,)))
    tensors = inputs.Inputs(
        *leaves(), bias.requires_grad_(), slopes, sinks.requires_grad_(), torch.tensor(3)
    )
    options = inputs.Options(dropout_p=0.2)
    torch.library.opcheck(kernels("operators").attention_forward_op, (*tensors, *options))
    assert "dbias_kernel" in on_the_cpu


def test_torch_finds_nothing_wrong_with_packed_sequences(kernels, on_the_cpu):
    inputs = kernels("inputs")
    starts = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 20], [0, 20, 24]))
    tensors = inputs.Inputs(*leaves(), None, None, None, None, *starts)
    torch.library.opcheck(
        kernels("operators").attention_forward_op, (*tensors, *inputs.Options(causal=True))
    )
    assert "dkdv_kernel" in on_the_cpu


def test_torch_finds_nothing_wrong_with_a_block_mask(kernels, on_the_cpu):
    inputs = kernels("inputs")
    mask = kernels("attention").create_block_mask(lambda q, k: (q + k) % 3 > 0, 20, 24, "cpu")
    tensors = inputs.Inputs(*leaves(), block_mask=mask.flat)
    torch.library.opcheck(kernels("operators").attention_forward_op, (*tensors, *inputs.Options()))
    assert "dkdv_kernel" in on_the_cpu


def test_torch_finds_nothing_wrong_with_strides(kernels, on_the_cpu):
    operators = kernels("operators")
    inputs = kernels("inputs")
    options = inputs.Options(
        softmax_scale=0.3, causal=True, window_left=5, softcap=2.0, alignment="top-left"
    )
    tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in leaves()]
    torch.library.opcheck(operators.attention_forward_op, (*inputs.Inputs(*tensors), *options))
    assert "forward_kernel" in on_the_cpu


@pytest.fixture
def function(kernels):
    """What a model would compile."""
    attention = kernels("attention").attention

    def function(q, k, v):
        o, lse = attention(2 * q, k, v, causal=True, window_size=(7, 0), return_lse=True)
        return o.relu(), lse + 1

    return function


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiles_whole_and_gives_the_same_bits(function, on_the_cpu, backend, dynamic):
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    inputs = leaves()
    got, expected = compiled(*inputs), function(*inputs)
    assert on_the_cpu == ["forward_kernel"] * 2
    assert all(map(torch.equal, got, expected))
    got, expected = (torch.autograd.grad(o.sum(), inputs) for o, _ in (got, expected))
    assert all(map(torch.equal, got, expected))


@pytest.mark.filterwarnings("ignore")
def test_compiled_once_for_all_lengths(function, on_the_cpu):
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for seqlen in (20, 33, 64):
        q = torch.randn(1, 2, seqlen, 16)
        assert torch.equal(compiled(q, q, q)[0], function(q, q, q)[0])
    assert len(graphs) == 1
    assert on_the_cpu == ["forward_kernel"] * 6


def test_fake_tensors_run_no_kernel(kernels, on_the_cpu):
    with FakeTensorMode():
        q, k, v = (torch.empty(x, dtype=torch.float16, requires_grad=True) for x in SHAPES)
        o, lse = kernels("attention").attention(q, k, v, return_lse=True)
        dq, dk, dv = torch.autograd.grad(o.sum(), (q, k, v))
    assert on_the_cpu == []
    assert (o.shape, o.dtype) == ((1, 2, 20, 8), torch.float16)
    assert (lse.shape, lse.dtype) == ((1, 2, 20), torch.float32)
    assert [x.shape for x in (dq, dk, dv)] == [x.shape for x in (q, k, v)]


def test_fake_tensors_are_refused_as_real_ones_are(kernels):
    with FakeTensorMode(), pytest.raises(ValueError, match="head_dim=300: must be 1 to 256"):
        kernels("attention").attention(*(torch.empty(1, 1, 8, 300, dtype=torch.float16),) * 3)


def test_a_gradient_has_no_gradient(kernels, on_the_cpu):
    inputs = leaves()
    (dq,) = torch.autograd.grad(
        kernels("attention").attention(*inputs).sum(), inputs[:1], create_graph=True
    )
    assert "dq_kernel" in on_the_cpu
    with pytest.raises(NotImplementedError, match="its gradients have no gradients"):
        torch.autograd.grad(dq.sum(), inputs[1])


def test_the_operator_alone_has_the_same_gradients(kernels, on_the_cpu):
    inputs, arguments = leaves(), kernels("inputs")
    operator = kernels("operators").attention_forward_op
    o, lse = operator(*arguments.Inputs(*inputs), *arguments.Options())
    expected = kernels("attention").attention(*inputs, return_lse=True)
    for one, due in zip((o, lse), expected, strict=True):
        got, grads = (
            torch.autograd.grad(x.sum(), inputs[:2], retain_graph=True) for x in (one, due)
        )
        assert all(map(torch.equal, got, grads))
    assert on_the_cpu.count("dq_kernel") == 4


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_compute_it_again(kernels, on_the_cpu, use_reentrant):
    inputs, attention = leaves(), kernels("attention").attention

    def function(*inputs):
        return attention(*inputs, causal=True, dropout_p=0.2)

    torch.manual_seed(0)
    o = checkpoint(function, *inputs, use_reentrant=use_reentrant)
    got = grads_of(o, inputs)
    assert on_the_cpu.count("forward_kernel") == 2
    torch.manual_seed(0)
    assert all(map(torch.equal, got, grads_of(function(*inputs), inputs)))


def grads_of(o, inputs):
    for x in inputs:
        x.grad = None
    o.square().sum().backward()
    return [x.grad for x in inputs]


def test_only_these_tensors_are_saved(kernels, on_the_cpu):
    inputs = leaves()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o, lse = kernels("attention").attention(*inputs, return_lse=True)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in (o, lse, *inputs)]
    assert on_the_cpu == ["forward_kernel"]


def test_the_package_can_be_loaded_twice(kernels, another_copy, on_the_cpu):
    first, second = kernels("operators"), another_copy("operators")
    assert first.attention_forward_op is not second.attention_forward_op
    inputs = leaves()
    o = kernels("attention").attention(*inputs)
    assert o.isfinite().all()
    assert on_the_cpu == ["forward_kernel"]  # that of the first copy, which this fixture watches
