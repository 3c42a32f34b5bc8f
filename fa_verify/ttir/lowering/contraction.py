"""Joins a product and the sum it goes into, as LLVM does for the code that Triton generates.

Triton lets LLVM contract (`enable_fp_fusion`), and NVPTX fuses aggressively: also where the product
has other readers, which then compute it again (DAGCombiner, visitFADDForFMACombine; of two products
the one with fewer readers is fused, the first if they have as many). Only products in the block of
the sum, and not those that `reduce` and `scan` regions see as arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_verify.ttir.syntax.ir import Block, Function, Op, Value

_SUMS = frozenset({"arith.addf", "arith.subf"})


def contract(function: Function) -> None:
    """Rewrite sums of products into math.fma; attribute `negate` names what changes sign."""
    for block in function.body.blocks:
        _contract_block(block)


def _contract_block(block: Block) -> None:
    here = set(map(id, block.ops))
    for op in block.ops:
        for region in op.regions:
            for inner in region.blocks:
                _contract_block(inner)
        if op.name in _SUMS:
            products = [v for v in op.operands if _is_product(v, here)]
            if products:
                _fuse(op, min(products, key=lambda v: len(v.users)))
    block.ops = [op for op in block.ops if op.name != "arith.mulf" or op.results[0].users]


def _is_product(value: Value, here: set[int]) -> bool:
    op = value.producer
    return op is not None and op.name == "arith.mulf" and id(op) in here


def _fuse(op: Op, product: Value) -> None:
    multiply = product.producer
    if multiply is None:
        raise AssertionError
    first = op.operands[0] is product
    addend = op.operands[1 if first else 0]
    if op.name == "arith.subf":
        op.attrs["negate"] = "addend" if first else "product"
    op.name, op.operands = "math.fma", [*multiply.operands, addend]
    product.users.remove(op)
    for value in multiply.operands:
        value.users.append(op)
