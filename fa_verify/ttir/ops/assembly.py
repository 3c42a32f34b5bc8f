"""tt.elementwise_inline_asm: PTX on packs of neighbouring elements (see `ptx`)."""

from __future__ import annotations

import time
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.launch import hopper
from fa_verify.ttir.memory.cells import Access
from fa_verify.ttir.numbers.floats import RAW, Array, decode, encode
from fa_verify.ttir.ops.pointers import address_of
from fa_verify.ttir.ptx.bits import WIDTH
from fa_verify.ttir.ptx.texts import Thread, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.memory.values import Pointer
    from fa_verify.ttir.sanitizer.findings import Site
    from fa_verify.ttir.syntax.ir import Op, Type

_REGISTER = {"h": 16, "r": 32, "f": 32, "l": 64, "d": 64}


class _Packing:
    """How the elements of a tile lie in registers: those under 32 bits share one."""

    def __init__(self, type_: Type, pack: int) -> None:
        if type_.scalar == "i1":
            msg = "inline assembly on booleans"
            raise Unsupported(msg)
        self.scalar, self.shape, self.pack = type_.scalar, type_.shape, pack
        self.bits = 64 if type_.scalar == "ptr" else RAW[type_.scalar].itemsize * 8
        self.each = min(max(32 // self.bits, 1), pack)
        self.registers = pack // self.each

    def registers_of(self, value: Array, programs: int) -> list[Array]:
        """Bits of each register, one entry a pack."""
        spread = np.broadcast_to(value, (programs, *self.shape)).reshape(programs, -1)
        missing = -spread.shape[1] % self.pack
        if missing:  # what pads a pack is undefined
            spread = np.pad(spread, ((0, 0), (0, missing)))
        raw = spread if self.scalar == "ptr" else encode(np.ascontiguousarray(spread), self.scalar)
        columns = raw.view(f"u{self.bits // 8}").astype(np.uint64).reshape(-1, self.pack)
        registers = []
        for first in range(0, self.pack, self.each):
            whole = columns[:, first].copy()
            for i in range(1, self.each):
                whole |= columns[:, first + i] << np.uint64(i * self.bits)
            registers.append(whole)
        return registers

    def tile_of(self, registers: list[Array], programs: int) -> Array:
        """Undo `registers_of`."""
        mask = np.uint64((1 << self.bits) - 1)
        columns = [
            whole >> np.uint64(i * self.bits) & mask
            for whole in registers
            for i in range(self.each)
        ]
        raw = np.stack(columns, axis=1).astype(f"u{self.bits // 8}")
        raw = raw.reshape(programs, -1)[:, : prod(self.shape)]
        stored = np.ascontiguousarray(raw).view(RAW[self.scalar])
        tile: Array = decode(stored, self.scalar).reshape(programs, *self.shape)
        return tile


def _memory(machine: Machine, site: Site) -> tuple[Callable[..., Array], Callable[..., None]]:
    """Loads and stores of a text, each element by its address."""

    def reach(addresses: Array, kind: str) -> tuple[Access, Pointer]:
        scalar = f"i{WIDTH[kind]}"
        return Access(site, (), scalar), machine.addresses.pointer(addresses.view(np.int64), scalar)

    def masks(keep: Array | None) -> tuple[Array, ...]:
        return () if keep is None else (keep,)

    def load(addresses: Array, kind: str, keep: Array | None) -> Array:
        access, pointer = reach(addresses, kind)
        found = machine.accesses.load(access, pointer, masks(keep), None)
        return found.view(f"u{found.dtype.itemsize}").astype(np.uint64)

    def store(addresses: Array, kind: str, bits: Array, keep: Array | None) -> None:
        access, pointer = reach(addresses, kind)
        raw = bits.astype(f"u{WIDTH[kind] // 8}").view(RAW[access.scalar])
        machine.accesses.store(access, pointer, raw, masks(keep))

    return load, store


def _special(machine: Machine) -> dict[str, Callable[[], Array]]:
    """Special registers. Program p runs on multiprocessor p modulo their number."""
    lanes, grid = machine.lanes, machine.grid
    table: dict[str, Callable[[], Any]] = {
        "%globaltimer": lambda: np.array([time.time_ns()]),
        "%clock64": lambda: np.array([time.perf_counter_ns()]),
        "%clock": lambda: np.array([time.perf_counter_ns() & 0xFFFFFFFF]),
        "%smid": lambda: lanes.linear % hopper.PROPERTIES["multiprocessor_count"],
        "%nsmid": lambda: np.array([hopper.PROPERTIES["multiprocessor_count"]]),
    }
    for axis, extent in zip("xyz", grid, strict=True):
        table[f"%ctaid.{axis}"] = partial(getattr, lanes, axis)
        table[f"%nctaid.{axis}"] = partial(np.array, [extent])
    return table


def inline_asm(op: Op, low: Lowering) -> Step:
    """tt.elementwise_inline_asm."""
    source = op.words[0][1:-1]
    text = parse(_unescaped(source))
    pack = int(op.attrs["packed_element"].split()[0])
    inputs = [_Packing(value.type, pack) for value in op.operands]
    outputs = [_Packing(value.type, pack) for value in op.results]
    sources = [(low.slot(value), value.type) for value in op.operands]
    results = [low.slot(value) for value in op.results]
    count = sum(x.registers for x in outputs)
    constraints = [c.strip() for c in op.attrs["constraints"].strip('"').split(",")]
    widths = {f"${i}": _REGISTER.get(c.strip("=&")[:1], 32) for i, c in enumerate(constraints)}
    tied = {f"${i}": f"${c}" for i, c in enumerate(constraints) if c.isdigit()}
    machine, site = low.machine, low.site(op)
    tile = next((x.shape for x in (*inputs, *outputs)), ())

    def step(env: Env) -> None:
        programs = machine.lanes.linear.size
        registers: dict[str, Array] = {}
        for (slot, type_), packing in zip(sources, inputs, strict=True):
            value = address_of(env[slot], type_) if type_.scalar == "ptr" else env[slot]
            for bits in packing.registers_of(value, programs):
                registers[f"${count + len(registers)}"] = bits
        registers |= {target: registers[name] for name, target in tied.items()}
        packs = -(-prod(tile) // pack)
        lanes = machine.lanes
        machine.lanes = lanes.take(np.repeat(np.arange(programs), packs))
        thread = Thread(registers, programs * packs, _special(machine), _memory(machine, site))
        thread.run(text, widths)
        machine.lanes = lanes
        first = 0
        for slot, packing in zip(results, outputs, strict=True):
            names = [f"${first + i}" for i in range(packing.registers)]
            env[slot] = packing.tile_of([thread.result(name) for name in names], programs)
            first += packing.registers

    return step


def _unescaped(text: str) -> str:
    """MLIR writes control characters as a backslash and two hexadecimal digits."""
    parts = text.split("\\")
    return parts[0] + "".join(
        chr(int(part[:2], 16)) + part[2:] if part else "\\" for part in parts[1:]
    )


RULES: dict[str, Rule] = {"tt.elementwise_inline_asm": inline_asm}
