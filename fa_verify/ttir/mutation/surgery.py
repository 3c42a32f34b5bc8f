"""Changes a parsed module in place, keeping producers and users right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.ttir.lowering.hoist import is_pure
from fa_verify.ttir.syntax.ir import Block, Op, Region, Type, Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fa_verify.ttir.syntax.ir import Module

__all__ = ["Surgery", "literal", "number"]

# Regions of these combine two elements: one operation says what the whole does.
COMBINING = frozenset({"tt.reduce", "tt.scan", "tt.map_elementwise"})


def literal(type_: Type, value: object) -> str:
    """A constant of a type as MLIR writes it, each element the same."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return f"dense<{text}>" if type_.shape else text


def number(value: Value) -> str | None:
    """The one number that a value is known to hold, as text; None: it is not known."""
    op = value.producer
    while op is not None and op.name in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
        op = op.operands[0].producer
    if op is None or op.name != "arith.constant":
        return None
    text = op.attrs["value"].removeprefix("dense<").removesuffix(">").strip()
    return None if text.startswith("[") else text


class Surgery:
    """A module to be changed, and where each of its operations stands."""

    def __init__(self, module: Module) -> None:
        """Find the block of each operation."""
        self.module = module
        self._blocks: dict[Op, Block] = {}
        for function in module.functions.values():
            self._index(function.body)

    def _index(self, region: Region) -> None:
        for block in region.blocks:
            for op in block.ops:
                self._blocks[op] = block
                for inner in op.regions:
                    self._index(inner)

    def ops(self) -> Iterator[Op]:
        """Operations outside the regions that combine elements, outer before inner."""
        for function in self.module.functions.values():
            yield from _outside(function.body)

    def replace(self, op: Op, index: int, value: Value) -> None:
        """Let an operand be another value."""
        op.operands[index].users.remove(op)
        op.operands[index] = value
        value.users.append(op)

    def forward(self, old: Value, new: Value, but: Op | None = None) -> None:
        """Let all that reads one value, but for one operation, read another."""
        for user in list(dict.fromkeys(old.users)):
            if user is but:
                continue
            for index, operand in enumerate(user.operands):
                if operand is old:
                    self.replace(user, index, new)
            for _, passed in user.successors:
                for index, value in enumerate(passed):
                    if value is old:
                        passed[index] = new
                        old.users.remove(user)
                        new.users.append(user)

    def remove(self, op: Op) -> None:
        """Take out an operation whose results nothing reads."""
        for operand in op.operands:
            operand.users.remove(op)
        op.operands.clear()
        self._blocks.pop(op).ops.remove(op)

    def following(self, op: Op) -> Op:
        """The operation behind another in its block."""
        ops = self._blocks[op].ops
        return ops[ops.index(op) + 1]

    def copied(self, op: Op) -> Op:
        """A copy of an operation, behind it; nothing reads its results."""
        block = self._blocks[op]
        copy = _copy(op, {})
        block.ops.insert(block.ops.index(op) + 1, copy)
        self._blocks[copy] = block
        return copy

    def sweep(self) -> None:
        """Take out what nothing reads any more, as Triton's compiler does."""
        pending = [op for op in self._blocks if is_pure(op)]
        while pending:
            op = pending.pop()
            if op in self._blocks and not any(x.users for x in op.results):
                makers = [x.producer for x in op.operands if x.producer is not None]
                self.remove(op)
                pending += [maker for maker in makers if is_pure(maker)]

    def before(
        self,
        place: Op,
        name: str,
        operands: Sequence[Value],
        result: Type | None,
        *,
        attrs: dict[str, str] | None = None,
        words: Sequence[str] = (),
    ) -> Value:
        """Put a new operation before another, at its line; its result."""
        block = self._blocks[place]
        return self._put(block, block.ops.index(place), place, name, operands, result, attrs, words)

    def after(self, place: Op, name: str, operands: Sequence[Value], result: Type | None) -> Value:
        """Put a new operation behind another, at its line; its result."""
        block = self._blocks[place]
        return self._put(block, block.ops.index(place) + 1, place, name, operands, result, None, ())

    def round_trip(self, value: Value, there: str, back: str, scalar: str) -> None:
        """Cast a value to another scalar and back before anything reads it."""
        place = value.producer
        assert place is not None  # noqa: S101 - for mypy: results of operations are cast
        other = self.after(place, there, (value,), Type(scalar, value.type.shape))
        assert other.producer is not None  # noqa: S101 - likewise
        again = self.after(other.producer, back, (other,), value.type)
        self.forward(value, again, but=other.producer)

    def constant(self, place: Op, type_: Type, text: str) -> Value:
        """A constant before an operation."""
        return self.before(place, "arith.constant", (), type_, attrs={"value": text})

    def _put(  # noqa: PLR0917
        self, block: Block, at: int, place: Op, name: str, operands: Sequence[Value],
        result: Type | None, attrs: dict[str, str] | None, words: Sequence[str],
    ) -> Value:  # fmt: skip
        op = Op(name, list(operands), [], dict(attrs or {}), list(words), location=place.location)
        for operand in operands:
            operand.users.append(op)
        value = Value(f"%mutated_{len(self._blocks)}", result or operands[0].type, op)
        if result is not None:
            op.results.append(value)
        block.ops.insert(at, op)
        self._blocks[op] = block
        return value


def _copy(op: Op, known: dict[Value, Value]) -> Op:
    """A copy that reads what `known` says in place of values that were copied too."""
    copy = Op(
        op.name,
        [known.get(x, x) for x in op.operands],
        [],
        dict(op.attrs),
        list(op.words),
        list(op.types),
        list(op.groups),
        location=op.location,
    )
    copy.results = [Value(x.name, x.type, copy) for x in op.results]
    for operand in copy.operands:
        operand.users.append(copy)
    known.update(zip(op.results, copy.results, strict=True))
    for region in op.regions:
        blocks = []
        for block in region.blocks:
            args = [Value(x.name, x.type) for x in block.args]
            known.update(zip(block.args, args, strict=True))
            blocks.append(Block(block.label, args, [_copy(x, known) for x in block.ops]))
        copy.regions.append(Region(blocks))
    return copy


def _outside(region: Region) -> Iterator[Op]:
    for block in region.blocks:
        for op in block.ops:
            yield op
            if op.name not in COMBINING:
                for inner in op.regions:
                    yield from _outside(inner)
