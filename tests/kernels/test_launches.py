"""Launches made ready pass what Triton's launcher passes, and are left to it where they cannot."""

# ruff: noqa: N803

import ctypes
import itertools
import re
import struct
import threading
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from fa_verify import ttir

GRID = (3, 2, 1)
FUNCTION, STREAM, DEVICE = 11, 22, 1
POINTERS = ctypes.POINTER(ctypes.c_void_p)


@triton.jit
def kernel(x, described, absent, n, small, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile = described.load([tl.program_id(1), tl.program_id(0) * BLOCK]).reshape(BLOCK)
    tl.store(x + i, tile * factor + small, mask=i < n)


SIGNATURE = {
    "x": "*fp32", "described": "tensordesc<fp32[1, 16]>", "absent": "constexpr", "n": "i64",
    "small": "i32", "factor": "fp32", "BLOCK": "constexpr",
}  # fmt: skip
PLACES = {0: 1, 1: 0}


def parameter_sizes(ptx):
    """Of the parameters of the one kernel, as the assembly declares them."""
    entry = re.search(r"\.entry .*?\((.*?)\)", ptx, re.DOTALL)[1]
    declared = (line.split("//")[0] for line in entry.splitlines() if ".param" in line)
    return [
        int(re.search(r"\[(\d+)\]", line)[1])
        if "[" in line
        else int(re.search(r"\.[ubsf](\d+)", line)[1]) // 8
        for line in declared
    ]


@pytest.fixture(scope="module")
def assembled():
    """The kernel as Triton compiles it for a Hopper."""
    source = ASTSource(kernel, SIGNATURE, {(2,): None, (6,): 16})
    options = {"enable_fp_fusion": True}  # the default, of which Triton 3.9 warns
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


class Driver:
    """A driver that keeps what it is asked to launch; its kernel's parameters have these sizes."""

    def __init__(self, sizes) -> None:
        self.sizes, self.launched, self.error = sizes, [], 0
        self.before = lambda: None
        self.cuFuncGetParamInfo = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, POINTERS, POINTERS
        )(self._parameter)
        self.cuLaunchKernel = ctypes.CFUNCTYPE(
            *(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7),
            *(ctypes.c_void_p, POINTERS, ctypes.c_void_p),
        )(self._launch)

    def _parameter(self, function, index, offset, size):
        assert function == FUNCTION
        if index >= len(self.sizes):
            return 1
        size[0] = self.sizes[index]
        return 0

    def _launch(self, function, *numbers):
        *sizes, shared, stream, pointers, extra = numbers
        assert extra is None
        assert function == FUNCTION
        self.before()
        found = [ctypes.string_at(pointers[i], size) for i, size in enumerate(self.sizes)]
        launch = SimpleNamespace(
            grid=tuple(sizes[:3]), threads=tuple(sizes[3:]), shared=shared, stream=stream,
            parameters=found, places=tuple(pointers[i] for i in range(len(self.sizes))),
        )  # fmt: skip
        self.launched.append(launch)
        return self.error


@pytest.fixture
def ready(kernels, assembled, monkeypatch):
    """``ready(...)``: the launches module, a driver, and how a launch is made ready."""
    launches = kernels("launches")

    def made(sizes=None, words=None, **changed):
        library = Driver(parameter_sizes(assembled.asm["ptx"]) if sizes is None else sizes)
        active = SimpleNamespace(
            get_current_stream=lambda device: next(streams) + device,
            get_current_device=lambda: DEVICE,
            utils=SimpleNamespace(fill_tma_descriptor=None),
        )
        streams = itertools.count(STREAM)  # each launch meets another
        monkeypatch.setattr(
            launches, "sys",
            SimpleNamespace(modules={"types": SimpleNamespace(TMA_DTYPE_DEVICE_TO_HOST={})}),
        )  # fmt: skip
        cuda = launches.Cuda(library, active)
        monkeypatch.setattr(
            cuda, "_words", words or (lambda _, meta, address: (address, *range(1, 16)))
        )
        monkeypatch.setattr(launches.Cuda, "of", lambda _: cuda)
        monkeypatch.setattr(launches.triton.runtime, "driver", SimpleNamespace(active=active))
        metadata = SimpleNamespace(**{**assembled.metadata._asdict(), **changed})
        compiled = SimpleNamespace(src=assembled.src, metadata=metadata, function=FUNCTION)

        def prepare(tensors, times=1):
            one = launches.prepared(compiled, GRID, values(*tensors), PLACES)
            return one and launches.Launches([one] * times)

        return library, prepare

    return made


def values(described, x):
    """Arguments of a launch."""
    return [x, TensorDescriptor(described, [2, 40], [40, 1], [1, 16]), None, 40, -3, 0.5, 16]


def tensors():
    return [torch.empty(2, 40), torch.empty(48)]


def expected(described, x):
    """What the kernel is to get."""
    return [
        struct.pack("<Q", x.data_ptr()),
        struct.pack("<16Q", described.data_ptr(), *range(1, 16)),
        *(struct.pack("<i", size) for size in (2, 40)),
        *(struct.pack("<q", stride) for stride in (40, 1)),
        struct.pack("<q", 40), struct.pack("<i", -3), struct.pack("<f", 0.5),
        bytes(8), bytes(8),
    ]  # fmt: skip


def test_the_kernel_gets_what_its_assembly_declares(ready, assembled):
    library, prepare = ready()
    first = tensors()
    launch = prepare(first)
    for call, given in enumerate((first, tensors(), tensors())):
        launch(given)
        found = library.launched[-1]
        assert found.parameters == expected(*given)
        assert (found.grid, found.threads) == (GRID, (128, 1, 1))
        assert found.shared == assembled.metadata.shared > 0
        assert found.stream == STREAM + call + DEVICE
    assert len(library.launched) == 3


def test_launches_together_have_parameters_of_their_own(ready):
    library, prepare = ready()
    given = tensors()
    addresses = set()
    launch = prepare(given, times=3)
    for _ in range(2):
        launch(given)
    assert [one.parameters for one in library.launched] == [expected(*given)] * 6
    for one in library.launched:
        assert not any(address % 8 for address in one.places)
        assert one.places[1] % 64 == 0  # the tensor map
        addresses.add(one.places)
    assert len(addresses) == 3  # all are read before the next call changes them
    (stream_of_first,) = {one.stream for one in library.launched[:3]}
    assert stream_of_first == STREAM + DEVICE


def test_threads_do_not_share_parameters(ready):
    library, prepare = ready()
    library.before = threading.Barrier(2, timeout=20).wait  # both have filled in their addresses
    launch = prepare(tensors())
    given = [tensors(), tensors()]
    threads = [threading.Thread(target=launch, args=(one,)) for one in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [launch.parameters for launch in library.launched]
    assert sorted(found) == sorted(expected(*one) for one in given)


DIFFERENT = {
    "several programs a cluster": {"num_ctas": 2},
    "dependent": {"launch_pdl": True},
    "cooperative": {"launch_cooperative_grid": True},
    "memory for programs": {"global_scratch_size": 128},
    "memory for profilers": {"profile_scratch_size": 128},
    "descriptors without a map": {"tensordesc_meta": None},
    "a parameter less": {"sizes": [8, 128, 4, 4, 8, 8, 8, 4, 4, 8]},
    "a smaller parameter": {"sizes": [8, 128, 4, 4, 8, 8, 4, 4, 4, 8, 8]},
    "no address first": {"words": lambda _, meta, address: (address + 1, *range(1, 16))},
    "the address elsewhere": {"words": lambda _, m, address: (address, address, *range(2, 16))},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_left_to_triton(ready, name):
    _, prepare = ready(**DIFFERENT[name])
    assert prepare(tensors()) is None


def test_an_empty_grid_is_left_to_triton(ready, monkeypatch):
    monkeypatch.setattr(f"{__name__}.GRID", (0, 1, 1))
    _, prepare = ready()
    assert prepare(tensors()) is None


def test_a_refused_launch_raises(ready):
    library, prepare = ready()
    launch = prepare(tensors())
    library.error = 700
    with pytest.raises(RuntimeError, match="700"):
        launch(tensors())


def test_another_driver_has_no_such_launches(kernels):
    launches = kernels("launches")
    with ttir.execute():
        assert launches.Cuda.of(triton.runtime.driver.active) is None
        assert launches.prepared(None, GRID, [], {}) is None


class Map:
    """An object that ends in 16 words."""

    __slots__ = tuple(f"word{i}" for i in range(16))


def test_a_tensor_map_is_what_the_object_ends_in(kernels):
    made = []

    def encode(address, *_):
        made.append(Map())
        words = struct.pack("<16Q", address, *range(100, 115))
        ctypes.memmove(id(made[-1]) + Map.__basicsize__ - 128, words, 128)
        return made[-1]

    cuda = object.__new__(kernels("launches").Cuda)
    cuda._encode, cuda._dtypes = encode, {7: 7}
    described = TensorDescriptor(torch.empty(2, 40), [2, 40], [40, 1], [1, 16])
    meta = {"swizzle": 0, "elem_size": 4, "elem_type": 7, "block_size": [1, 16]}
    try:
        found = cuda.tensor_map(described, meta)
    finally:
        for one in made:  # no pointers to objects
            ctypes.memset(id(one) + Map.__basicsize__ - 128, 0, 128)
    assert found == (described.base.data_ptr(), *range(100, 115))


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_whoever_watches_launches_is_told(kernels, hook):
    launches = kernels("launches")
    assert not launches.watched()
    hooks, seen = getattr(knobs.runtime, hook), []
    hooks.add(seen.append)
    try:
        assert launches.watched()
    finally:
        hooks.remove(seen.append)
    assert not launches.watched()
