"""What code asks of torch.cuda, torch.accelerator and Triton's driver gets one H200's answers."""

import subprocess
import sys

import pytest
import torch
import triton

from fa_verify import ttir
from fa_verify.ttir.launch import hopper

ASKED = [
    ("torch.cuda.is_available()", True),
    ("torch.cuda.device_count()", 1),
    ("torch.cuda.current_device()", 0),
    ('torch.cuda.get_device_capability("cuda:0")', (9, 0)),
    ("torch.cuda.get_device_name()", "NVIDIA H200"),
    ("torch.cuda.is_bf16_supported()", True),
    ("torch.cuda.is_bf16_supported(including_emulation=False)", True),
    ('torch.cuda.get_device_properties("cuda").multi_processor_count', 132),
    ("torch.cuda.get_device_properties(0).shared_memory_per_block_optin", 232448),
    ("torch.cuda.current_stream().cuda_stream", 0),
    ("torch.cuda.Stream(priority=-1).query()", True),
    ("torch.cuda.is_current_stream_capturing()", False),
    ("torch.cuda.mem_get_info()[0] > 1 << 36", True),
    ("torch.cuda.max_memory_allocated()", 0),
    ("torch.cuda.synchronize()", None),
    ("torch.cuda.empty_cache()", None),
    ("torch.version.cuda is None", False),
    ("torch._C._cuda_getCurrentRawStream(0)", 0),
    ("torch._C._cuda_exchangeDevice(0)", 0),
    ("torch.cuda._exchange_device(0)", 0),
    ("torch.cuda._DeviceGuard(0).__enter__().idx", 0),
    ("torch.cuda._sleep(1000)", None),
    ("torch.cuda.set_per_process_memory_fraction(0.5)", None),
    ("torch.accelerator.is_available()", True),
    ("torch.accelerator.current_accelerator().type", "cuda"),
    ("torch.accelerator.synchronize()", None),
    ("triton.runtime.driver.active.get_current_target().arch", 90),
    ("triton.runtime.driver.active.get_current_target().backend", "cuda"),
    ("triton.runtime.driver.active.get_device_capability()", (9, 0)),
    (
        "triton.runtime.driver.active.get_current_stream(triton.runtime.driver.active.get_current_device())",
        0,
    ),
    ("triton.runtime.driver.active.get_device_interface().current_device()", 0),
    ('triton.runtime.driver.active.utils.get_device_properties(0)["max_shared_mem"]', 232448),
    ('triton.runtime.driver.active.utils.get_device_properties(0)["warpSize"]', 32),
    ("round(triton.testing.get_dram_gbps() / 1000, 1)", 4.8),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real device answers for itself")
@pytest.mark.parametrize(("question", "answer"), ASKED)
def test_questions_are_answered_as_by_an_h200(question, answer):
    with ttir.activated():
        assert eval(question) == answer  # noqa: S307 - from the table above


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real device answers for itself")
def test_every_name_is_put_back():
    before = [dict(names) for names, _ in hopper._REPLACED]
    with pytest.raises(ZeroDivisionError), ttir.activated():
        raise ZeroDivisionError
    assert [dict(names) for names, _ in hopper._REPLACED] == before
    assert not torch.cuda.is_available()


def test_contexts_streams_and_events_order_nothing_and_raise_nothing():
    with ttir.activated():
        stream = torch.cuda.Stream()
        with torch.cuda.device(0), torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.current_stream())
            event = stream.record_event()
        event.synchronize()
        torch.cuda.default_stream().wait_event(event)
        assert event.query()


def test_random_numbers_of_the_device_repeat_from_their_seed():
    with ttir.activated():
        torch.cuda.manual_seed_all(5)
        state, first = torch.cuda.get_rng_state(), torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)


def test_the_devices_generator_has_a_seed_and_an_offset():
    with ttir.activated():
        torch.manual_seed(2**63 + 5)  # as large as they come
        (generator,) = torch.cuda.default_generators
        state = generator.get_state()
        assert state.view(torch.int64).tolist() == [5 - 2**63, 0]
        state.view(torch.int64)[1] += 8  # what libraries do before they draw in a kernel
        generator.set_state(state)
        assert (generator.initial_seed(), generator.get_offset()) == (2**63 + 5, 8)
        torch.manual_seed(3)
        assert generator.get_state().view(torch.int64).tolist() == [3, 0]
        first = torch.rand(2)
        generator.set_state(generator.get_state())  # the seed that it has: the CPU goes on
        assert not torch.equal(torch.rand(2), first)
        generator.manual_seed(3)
        assert torch.equal(torch.rand(2), first)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real device answers for itself")
def test_time_passes_between_events():
    calls = []
    with ttir.execute():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        end.record()
        assert 0 < start.elapsed_time(end) < 1e4
        milliseconds = triton.testing.do_bench(lambda: calls.append(1), warmup=1, rep=1)
    assert milliseconds > 0
    assert len(calls) > 5


def test_torch_compile_can_be_imported_meanwhile():
    code = "from fa_verify import ttir\nwith ttir.execute():\n    import torch._dynamo"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
