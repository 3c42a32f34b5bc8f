"""Which arguments a kernel may write to, from the IR alone.

Pointer values that may be the same pointer are joined into classes, position by position through
loops and branches; a class that any store or atomic writes through marks its function arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_verify.ttir.syntax.ir import Function, Module, Op, Value

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


class Aliases:
    """What the pointers inside one function may point into, and whether it is stored to.

    Attributes:
        anywhere: The function stores to an address that it makes itself.
    """

    def __init__(
        self, function: Function, module: Module, memo: dict[str, set[int]] | None = None
    ) -> None:
        """Look at all operations; `memo` keeps what is known of functions that are called."""
        memo = {} if memo is None else memo
        self._classes = _Classes()
        written: list[Value] = []
        made: list[Value] = []
        self.anywhere = False
        for op in function.walk():
            _join(op, self._classes)
            if op.name in _WRITES:
                written.append(op.operands[0])
            elif op.name == "tt.call":
                inner = _stored(module.functions[op.callee], module, memo)
                written += [op.operands[i] for i in inner if i != ADDRESSES]
                self.anywhere = self.anywhere or ADDRESSES in inner
            elif _from_address(op):
                made.append(op.results[0])
        self._written = {id(self._classes.find(value)) for value in written}
        self.anywhere = self.anywhere or any(
            id(self._classes.find(value)) in self._written for value in made
        )
        self._arguments = {id(self._classes.find(arg)) for arg in function.args}
        # Branches pass pointers on in ways that are not followed here.
        self._unknown = len(function.body.blocks) > 1 and any(
            arg.type.scalar in _POINTERS for block in function.body.blocks for arg in block.args
        )

    def may_be_stored(self, pointer: Value) -> bool:
        """Whether the function may store to where `pointer` points."""
        found = id(self._classes.find(pointer))
        unknown = self.anywhere or self._unknown or found not in self._arguments
        return unknown or found in self._written


def _stored(function: Function, module: Module, memo: dict[str, set[int]]) -> set[int]:
    if function.name not in memo:
        memo[function.name] = set()
        aliases = Aliases(function, module, memo)
        found = {i for i, arg in enumerate(function.args) if aliases.may_be_stored(arg)}
        memo[function.name] = found | ({ADDRESSES} if aliases.anywhere else set())
    return memo[function.name]


def stored_arguments(module: Module) -> frozenset[int]:
    """Positions of the arguments that a kernel may store to, reduce into or update atomically."""
    return frozenset(_stored(module.entry, module, {}))
