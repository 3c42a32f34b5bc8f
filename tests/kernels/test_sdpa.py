"""The drop-in against torch's own function."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fa_verify import ttir


def leaves(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def grads(o, inputs):
    weights = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).reshape(o.shape)
    return torch.autograd.grad(o, inputs, weights)


@pytest.fixture
def sdpa(kernels, monkeypatch):
    """The drop-in, with the kernels for whatever they take, however small."""
    monkeypatch.setattr(kernels("sdpa"), "faster", lambda *_tensors: True)
    return kernels("sdpa").scaled_dot_product_attention


@pytest.mark.parametrize("is_causal", [True, False])
def test_it_is_top_left_as_in_torch(sdpa, is_causal):
    inputs = leaves((1, 2, 30, 16), (1, 1, 150, 16), (1, 1, 150, 16))
    with ttir.execute() as run:
        o = sdpa(*inputs, is_causal=is_causal, scale=0.5, enable_gqa=True)
        got = grads(o, inputs)
    assert {launch.kernel for launch in run.launches} >= {"forward_kernel", "dkdv_kernel"}
    exact = functional.scaled_dot_product_attention(
        *inputs, is_causal=is_causal, scale=0.5, enable_gqa=True
    )
    torch.testing.assert_close(o, exact)
    torch.testing.assert_close(got, grads(exact, inputs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", [(20, 150), (2, 1, 1, 150), (1, 4, 20, 1), (2, 4, 20, 150)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_are_torchs_and_run_by_the_kernels(sdpa, kind, shape):
    *inputs, mask = leaves((2, 4, 20, 16), (2, 2, 150, 16), (2, 2, 150, 8), shape)
    if kind == "bool":
        mask = (mask.detach() > -1).expand(2, 4, 20, 150)
    differentiated = inputs if kind == "bool" else [*inputs, mask]
    with ttir.execute() as run:
        o = sdpa(*inputs, attn_mask=mask, enable_gqa=True)
        got = grads(o, differentiated)
    assert run.incidents == []
    launched = {launch.kernel for launch in run.launches}
    assert {"forward_kernel", "dkdv_kernel"} <= launched
    assert ("dbias_kernel" in launched) == (kind == "float")
    exact = functional.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(o, exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, grads(exact, differentiated), atol=2e-5, rtol=1e-4)


def test_rows_that_a_mask_hides_whole_are_torchs(sdpa):
    inputs = leaves((1, 2, 20, 16), (1, 2, 150, 16), (1, 2, 150, 8))
    mask = torch.arange(20)[:, None] % 3 > 0
    with ttir.execute():
        o = sdpa(*inputs, attn_mask=mask.expand(20, 150))
        got = grads(o, inputs)
    exact = functional.scaled_dot_product_attention(*inputs, attn_mask=mask.expand(20, 150))
    torch.testing.assert_close(o, exact)
    torch.testing.assert_close(got, grads(exact, inputs), atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
def test_transforms_are_torchs(sdpa):
    x = torch.randn(3, 1, 2, 8, 16)
    plain = functional.scaled_dot_product_attention
    transforms = (
        lambda f: torch.vmap(lambda y: f(y, y, y))(x),
        lambda f: torch.func.grad(lambda y: f(y, y, y).square().sum())(x[0]),
        lambda f: torch.func.jvp(lambda y: f(y, y, y), (x[0],), (x[1],))[1],
    )
    with ttir.execute() as run, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for transform in transforms:
            assert torch.equal(transform(sdpa), transform(plain))
        assert run.launches == []
        with torch.autograd.forward_ad.dual_level():
            y = torch.autograd.forward_ad.make_dual(x[0], x[1])
            assert torch.autograd.forward_ad.unpack_dual(sdpa(y, y, y)).tangent is not None
        assert run.launches == []
        sdpa(x[0], x[0], x[0])
        assert run.launches != []


def test_dropout_is_that_of_the_generator(sdpa, kernels):
    inputs = leaves((1, 2, 150, 16), (1, 2, 150, 16), (1, 2, 150, 16))
    with ttir.execute():
        torch.manual_seed(1)
        o = sdpa(*inputs, dropout_p=0.25)
        torch.manual_seed(1)
        expected = kernels("attention").attention(*inputs, dropout_p=0.25)
    assert torch.equal(o, expected)
    assert not torch.equal(o, functional.scaled_dot_product_attention(*inputs))


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, 1.5])
def test_dropout_that_kernels_do_not_take_is_torchs(sdpa, dropout_p):
    inputs = leaves((1, 2, 150, 16), (1, 2, 150, 16), (1, 2, 150, 16))
    with ttir.execute() as run:
        got = outcome(sdpa, *inputs, dropout_p=dropout_p)
        expected = outcome(functional.scaled_dot_product_attention, *inputs, dropout_p=dropout_p)
    assert run.launches == []
    if isinstance(expected, tuple):
        assert got == expected
    else:
        torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "precision", "kernels_run"),
    [
        ((1, 1, 40, 16), torch.float16, "highest", False),
        ((1, 16, 4096, 64), torch.float16, "highest", False),
        ((8, 16, 4096, 64), torch.float16, "highest", True),
        ((8, 16, 4096, 64), torch.float32, "highest", False),
        ((8, 16, 4096, 64), torch.float32, "high", True),
    ],
)
def test_what_torch_does_faster_is_torchs(
    kernels, on_the_cpu, monkeypatch, shape, dtype, precision, kernels_run
):
    monkeypatch.setattr(
        kernels("sdpa"),
        "_float32_precision",
        {"highest": lambda: "ieee", "high": lambda: "tf32"}[precision],
    )
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype) for _ in range(3)]
        with Asked() as asked:
            kernels("sdpa").scaled_dot_product_attention(*inputs)
    assert any("attention_forward" in name for name in asked.names) == kernels_run
    assert on_the_cpu == []


def test_tensors_where_triton_does_not_run_are_torchs(sdpa):
    inputs = leaves((1, 1, 150, 16), (1, 1, 150, 16), (1, 1, 150, 16))
    torch.testing.assert_close(sdpa(*inputs), functional.scaled_dot_product_attention(*inputs))


class Asked(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def outcome(function, *args, **options):
    """What a call returned, or the error that it raised."""
    try:
        return function(*args, **options)
    except Exception as error:  # noqa: BLE001
        return type(error), str(error)


SHAPES = {
    "gqa": ((2, 4, 20, 16), (2, 2, 150, 16), (2, 2, 150, 24)),
    "heads that broadcast": ((1, 4, 20, 16), (1, 1, 150, 16), (1, 1, 150, 16)),
    "heads that do not": ((1, 3, 20, 16), (1, 2, 150, 16), (1, 2, 150, 16)),
    "batches that broadcast": ((2, 1, 20, 16), (1, 1, 150, 16), (1, 1, 150, 16)),
    "head_dims that do not fit": ((1, 1, 20, 16), (1, 1, 150, 8), (1, 1, 150, 16)),
    "lengths that do not fit": ((1, 1, 20, 16), (1, 1, 150, 16), (1, 1, 149, 16)),
    "three axes": ((2, 20, 16), (2, 150, 16), (2, 150, 16)),
    "five axes": ((1, 2, 2, 20, 16), (1, 2, 2, 150, 16), (1, 2, 2, 150, 16)),
    "no keys": ((1, 1, 150, 16), (1, 1, 0, 16), (1, 1, 0, 16)),
    "wide": ((1, 1, 20, 257), (1, 1, 150, 257), (1, 1, 150, 257)),
}
MASKS = {
    "none": None,
    "2D bool": torch.ones(20, 150, dtype=torch.bool).tril(90),
    "broadcast float": torch.linspace(-2, 2, 150).reshape(1, 1, 1, 150),
    "a shape that does not fit": torch.zeros(7, 7),
    "integers": torch.zeros(20, 150, dtype=torch.int64),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("mask", MASKS)
def test_results_and_errors_are_torchs(sdpa, shapes, mask):
    inputs = leaves(*shapes)
    for is_causal, scale, enable_gqa in itertools.product(
        (False, True), (None, 0.3), (False, True)
    ):
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        options["attn_mask"] = MASKS[mask]
        with ttir.execute() as run:
            got = outcome(sdpa, *inputs, **options)
            expected = outcome(functional.scaled_dot_product_attention, *inputs, **options)
        assert run.incidents == []
        if isinstance(expected, tuple):
            assert got == expected
        else:
            torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float64", "float64"), ("int64",) * 2])
def test_dtypes_are_torchs(sdpa, dtypes):
    q, k = (torch.ones(1, 1, 150, 16, dtype=getattr(torch, dtype)) for dtype in dtypes)
    with ttir.execute():
        got = outcome(sdpa, q, k, k)
    expected = outcome(functional.scaled_dot_product_attention, q, k, k)
    if isinstance(expected, tuple):
        assert got == expected
    else:
        torch.testing.assert_close(got, expected)


def test_autocast_is_torchs(sdpa):
    inputs = leaves((1, 1, 150, 16), (1, 1, 150, 16), (1, 1, 150, 16))
    with ttir.execute() as run, torch.autocast("cpu", torch.float16):
        o = sdpa(*inputs)
        expected = functional.scaled_dot_product_attention(*inputs)
    assert [launch.kernel for launch in run.launches] == ["forward_kernel"]
    assert o.dtype == expected.dtype == torch.float16
    torch.testing.assert_close(o, expected, atol=1e-3, rtol=0)  # o < 1: an ulp is up to 2^-11


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("patched", [True, False])
def test_it_compiles_whole(kernels, on_the_cpu, monkeypatch, patched):
    """With the kernels; and with its own rules, by which so small a call is torch's."""
    if patched:
        monkeypatch.setattr(kernels("sdpa"), "faster", lambda *_tensors: True)
    sdpa = kernels("sdpa").scaled_dot_product_attention
    compiled = torch.compile(
        lambda *args: sdpa(*args, is_causal=True), fullgraph=True, backend="aot_eager"
    )
    for dtype in (torch.float16,) if patched else (torch.float16, torch.float32):
        inputs = leaves(*((1, 1, 150, 16),) * 3, dtype=dtype)
        expected = functional.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.testing.assert_close(compiled(*inputs), expected, atol=2e-3, rtol=0)
    assert on_the_cpu == ["forward_kernel"] * patched


def test_importing_the_kernels_loads_no_compiler_of_torch():
    script = (
        "import sys, torch\n"
        "from fa_verify import loader\n"
        "loader.load('kernels')\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_in_the_place_of_torch_s_own_it_still_hands_on(sdpa, monkeypatch):
    inputs = [torch.randn(1, 2, 8, 16) for _ in range(3)]  # too short for the kernels
    expected = functional.scaled_dot_product_attention(*inputs)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", sdpa)
    assert torch.equal(functional.scaled_dot_product_attention(*inputs), expected)
