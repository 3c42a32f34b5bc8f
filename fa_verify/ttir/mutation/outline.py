"""`Outline`: an `Alteration` that changes nothing, and notes what the lines of kernels are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa_verify.ttir.mutation.changes import Facts
from fa_verify.ttir.mutation.modules import OfModules
from fa_verify.ttir.mutation.surgery import number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.ttir.options import Edit
    from fa_verify.ttir.syntax.ir import Location, Module, Op, Value

__all__ = ["Line", "Outline"]

_STORES = frozenset({
    "tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_store", "tt.descriptor_reduce",
})  # fmt: skip
_ACCESSES = _STORES | {"tt.load", "tt.descriptor_load"}
_LOOPS = ("scf.for", "scf.while")
_SHAPED = frozenset({"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans"})
_CAST = _SHAPED | {"arith.truncf", "arith.extf", "arith.extsi", "arith.trunci", "arith.sitofp"}
_PARTS = ("arith.divsi", "arith.remsi", "arith.divui", "arith.remui")
_POINTERS = ("base", "address", "advance")
_MATRIX = 2  # axes of a tile of logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line, and one thing that it is for.

    Attributes:
        kind: "base": where an argument's elements lie is computed from the argument itself;
            "address": from such a pointer; "advance": it is moved on in a loop; "index": a quotient
            or a remainder, no tile of them, is computed that a base needs. "use": arithmetic with a
            number that is an argument, or with what was loaded through one. "stored": what is
            stored through an argument is computed. "comparison": of two axes of a tile. "begin",
            "end": of a loop. "sum": of the rows of a tile, in a loop. "product": a dot that is
            added to what was accumulated. "narrowed": float32 is rounded to a narrower format, and
            read as float32 again, in a loop.
        name: The argument, or of what is narrowed "tile" or "rows"; "" where there is none.
        kernel: The function; writes: the arguments that it stores to.
        file, line: Where; a helper's line that several arguments go through gives way to its call.
    """

    kind: str
    name: str = ""
    kernel: str
    writes: frozenset[str]
    file: str
    line: int


class Outline(OfModules):
    """Notes the lines of the kernels that a run launches.

    Attributes:
        found: In the kernels' order.
    """

    def __init__(self) -> None:
        """Note nothing yet."""
        self.found: dict[Line, None] = {}

    def edit(self, kernel: str) -> Edit | None:
        """Look at each module."""
        del kernel
        return self

    def __call__(self, module: Module) -> None:
        """Note what is there."""
        facts = Facts(module)
        ops = list(module.entry.walk())
        stores = [op for op in ops if op.name in _STORES]
        writes = frozenset(facts.argument(op.operands[0]) for op in stores)
        noted = [item for op in ops for item in _purposes(op, facts)]
        through: dict[tuple[str, int], set[str]] = {}
        for kind, name, at in noted:
            if kind in _POINTERS:
                through.setdefault((at.file, at.line), set()).add(name)
        shared = {place for place, names in through.items() if len(names) > 1}
        for kind, name, at in noted:
            file, line = _told_apart(at, shared if kind in _POINTERS else set())
            if file:
                found = Line(
                    kind=kind, name=name, kernel=module.entry.name, writes=writes, file=file,
                    line=line,
                )  # fmt: skip
                self.found.setdefault(found)


def _told_apart(at: Location, shared: set[tuple[str, int]]) -> tuple[str, int]:
    """The innermost line of a chain of calls that not several arguments go through."""
    own = (at.file, at.line)
    chain = [(file, line) for file, line, _ in at.calls]
    outer = chain[chain.index(own) :] if own in chain else []
    return next((place for place in outer if place not in shared), own)


def _purposes(op: Op, facts: Facts) -> Iterator[tuple[str, str, Location]]:
    """Kinds, names and places of what one operation is for."""
    if op.name in _ACCESSES:
        yield from _of_access(op, facts)
    elif op.name in _LOOPS:
        yield from _of_loop(op)
    elif op.name == "arith.cmpi":
        tile = len(op.results[0].type.shape) == _MATRIX
        if tile and not any(map(_one_number, op.operands)):
            yield "comparison", "", op.location
    elif op.name in ("tt.reduce", "tt.dot", "arith.extf"):
        yield from _of_accumulation(op, facts)
    elif op.results and op.results[0].type.is_float and op.name.startswith(("arith.", "math.")):
        for operand in op.operands:
            source = _source(operand)
            if source in facts.arguments:
                yield "use", facts.arguments[source], op.location
            elif source.producer is not None and source.producer.name == "tt.load":
                yield "use", facts.argument(source.producer.operands[0]), op.location


def _of_accumulation(op: Op, facts: Facts) -> Iterator[tuple[str, str, Location]]:
    if op.name == "tt.dot":
        if number(op.operands[2]) is None:
            yield "product", "", op.location
    elif not _in_a_loop(op, facts):
        return
    elif op.name == "tt.reduce" and any(inner.name == "arith.addf" for inner in op.walk()):
        yield "sum", "", op.location
    elif (rounds := op.operands[0].producer) is not None and rounds.name == "arith.truncf":
        tile = len(op.results[0].type.shape) == _MATRIX
        yield "narrowed", "tile" if tile else "rows", rounds.location


def _of_access(op: Op, facts: Facts) -> Iterator[tuple[str, str, Location]]:
    name = facts.argument(op.operands[0])
    makers = list(_addressing(op.operands[0], facts))
    roots = {x.location.line for x, kind in makers if kind == "base"}
    for maker, kind in makers:
        yield kind, name, maker.location
        for inner in _quotients(maker) if maker.location.line in roots else ():
            yield "index", name, inner.location
    if op.name in _STORES and len(op.operands) > 1:
        stored = _maker(op.operands[1])
        if stored is not None:  # a loop computes all that it hands on
            yield "stored", name, (op if stored.regions else stored).location


def _of_loop(loop: Op) -> Iterator[tuple[str, str, Location]]:
    """Of the innermost loops that multiply."""
    inside = [x for x in loop.walk() if x is not loop]
    if any(x.name == "tt.dot" for x in inside) and not any(x.name in _LOOPS for x in inside):
        for kind, bound in _bounds(loop):
            for maker in _computed(bound, loop):
                yield kind, "", maker.location


def _bounds(loop: Op) -> Iterator[tuple[str, Value]]:
    """Where a loop begins and ends."""
    if loop.name == "scf.for":
        yield from zip(("begin", "end"), loop.operands[:2], strict=True)
        return
    for inner in loop.walk():
        test = inner.operands[0].producer if inner.name == "scf.condition" else None
        if test is not None:
            yield from (("end", x) for x in test.operands[1:])


def _computed(bound: Value, loop: Op) -> Iterator[Op]:
    """The operations that a loop's bound comes from, on the nearest lines but the loop's own."""
    pending, found = [bound], False
    while pending:
        op = _maker(pending.pop())
        if op is None or op.name == "arith.constant":
            continue
        if op.location.line == loop.location.line and not op.regions:
            pending += op.operands
            continue
        found = True
        yield op
    if not found:
        yield loop


def _maker(value: Value) -> Op | None:
    """The operation that computes a value, but for its shape and format."""
    op = value.producer
    while op is not None and op.name in _CAST and op.operands[0].producer is not None:
        op = op.operands[0].producer
    return op


def _source(value: Value) -> Value:
    """What a tile is made of that is all one number, or a number itself."""
    while value.producer is not None and value.producer.name in _CAST:
        value = value.producer.operands[0]
    return value


def _one_number(value: Value) -> bool:
    """Whether a tile is all one number."""
    return not _source(value).type.shape or number(value) is not None


def _in_a_loop(op: Op, facts: Facts) -> bool:
    owner = facts.owners.get(op)
    return owner is not None and (owner.name in _LOOPS or _in_a_loop(owner, facts))


def _addressing(pointer: Value, facts: Facts) -> Iterator[tuple[Op, str]]:
    """The operations between an argument and an access through it, and whether they move it on."""
    pending, seen = [pointer], set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        op = value.producer
        if op is None:
            pending += _carried(value, facts)
        elif op.regions:
            index = op.results.index(value)
            pending += [x.operands[index] for x in _yields(op)]
            pending += op.operands[3 + index : 4 + index] if op.name == "scf.for" else []
        else:
            if op.name in ("tt.addptr", "tt.make_tensor_descriptor"):
                carried = op.operands[0].producer is None and op.operands[0] not in facts.arguments
                base = _source(op.operands[0]) in facts.arguments
                yield op, "base" if base else "advance" if carried else "address"
            pending += op.operands[:1]


def _carried(value: Value, facts: Facts) -> list[Value]:
    """What a value that a loop hands on is at first, and at the end of each turn."""
    for owner in {*facts.owners.values()}:
        if owner.name != "scf.for":
            continue
        args = owner.regions[0].blocks[0].args[1:]
        if value in args:
            index = args.index(value)
            return [owner.operands[3 + index], *(x.operands[index] for x in _yields(owner))]
    return []


def _yields(op: Op) -> list[Op]:
    lasts = [block.ops[-1] for region in op.regions for block in region.blocks if block.ops]
    return [last for last in lasts if last.name == "scf.yield"]


def _quotients(maker: Op) -> Iterator[Op]:
    """Quotients and remainders that an offset is computed of."""
    pending, seen = list(maker.operands[1:]), set()
    while pending:
        op = pending.pop().producer
        if op is None or op in seen or not op.results[0].type.is_int:
            continue
        seen.add(op)
        if op.name in _PARTS and not op.results[0].type.shape:
            yield op
        pending += op.operands
