"""Reads TTIR text, as Triton 3.6 to 3.9 print it, into `ir`.

Understands MLIR's pretty syntax well enough for the operations that Triton's language emits: every
operation is reduced to operands, words, attributes, types, regions and a location. What an
operation means is not known here.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.syntax.ir import Block, Function, Location, Module, Op, Region, Type, Value
from fa_verify.ttir.syntax.locations import Locations
from fa_verify.ttir.syntax.tokens import tokenise

if TYPE_CHECKING:
    from collections.abc import Callable

_SHAPE = re.compile(r"^((?:\d+x)*)(.*)$")
_SCALAR = re.compile(r"^(?:i\d+|index|b?f\d+\w*|none)$")
_SIGNED = re.compile(r"^[us](i\d+)$")  # descriptors say which integers they hold
_TERMINATORS = frozenset({
    "scf.yield", "scf.condition", "tt.return", "cf.br", "cf.cond_br", "tt.reduce.return",
    "tt.scan.return", "tt.map_elementwise.return",
})  # fmt: skip


@lru_cache(maxsize=4096)
def parse_type(text: str) -> Type:  # noqa: PLR0911 - one a form of type
    """Parse one type as MLIR writes it."""
    if text.startswith("tensor<"):
        inner = text[7:-1]
        match = _SHAPE.match(inner)
        dims, rest = (match[1], match[2]) if match else ("", inner)
        element = parse_type(rest.split(",")[0] if not rest.startswith("!") else rest)
        shape = tuple(int(x) for x in dims.split("x") if x)
        return Type(element.scalar, shape, element.pointee, element.unsigned)
    if text.startswith("!tt.ptr<"):
        inner = text[8:-1]
        return Type("ptr", (), parse_type(re.sub(r",\s*\d+$", "", inner)))
    if text.startswith("!tt.tensordesc"):
        return Type("desc", (), _block_type(text[text.index("<") + 1 : -1]))
    if _SCALAR.match(text):
        return Type(text)
    if signed := _SIGNED.match(text):
        return Type(signed[1], unsigned=text.startswith("u"))
    if text.startswith("<"):
        return _block_type(text[1:-1])
    return Type("none", (), None)


def _block_type(inner: str) -> Type:
    inner = inner.split(",", maxsplit=1)[0]
    return parse_type(
        inner if inner.startswith("tensor<") or "x" not in inner else f"tensor<{inner}>"
    )


class _Parser:
    def __init__(self, text: str, library: str) -> None:
        self.locations = Locations(text, library)
        self.tokens = tokenise(text)
        self.at = 0
        self.scopes: list[dict[str, Value]] = []

    # -- token helpers
    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at]

    def next(self) -> tuple[str, str]:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        if self.tokens[self.at][1] == text and self.tokens[self.at][0] not in ("str", "loc"):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            around = " ".join(x[1] for x in self.tokens[max(0, self.at - 8) : self.at + 4])
            msg = f"TTIR syntax: expected {text!r} near {around!r}"
            raise Unsupported(msg)

    def location(self) -> Location:
        if self.peek()[0] == "loc":
            return self.locations.resolve(self.next()[1])
        return Location()

    # -- values
    def lookup(self, name: str) -> Value:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        msg = f"TTIR value {name} used before its definition"
        raise Unsupported(msg)

    def define(self, name: str, type_: Type, producer: Op | None = None) -> Value:
        value = Value(name, type_, producer)
        self.scopes[-1][name] = value
        return value

    def type(self) -> Type:
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

    # -- structure
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

    def region(self) -> Region:
        region = Region()
        self.scopes.append({})
        self.region_into(region)
        self.scopes.pop()
        return region

    def region_into(self, region: Region) -> None:
        self.expect("{")
        block = Block("")
        region.blocks.append(block)
        while not self.accept("}"):
            if self.peek()[0] == "label":
                label = self.next()[1]
                block = Block(label)
                if region.blocks[0].label == "" and not region.blocks[0].ops:
                    region.blocks[0] = block
                else:
                    region.blocks.append(block)
                if self.accept("("):
                    while not self.accept(")"):
                        name = self.next()[1]
                        self.expect(":")
                        block.args.append(self.define(name, self.type()))
                        self.location()
                        self.accept(",")
                self.expect(":")
                continue
            block.ops.append(self.operation())
        for block in region.blocks:  # MLIR leaves out a yield of nothing
            if not block.ops or block.ops[-1].name not in _TERMINATORS:
                block.ops.append(Op("scf.yield"))

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
        return self._implied(op) if results is None else results

    @staticmethod
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

    def _assignments(self, op: Op, target: Block) -> list[tuple[str, Value]]:
        """Parse (%arg = %init, ...)."""
        pairs: list[tuple[str, Value]] = []
        self.expect("(")
        while not self.accept(")"):
            name = self.next()[1]
            self.expect("=")
            pairs.append((name, self.lookup(self.next()[1])))
            self.accept(",")
        op.operands.extend(value for _, value in pairs)
        del target
        return pairs

    def scf_for(self, op: Op) -> list[Type]:
        if self.accept("unsigned"):
            op.words.append("unsigned")
        induction = self.next()[1]
        self.expect("=")
        lower = self.lookup(self.next()[1])
        self.expect("to")
        upper = self.lookup(self.next()[1])
        self.expect("step")
        step = self.lookup(self.next()[1])
        op.operands = [lower, upper, step]
        block = Block("")
        pairs: list[tuple[str, Value]] = []
        types: list[Type] = []
        if self.accept("iter_args"):
            pairs = self._assignments(op, block)
            self.expect("->")
            types = self.type_list()
        index_type = Type("i32")
        if self.accept(":"):
            index_type = self.type()
        self.scopes.append({})
        args = [self.define(induction, index_type)]
        args += [self.define(n, t) for (n, _), t in zip(pairs, types, strict=True)]
        region = Region()
        self.region_into(region)
        region.blocks[0].args = args
        self.scopes.pop()
        op.regions.append(region)
        if self.peek()[1] == "{":
            op.attrs.update(self.attributes())
        return types

    def scf_while(self, op: Op) -> list[Type]:
        pairs = self._assignments(op, Block("")) if self.peek()[1] == "(" else []
        self.expect(":")
        if self.accept("("):
            self.at -= 1
        before_types = self.type_list()
        self.expect("->")
        types = self.type_list()
        self.scopes.append({})
        args = [self.define(n, t) for (n, _), t in zip(pairs, before_types, strict=True)]
        before = Region()
        self.region_into(before)
        before.blocks[0].args = args
        self.scopes.pop()
        op.regions.append(before)
        self.expect("do")
        op.regions.append(self.region())
        if self.accept("attributes"):
            op.attrs.update(self.attributes())
        return types

    def scf_if(self, op: Op) -> list[Type]:
        op.operands.append(self.lookup(self.next()[1]))
        types: list[Type] = []
        if self.accept("->"):
            types = self.type_list()
        op.regions.append(self.region())
        if self.accept("else"):
            op.regions.append(self.region())
        if self.peek()[1] == "{":
            op.attrs.update(self.attributes())
        return types

    def branch(self, op: Op) -> list[Type]:
        if op.name == "cf.cond_br":
            op.operands.append(self.lookup(self.next()[1]))
            self.expect(",")
        while self.peek()[0] == "label":
            label = self.next()[1]
            values: list[Value] = []
            if self.accept("("):
                while not self.accept(":"):
                    values.append(self.lookup(self.next()[1]))
                    self.accept(",")
                while not self.accept(")"):
                    self.at += 1
            op.successors.append((label, values))
            self.accept(",")
        if self.peek()[1] == "{":
            op.attrs.update(self.attributes())
        return []


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
