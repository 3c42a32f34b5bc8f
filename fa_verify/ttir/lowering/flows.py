"""Which integers become addresses: by sums, products and choices, through loops and branches.

Hashes and random numbers wrap on purpose: what passes through bitwise operations, remainders or an
unsigned extension is nobody's mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.ttir.syntax.ir import Function, Op, Value

_LINEAR = frozenset({
    "arith.addi", "arith.divsi", "arith.extsi", "arith.maxsi", "arith.minsi", "arith.muli",
    "arith.select", "arith.shli", "arith.subi", "tt.broadcast", "tt.expand_dims", "tt.reshape",
    "tt.splat", "tt.trans",
})  # fmt: skip
_FIRST = {"tt.addptr": 1, "tt.advance": 1, "tt.make_tensor_descriptor": 1, "tt.make_tensor_ptr": 1}


def addresses(function: Function) -> set[Value]:
    """Every value of a function that may become part of an address or of a descriptor."""
    sources: dict[Value, list[Value]] = {}
    found: set[Value] = set()
    pending: list[Value] = []
    for op in function.walk():
        for operand, result in _edges(op):
            sources.setdefault(result, []).append(operand)
        first = 1 if op.name.startswith("tt.descriptor") else _FIRST.get(op.name)
        if first is not None:
            pending += [x for x in op.operands[first:] if x.type.is_int]
    while pending:
        value = pending.pop()
        if value not in found:
            found.add(value)
            pending += sources.get(value, ())
    return found


def _edges(op: Op) -> Iterator[tuple[Value, Value]]:
    """Pairs of values of which the second is, or is computed from, the first."""
    if op.name in _LINEAR:
        yield from ((operand, op.results[0]) for operand in op.operands)
    elif op.name == "scf.for":
        yield from ((operand, op.regions[0].blocks[0].args[0]) for operand in op.operands[:3])
    yield from handed_on(op)


def handed_on(op: Op) -> Iterator[tuple[Value, Value]]:
    """Pairs of values of which the second may be the first, carried through a loop or a branch."""
    if op.name == "scf.for":
        block = op.regions[0].blocks[0]
        yielded = block.ops[-1].operands
        yield from zip(op.operands[3:], block.args[1:], strict=True)
        yield from zip(yielded, block.args[1:], strict=True)
        yield from zip(yielded, op.results, strict=True)
    elif op.name == "scf.if":
        for region in op.regions:
            yield from zip(region.blocks[0].ops[-1].operands, op.results, strict=False)
    elif op.name == "scf.while":
        before, after = (region.blocks[0] for region in op.regions)
        yield from zip(op.operands, before.args, strict=True)
        yield from zip(after.ops[-1].operands, before.args, strict=True)
        yield from zip(before.ops[-1].operands[1:], after.args, strict=True)
        yield from zip(before.ops[-1].operands[1:], op.results, strict=True)
