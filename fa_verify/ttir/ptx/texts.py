"""Runs the short PTX texts of inline assembly, one instruction at a time, all lanes together.

Registers hold bits (uint64, one entry a lane); an instruction's suffixes say what they mean. What
instructions do is in `ptx_table`. Control flow, shared memory and whatever names a thread cannot be
run: TTIR has no threads.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.ptx.bits import WIDTH, Instruction, bits_of, typed
from fa_verify.ttir.ptx.table import INSTRUCTIONS, MODIFIERS, SILENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.numbers.floats import Array

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ARGUMENT = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_DECLARED = re.compile(r"([\w$%]+)(?:<(\d+)>)?")
_FLOATS = {"f16": "<e", "f32": "<f", "f64": "<d"}


@dataclass(frozen=True, slots=True)
class Statement:
    """One instruction: "p" guards it if not "", `opcode` in parts, operands as text."""

    guard: str
    opcode: tuple[str, ...]
    operands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """A parsed text: its statements, and the width in bits of every declared register."""

    statements: tuple[Statement, ...]
    widths: dict[str, int]


@lru_cache(maxsize=256)
def parse(text: str) -> Text:
    """Cut a text into statements.

    Raises:
        Unsupported: It has a label, or an instruction that is not in the table.
    """
    widths: dict[str, int] = {}
    statements: list[Statement] = []
    for raw in _COMMENT.sub(" ", text).split(";"):
        line = " ".join(raw.split()).lstrip("{} ").rstrip()
        if line.endswith("}") and "{" not in line:
            line = line.rstrip("} ")
        if not line:
            continue
        if line.startswith(".reg"):
            _, kind, names = line.split(maxsplit=2)
            for name, count in _DECLARED.findall(names):
                each = [f"{name}{i}" for i in range(int(count))] if count else [name]
                widths |= dict.fromkeys(each, WIDTH.get(kind.strip("."), 32))
            continue
        guard, rest = line[1:].split(maxsplit=1) if line.startswith("@") else ("", line)
        opcode, _, operands = rest.partition(" ")
        parts = tuple(opcode.split("."))
        known = parts[0] in INSTRUCTIONS or parts[0] in ("mov", "ld", "st")
        known = known and all(part in WIDTH or part in MODIFIERS for part in parts[1:])
        if not known and parts[0] not in SILENT:
            msg = f"the PTX instruction {opcode}"
            raise Unsupported(msg)
        found = tuple(x.strip() for x in _ARGUMENT.findall(operands))
        statements.append(Statement(guard, parts, found))
    return Text(tuple(statements), widths)


class Thread:
    """The registers of one run, for all lanes.

    Attributes:
        registers: Bits by name.
        special: What special registers such as %smid read as, by name.
        load: (addresses, type, lanes or None) -> bits.
        store: (addresses, type, bits, lanes or None).
    """

    def __init__(
        self,
        registers: dict[str, Array],
        lanes: int,
        special: dict[str, Callable[[], Array]],
        memory: tuple[Callable[..., Array], Callable[..., None]],
    ) -> None:
        """Start with the given registers."""
        self.registers, self.special = registers, special
        self.load, self.store = memory
        self._lanes = lanes
        self._widths: dict[str, int] = {}

    def run(self, text: Text, widths: dict[str, int]) -> None:
        """Run a text; `widths` are those of the registers it was given."""
        self._widths = widths | text.widths
        for statement in text.statements:
            keep = None
            if statement.guard:
                keep = typed(self._read(statement.guard.lstrip("!"), "pred"), "pred")
                keep = ~keep if statement.guard.startswith("!") else keep
            self._execute(statement, keep)

    def result(self, name: str) -> Array:
        """Bits that the text left in a register; zero if it never wrote there."""
        found = self.registers.get(name)
        return np.zeros(self._lanes, np.uint64) if found is None else found

    def _execute(self, statement: Statement, keep: Array | None) -> None:
        name, *suffixes = statement.opcode
        types = [s for s in suffixes if s in WIDTH]
        operands = statement.operands
        if name in SILENT:
            return
        if name == "mov":
            self._move(operands, types, keep)
        elif name == "ld":
            addresses = self._read(operands[1].strip("[] "), "u64")
            self._write(operands[0], self.load(addresses, types[0], keep), keep)
        elif name == "st":
            addresses = self._read(operands[0].strip("[] "), "u64")
            self.store(addresses, types[0], self._read(operands[1], types[0]), keep)
        else:
            instruction = Instruction(name, frozenset(suffixes), tuple(types))
            rule = INSTRUCTIONS[name]
            sources = [self._read(x, instruction.source(i)) for i, x in enumerate(operands[1:])]
            results = rule(instruction, *sources)
            for target, bits in zip(operands[0].split("|"), results, strict=False):
                self._write(target, bits, keep)

    def _move(self, operands: tuple[str, ...], types: list[str], keep: Array | None) -> None:
        """Between registers, or to and from several that make one up together."""
        target, source = operands
        kind = types[0] if types else "b32"
        if target.startswith("{"):
            names, bits = target.strip("{} ").split(","), self._read(source, kind)
            width = WIDTH[kind] // len(names)
            for i, name in enumerate(names):
                part = bits >> np.uint64(i * width) & np.uint64((1 << width) - 1)
                self._write(name.strip(), part, keep)
        elif source.startswith("{"):
            names = source.strip("{} ").split(",")
            width = WIDTH[kind] // len(names)
            whole = np.zeros(self._lanes, np.uint64)
            for i, name in enumerate(names):
                part = self._read(name.strip(), "b32") & np.uint64((1 << width) - 1)
                whole |= part << np.uint64(i * width)
            self._write(target, whole, keep)
        else:
            self._write(target, self._read(source, kind), keep)

    def _read(self, name: str, kind: str) -> Array:
        found = self.registers.get(name)
        if found is not None:
            return found
        if name.startswith("%"):
            if name not in self.special:
                msg = f"the PTX register {name}"
                raise Unsupported(msg)
            value = np.broadcast_to(self.special[name](), self._lanes)
            return bits_of(value, "u64")
        if re.match(r"[-\d]", name):
            return np.full(self._lanes, _literal(name, kind), np.uint64)
        if name in self._widths:  # never written: any value will do
            return np.zeros(self._lanes, np.uint64)
        msg = f"the PTX operand {name}"
        raise Unsupported(msg)

    def _write(self, name: str, bits: Array, keep: Array | None) -> None:
        width = self._widths.get(name, 32)
        if width < 64:
            bits = bits & np.uint64((1 << width) - 1)
        if keep is not None:
            old = self.registers.get(name)
            bits = np.where(keep, bits, np.uint64(0) if old is None else old)
        self.registers[name] = bits


def _literal(text: str, kind: str) -> int:
    """Bits of a constant: 0f and 0d are bits already; a decimal point makes a float."""
    if text[:2].lower() in ("0f", "0d"):
        return int.from_bytes(bytes.fromhex(text[2:].zfill(16)))
    if re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", text):
        if kind not in _FLOATS:
            msg = f"the PTX constant {text} as {kind}"
            raise Unsupported(msg)
        return int.from_bytes(struct.pack(_FLOATS[kind], float(text)), "little")
    return int(text.rstrip("U"), 0) & 0xFFFFFFFFFFFFFFFF
