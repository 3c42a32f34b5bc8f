"""torch.cuda's answers while the executor is active on a machine without CUDA: one H200's.

Kernel launchers ask for capabilities, multiprocessor counts, streams, events, memory and device
guards. Where CUDA is available nothing is replaced. That tensors asked for on "cuda" are made on
the CPU is not decided here.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from triton.backends.compiler import GPUTarget

from fa_verify.ttir.launch.handles import Event, Generator, Guard, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "NVIDIA H200"
# As cuDeviceGetAttribute and cuDeviceTotalMem answered on an H200.
_MEMORY = 150_109_880_320
PROPERTIES = {
    "max_shared_mem": 232448,
    "max_num_regs": 65536,
    "multiprocessor_count": 132,
    "warpSize": 32,
    "sm_clock_rate": 1980000,
    "mem_clock_rate": 3201000,
    "mem_bus_width": 6016,
}
_TORCH_PROPERTIES = SimpleNamespace(
    name=NAME, major=9, minor=0, total_memory=_MEMORY,
    multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, L2_cache_size=60 << 20, is_integrated=0,
    is_multi_gpu_board=0, gcnArchName=NAME, clock_rate=1980000, memory_clock_rate=3201000,
    memory_bus_width=6016, uuid="GPU-00000000-0000-0000-0000-000000000000", pci_bus_id=0,
    pci_device_id=0, pci_domain_id=0,
)  # fmt: skip


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _distinct(name: str, answer: Any) -> Any:
    """A twin of `answer` for `name` alone.

    torch.compile's tables, should they be made meanwhile, forbid two names for one object.
    """
    if isinstance(answer, type):
        return answer if answer.__name__ == name else type(name, (answer,), {})
    return partial(answer)


_GENERATORS = (Generator(),)


def _cuda() -> dict[str, Any]:
    """Replacements in torch.cuda."""
    nothing = _always(None)
    generator = _GENERATORS[0]
    return {
        # which device
        "is_available": _always(True),
        "is_initialized": _always(True),
        "init": nothing,
        "device_count": _always(1),
        "current_device": _always(0),
        "set_device": nothing,
        "get_device_capability": _always((9, 0)),
        "get_device_properties": _always(_TORCH_PROPERTIES),
        "get_device_name": _always(NAME),
        "get_arch_list": _always(["sm_90"]),
        "is_bf16_supported": _always(True),
        "is_tf32_supported": _always(True),
        "can_device_access_peer": _always(False),
        "clock_rate": _always(PROPERTIES["sm_clock_rate"] // 1000),
        # order of work
        "synchronize": nothing,
        "current_stream": lambda *_, **__: Stream(),
        "default_stream": lambda *_, **__: Stream(),
        "set_stream": nothing,
        "stream": Guard,
        "StreamContext": Guard,
        "device": Guard,
        "device_of": Guard,
        "_DeviceGuard": Guard,
        "_exchange_device": _always(0),
        "_maybe_exchange_device": _always(0),
        "_sleep": nothing,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "is_current_stream_capturing": _always(False),
        # memory
        "empty_cache": nothing,
        "ipc_collect": nothing,
        "mem_get_info": _always((_MEMORY, _MEMORY)),
        "set_per_process_memory_fraction": nothing,
        "memory_allocated": _always(0),
        "max_memory_allocated": _always(0),
        "memory_reserved": _always(0),
        "max_memory_reserved": _always(0),
        "memory_stats": _always({}),
        "memory_summary": _always(""),
        "reset_peak_memory_stats": nothing,
        "reset_max_memory_allocated": nothing,
        "reset_accumulated_memory_stats": nothing,
        # random numbers come from the CPU's generator
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "seed": generator.seed,
        "seed_all": generator.seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    }


def _accelerator() -> dict[str, Any]:
    """Replacements in torch.accelerator."""
    nothing = _always(None)
    return {
        "is_available": _always(True),
        "current_accelerator": _always(torch.device("cuda")),
        "device_count": _always(1),
        "current_device_index": _always(0),
        "current_device_idx": _always(0),
        "set_device_index": nothing,
        "set_device_idx": nothing,
        "device_index": Guard,
        "get_device_capability": _always((9, 0)),
        "current_stream": lambda *_, **__: Stream(),
        "set_stream": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "get_memory_info": _always((_MEMORY, _MEMORY)),
        "memory_allocated": _always(0),
        "max_memory_allocated": _always(0),
        "memory_reserved": _always(0),
        "max_memory_reserved": _always(0),
        "memory_stats": _always({}),
        "reset_peak_memory_stats": nothing,
        "reset_accumulated_memory_stats": nothing,
    }


# Launchers of other projects ask torch's core for the stream, as Triton's own driver does.
_CORE = {
    "_cuda_getCurrentRawStream": _always(0),
    "_cuda_getDevice": _always(0),
    "_cuda_setDevice": _always(None),
    "_cuda_exchangeDevice": _always(0),
    "_cuda_maybeExchangeDevice": _always(0),
    "_cuda_synchronize": _always(None),
    "_host_emptyCache": _always(None),
}
_ABSENT = object()


def _replaced() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each module's namespace, and the names in it that are replaced."""
    tables = [(torch.cuda, _cuda())]
    if hasattr(torch, "accelerator"):
        tables.append((torch.accelerator, _accelerator()))
    for module, answers in tables:
        yield (
            vars(module),
            {k: _distinct(k, v) for k, v in answers.items() if hasattr(module, k)},
        )
    yield vars(torch.cuda), {"default_generators": _GENERATORS}
    yield vars(torch.version), {"cuda": "12.8"}
    yield vars(torch._C), _CORE  # noqa: SLF001


_REPLACED = list(_replaced())


_TARGETS = [GPUTarget("cuda", 90, 32)]


def target() -> GPUTarget:
    """What Triton is to compile for."""
    return _TARGETS[-1]


def capability() -> tuple[int, int]:
    """As torch.cuda has it."""
    return _TORCH_PROPERTIES.major, _TORCH_PROPERTIES.minor


def become(chip: GPUTarget, shared: int) -> None:
    """Answer as another chip for the rest of the process.

    For whoever only wants to know what is launched there: numbers stay those of a Hopper.

    Args:
        chip: Its target.
        shared: Bytes of shared memory that a program may have.
    """
    _TARGETS.append(chip)
    amd = chip.backend == "hip"
    # ROCm's torch takes the first two digits of gfx942 for a capability.
    major, minor = (int(chip.arch[3]), int(chip.arch[4])) if amd else divmod(chip.arch, 10)
    properties = _TORCH_PROPERTIES
    properties.major, properties.minor, properties.warp_size = major, minor, chip.warp_size
    properties.shared_memory_per_block_optin = PROPERTIES["max_shared_mem"] = shared
    PROPERTIES["warpSize"] = chip.warp_size
    if amd:
        properties.gcnArchName = chip.arch
    for names, answers in _REPLACED:
        if "get_device_capability" in answers:
            answers["get_device_capability"] = _always((major, minor))
        if "get_arch_list" in answers:
            answers["get_arch_list"] = _always([chip.arch if amd else f"sm_{chip.arch}"])
        if names is vars(torch.version) and amd:
            answers |= {"cuda": None, "hip": "6.4"}


@contextmanager
def answering() -> Iterator[None]:
    """Answer for torch.cuda where there is no CUDA."""
    if torch.cuda.is_available():
        yield
        return
    saved = [{k: names.get(k, _ABSENT) for k in answers} for names, answers in _REPLACED]
    try:
        for names, answers in _REPLACED:
            names.update(answers)
        yield
    finally:
        for (names, _), before in zip(_REPLACED, saved, strict=True):
            names.update(before)
            for name in [k for k, v in before.items() if v is _ABSENT]:
                del names[name]
