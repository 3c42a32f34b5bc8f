"""Run-time values other than plain arrays, and what can be done to any value lane by lane.

An array value has shape (programs or 1, *tile) where each tile extent is the type's or 1: splats,
broadcasts and constants are never spread out until an operation needs it. Integer sums that only
become addresses, and conjunctions that only become masks, stay tuples of their small terms. A
pointer is one argument (or one of several, chosen lane by lane) and a tuple of offset terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.numbers.floats import Array
from fa_verify.ttir.numbers.shorts import widen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fa_verify.ttir.memory.argument import Argument

Terms = tuple[Array, ...]
Selection = slice | Array
RuntimeValue = Any  # Array | Terms | Pointer | Descriptor


def merge_terms(terms: Sequence[Array]) -> Terms:
    """Add up terms that vary along the same tile axes."""
    if len(terms) < 2:
        return tuple(terms)
    grouped: dict[tuple[int, ...], Array] = {}
    for term in terms:
        key = term.shape[1:]  # each extent is the tile's or 1
        seen = grouped.get(key)
        grouped[key] = term if seen is None else _sum(seen, term)
    return tuple(grouped.values())


def _sum(a: Array, b: Array) -> Array:
    """A + b, in 64 bits where 32 do not hold it: whether that matters shows in the whole sum."""
    both = a + b
    if both.dtype.itemsize == 4 and ((a ^ both) & (b ^ both) < 0).any():
        return a.astype(np.int64) + b
    return both


def total(terms: Sequence[Array]) -> Array:
    """Sum of all terms, spread out."""
    return reduce(np.add, terms)


def conjunction(terms: Sequence[Array]) -> Array:
    """Logical and of all terms, spread out."""
    return reduce(np.logical_and, terms)


class Pointer:
    """Element addresses: `args[which]` (or args[0]) plus the sum of `terms`, int64 elements."""

    __slots__ = ("args", "terms", "which")

    def __init__(
        self, args: tuple[Argument, ...], terms: Terms, which: Array | None = None
    ) -> None:
        """Point into `args`."""
        self.args, self.terms, self.which = args, terms, which

    def shift(self, offsets: Sequence[Array]) -> Pointer:
        """Move by a sum of int64 terms."""
        if len(self.terms) == len(offsets) == 1 and self.terms[0].shape == offsets[0].shape:
            return Pointer(self.args, (self.terms[0] + offsets[0],), self.which)
        return Pointer(self.args, merge_terms((*self.terms, *offsets)), self.which)

    def map(self, function: Callable[[Array], Array]) -> Pointer:
        """Apply a rearrangement of the tile that treats every term alike."""
        which = None if self.which is None else function(self.which)
        return Pointer(self.args, tuple([function(t) for t in self.terms]), which)

    def dense(self) -> Pointer:
        """The same addresses with a single term."""
        return Pointer(self.args, (total(self.terms),), self.which)

    def select_arrays(self, args: tuple[Argument, ...]) -> tuple[Array, Array]:
        """Offsets and index into `args` (a superset of ours) as arrays."""
        offsets = total(self.terms)
        renumber = np.array([args.index(a) for a in self.args], np.int32)
        which = np.zeros((1,) * offsets.ndim, np.int32) if self.which is None else self.which
        return offsets, renumber[which]


def union_args(pointers: Sequence[Pointer]) -> tuple[Argument, ...]:
    """All arguments that any of the pointers may point into."""
    seen: dict[int, Argument] = {}
    for pointer in pointers:
        for arg in pointer.args:
            seen.setdefault(id(arg), arg)
    return tuple(seen.values())


@dataclass(slots=True, eq=False)
class Descriptor:
    """A tensor descriptor: base, extents and strides (int64, one a program or one for all)."""

    base: Pointer
    shape: tuple[Array, ...]
    strides: tuple[Array, ...]
    block: tuple[int, ...]
    scalar: str
    nan_padding: bool = False
    round_f32_to_tf32: bool = False


def nbytes(value: RuntimeValue) -> int:
    """Size of an array or of terms."""
    return sum(map(nbytes, value)) if isinstance(value, tuple) else int(value.nbytes)


def take(value: RuntimeValue, lanes: Selection) -> RuntimeValue:
    """Keep the given program lanes of a value."""
    if isinstance(value, np.ndarray):
        return value if value.shape[0] == 1 else value[lanes]
    if isinstance(value, tuple):
        return tuple([take(x, lanes) for x in value])
    if isinstance(value, Pointer):
        return value.map(lambda t: t if t.shape[0] == 1 else t[lanes])
    if isinstance(value, Descriptor):
        return Descriptor(
            take(value.base, lanes), take(value.shape, lanes), take(value.strides, lanes),
            value.block, value.scalar, value.nan_padding, value.round_f32_to_tf32,
        )  # fmt: skip
    return value


def same(a: RuntimeValue, b: RuntimeValue) -> bool:
    """Whether two values are surely equal."""
    if a is b:
        return True
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, Pointer) and isinstance(b, Pointer):
        return (
            a.args == b.args
            and a.which is b.which
            and bool(np.array_equal(total(a.terms), total(b.terms)))
        )
    return False


def merge(parts: Sequence[tuple[Selection, RuntimeValue]], lanes: int) -> RuntimeValue:
    """Put values of disjoint sets of program lanes together; inverse of `take`."""
    values = [value for _, value in parts]
    first = values[0]
    if all(value is first for value in values):
        return first
    if isinstance(first, np.ndarray):
        return _merge_arrays(parts, lanes)
    if isinstance(first, Pointer):
        args = union_args(values)
        pairs = [(where, value.select_arrays(args)) for where, value in parts]
        offsets = _merge_arrays([(where, pair[0]) for where, pair in pairs], lanes)
        which = None
        if len(args) > 1:
            which = _merge_arrays([(where, pair[1]) for where, pair in pairs], lanes)
        return Pointer(args, (offsets,), which)
    if isinstance(first, Descriptor):
        rank = range(len(first.shape))
        return Descriptor(
            merge([(w, d.base) for w, d in parts], lanes),
            tuple([merge([(w, d.shape[i]) for w, d in parts], lanes) for i in rank]),
            tuple([merge([(w, d.strides[i]) for w, d in parts], lanes) for i in rank]),
            first.block, first.scalar, first.nan_padding, first.round_f32_to_tf32,
        )  # fmt: skip
    msg = f"a merge of {type(first).__name__} values over divergent programs"
    raise Unsupported(msg)


def _merge_arrays(parts: Sequence[tuple[Selection, Array]], lanes: int) -> Array:
    tile = np.broadcast_shapes(*[value.shape[1:] for _, value in parts])
    dtype = parts[0][1].dtype
    if any(value.dtype != dtype for _, value in parts):  # some short, some not
        parts = [(where, widen(value)) for where, value in parts]
    merged = np.empty((lanes, *tile), parts[0][1].dtype)
    for where, value in parts:
        merged[where] = value
    return merged
