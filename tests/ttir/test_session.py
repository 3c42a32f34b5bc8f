"""Switching the executor on and off, autotuning, allocation, schedules, and what launchers ask."""

# Triton reads the kernels in this file: their constexprs are upper-case and their names are short.
# ruff: noqa: N803, PTH123

import time

import pytest
import torch
import triton
import triton.backends
import triton.language as tl
from triton.runtime.driver import driver

from fa_verify import ttir
from fa_verify.ttir.launch import session


@triton.jit
def plain(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, BLOCK + tl.zeros([BLOCK], tl.float32), mask=i < n)


CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((16, 1), (32, 2), (64, 4))]
seen = []


@triton.autotune(configs=CONFIGS, key=["n"], reset_to_zero=["x_ptr"])
@triton.jit
def tuned(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(x_ptr + i, x + BLOCK, mask=i < n)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 16}, pre_hook=lambda kwargs: seen.append(kwargs["BLOCK"]))],
    key=[],
)
@triton.heuristics({"EVEN": lambda kwargs: kwargs["n"] % kwargs["BLOCK"] == 0})
@triton.jit
def heuristic(x_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(x_ptr + i, tl.full([BLOCK], 2.0, tl.float32))
    else:
        tl.store(x_ptr + i, tl.full([BLOCK], 3.0, tl.float32), mask=i < n)


@triton.jit
def forever(x_ptr):
    x = 1.0
    while x > 0.0:
        x = x * 2.0 + 1.0 - x
        x = tl.minimum(x, 2.0)
    tl.store(x_ptr, x)


@triton.jit
def waiter(flag_ptr):
    while tl.atomic_cas(flag_ptr, 1, 1) == 0:
        pass


ASSEMBLY = tl.constexpr("mov.b32 $0, %laneid;")  # TTIR has no threads


@triton.jit
def assembly(x_ptr):
    x = tl.load(x_ptr)
    y = tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [x], tl.float32, True, 1)
    tl.store(x_ptr, y)  # after the assembly


def test_everything_is_put_back_even_after_an_exception():
    before = dict(triton.backends.backends), driver._active, torch.cuda.current_device
    with pytest.raises(ZeroDivisionError), ttir.execute():  # noqa: PT012
        assert "fa_verify" in triton.backends.backends
        assert "nvidia" not in triton.backends.backends
        assert torch.cuda.get_device_capability() == (9, 0)
        raise ZeroDivisionError
    assert before == (dict(triton.backends.backends), driver._active, torch.cuda.current_device)
    assert not torch.empty(1000).isnan().all()


def test_executions_do_not_nest():
    with ttir.execute(), pytest.raises(RuntimeError, match="nested"), ttir.execute():
        pass
    with ttir.execute():
        pass


def test_launching_while_only_activated_says_what_to_do():
    with ttir.activated(), pytest.raises(RuntimeError, match=r"ttir\.execute"):
        plain[(1,)](torch.zeros(16), 16, 16)


def test_launchers_get_a_hoppers_answers():
    with ttir.activated():
        target = triton.runtime.driver.active.get_current_target()
        assert (target.backend, target.arch, target.warp_size) == ("cuda", 90, 32)
        assert triton.runtime.driver.active.get_active_torch_device() == torch.device("cpu")
        properties = torch.cuda.get_device_properties(0)
        assert (properties.major, properties.multi_processor_count) == (9, 132)
        utils = triton.runtime.driver.active.utils
        assert utils.get_device_properties(0)["multiprocessor_count"] == 132
        with torch.cuda.device(None):
            torch.cuda.synchronize()
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))


@pytest.mark.parametrize("config", [0, 1, 2, 4])
def test_one_autotune_configuration_is_pinned(config):
    with ttir.execute(ttir.Options(config=config)) as run:
        x = torch.ones(100)
        grid = lambda meta: (triton.cdiv(100, meta["BLOCK"]),)  # noqa: E731
        tuned[grid](x, 100)
        block = (16, 32, 64)[config % 3]
        assert (x == 1 + block).all()  # never reset: as on every launch but the first on a GPU
        tuned[grid](x, 100)
        assert (x == 1 + 2 * block).all()
    assert run.configs == {"tuned": 3}
    assert [launch.constants["BLOCK"] for launch in run.launches] == [block, block]
    assert run.launches[0].num_warps == (1, 2, 4)[config % 3]
    assert run.launches[0].grid == (triton.cdiv(100, block), 1, 1)
    assert run.incidents == []


def test_heuristics_and_hooks_behave():
    seen.clear()
    x = torch.zeros(33)
    with ttir.execute() as run:
        heuristic[(2,)](x, 32)
        assert (x[:32] == 2).all()
        heuristic[(3,)](x, 33)
    assert (x == 3).all()
    assert seen == [16, 16]
    assert run.launches[1].constants["EVEN"] is False


def test_launch_hooks_are_called():
    calls = []
    knobs = triton.knobs.runtime
    enter, leave = (lambda _: calls.append("enter")), (lambda _: calls.append("exit"))
    knobs.launch_enter_hook.add(enter)
    knobs.launch_exit_hook.add(leave)
    try:
        with ttir.execute():
            plain[(1,)](torch.zeros(16), 16, 16)
    finally:
        knobs.launch_enter_hook.remove(enter)
        knobs.launch_exit_hook.remove(leave)
    assert calls == ["enter", "exit"]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.bool]
)
def test_what_is_allocated_uninitialised_is_poisoned(dtype):
    with ttir.execute() as run:
        x = torch.empty(3, 5, dtype=dtype)
        y = torch.empty_like(x)
        z = x.new_empty(4)
        s = torch.empty_strided((2, 2), (4, 1), dtype=dtype)
    for tensor in (x, y, z, s):
        assert run.unwritten(tensor).all()
        if dtype.is_floating_point:
            assert tensor.isnan().all()
        else:
            assert (tensor != 0).all()


def test_what_torch_writes_counts_as_written():
    with ttir.execute() as run:
        x = torch.empty(4, 4)
        x[1] = 1.0
        x[:, 2].add_(1.0)
        torch.add(torch.ones(4), 1.0, out=x[3])
        assert run.unwritten(x).sum() == 6
        assert not run.unwritten(torch.zeros(3)).any()
        assert not run.unwritten(x.clone()).any()


def test_shuffled_schedules_differ_by_seed_and_repeat():
    def last_writer(seed):
        with ttir.execute(ttir.Options(schedule="shuffled", schedule_seed=seed)):
            x = torch.zeros(1)
            overwrite[(50,)](x)
            return x.item()

    assert last_writer(1) == last_writer(1)
    assert len({last_writer(seed) for seed in range(6)}) > 2


@triton.jit
def overwrite(x_ptr):
    tl.store(x_ptr, tl.program_id(0).to(tl.float32))


def test_the_last_program_of_a_schedule_has_the_last_word():
    for schedule, last in (("forward", 49), ("reverse", 0), ("serial", 49)):
        with ttir.execute(ttir.Options(schedule=schedule)):
            x = torch.zeros(1)
            overwrite[(50,)](x)
        assert x.item() == last


def test_the_deadline_stops_an_endless_loop():
    options = ttir.Options(deadline=time.thread_time() + 0.2)
    with pytest.raises(ttir.TimeLimit), ttir.execute(options):
        forever[(1,)](torch.zeros(1))


def test_a_hopeless_wait_is_unsupported_and_names_its_line():
    with (
        pytest.raises(ttir.Unsupported, match="waits for another program") as caught,
        ttir.execute(),
    ):
        waiter[(1,)](torch.zeros(1, dtype=torch.int32))
    assert caught.value.file == __file__
    assert caught.value.op == "scf.while"


def test_what_cannot_be_run_names_operation_and_line():
    with pytest.raises(ttir.Unsupported) as caught, ttir.execute():
        assembly[(1,)](torch.zeros(1))
    assert caught.value.op == "tt.elementwise_inline_asm"
    assert caught.value.file == __file__
    with open(__file__, encoding="utf-8") as source:
        lines = source.read().splitlines()
    assert "inline_asm_elementwise" in lines[caught.value.line - 1]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"schedule": "parallel"}, "schedule="),
        ({"residents": 0}, "residents="),
        ({"memory_limit": 0}, "memory_limit="),
        ({"config": -1}, "config="),
    ],
)
def test_options_reject_what_means_nothing(fields, match):
    with pytest.raises(ValueError, match=match):
        ttir.Options(**fields)


def test_this_triton_is_one_we_are_tested_on():
    assert ttir.available()


def test_a_kernel_shows_what_a_gpu_would_have_been_given():
    with ttir.execute():
        kernel = plain[(1,)](torch.zeros(16), 16, BLOCK=16)
        assert "ptx" in kernel.asm
        assert "hsaco" not in kernel.asm
        assert kernel.asm.get("hsaco") is None
        assert kernel.asm.get("ptx") == kernel.asm["ptx"]
        assert ".target sm_90" in kernel.asm["ptx"]
        assert "ttg.num-warps" in kernel.asm["ttgir"]
        assert kernel.asm["cubin"].startswith(b"\x7fELF")
        with pytest.raises(KeyError, match="hsaco"):
            kernel.asm["hsaco"]


def test_whoever_asks_finds_an_active_driver():
    with ttir.activated():
        assert any(backend.driver.is_active() for backend in triton.backends.backends.values())


class Strided:
    """Stands for a tensor in a launch: begins elsewhere, walks backwards."""

    def __init__(self, held, offset):
        self._held, self._offset, self.dtype = held, offset, held.dtype

    def data_ptr(self):
        return self._held.data_ptr() + self._offset * self._held.element_size()


@triton.jit
def reverse(x_ptr, y_ptr, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i * stride))


def test_an_argument_may_be_anything_with_an_address():
    x, y = torch.arange(16.0), torch.zeros(16)
    with ttir.execute() as run:
        reverse[(1,)](Strided(x, 15), y, -1, 16)
        assert run.incidents == []
        assert torch.equal(y, x.flip(0))
        reverse[(1,)](Strided(x, 14), y, -1, 16)
    assert [(i.kind, i.argument, i.offset) for i in run.incidents] == [
        ("out-of-bounds-read", "x_ptr", -1)
    ]


def test_a_compiled_kernel_counts_its_arguments_as_cuda_s_launcher_does():
    x, y = torch.arange(16.0), torch.zeros(16)
    with ttir.execute():
        compiled = reverse[(1,)](x, y, 1, 16)
        y.zero_()
        compiled[(1, 1, 1)](x, y, 1, 16)
        assert torch.equal(y, x)
        with pytest.raises(TypeError, match="1 arguments given to a compiled kernel that takes 4"):
            compiled[(1, 1, 1)](x)
        y.zero_()
        if session.version() < (3, 7):  # seen on an H200 with Triton 3.6
            with pytest.raises(TypeError, match="3 arguments"):
                compiled[(1, 1, 1)](x, y, 1)
            return
        compiled[(1, 1, 1)](x, y, 1)
    assert torch.equal(y, x)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_higher_order_operator_runs_during_an_execution():
    # Uncompiled, flex_attention is one, and traces its functions with tensors that have no memory.
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    x = torch.randn(1, 1, 8, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.softmax(x @ x.mT / 4 - 1.0, -1) @ x

    with ttir.execute():
        found = flex(x, x, x, score_mod=lambda score, *_: score - 1.0)
    torch.testing.assert_close(found, expected)
