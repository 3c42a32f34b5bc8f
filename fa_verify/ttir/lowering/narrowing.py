"""Does in 16 bits what a kernel does in float32 between a widening and a narrowing.

`(x / y).to(tl.float16)` of two fp16 tiles is a float32 quotient, rounded. The quotient of the fp16
tiles is the same by definition (see `numbers.floats`), and takes half the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.numbers.floats import SHORT, round_to
from fa_verify.ttir.syntax.ir import Op, Type, Value

if TYPE_CHECKING:
    from fa_verify.ttir.syntax.ir import Block, Function

_OPERATIONS = frozenset({"arith.addf", "arith.subf", "arith.mulf", "arith.divf"})
_IDLE = _OPERATIONS | {"arith.extf"}


def narrow(function: Function) -> None:
    """Rewrite operations on widened tiles that only a rounding to the tiles' own type reads."""
    for block in function.body.blocks:
        _narrow_block(block)


def _narrow_block(block: Block) -> None:
    here, ops = set(map(id, block.ops)), []
    for op in block.ops:
        for region in op.regions:
            for inner in region.blocks:
                _narrow_block(inner)
        wide = op.operands[0].producer if _rounds(op) else None
        if wide is not None and id(wide) in here:
            ops += _replace(op, wide)
        ops.append(op)
    idle = {op for op in ops if op.name in _IDLE and not op.results[0].users}
    for op in idle:
        for value in op.operands:
            value.users.remove(op)
    block.ops = [op for op in ops if op not in idle]


def _rounds(op: Op) -> bool:
    """Whether an operation rounds a float32 tile to nearest even in 16 bits."""
    if op.name != "arith.truncf" or op.words or op.attrs:
        return False
    source, target = op.operands[0].type, op.results[0].type
    return source.scalar == "f32" and target.scalar in SHORT and bool(target.shape)


def _replace(op: Op, wide: Op) -> list[Op]:
    """Turn a rounding into the operation that it rounds, if that can be; what has to precede it."""
    scalar = op.results[0].type.scalar
    if wide.name not in _OPERATIONS or len(wide.results[0].users) > 1:
        return []
    tiles = [_tile(x, scalar) for x in wide.operands]
    numbers = [tile or _number(x, scalar) for tile, x in zip(tiles, wide.operands, strict=True)]
    operands = [x for x in numbers if x is not None]
    if not any(tiles) or len(operands) < len(numbers):
        return []
    op.operands[0].users.remove(op)
    for value in wide.operands:
        value.users.remove(wide)
    op.name, op.operands, wide.operands = wide.name, operands, []
    for value in operands:
        value.users.append(op)
    made = [x.producer for x, tile in zip(operands, tiles, strict=True) if tile is None]
    return [x for x in made if x is not None]


def _tile(value: Value, scalar: str) -> Value | None:
    """The 16-bit tile that was widened."""
    op = value.producer
    if op is None or op.name != "arith.extf" or op.operands[0].type.scalar != scalar:
        return None
    return op.operands[0]


def _number(value: Value, scalar: str) -> Value | None:
    """A tile of one constant in 16 bits, if they hold it; not yet in any block."""
    op = value.producer
    if op is None or op.name != "arith.constant":
        return None
    try:
        number = float(op.attrs["value"].removeprefix("dense<").removesuffix(">"))
    except ValueError:  # several numbers, or bits
        return None
    if round_to(np.array([number]), scalar)[0] != number:
        return None
    short = Op("arith.constant", attrs=dict(op.attrs), location=op.location)
    short.results = [Value(value.name, Type(scalar, value.type.shape), short)]
    return short.results[0]
