"""Which operations may wait for another program, from the IR alone: polls, and some loops.

A loop waits if whether it goes on depends on something it reads itself and another program may
write: an atomic's result, a volatile load, a load through a pointer that this kernel also stores
through. An atomic that adds a constant other than 0 does not count: a loop that draws numbers from
a counter gets on by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.ttir.lowering.roots import Aliases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.ttir.syntax.ir import Function, Module, Op, Value

_LOADS = frozenset({
    "tt.load", "tt.descriptor_load", "tt.descriptor_gather", "tt.experimental_descriptor_load",
})  # fmt: skip


def waiting(module: Module) -> frozenset[Op]:
    """All operations of a module that may wait for another program."""
    found: set[Op] = set()
    for function in module.functions.values():
        found.update(op for op in function.walk() if op.name == "tt.atomic_poll")
        loops = [op for op in function.walk() if op.name == "scf.while"]
        if loops:
            aliases = Aliases(function, module)
            known = function is module.entry
            found.update(x for x in loops if _waits(x, module, aliases if known else None))
    return frozenset(found)


def _waits(loop: Op, module: Module, aliases: Aliases | None) -> bool:
    return any(_reads_what_others_write(op, module, aliases) for op in _deciding(loop))


def _reads_what_others_write(op: Op, module: Module, aliases: Aliases | None) -> bool:
    if op.name in ("tt.atomic_cas", "tt.atomic_load", "tt.atomic_poll"):
        return True
    if op.name == "tt.atomic_rmw":
        return not (op.words[0] == "add" and _is_constant_not_zero(op.operands[1]))
    if op.name in _LOADS:
        volatile = op.attrs.get("isVolatile") == "true"
        return volatile or aliases is None or aliases.may_be_stored(op.operands[0])
    if op.name == "tt.call":
        return _touches_memory(module.functions[op.callee], module)
    return False


def _touches_memory(function: Function, module: Module) -> bool:
    return any(
        op.name in _LOADS
        or op.name.startswith("tt.atomic")
        or (op.name == "tt.call" and _touches_memory(module.functions[op.callee], module))
        for op in function.walk()
    )


def _is_constant_not_zero(value: Value) -> bool:
    op = value.producer
    return op is not None and op.name == "arith.constant" and op.attrs["value"] != "0"


def _deciding(loop: Op) -> Iterator[Op]:
    """Operations inside a loop that its condition depends on."""
    before, after = loop.regions[0].blocks[0], loop.regions[1].blocks[0]
    inside = {x for region in loop.regions for b in region.blocks for o in b.ops for x in o.walk()}
    condition, following = before.ops[-1], after.ops[-1]
    turned = dict(zip(before.args, following.operands, strict=True))
    turned.update(zip(after.args, condition.operands[1:], strict=True))
    seen: set[Value] = set()
    open_ = [condition.operands[0]]
    while open_:
        value = open_.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in turned:
            open_.append(turned[value])
        op = value.producer
        if op is None or op not in inside:
            continue
        for inner in op.walk():  # of a branch or an inner loop, all that happens in it
            yield inner
            open_ += inner.operands
