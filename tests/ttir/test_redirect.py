"""Tensors asked for on cuda: made on the CPU, and answering as if they were not."""

import copy

import pytest
import torch
import torch.profiler
import torch.utils.checkpoint
import triton
import triton.language as tl

from fa_verify import ttir
from fa_verify.ttir.scripts.redirect import redirected


@pytest.fixture(autouse=True)
def on_cuda():
    with redirected():
        yield


MADE = {
    "factory": lambda: torch.randn(3, device="cuda"),
    "index": lambda: torch.zeros(3, device="cuda:0"),
    "number": lambda: torch.zeros(3, device=0),
    "device": lambda: torch.ones(3, device=torch.device("cuda", 0)),
    "tensor": lambda: torch.tensor([1.0, 2.0], device="cuda"),
    "as_tensor": lambda: torch.as_tensor([1, 2], device="cuda"),
    "cuda": lambda: torch.zeros(3).cuda(),
    "to": lambda: torch.zeros(3).to("cuda"),
    "to, by name": lambda: torch.zeros(3).to(device="cuda", dtype=torch.float16),
    "to, other": lambda: torch.zeros(3).to(torch.zeros(1, device="cuda")),
    "type_as": lambda: torch.zeros(3).type_as(torch.zeros(1, device="cuda")),
    "result": lambda: torch.zeros(3, device="cuda") + 1,
    "list": lambda: torch.cat([torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")]),
    "like": lambda: torch.empty_like(torch.zeros(3, device="cuda")),
    "new": lambda: torch.zeros(3, device="cuda").new_empty(2),
    "view": lambda: torch.zeros(3, 2, device="cuda")[1:].T,
    "parameter": lambda: torch.nn.Parameter(torch.zeros(3, device="cuda")),
    "module": lambda: torch.nn.Linear(2, 2).cuda().weight,
    "module, to": lambda: torch.nn.Linear(2, 2).to("cuda")(torch.zeros(2, device="cuda")),
    "module, device": lambda: torch.nn.Linear(2, 2, device="cuda").bias,
    "copy": lambda: copy.deepcopy(torch.zeros(3, device="cuda")),
    "pinned": lambda: torch.empty(3, pin_memory=True).cuda(non_blocking=True),
    "triton's": lambda: torch.zeros(
        3, device=triton.runtime.driver.active.get_active_torch_device()
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_asked_for_on_cuda_says_that_it_is_there(name):
    with ttir.execute():
        x = MADE[name]()
        assert x.is_cuda
        assert not x.is_cpu
        assert (x.device.type, x.device.index, x.get_device()) == ("cuda", 0, 0)
        assert torch.zeros(1, device=x.device).is_cuda
        with torch.cuda.device(x.device):
            torch.testing.assert_close(x, x.clone(), equal_nan=True)
    with torch._C.DisableTorchFunction():
        assert x.device.type == "cpu"


KEPT = {
    "factory": lambda: torch.zeros(3),
    "cpu": lambda: torch.zeros(3, device="cuda").cpu(),
    "to": lambda: torch.zeros(3, device="cuda").to("cpu"),
    "like": lambda: torch.zeros_like(torch.zeros(3, device="cuda"), device="cpu"),
    "result": lambda: torch.zeros(3) + 1,
    "filled": lambda: torch.zeros(3).copy_(torch.ones(3, device="cuda")),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_on_the_cpu_says_so(name):
    x = KEPT[name]()
    assert not x.is_cuda
    assert x.device == torch.device("cpu")


def test_a_transfer_copies_and_staying_does_not():
    there = torch.zeros(3, device="cuda")
    here = there.cpu()
    there += 1
    assert (here == 0).all()
    assert there.to("cuda").data_ptr() == there.cuda().data_ptr() == there.data_ptr()
    assert here.to("cpu").data_ptr() == here.data_ptr()


def test_default_devices():
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(3).is_cuda
        assert torch.nn.Linear(2, 2).weight.is_cuda
        assert torch.get_default_device().type == "cuda"
    finally:
        torch.set_default_device(None)
    with torch.device("cuda"):
        assert torch.zeros(3).is_cuda
    assert not torch.zeros(3).is_cuda


def test_generators_repeat():
    def draw():
        generator = torch.Generator(device="cuda")
        assert generator.device.type == "cuda"
        return torch.randn(8, device="cuda", generator=generator.manual_seed(3))

    assert torch.equal(draw(), draw())
    torch.cuda.manual_seed(5)
    x = torch.randn(8, device="cuda")
    torch.cuda.manual_seed(5)
    assert torch.equal(x, torch.randn(8, device="cuda"))


class Doubled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
    def forward(ctx, x):
        assert x.is_cuda
        ctx.dtype = x.dtype
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        assert grad.is_cuda
        assert grad.device.type == "cuda"
        assert torch.empty(1, device="cuda").is_cuda
        return torch.full_like(grad, 2)


def test_gradients_are_on_cuda_also_inside_backward():
    x = torch.ones(3, device="cuda", requires_grad=True)
    Doubled.apply(x).sum().backward()
    assert x.grad.is_cuda
    x.grad = None
    x.half().backward(torch.ones(3, device="cuda", dtype=torch.float16))
    assert x.grad.is_cuda
    (grad,) = torch.autograd.grad(Doubled.apply(x).sum(), x)
    assert grad.is_cuda
    assert (grad == 2).all()


def test_autocast_casts():
    a = torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda"):
        assert (a @ a).dtype == torch.float16
        assert Doubled.apply(a).dtype == torch.float16
        assert (a @ a).softmax(-1).dtype == torch.float32  # which the CPU's own would leave in half
        assert torch.nn.functional.layer_norm((a @ a), (2,)).dtype == torch.float32
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        assert (a @ a).dtype == torch.bfloat16
    assert (a @ a).dtype == torch.float32


@triton.jit
def write_three(x_ptr):
    i = tl.arange(0, 4)
    tl.store(x_ptr + i, i.to(tl.float32), mask=i < 3)


def test_operators_registered_for_cuda_are_called():
    @torch.library.custom_op("fa_verify_test::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        return torch.full((3,), 2.0, device="cuda")

    @torch.library.triton_op("fa_verify_test::thrice", mutates_args=())
    def thrice(x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        made = torch.empty(4, device=x.device)
        torch.library.wrap_triton(write_three)[(1,)](made)
        return made

    with ttir.execute() as run:
        assert twice(torch.zeros(3, device="cuda")).is_cuda
        made = thrice(torch.zeros(3, device="cuda"))
        assert made.is_cuda
        assert run.unwritten(made).tolist() == [False, False, False, True]
    with pytest.raises(NotImplementedError):
        twice(torch.zeros(3))


def test_operators_that_replace_torchs_are_called_by_the_script_only():
    filled = []
    with torch.library._scoped_library("aten", "IMPL") as library, ttir.execute():
        library.impl("fill_.Scalar", lambda x, value: filled.append(value) or x, "CUDA")
        x = torch.empty_like(torch.ones(3, device="cuda"))
        assert filled == []
        x.fill_(2.0)
        assert filled == [2.0]


def test_optimizers_step():
    model = torch.nn.Linear(2, 2).cuda()
    before = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
    assert (model.weight != before).all()


def test_nothing_is_timed():
    calls = []
    time = triton.testing.do_bench(lambda: calls.append(1), quantiles=[0.5, 0.2, 0.8])
    assert len(calls) == 1
    assert all(t != t for t in time)  # noqa: PLR0124 - not a number
    assert len(time) == 3


def test_pointwise_operations_in_half_precision_round_once():
    x = torch.randn(999, device="cuda", dtype=torch.float16, requires_grad=True)
    y = x.tanh()
    y.sum().backward()
    assert torch.equal(x.grad, (1 - y.detach().double() ** 2).half())
    assert y.dtype == torch.float16
    assert (x + torch.ones(999, device="cuda")).dtype == torch.float32
    assert (x > 0).dtype == torch.bool


def test_layer_norm_in_half_precision_is_summed_in_float32():
    x = torch.randn(512, 64, device="cuda", dtype=torch.float16)
    grad = torch.randn_like(x)
    bias = torch.zeros(64, device="cuda", dtype=torch.float16, requires_grad=True)
    torch.nn.functional.layer_norm(x, (64,), torch.ones_like(bias), bias).backward(grad)
    assert torch.equal(bias.grad, grad.double().sum(0).half())


def test_integers_have_a_histogram():
    x = torch.tensor([0, 3, 3, 1], device="cuda")
    counts = torch.histc(x, bins=4, min=0, max=3)
    assert counts.is_cuda
    assert (counts.dtype, counts.tolist()) == (torch.int64, [1, 1, 0, 2])


def test_inference_mode_changes_no_number():
    x = torch.randn(64, 999, device="cuda", dtype=torch.float16) + 3
    outside = torch.nn.functional.layer_norm(x, (999,))
    with torch.inference_mode():
        inside = torch.nn.functional.layer_norm(x, (999,))
    assert inside.is_cuda
    assert torch.equal(inside, outside)


def test_everything_is_put_back():
    with torch._C.DisableTorchFunction():
        before = torch.Generator, torch.autocast.__init__, torch.library.Library.impl
    with redirected():
        pass
    assert (torch.Generator, torch.autocast.__init__, torch.library.Library.impl) == before


@pytest.mark.parametrize("location", ["cuda", "cuda:0", torch.device("cuda", 0), "cpu", None])
def test_files_are_loaded_where_they_are_asked_for(tmp_path, location):
    torch.save({"x": torch.arange(3.0)}, tmp_path / "x.pt")
    x = torch.load(tmp_path / "x.pt", map_location=location)["x"]
    assert x.tolist() == [0, 1, 2]
    assert x.is_cuda == (location not in ("cpu", None))


def test_what_was_saved_on_cuda_is_loaded_there(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
        torch.save(torch.arange(3.0), tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt").is_cuda
    assert not torch.load(tmp_path / "x.pt", map_location="cpu").is_cuda


def test_a_profiler_records_the_cpu(capfd):
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profiler:
        torch.ones(3, device="cuda") + 1
    assert "aten::add" in {event.key for event in profiler.key_averages()}
    assert "CUDA" not in capfd.readouterr().err


def test_checkpoints_recompute_on_cuda():
    x = torch.ones(2, device="cuda", requires_grad=True)
    torch.utils.checkpoint.checkpoint(
        lambda x: (x * 2).sin().exp(), x, use_reentrant=False
    ).sum().backward()
    assert x.grad.is_cuda


def test_ranges_for_a_profiler_do_nothing():
    with torch.cuda.nvtx.range("forward"):
        torch.cuda.nvtx.mark("here")
    assert torch.cuda.memory_summary() == ""


def test_memory_that_inductors_code_asks_for_is_on_cuda():
    with redirected(), torch.cuda._DeviceGuard(0):
        x = torch._C._dynamo.guards._empty_strided_cuda((4, 3), (1, 4), torch.bfloat16)
        assert x.is_cuda
        assert (x.shape, x.stride(), x.dtype) == ((4, 3), (1, 4), torch.bfloat16)
