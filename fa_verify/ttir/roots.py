"""Which arguments a kernel may write to, from the IR alone.

Pointer values that may be the same pointer are joined into classes, position by position through
loops and branches; a class that any store or atomic writes through marks its function arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_verify.ttir.ir import Function, Module, Op, Value

_WRITES = frozenset({
    "tt.store", "tt.atomic_rmw", "tt.atomic_store", "tt.atomic_cas", "tt.descriptor_store",
    "tt.descriptor_reduce", "tt.descriptor_scatter",
})  # fmt: skip
_POINTERS = ("ptr", "desc")
ADDRESSES = -1  # stands for whatever lies at an address that the kernel makes


class _Classes:
    def __init__(self) -> None:
        self._parent: dict[Value, Value] = {}

    def find(self, value: Value) -> Value:
        while (parent := self._parent.get(value, value)) is not value:
            value = parent
        return value

    def join(self, a: Value, b: Value) -> None:
        if a.type.scalar in _POINTERS and b.type.scalar in _POINTERS:
            first, second = self.find(a), self.find(b)
            if first is not second:
                self._parent[first] = second


def _for(op: Op, classes: _Classes) -> None:
    block = op.regions[0].blocks[0]
    for init, *others in zip(
        op.operands[3:], block.args[1:], op.results, block.ops[-1].operands, strict=True
    ):
        for other in others:
            classes.join(init, other)


def _if(op: Op, classes: _Classes) -> None:
    for region in op.regions:
        for result, given in zip(op.results, region.blocks[0].ops[-1].operands, strict=False):
            classes.join(result, given)


def _while(op: Op, classes: _Classes) -> None:
    before, after = op.regions[0].blocks[0], op.regions[1].blocks[0]
    for init, *others in zip(op.operands, before.args, after.ops[-1].operands, strict=True):
        for other in others:
            classes.join(init, other)
    forwarded = before.ops[-1].operands[1:]
    for given, *others in zip(forwarded, after.args, op.results, strict=True):
        for other in others:
            classes.join(given, other)


def _join(op: Op, classes: _Classes) -> None:
    special = {"scf.for": _for, "scf.if": _if, "scf.while": _while}.get(op.name)
    if special is not None:
        special(op, classes)
        return
    for result in op.results:
        for operand in op.operands:
            classes.join(operand, result)


def _from_address(op: Op) -> bool:
    return op.name == "tt.int_to_ptr" or (
        op.name == "tt.load" and op.results[0].type.scalar == "ptr"
    )


def _stored(function: Function, module: Module, memo: dict[str, set[int]]) -> set[int]:
    if function.name in memo:
        return memo[function.name]
    memo[function.name] = set()
    classes = _Classes()
    written: list[Value] = []
    anywhere = False
    for op in function.walk():
        _join(op, classes)
        if op.name in _WRITES:
            written.append(op.operands[0])
        elif op.name == "tt.call":
            name = next(w for w in op.words if w.startswith("@"))[1:].strip('"')
            inner = _stored(module.functions[name], module, memo)
            written += [op.operands[i] for i in inner if i != ADDRESSES]
            anywhere = anywhere or ADDRESSES in inner
    if len(function.body.blocks) > 1:
        passed = [a for b in function.body.blocks for a in b.args if a.type.scalar in _POINTERS]
        if passed:
            memo[function.name] = set(range(len(function.args)))
            return memo[function.name]
    roots = {id(classes.find(value)) for value in written}
    if anywhere or any(
        _from_address(op) and id(classes.find(op.results[0])) in roots for op in function.walk()
    ):
        memo[function.name] = {ADDRESSES, *range(len(function.args))}
        return memo[function.name]
    memo[function.name] = {
        i for i, arg in enumerate(function.args) if id(classes.find(arg)) in roots
    }
    return memo[function.name]


def stored_arguments(module: Module) -> frozenset[int]:
    """Positions of the arguments that a kernel may store to, reduce into or update atomically."""
    return frozenset(_stored(module.entry, module, {}))
