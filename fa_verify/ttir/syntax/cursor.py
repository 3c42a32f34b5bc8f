"""A place in TTIR's tokens, the names in scope there, and what every operation is written with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.syntax.ir import Location, Type, Value
from fa_verify.ttir.syntax.locations import Locations
from fa_verify.ttir.syntax.tokens import tokenise
from fa_verify.ttir.syntax.types import parse_type

if TYPE_CHECKING:
    from fa_verify.ttir.syntax.ir import Op


class Cursor:
    """Where the parser is, and what it knows there."""

    def __init__(self, text: str, library: str) -> None:
        """Begin at the first token."""
        self.locations = Locations(text, library)
        self.tokens = tokenise(text)
        self.at = 0
        self.scopes: list[dict[str, Value]] = []

    # -- token helpers
    def peek(self) -> tuple[str, str]:
        """Kind and text of the next token."""
        return self.tokens[self.at]

    def next(self) -> tuple[str, str]:
        """Take the next token."""
        token = self.tokens[self.at]
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        """Take the next token if it is this one."""
        if self.tokens[self.at][1] == text and self.tokens[self.at][0] not in ("str", "loc"):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Take this token, or raise."""
        if not self.accept(text):
            around = " ".join(x[1] for x in self.tokens[max(0, self.at - 8) : self.at + 4])
            msg = f"TTIR syntax: expected {text!r} near {around!r}"
            raise Unsupported(msg)

    def location(self) -> Location:
        """Take the location that may follow."""
        if self.peek()[0] == "loc":
            return self.locations.resolve(self.next()[1])
        return Location()

    # -- values
    def lookup(self, name: str) -> Value:
        """Find the value of a name in the scopes around."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        msg = f"TTIR value {name} used before its definition"
        raise Unsupported(msg)

    def define(self, name: str, type_: Type, producer: Op | None = None) -> Value:
        """Put a new value into the innermost scope."""
        value = Value(name, type_, producer)
        self.scopes[-1][name] = value
        return value

    def type(self) -> Type:
        """Take a type."""
        return parse_type(self.next()[1])

    def type_list(self) -> list[Type]:
        """Parse `T` or `(T, T, ...)`."""
        if not self.accept("("):
            return [self.type()]
        types: list[Type] = []
        while not self.accept(")"):
            types.append(self.type())
            self.accept(",")
        return types

    def attributes(self) -> dict[str, str]:
        """Parse {k = v, ...} or <{k = v, ...}> keeping each value as text."""
        opener = self.next()[1]
        closer = "}>" if opener == "<{" else "}"
        attrs: dict[str, str] = {}
        while not self.accept(closer):
            key = self.next()[1].strip('"')
            if self.accept("="):
                depth, parts = 0, []
                while True:
                    kind, text = self.peek()
                    if depth == 0 and kind != "str" and text in (",", closer):
                        break
                    if kind == "punct":
                        depth += (text in "([{<") - (text in ")]}>")
                    parts.append(text)
                    self.at += 1
                attrs[key] = " ".join(parts)
            else:
                attrs[key] = "true"
            self.accept(",")
        return attrs
