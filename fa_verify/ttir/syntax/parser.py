"""Reads TTIR text, as Triton 3.6 to 3.9 print it, into `ir`.

Understands MLIR's pretty syntax well enough for the operations that Triton's language emits: every
operation is reduced to operands, words, attributes, types, regions and a location. What an
operation means is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.syntax.ir import Function, Module, Op, Region, Type, Value
from fa_verify.ttir.syntax.regions import Regions
from fa_verify.ttir.syntax.types import parse_type

if TYPE_CHECKING:
    from collections.abc import Callable


class _Parser(Regions):
    def module(self) -> Module:
        self.expect("module")
        if self.accept("attributes"):
            self.attributes()
        self.expect("{")
        functions: dict[str, Function] = {}
        while not self.accept("}"):
            function = self.function()
            functions[function.name] = function
        entry = next((f for f in functions.values() if f.public), None)
        if entry is None:
            msg = "TTIR module without a public function"
            raise Unsupported(msg)
        return Module(functions, entry)

    def function(self) -> Function:
        self.expect("tt.func")
        public = True
        while self.peek()[0] == "word":
            if self.next()[1] == "private":
                public = False
        name = self.next()[1][1:].strip('"')
        self.scopes.append({})
        self.expect("(")
        args: list[Value] = []
        attributes: list[dict[str, str]] = []
        while not self.accept(")"):
            arg_name = self.next()[1]
            self.expect(":")
            value = self.define(arg_name, self.type())
            attributes.append(self.attributes() if self.peek()[1] == "{" else {})
            self.location()
            args.append(value)
            self.accept(",")
        results: list[Type] = []
        if self.accept("->"):
            results = self.type_list()
        if self.accept("attributes"):
            self.attributes()
        body = Region()
        self.region_into(body)
        location = self.location()
        self.scopes.pop()
        return Function(name, args, body, public, location, results, attributes)

    def operation(self) -> Op:
        names: list[tuple[str, int]] = []
        while self.peek()[0] == "ssa":
            text = self.next()[1]
            name, _, count = text.partition(":")
            names.append((name, int(count) if count else 1))
            if not self.accept(","):
                self.expect("=")
                break
        kind, name = self.next()
        op = Op(name.strip('"'))
        custom: Callable[[Op], list[Type]]
        if kind == "str":
            custom = self.generic
        else:
            custom = {
                "scf.for": self.scf_for,
                "scf.while": self.scf_while,
                "scf.if": self.scf_if,
                "cf.br": self.branch,
                "cf.cond_br": self.branch,
                "arith.constant": self.constant,
            }.get(name, self.pretty)
        types = custom(op)
        op.location = self.location()
        for operand in op.operands:
            operand.users.append(op)
        for _, values in op.successors:
            for value in values:
                value.users.append(op)
        flat = [
            (f"{name}#{i}" if count > 1 else name) for name, count in names for i in range(count)
        ]
        if len(flat) != len(types):
            types = self.result_types(op, len(flat), types)
        op.results = [self.define(n, t, op) for n, t in zip(flat, types, strict=True)]
        return op

    def result_types(self, op: Op, count: int, types: list[Type]) -> list[Type]:
        """Infer result types where the syntax does not spell them out."""
        if count == 0:
            return []
        if count == 1 and types:
            return [types[-1]]
        if op.name == "tt.split" and types:
            return [types[-1]] * count
        message = f"cannot tell the result types of {op.name}"
        raise Unsupported(message, op=op.name, file=op.location.file, line=op.location.line)

    def generic(self, op: Op) -> list[Type]:
        """Parse "name"(operands) <{properties}> ({regions}) {attrs} : (types) -> types."""
        self.expect("(")
        while not self.accept(")"):
            op.operands.append(self.lookup(self.next()[1]))
            self.accept(",")
        if self.peek()[1] == "<{":
            op.attrs.update(self.attributes())
        if self.accept("("):
            while not self.accept(")"):
                op.regions.append(self.region())
                self.accept(",")
        if self.peek()[1] == "{":
            op.attrs.update(self.attributes())
        self.expect(":")
        self.type_list()
        self.expect("->")
        return self.type_list()

    def pretty(self, op: Op) -> list[Type]:
        """Parse operands, words and attributes up to ':', then types."""
        inside = False  # brackets
        while True:
            kind, text = self.peek()
            if kind == "loc" or (text in (":", "->") and kind == "punct"):
                break
            if kind == "punct" and text in ("{", "<{"):
                op.attrs.update(self.attributes())
                continue
            self.at += 1
            if kind == "ssa":
                op.operands.append(self.lookup(text))
                if inside:
                    op.groups[-1] += 1
            elif kind == "word" and self.peek() == ("punct", "="):
                self.at += 1
                op.attrs[text] = self.next()[1]
            elif text == "scale":  # which operands are scales is told by the word before them
                op.attrs["scales"] = f"{op.attrs.get('scales', '')} {len(op.operands)}"
            elif kind != "punct":
                op.words.append(text)
            elif text in "[]":
                inside = text == "["
                op.groups += [0] if inside else []
        return self._pretty_types(op)

    def _pretty_types(self, op: Op) -> list[Type]:
        """Parse what follows ':' and tell the result types."""
        results: list[Type] | None = None
        if self.accept(":") or self.peek() == ("punct", "->"):
            while self.peek()[0] != "loc":
                kind, text = self.next()
                if text in ("->", "to") and kind != "str":
                    results = self.type_list()
                    while self.accept(","):
                        results += self.type_list()
                elif kind in ("type", "word"):
                    op.types.append(parse_type(text))
                elif kind == "ssa":  # tt.print "prefix" {attributes} : operands : types
                    op.operands.append(self.lookup(text))
        return _implied(op) if results is None else results

    def constant(self, op: Op) -> list[Type]:
        kind, text = self.next()
        if kind == "punct" and text == "{":
            self.at -= 1
            op.attrs.update(self.attributes())
            kind, text = self.next()
        op.attrs["value"] = text
        if self.accept(":"):
            return [self.type()]
        return [Type("i1")]


def _implied(op: Op) -> list[Type]:
    """Result types of operations that print those of their operands only."""
    types = op.types
    if op.name == "tt.load" and types:
        pointee = types[0].pointee
        if pointee is None:
            msg = "load of a non-pointer"
            raise Unsupported(msg, op=op.name)
        return [Type(pointee.scalar, types[0].shape or pointee.shape, pointee.pointee)]
    if op.name in ("arith.cmpi", "arith.cmpf"):
        types = [Type("i1", types[0].shape)]
    elif op.name == "arith.addui_extended":
        types = [types[0], Type("i1", types[0].shape)]
    elif op.name in ("arith.mului_extended", "arith.mulsi_extended"):
        types = [types[0], types[0]]
    elif op.name == "tt.make_tensor_descriptor":
        types = [Type("desc", (), types[-1])]
    elif op.name == "arith.select":
        types = types[-1:]
    else:
        types = types[:1]
    return types


def parse(text: str, library: str) -> Module:
    """Parse a TTIR module.

    Args:
        text: What Triton printed, locations included.
        library: Path fragment of Triton's own package; locations inside are attributed to the
        caller.

    Raises:
        Unsupported: The text is not TTIR that we understand.
    """
    return _Parser(text, library).module()
