"""Regions, and the operations of scf and cf, which have syntax of their own."""

from __future__ import annotations

from fa_verify.ttir.syntax.cursor import Cursor
from fa_verify.ttir.syntax.ir import Block, Op, Region, Type, Value

_TERMINATORS = frozenset({
    "scf.yield", "scf.condition", "tt.return", "cf.br", "cf.cond_br", "tt.reduce.return",
    "tt.scan.return", "tt.map_elementwise.return",
})  # fmt: skip


class Regions(Cursor):
    """Parses what is between braces, given how to parse an operation."""

    def operation(self) -> Op:
        """Parse the next operation, whichever it is."""
        raise NotImplementedError

    def region(self) -> Region:
        """Parse a region with a scope of its own."""
        region = Region()
        self.scopes.append({})
        self.region_into(region)
        self.scopes.pop()
        return region

    def region_into(self, region: Region) -> None:
        """Parse the blocks between braces."""
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

    def _assignments(self, op: Op) -> list[tuple[str, Value]]:
        """Parse (%arg = %init, ...)."""
        pairs: list[tuple[str, Value]] = []
        self.expect("(")
        while not self.accept(")"):
            name = self.next()[1]
            self.expect("=")
            pairs.append((name, self.lookup(self.next()[1])))
            self.accept(",")
        op.operands.extend(value for _, value in pairs)
        return pairs

    def scf_for(self, op: Op) -> list[Type]:
        """Parse `for %i = a to b step c iter_args(...)`."""
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
        pairs: list[tuple[str, Value]] = []
        types: list[Type] = []
        if self.accept("iter_args"):
            pairs = self._assignments(op)
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
        """Parse `while (...) : types { } do { }`."""
        pairs = self._assignments(op) if self.peek()[1] == "(" else []
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
        """Parse `if %c -> types { } else { }`."""
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
        """Parse the successors of cf.br and cf.cond_br."""
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
