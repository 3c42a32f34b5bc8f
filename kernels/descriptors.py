"""Tensor descriptors, by which Hopper's copy engine (TMA) moves tiles without registers or masks.

Described are whole tensors (batch, heads, rows, columns), and vectors with an element a row: a tile
that reaches past the last row or column of its head reads zeros there, and is not written there.
The engine takes multiples of 16 bytes only.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["alignable", "columns", "describable", "descriptor", "hopper", "vector"]

_BYTES = 16  # of which addresses and strides are multiples: CUDA driver API, cuTensorMapEncodeTiled
_MOST_BYTES = 1 << 40  # of a stride, exclusive; likewise
_MOST_ROWS = 1 << 31  # coordinates are int32
_HOPPER = 9
_PARTS = 10  # of a compute capability


def hopper():
    """Whether kernels run on a chip of compute capability 9.x."""
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch // _PARTS == _HOPPER


def describable(*tensors):  # noqa: ANN002
    """Whether all of (batch, heads, rows, columns) tensors can be described."""
    return all(map(_describable, tensors))


def _describable(x):
    bytes_ = [stride * x.element_size() for stride in _strides(x)[:3]]
    return (
        x.numel() > 0
        and x.stride(3) == 1
        and x.data_ptr() % _BYTES == 0
        and all(0 < stride < _MOST_BYTES and stride % _BYTES == 0 for stride in bytes_)
        and max(x.shape) < _MOST_ROWS
    )


def _strides(x):
    """Strides, with a legal one for an axis of one element, which may have any."""
    legal = _BYTES // x.element_size()
    return [stride if size > 1 else legal for size, stride in zip(x.shape, x.stride(), strict=True)]


def columns(x, block, width, tail):
    """Describe tiles of `block` rows: the first `width` columns, and the `tail` after them.

    None describes no columns.
    """
    shape, strides = list(x.shape), [*_strides(x)[:3], 1]
    return tuple(
        _of_shape(x, shape, strides, [1, 1, block, part]) if part else None
        for part in (width, tail)
    )


def _of_shape(x, shape, strides, block_shape):
    """A descriptor of what is `describable`."""
    return descriptor(x, {"shape": shape, "strides": strides, "block_shape": block_shape})


def descriptor(x, fields):
    """A `TensorDescriptor` of x with these fields, without its own checks.

    They take the host 4 us, of which a backward pass makes fourteen.
    """
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.__dict__.update(fields, base=x)
    return made


def alignable(x):
    """A (batch, heads, rows) tensor that `vector` takes: itself, or a padded copy."""
    elements = _BYTES // x.element_size()
    excess = x.shape[-1] % elements
    if excess == 0 and x.data_ptr() % _BYTES == 0 and x.is_contiguous():
        return x
    return torch.nn.functional.pad(x, (0, elements - excess))


def vector(x, block):
    """Describe `block` elements of such a tensor."""
    length = x.shape[-1]
    return _of_shape(x, [x.numel() // length, length], [length, 1], [1, block])


@triton.jit
def load_tile(
    tile, tail, batch, head, first_row,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a head as (tile, tail); rows and columns past the end are 0."""
    first = tile.load([batch, head, first_row, 0]).reshape(ROWS, BLOCK_D)
    rest = first
    if TAIL_D > 0:
        rest = tail.load([batch, head, first_row, BLOCK_D]).reshape(ROWS, TAIL_D)
    return first, rest


@triton.jit
def load_vector(vector, sequence, first_row, ROWS: tl.constexpr):
    """ROWS elements of one of batch * heads sequences; past the end they are 0."""
    return vector.load([sequence, first_row]).reshape(ROWS)


@triton.jit
def store_tile(
    tile, tail, batch, head, first_row, values, tail_values,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
):  # fmt: skip
    """Store (values, tail_values), cast to the tensor's dtype."""
    values = values.to(tile.dtype).reshape(1, 1, ROWS, BLOCK_D)
    tile.store([batch, head, first_row, 0], values)
    if TAIL_D > 0:
        tail_values = tail_values.to(tile.dtype).reshape(1, 1, ROWS, TAIL_D)
        tail.store([batch, head, first_row, BLOCK_D], tail_values)
