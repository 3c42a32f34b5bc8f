"""A small typed IR for TTIR: types, values, operations, blocks, and where each operation came from.

Owns the data structures only. Knows neither the text they are parsed from nor how they are run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BITS: dict[str, int] = {
    "i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "index": 64,
    "f8E4M3FN": 8, "f8E5M2": 8, "f8E4M3FNUZ": 8, "f8E5M2FNUZ": 8, "f8E4M3B11FNUZ": 8,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Type:
    """A scalar or tensor type.

    `scalar` is the element's name as MLIR writes it ("i32", "bf16"), or "ptr", "desc", "none".
    `pointee` is what a pointer points to, or the block type of a tensor descriptor, the one
    place where TTIR tells integers that are `unsigned` from others.
    """

    scalar: str
    shape: tuple[int, ...] = ()
    pointee: Type | None = None
    unsigned: bool = False

    @property
    def is_float(self) -> bool:
        """Whether elements are floating-point numbers."""
        return self.scalar.startswith(("f", "bf"))

    @property
    def is_int(self) -> bool:
        """Whether elements are integers (i1 included)."""
        return self.scalar.startswith("i")

    @property
    def bits(self) -> int:
        """Width of one element in bits; 64 for pointers."""
        return BITS.get(self.scalar, 64)

    @property
    def numel(self) -> int:
        """Elements in one program's tile."""
        return prod(self.shape)

    def __str__(self) -> str:
        """Write the type about as MLIR does."""
        base = self.scalar if self.pointee is None else f"{self.scalar}<{self.pointee}>"
        return f"tensor<{'x'.join(map(str, self.shape))}x{base}>" if self.shape else base


@dataclass(frozen=True, slots=True)
class Location:
    """Where an operation was written.

    Attributes:
        file: Source file; line, column: in it.
        calls: The same of each call that inlining passed through, from the innermost to the
            outermost, Triton's own library included; tells two uses of one helper apart.
    """

    file: str = ""
    line: int = 0
    column: int = 0
    calls: tuple[tuple[str, int, int], ...] = ()


@dataclass(slots=True, eq=False)
class Value:
    """One SSA value; `users` lists the operations that read it."""

    name: str
    type: Type
    producer: Op | None = None
    users: list[Op] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Op:
    """One operation.

    `words` are the bare words of the pretty syntax in order ("slt", "acq_rel", "tf32"), `attrs` the
    named attributes as text, `groups` the operand counts inside each pair of brackets, `successors`
    the labels and operands a branch passes on.
    """

    name: str
    operands: list[Value] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    attrs: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    types: list[Type] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    successors: list[tuple[str, list[Value]]] = field(default_factory=list)
    location: Location = Location()

    @property
    def callee(self) -> str:
        """Name of the function that a tt.call calls."""
        return next(word for word in self.words if word.startswith("@"))[1:].strip('"')

    def walk(self) -> Iterator[Op]:
        """Yield this operation and all inside it."""
        yield self
        for region in self.regions:
            for block in region.blocks:
                for op in block.ops:
                    yield from op.walk()


@dataclass(slots=True, eq=False)
class Block:
    """A label, its arguments, and operations that end in a terminator."""

    label: str
    args: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Region:
    """A list of blocks; the first is the entry."""

    blocks: list[Block] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Function:
    """A tt.func: its name, arguments (and their attributes), body, whether it is the kernel."""

    name: str
    args: list[Value]
    body: Region
    public: bool
    location: Location
    results: list[Type] = field(default_factory=list)
    attributes: list[dict[str, str]] = field(default_factory=list)

    def walk(self) -> Iterator[Op]:
        """Yield all operations, outer before inner."""
        for block in self.body.blocks:
            for op in block.ops:
                yield from op.walk()


@dataclass(slots=True, eq=False)
class Module:
    """All functions of one kernel, the kernel itself being `entry`."""

    functions: dict[str, Function]
    entry: Function


def dismantle(module: Module) -> None:
    """Take a module's cycles apart, so that its memory is free at once and needs no collector."""
    for function in module.functions.values():
        for op in list(function.walk()):
            for value in (*op.operands, *op.results):
                value.users.clear()
                value.producer = None
            op.regions.clear()
