"""Wrong addresses: tensors loaded or stored by another's strides, sequences and heads mistaken."""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from fa_verify.diagnosis.addressing import read_by
from fa_verify.inputs import SPARSE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fa_verify.inputs import Inputs

__all__ = ["extent", "loads", "slips", "stores", "sums"]

Strides = tuple[int, ...]
_TILES = (16, 32, 64, 128)  # columns that a kernel may take for granted


def _slips(
    name: str, tensor: torch.Tensor, others: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Strides]]:
    """Sentences and the strides by which a tensor could be addressed by mistake."""
    b, h, n, d = tensor.stride()
    for other, theirs in others.items():
        text = f"{name} is addressed with {other}'s strides"
        yield text, tuple(theirs.stride())
        yield text, (*theirs.stride()[:3], d)
        yield f"the rows of {name} are addressed with {other}'s stride", (b, h, theirs.stride(2), d)
        yield (
            f"the heads of {name} are addressed with {other}'s stride",
            (b, theirs.stride(1), n, d),
        )
        text = f"the sequences of {name} are addressed with {other}'s stride"
        yield text, (theirs.stride(0), h, n, d)
        width = theirs.shape[3]
        text = f"the heads of {name} begin as if they had as many columns as {other}"
        yield text, (b * width // tensor.shape[3], h * width // tensor.shape[3], n, d)
    contiguous = tuple(torch.empty(tensor.shape, device="meta").stride())
    yield f"{name} is addressed with a contiguous tensor's strides", contiguous
    yield f"the rows of {name} are taken to be contiguous", (b, h, tensor.shape[3], d)
    yield f"the columns of {name} are taken to be contiguous", (b, h, n, 1)
    yield f"{name}'s batch and head strides are swapped", (h, b, n, d)
    yield f"{name}'s head and row strides are swapped", (b, n, h, d)
    yield f"{name}'s row and column strides are swapped", (b, h, d, n)


def loads(
    x: Inputs,
    names: str | tuple[str, ...],
    o: torch.Tensor | None = None,
    blocks: Sequence[int] = (),
) -> Iterator[tuple[str, str, Callable[[], torch.Tensor]]]:
    """Sentences, the input that is loaded wrongly, and what is loaded in its place, on demand.

    Args:
        x: The inputs.
        names: Which inputs may be.
        o: The output, whose strides do may be given.
        blocks: Rows of blocks that pointers may advance by.
    """
    for name in names:
        tensor = getattr(x, name)
        if tensor is None or not tensor.numel():
            continue
        kin = {"q": "k", "k": "qv", "v": "kq", "do": "q"}[name]
        others = {other: getattr(x, other) for other in kin}
        if name == "do" and o is not None:
            others = {"o": o, **others}
        yield from slips(name, tensor, others)
        yield from _packed(name, tensor, others)
        for block in blocks:
            yield from _advanced(name, tensor, others, block)


def _packed(
    name: str, tensor: torch.Tensor, others: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str, Callable[[], torch.Tensor]]]:
    """Slips of a kernel whose launcher lays rows out one after the other, heads inside them."""
    if not 0 < tensor.numel() < SPARSE:
        return
    rows = tensor.cpu().transpose(1, 2).contiguous().transpose(1, 2)
    b, h, n, d = rows.stride()
    for other, theirs in others.items():
        width = theirs.shape[3]
        if width != tensor.shape[3] and tensor.shape[1] > 1:
            text = f"the heads of {name} begin as if they had as many columns as {other}"
            yield text, name, functools.partial(read_by, rows, (b, width, n, d))
        if (size := theirs.shape[1] * width) != n:
            text = f"the rows of {name} are addressed with {other}'s stride"
            yield text, name, functools.partial(read_by, rows, (b, h, size, d))


def _advanced(
    name: str, tensor: torch.Tensor, others: Mapping[str, torch.Tensor], block: int
) -> Iterator[tuple[str, str, Callable[[], torch.Tensor]]]:
    """Pointers to a block of rows that advance from block to block."""
    b, h, n, d = tensor.stride()
    rows, most = tensor.shape[2], extent(tensor.shape, (b, h, 0, d))
    blocks = torch.arange(rows) // block * block
    for other, theirs in others.items():
        wrong = theirs.stride(2)
        if wrong == n or most + rows * max(wrong, n) >= SPARSE:
            continue
        text = f"the rows of {name} within a block are addressed with {other}'s stride"
        moved = blocks * (n - wrong)
        yield text, name, functools.partial(_read, tensor, (b, h, wrong, d), moved)
        if rows <= block:  # and never advances
            continue
        text = f"the pointer to {name} advances from block to block by {other}'s row stride"
        # A loop of its own for the last, partial block finds its pointer anew.
        anew = torch.where(torch.arange(rows) >= rows // block * block, 0, moved)
        for off in (moved, anew):
            yield text, name, functools.partial(_read, tensor, (b, h, n, d), -off)


def slips(
    name: str, tensor: torch.Tensor, others: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> Iterator[tuple[str, str, Callable[[], torch.Tensor]]]:
    """The same of one tensor, whose strides may be mistaken for those of others."""
    b, h, n, d = tensor.stride()
    found = list(_slips(name, tensor, others))
    found.append((f"{name} of the first sequence is read for every sequence", (0, h, n, d)))
    found.append((f"{name} of the first head is read for every head", (b, 0, n, d)))
    if n > 0 and h % n:
        text = f"the offset of a head of {name} is rounded down to whole rows"
        found.append((text, (b, h // n * n, n, d)))
    right, sizes = tuple(tensor.stride()), tensor.shape
    for sentence, wrong in found:
        if _same(wrong, right, sizes) or extent(sizes, wrong) >= SPARSE:
            continue
        yield sentence, name, functools.partial(_read, tensor, wrong)


def _read(tensor: torch.Tensor, wrong: Strides, moved: torch.Tensor | None = None) -> torch.Tensor:
    return read_by(tensor.cpu(), wrong, moved=moved)


def stores(
    name: str, tensor: torch.Tensor, others: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Strides]]:
    """Sentences and the strides by which an output could be stored by mistake."""
    if not tensor.numel() or extent(tensor.shape, tuple(tensor.stride())) >= SPARSE:
        return
    found = list(_slips(name, tensor, others))
    _, heads, rows, width = tensor.shape
    for tile in _TILES:
        if tile != width:
            text = f"the rows of {name} are stored as far apart as if head_dim were {tile}"
            found.append((text, (heads * rows * tile, rows * tile, tile, 1)))
            found.append((text, (heads * rows * width, rows * width, tile, 1)))
    for sentence, wrong in found:
        if (
            not _same(wrong, tuple(tensor.stride()), tensor.shape)
            and extent(tensor.shape, wrong) < SPARSE
        ):
            yield sentence, wrong


def sums(name: str, sizes: torch.Size, other: torch.Size) -> Iterator[tuple[str, Strides]]:
    """The same of a contiguous sum that programs add to by atomics; other: another's sizes."""
    _, heads, rows, width = sizes
    if other[3] != width:
        text = f"the rows of the sum of {name} are as far apart as those of a tensor of "
        strides = (heads * rows * other[3], rows * other[3], other[3], 1)
        yield f"{text}{other[3]} columns, not {width}", strides
        yield (
            f"{text}{other[3]} columns, not {width}",
            (heads * rows * width, rows * width, other[3], 1),
        )
    if other[2] != rows:
        text = f"the heads of the sum of {name} are as far apart as those of a tensor of "
        strides = (heads * other[2] * width, other[2] * width, width, 1)
        yield f"{text}{other[2]} rows, not {rows}", strides
    if other[1] != heads:
        text = f"the sequences of the sum of {name} are as far apart as those of a tensor of "
        strides = (other[1] * rows * width, rows * width, width, 1)
        yield f"{text}{other[1]} heads, not {heads}", strides


def extent(sizes: torch.Size, strides: Sequence[int]) -> int:
    """Elements from the first to the last: what is further apart takes too much memory."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _same(a: Strides, b: Strides, sizes: torch.Size) -> bool:
    """Whether two strides lead to the same places: along an axis of one element any stride does."""
    return all(x == y or size == 1 for x, y, size in zip(a, b, sizes, strict=True))
