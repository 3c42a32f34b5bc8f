"""Moves what does not change out of loops, once, so that no iteration pays for it.

Triton leaves loop-invariant code motion to later stages than TTIR. Only operations without effects
and without regions move; running one whose loop would not have run is harmless, as none can fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_verify.ttir.syntax.ir import Block, Function, Op, Value

_LOOPS = frozenset({"scf.for", "scf.while"})
_PURE = frozenset({
    "tt.addptr", "tt.bitcast", "tt.broadcast", "tt.clampf", "tt.expand_dims", "tt.fp_to_fp",
    "tt.get_num_programs", "tt.get_program_id", "tt.join", "tt.make_range", "tt.mulhiui",
    "tt.precise_divf", "tt.precise_sqrt", "tt.reshape", "tt.splat", "tt.split", "tt.trans",
    "ub.poison",
})  # fmt: skip


def is_pure(op: Op) -> bool:
    """Whether an operation has no effects and no regions."""
    return not op.regions and (op.name in _PURE or op.name.startswith(("arith.", "math.")))


def _hoist_block(block: Block) -> None:
    ops: list[Op] = []
    for op in block.ops:
        for region in op.regions:
            for inner in region.blocks:
                _hoist_block(inner)
        if op.name in _LOOPS:
            ops += _invariant(op)
        ops.append(op)
    block.ops = ops


def _invariant(loop: Op) -> list[Op]:
    """Take the invariant operations out of a loop's own blocks, in order."""
    inside: set[Value] = set()
    for region in loop.regions:
        for block in region.blocks:
            inside.update(block.args)
            for op in block.ops:
                inside.update(op.results)
    moved: list[Op] = []
    for region in loop.regions:
        for block in region.blocks:
            kept: list[Op] = []
            for op in block.ops:
                if is_pure(op) and inside.isdisjoint(op.operands):
                    moved.append(op)
                    inside.difference_update(op.results)
                else:
                    kept.append(op)
            block.ops = kept
    return moved


def hoist(function: Function) -> None:
    """Hoist in all loops of a function, inner loops first."""
    for block in function.body.blocks:
        _hoist_block(block)
