"""`Numbering`: which values of a module are computed alike of the same ones, and so are equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.ttir.lowering.hoist import is_pure

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from fa_verify.ttir.syntax.ir import Type, Value

__all__ = ["Numbering"]

_Key = tuple[str, tuple[tuple[str, str], ...], tuple[str, ...], "Type", int, tuple["Value", ...]]


class Numbering:
    """Value numbering over pure operations: one value stands for all that equal it."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._first: dict[_Key, Value] = {}
        self._known: dict[Value, Value] = {}

    def of(self, value: Value) -> Value:
        """The value that stands for this one."""
        known = self._known.get(value)
        if known is None:
            known = self._known[value] = self._found(value)
        return known

    def _found(self, value: Value) -> Value:
        op = value.producer
        if op is None or not is_pure(op):
            return value
        operands = tuple(map(self.of, op.operands))
        attrs, words = tuple(sorted(op.attrs.items())), tuple(op.words)
        key = (op.name, attrs, words, value.type, op.results.index(value), operands)
        return self._first.setdefault(key, value)

    def varies(self, value: Value, inside: AbstractSet[Value]) -> bool:
        """Whether a value may be another one in the next iteration of a loop.

        Args:
            value: The value.
            inside: Values that exist anew in each iteration.
        """
        if value not in inside:
            return False
        op = value.producer
        return op is None or not is_pure(op) or any(self.varies(x, inside) for x in op.operands)
