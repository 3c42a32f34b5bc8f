"""A kernel ready to run: parsed, lowered, and executed wave by wave over its grid.

Knows the whole way from TTIR text to memory effects, but nothing of Triton's runtime or of torch
interception. Programs are cached by their text, as lowering costs milliseconds and fuzzing repeats
itself.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.engine import control, whiles
from fa_verify.ttir.engine.binding import binder
from fa_verify.ttir.engine.control import Body
from fa_verify.ttir.engine.coverage import Coverage
from fa_verify.ttir.engine.machine import Lanes, Machine
from fa_verify.ttir.engine.turns import Turns
from fa_verify.ttir.lowering.contraction import contract
from fa_verify.ttir.lowering.hoist import hoist
from fa_verify.ttir.lowering.lower import MASK_OPERAND, Lowering
from fa_verify.ttir.lowering.narrowing import narrow
from fa_verify.ttir.lowering.roots import ADDRESSES, stored_arguments
from fa_verify.ttir.lowering.settled import Settled, settle
from fa_verify.ttir.lowering.waits import waiting
from fa_verify.ttir.memory.access import Accesses
from fa_verify.ttir.memory.addresses import Addresses
from fa_verify.ttir.memory.values import Descriptor, Pointer
from fa_verify.ttir.ops import (
    arithmetic,
    assembly,
    atomics,
    casts,
    choice,
    descriptors,
    functions,
    host,
    integers,
    library,
    pointers,
    products,
    reductions,
    scaled_products,
    tiles,
)
from fa_verify.ttir.sanitizer import descriptor_rules, readback
from fa_verify.ttir.sanitizer.findings import Findings, Site
from fa_verify.ttir.sanitizer.hints import Specialisation
from fa_verify.ttir.syntax.copying import parsed
from fa_verify.ttir.syntax.ir import dismantle
from fa_verify.ttir.syntax.parser import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from fa_verify.ttir.lowering.lower import Rule
    from fa_verify.ttir.memory.known import Memory
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.options import Edit, FloatModel, Options
    from fa_verify.ttir.syntax.ir import Location, Module, Op

RULES: dict[str, Rule] = {
    **choice.RULES, **integers.RULES, **arithmetic.RULES, **casts.RULES, **functions.RULES,
    **library.RULES, **tiles.RULES, **reductions.RULES, **products.RULES,
    **scaled_products.RULES, **assembly.RULES, **pointers.RULES, **atomics.RULES,
    **descriptors.RULES, **host.RULES, **control.RULES, **whiles.RULES,
}  # fmt: skip
_TICKETS = frozenset({"tt.atomic_rmw", "tt.atomic_cas"})
LIBRARY = "/triton/language/"  # locations under it are attributed to the kernel that called in
# Programs that take turns and have begun, as long as one of them can go on: one for each
# multiprocessor of an H200. More only cost memory: 1151 rows of 8192 in the tutorial's layer norm
# take 918 MB at once and 663 MB so.
_RESIDENTS = 132
_WAVE_BYTES = 8 << 20  # live tile data of a wave: a few cores share 32 MB of cache, steps cost less


@dataclass(frozen=True, slots=True, eq=False)
class TensorDescriptorArgument:
    """A host-made tensor descriptor as a kernel's argument."""

    base: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nan_padding: bool
    round_f32_to_tf32: bool


class Program:
    """One specialisation of one kernel."""

    def __init__(
        self,
        text: str,
        file: str,
        floats: FloatModel,
        lowering: Callable[..., Lowering] = Lowering,
        edit: Edit | None = None,
    ) -> None:
        """Parse and lower.

        Args:
            text: The TTIR module.
            file: The kernel's source file now; replaces the path the TTIR was compiled from, which
                a compiler cache may have kept from another copy of the same source.
            floats: How the chip's arithmetic is imitated.
            lowering: What lowers each function.
            edit: Changes the module before it is lowered.

        Raises:
            Unsupported: The kernel has an operation that cannot be run.
        """
        module = parse(text, LIBRARY) if edit is None else parsed(text, LIBRARY)
        self.edit = edit
        if edit is not None:
            edit(module)
        self.name, self.types = module.entry.name, [arg.type for arg in module.entry.args]
        self._binders = list(map(binder, self.types))
        self.machine = Machine()
        self._compiled_from = module.entry.location.file
        self._file = file or self._compiled_from
        self._bodies: dict[str, Body] = {}
        self._peak = 1
        self.coverage = self.machine.coverage = Coverage(module, self._place)
        waits = waiting(module)
        self.waits = bool(waits)
        callees = [f for f in module.functions.values() if f is not module.entry]
        for function in (*callees, module.entry):
            hoist(function)
            if floats.contraction == "fused":
                contract(function)
            plain = lowering is Lowering
            if plain and floats.subnormals == "keep":
                narrow(function)
            settled = settle(function) if plain and function is module.entry else 0
            low = lowering(
                function=function,
                module=module,
                machine=self.machine,
                rules=RULES if edit is None else {**RULES, **edit.rules},
                site=self._site,
                callees=self._bodies,
                floats=floats,
                waiting=waits,
            )
            self._bodies[function.name] = Body(low)
            self._settled = Settled(low, self._bodies[function.name].graph, settled)
            self._peak += low.peak_bytes
        self.stored = stored_arguments(module)
        self._reads_back = readback.possible(module)
        self.tickets = self._tickets(module)
        self.site = Site(self.name, self._file, module.entry.location.line, masked=False)
        self.specialisation = Specialisation(module.entry, self.site)
        dismantle(module)

    def _tickets(self, module: Module) -> Site | None:
        """The first atomic whose result is used."""
        ops = [op for function in module.functions.values() for op in function.walk()]
        used = [op for op in ops if op.name in _TICKETS and any(x.users for x in op.results)]
        return self._site(used[0]) if used else None

    def _place(self, location: Location) -> tuple[str, int]:
        file = location.file
        return (self._file if file == self._compiled_from else file), location.line

    def _site(self, op: Op) -> Site:
        position = MASK_OPERAND.get(op.name)
        masked = position is not None and len(op.operands) > position
        return Site(self.name, *self._place(op.location), masked)

    def run(
        self,
        names: Sequence[str],
        values: Sequence[Any],
        grid: tuple[int, int, int],
        *,
        options: Options,
        memory: Memory,
        findings: Findings,
    ) -> None:
        """Execute every program of the grid.

        Args:
            names: Parameter name of each value.
            values: One for each argument of the TTIR function: tensors, numbers or descriptors.
            grid: Programs along x, y, z.
            options: How to execute.
            memory: What is known about written-ness.
            findings: Where incidents go.
        """
        count = grid[0] * grid[1] * grid[2]
        if count <= 0:
            return
        machine = self.machine
        machine.grid, machine.deadline = grid, options.deadline
        machine.accesses = Accesses(machine, findings, sanitize=options.sanitize)
        machine.addresses = addresses = Addresses(memory)
        bound = self._bound(names, values, addresses)
        reports = machine.accesses.reports
        reports.arguments, reports.memory = addresses.arguments, memory
        if options.sanitize:
            self.specialisation.check(names, values, _number, findings)
            for value in bound:
                if isinstance(value, Descriptor):
                    descriptor_rules.check(value, self.site, reports)
            self._track(bound, addresses)
            if self._reads_back or addresses.shared():
                machine.accesses.read_back = readback.ReadBack(machine, findings)
            machine.accesses.reading = memory.regions.reading(addresses.arguments, grid)
        body = self._bodies[self.name]

        def advance(linear: Array) -> None:
            machine.check()
            machine.lanes = Lanes.of(linear, grid)
            env = body.bind(bound)
            self._settled(machine, env, bound)
            body.graph(env)

        if self.waits:
            self._take_turns(count, options, advance)
        else:
            with np.errstate(all="ignore"):
                for linear in self._waves(grid, count, options):
                    advance(linear)
        for argument in addresses.arguments:
            argument.finish()

    def _bound(
        self, names: Sequence[str], values: Sequence[Any], addresses: Addresses
    ) -> list[Any]:
        triples = zip(self._binders, names, values, strict=True)
        return [bind(name, value, addresses) for bind, name, value in triples]

    @property
    def read_back(self) -> bool:
        """Whether the last launch read an element that it wrote."""
        return any(tracking.read_back() for tracking in self.machine.addresses.tracking.values())

    def run_dry(
        self, names: Sequence[str], values: Sequence[Any], grid: tuple[int, int, int],
        *, options: Options, memory: Memory, linear: int | None = None,
    ) -> None:  # fmt: skip
        """Execute the grid, or one program of it, with the machine's accesses as they are.

        Only for kernels lowered in a way of one's own: the first steps of others are set apart.
        """
        machine = self.machine
        machine.grid, machine.deadline = grid, options.deadline
        machine.addresses = Addresses(memory)
        bound = self._bound(names, values, machine.addresses)
        waves = self._waves(grid, prod(grid), options)
        if linear is not None:
            waves = [np.array([linear], np.int32)]
        with np.errstate(all="ignore"):
            for wave in waves:
                machine.lanes = Lanes.of(wave, grid)
                self._bodies[self.name](bound)

    def _track(self, bound: Sequence[Any], addresses: Addresses) -> None:
        """Attach race tracking to every argument whose storage this kernel writes to."""
        addresses.stores_anywhere = ADDRESSES in self.stored
        pointers = [x.base if isinstance(x, Descriptor) else x for x in bound]
        for position, pointer in enumerate(pointers):
            if isinstance(pointer, Pointer):
                addresses.track(pointer.args[0], stored=position in self.stored)
        for argument in addresses.arguments:  # what shares a storage with a later one
            addresses.track(argument, stored=False)

    def _take_turns(self, count: int, options: Options, advance: Callable[[Array], None]) -> None:
        residents = options.residents or max(1, min(_RESIDENTS, options.memory_limit // self._peak))
        turns = self.machine.turns = Turns(self.machine, options, residents)
        try:
            turns.run(_order(count, options), advance)
        finally:
            self.machine.turns = None

    def _waves(self, grid: tuple[int, int, int], count: int, options: Options) -> list[Array]:
        """Linear program numbers, wave by wave, in schedule order."""
        order = _order(count, options)
        budget = min(_WAVE_BYTES, options.memory_limit)
        width = 1 if options.schedule == "serial" else max(1, min(count, budget // self._peak))
        if width >= count:
            return [order]
        if options.schedule == "shuffled":
            return np.array_split(order, -(-count // width))
        # Programs of one row of the grid usually share tiles: keep them in one wave, or split
        # evenly.
        if width >= grid[0]:
            width -= width % grid[0]
            return np.split(order, range(width, count, width))
        rows = np.split(order, range(grid[0], count, grid[0]))
        pieces = -(-grid[0] // width)
        return [wave for row in rows for wave in np.array_split(row, pieces)]


def _order(count: int, options: Options) -> Array:
    """Linear program numbers in the order in which they begin."""
    order = np.arange(count, dtype=np.int32)
    if options.schedule == "reverse":
        return order[::-1].copy()
    if options.schedule == "shuffled":
        order = np.random.default_rng(options.schedule_seed).permutation(order)
    return order


def _number(value: Any) -> int:
    """What divisibility is about: an integer, or the address of a tensor's first element."""
    return value if isinstance(value, int) else int(value.data_ptr())


@lru_cache(maxsize=1024)
def program_for(text: str, file: str, floats: FloatModel) -> Program:
    """The program for a TTIR text under a float model, parsed and lowered at most once."""
    return _lowered(text, file, floats, None)


@lru_cache(maxsize=8)  # an edit is tried on a few cases and not seen again
def edited(text: str, file: str, floats: FloatModel, edit: Edit) -> Program:
    """The program for a TTIR text after an edit."""
    return _lowered(text, file, floats, edit)


def _lowered(text: str, file: str, floats: FloatModel, edit: Edit | None) -> Program:
    """Parse and lower.

    Meanwhile cyclic garbage is not collected: a collection in the midst of so many young objects
    costs ten times the lowering itself.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return Program(text, file, floats, edit=edit)
    finally:
        if enabled:
            gc.enable()
