"""Launches made ready once: each is a call of the driver then, in which only addresses are new.

Triton's launcher takes all arguments apart at each launch and encodes each tensor descriptor anew,
which for a Hopper kernel takes the host longer than the rest of a pass. Here the parameters are
laid out once. What would differ from Triton's own launch, or cannot be checked, is left to it.
"""

import ctypes
import functools
import struct
import sys

import triton
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["Cuda", "Launches", "prepared", "watched"]

_NUMBERS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q",
    "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d",
}  # fmt: skip
_WORD, _WARP = 8, 32
_ALIGNMENT = 64  # of a tensor map, and here of every parameter
_MAP_WORDS = 16
_FURTHER = 16  # bytes: another address that a map may have
_UNUSUAL = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")


class _LeftToTritonError(Exception):
    """A launch that is not made ready."""


class Cuda:
    """NVIDIA's driver, as far as launches need it.

    Args:
        library: libcuda; it must have cuLaunchKernel and cuFuncGetParamInfo (CUDA 12.4).
        active: Triton's driver.

    Attributes:
        launch: cuLaunchKernel.
        stream: The address of a device's current stream.
    """

    def __init__(self, library, active) -> None:
        pointer, count = ctypes.c_void_p, ctypes.c_uint
        self.launch, self._parameter = library.cuLaunchKernel, library.cuFuncGetParamInfo
        self.launch.argtypes = [pointer, *[count] * 7, *[pointer] * 3]
        self._parameter.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
        self.stream = active.get_current_stream
        utilities = active.utils
        tiled = "fill_tma_descriptor_tiled"  # Triton 3.6: without the last word
        self._encode = getattr(utilities, tiled, None) or utilities.fill_tma_descriptor
        self._dtypes = sys.modules[type(active).__module__].TMA_DTYPE_DEVICE_TO_HOST

    @staticmethod
    @functools.cache
    def of(active):  # noqa: ANN205
        """That of Triton's driver; None if it is another's, or has other functions."""
        if type(active).__module__ != "triton.backends.nvidia.driver":
            return None
        try:
            return Cuda(ctypes.CDLL("libcuda.so.1"), active)
        except (OSError, AttributeError):
            return None

    def parameters(self, function):
        """How many bytes each parameter of a kernel has."""
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        where = ctypes.byref(offset), ctypes.byref(size)
        sizes = []
        while not self._parameter(function, len(sizes), *where):  # an error: there are no more
            sizes.append(size.value)
        return sizes

    def tensor_map(self, described, meta):
        """The words of a tensor map; the first of them is the address, and nothing else is."""
        address = described.base.data_ptr()
        first, other = (self._words(described, meta, x) for x in (address, address + _FURTHER))
        if (first[0], other[0]) != (address, address + _FURTHER) or first[1:] != other[1:]:
            raise _LeftToTritonError
        return first

    def _words(self, described, meta, address):
        made = self._encode(
            address, meta["swizzle"], meta["elem_size"], self._dtypes[meta["elem_type"]],
            meta["block_size"], described.shape, described.strides, described.padding == "nan",
        )  # fmt: skip
        # The object ends in the map.
        end = id(made) + type(made).__basicsize__
        return struct.unpack("16Q", ctypes.string_at(end - _MAP_WORDS * _WORD, _MAP_WORDS * _WORD))


def watched():
    """Whether somebody, a profiler, is to be told of each launch: Triton's launcher does that."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def prepared(compiled, grid, values, places):
    """Return what `Launches` are made of, or None.

    Args:
        compiled: The kernel.
        grid: Of three numbers.
        values: Its arguments in this launch, in order, constants included.
        places: By an argument's index: where in a list its tensor is, or the one that it describes.
            Tensors of other lists must be of the form of those among `values`.
    """
    cuda = Cuda.of(triton.runtime.driver.active)
    if cuda is None or not all(grid):
        return None
    try:
        return _Prepared(cuda, compiled, grid, values, places)
    except _LeftToTritonError:
        return None


class Launches:
    """Launches one after the other: a function of the list of tensors that they are of.

    Threads may launch them at a time: each has parameters of its own.
    """

    def __init__(self, prepared) -> None:
        self._prepared, self._cuda = prepared, prepared[0].cuda
        self._device = triton.runtime.driver.active.get_current_device()
        self._addresses, begin = [], 0  # (word of all, place of the tensor)
        for one in prepared:
            self._addresses += [(begin + word, place) for word, place in one.addresses]
            begin += len(one.image) // _WORD
        self._free = []  # parameters that nobody launches with

    def __call__(self, tensors):  # noqa: ANN204
        """Launch with the tensors at the places."""
        free = self._free
        made = free.pop() if free else self._made()
        words, launches = made
        addresses = [tensor.data_ptr() for tensor in tensors]
        for word, place in self._addresses:
            words[word] = addresses[place]
        launch, stream = self._cuda.launch, self._cuda.stream(self._device)
        for function, sizes, pointers in launches:
            error = launch(function, *sizes, stream, pointers, None)
            if error:
                msg = f"cuLaunchKernel: CUDA error {error}"
                raise RuntimeError(msg)
        free.append(made)

    def _made(self):
        """All parameters in memory, as words; and what each launch passes to the driver."""
        image = b"".join(one.image for one in self._prepared)
        memory = ctypes.create_string_buffer(len(image) + _ALIGNMENT)
        begin = -ctypes.addressof(memory) % _ALIGNMENT
        memory[begin : begin + len(image)] = image
        words = memoryview(memory).cast("B")[begin : begin + len(image)].cast("Q")
        start, launches = ctypes.addressof(memory) + begin, []
        for one in self._prepared:
            pointers = (ctypes.c_void_p * len(one.offsets))(*(start + x for x in one.offsets))
            launches.append((one.compiled.function, one.sizes, pointers))
            start += len(one.image)
        return words, launches


class _Prepared:
    """What does not change of a launch.

    Attributes:
        cuda: The driver.
        compiled: The kernel.
        sizes: Blocks, threads a block, bytes of shared memory.
        image: All parameters, a multiple of the alignment.
        offsets: Of each parameter in it.
        addresses: Words of it that hold addresses, and the places of their tensors.
    """

    def __init__(self, cuda, compiled, grid, values, places) -> None:
        metadata = compiled.metadata
        if metadata.num_ctas != 1 or any(getattr(metadata, name, 0) for name in _UNUSUAL):
            raise _LeftToTritonError
        self.cuda, self.compiled = cuda, compiled
        self.sizes = *grid, _WARP * metadata.num_warps, 1, 1, metadata.shared
        self.image, self.offsets, self.addresses = bytearray(), [], []
        self._lay_out(values, places)

    def _lay_out(self, values, places):
        """Put the parameters where they belong: those that Triton's launcher passes."""
        compiled = self.compiled
        metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        parameters, addresses = [], []
        for index, (value, kind) in enumerate(
            zip(values, compiled.src.signature.values(), strict=True)
        ):
            if kind == "constexpr":
                continue
            if index in places:  # the next parameter is, or begins with, an address
                addresses.append((len(parameters), places[index]))
            if isinstance(value, TensorDescriptor):
                parameters += self._described(value, next(metas, None))
            elif isinstance(kind, str) and kind.startswith("*") and index in places:
                parameters.append(bytes(_WORD))
            elif kind in _NUMBERS:
                parameters.append(struct.pack(f"<{_NUMBERS[kind]}", value))
            else:
                raise _LeftToTritonError
        parameters += [bytes(_WORD)] * 2  # memory for the programs and for profilers: none
        if [len(x) for x in parameters] != self.cuda.parameters(compiled.function):
            raise _LeftToTritonError
        for parameter in parameters:
            self._align(_ALIGNMENT if len(parameter) > _WORD else _WORD)
            self.offsets.append(len(self.image))
            self.image += parameter
        self._align(_ALIGNMENT)  # for that of the next launch
        self.addresses = [(self.offsets[at] // _WORD, place) for at, place in addresses]

    def _align(self, alignment):
        self.image += bytes(-len(self.image) % alignment)

    def _described(self, value, meta):
        """Parameters of a tensor descriptor."""
        if (
            meta is None
            or meta["fp4_padded"]
            or meta.get("is_im2col")
            or getattr(value, "round_f32_to_tf32", False)
        ):
            raise _LeftToTritonError
        return [
            struct.pack("<16Q", *self.cuda.tensor_map(value, meta)),
            *(struct.pack("<i", size) for size in value.shape),
            *(struct.pack("<q", stride) for stride in value.strides),
        ]
