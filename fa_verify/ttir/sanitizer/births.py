"""Finds the operation in which a NaN that a kernel stored was born.

When a program stores a NaN, it alone runs once more after the launch, its stores and atomics going
nowhere, and after each operation one looks for a NaN where no operand has one. What was loaded as
NaN was not born in the kernel, and what is born after a maximum dropped a NaN may stem from it
(-inf - -inf in a softmax). Then other programs that stored a NaN at the same line are looked at.
A program is not run again if the launch also read what it wrote, or if programs wait for each
other: it could not be the same again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.engine.program import Program
from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.lowering.lower import Lowering
from fa_verify.ttir.memory.access import Accesses, Update
from fa_verify.ttir.numbers.shorts import widen
from fa_verify.ttir.ops.tiles import integer
from fa_verify.ttir.sanitizer.findings import Findings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.ttir.lowering.lower import Env, Step
    from fa_verify.ttir.memory.cells import Access
    from fa_verify.ttir.memory.known import Memory
    from fa_verify.ttir.memory.values import Pointer, Terms
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.options import Edit, FloatModel, Options
    from fa_verify.ttir.sanitizer.findings import Site
    from fa_verify.ttir.syntax.ir import Op

# Each result element is computed from the same element of every operand.
_ELEMENTWISE = ("arith.", "math.", "tt.clampf", "tt.fp_to_fp", "tt.precise")
_TRIED = 16  # programs run again for one store, spread over those that stored NaN: bounds the time
_DROPS = ("arith.maxnumf", "arith.minnumf", "tt.clampf", "tt.scan")  # and tt.reduce
_LOADS = ("tt.load", "tt.descriptor_load", "tt.descriptor_gather", "tt.atomic", "tt.call", "scf.")


@dataclass(frozen=True, slots=True, eq=False)
class Birth:
    """An operation that made NaN, or inf, out of numbers."""

    site: Site
    op: str
    operands: str


class Tracer:
    """Remembers the first birth of NaN in one program's run, and the first of inf before it."""

    def __init__(self) -> None:
        """See nothing yet."""
        self.nan: Birth | None = None
        self.inf: Birth | None = None
        self._hidden: Birth | None = None  # a first birth, all of which a select left out
        self._dropped = False  # a NaN vanished in a maximum: what is born now may stem from it

    def reset(self) -> None:
        """Forget."""
        self.nan, self.inf, self._hidden, self._dropped = None, None, None, False

    @property
    def birth(self) -> Birth | None:
        """The first birth of a NaN that no select left out, or else the first."""
        return self.nan or self._hidden

    def hide(self, operands: Sequence[Array], result: Array) -> None:
        """Look whether a select leaves out every NaN."""
        if self.nan is None or np.isnan(result).any():
            return
        if any(np.isnan(x).any() for x in operands):
            self.nan, self._hidden = None, self._hidden or self.nan

    def drop(self, operands: Sequence[Array], results: Sequence[Array], axis: int | None) -> None:
        """Look whether a maximum or minimum leaves out a NaN; `axis`: what a reduction removes."""
        for operand, result in zip(operands, cycle(results), strict=False):
            odd = np.isnan(operand)
            nan = odd if axis is None else np.any(odd, axis=axis)
            self._dropped |= bool((nan & ~np.isnan(result)).any())

    def look(self, op: str, site: Site, operands: Sequence[Array], result: Array) -> None:
        """Look at one operation's result."""
        if self.nan is not None or self._dropped:
            return
        if np.isnan(result).any():
            self.nan = self._birth(op, site, operands, result, np.isnan)
        if self.inf is None and np.isinf(result).any():
            self.inf = self._birth(op, site, operands, result, np.isinf)

    @staticmethod
    def _birth(
        op: str, site: Site, operands: Sequence[Array], result: Array, is_odd: Any
    ) -> Birth | None:
        new = is_odd(result)
        fits = op.startswith(_ELEMENTWISE) and all(x.ndim == result.ndim for x in operands)
        for operand in operands:
            odd = is_odd(operand) | np.isnan(operand)
            new = new & ~(odd if fits else odd.any())
        if not new.any():
            return None
        if not fits:
            has_inf = any(np.isinf(x).any() for x in operands)
            return Birth(site, op, "operands with inf" if has_inf else "finite operands")
        where = np.unravel_index(int(np.argmax(new)), new.shape)
        values = [np.broadcast_to(x, new.shape)[where] for x in operands]
        return Birth(site, op, ", ".join(f"{float(x):.6g}" for x in values))


class _TracedLowering(Lowering):
    def __init__(self, *, tracer: Tracer, **kwargs: Any) -> None:
        self._tracer = tracer
        super().__init__(**kwargs)

    def _lower(self, op: Op) -> Step | None:
        step = super()._lower(op)
        floats = [x for x in op.results if x.type.is_float]
        reduces = op.name in {"tt.reduce", "tt.scan"}
        skipped = (op.regions and not reduces) or op.name.startswith(_LOADS)
        if step is None or not floats or skipped:
            return step
        operands = [self.slot(x) for x in op.operands if x.type.is_float]
        results, site, tracer = [self.slot(x) for x in floats], self.site(op), self._tracer
        axis = integer(op, "axis") + 1 if op.name == "tt.reduce" else None
        drops = axis is not None or op.name in _DROPS

        def watched(env: Env) -> None:
            before = [widen(env[slot]) for slot in operands]
            step(env)
            after = [widen(env[slot]) for slot in results]
            for result in after:
                tracer.look(op.name, site, before, result)
            if op.name == "arith.select":
                tracer.hide(before, after[0])
            if drops:
                tracer.drop(before, after, axis)

        return watched


class Dry(Accesses):
    """Accesses that read only."""

    def store(self, access: Access, pointer: Pointer, values: Array, masks: Terms) -> None:
        """Go nowhere."""

    def atomic(
        self, access: Access, pointer: Pointer, masks: Terms, operands: Sequence[Array],
        update: Update,
    ) -> Array:  # fmt: skip
        """Read what is there."""
        del update
        reading = Update(function=None, reads=True, used=True, acquires=False, releases=False)
        return super().atomic(access, pointer, masks, operands, reading)


class Traced(Program):
    """A kernel that is looked at operation by operation."""

    def __init__(self, text: str, file: str, floats: FloatModel, edit: Edit | None) -> None:
        self.tracer = Tracer()
        super().__init__(text, file, floats, partial(_TracedLowering, tracer=self.tracer), edit)

    def replay(  # noqa: PLR0917
        self, names: Sequence[str], values: Sequence[Any], grid: tuple[int, int, int],
        options: Options, memory: Memory, linear: int,
    ) -> Tracer:  # fmt: skip
        """Run one program, leaving memory as it is."""
        self.tracer.reset()
        machine = self.machine
        machine.accesses = Dry(machine, Findings(0), sanitize=False)
        self.run_dry(names, values, grid, options=options, memory=memory, linear=linear)
        return self.tracer


@lru_cache(maxsize=64)
def traced(text: str, file: str, floats: FloatModel, edit: Edit | None) -> Traced:
    """The kernel, to be run again."""
    return Traced(text, file, floats, edit)


def explain(  # noqa: PLR0917
    program: Program, text: str, file: str, names: Sequence[str], values: Sequence[Any],
    grid: tuple[int, int, int], options: Options, memory: Memory, findings: Findings,
) -> None:  # fmt: skip
    """Note where each NaN that the launch just stored was born ("nan-born")."""
    stored = program.machine.accesses.nans if 0 not in grid else {}
    if not stored or program.waits or program.read_back:
        return
    again = traced(text, file, options.float_model, program.edit)
    births: dict[int, tuple[Birth | None, Birth | None]] = {}
    for by_program in stored.values():
        tried = np.array(list(by_program))
        tried = tried[np.unique(np.linspace(0, tried.size - 1, _TRIED).astype(int))]
        for linear in tried.tolist():
            if linear not in births:
                try:
                    tracer = again.replay(names, values, grid, options, memory, linear)
                except Unsupported:
                    return
                births[linear] = (tracer.birth, tracer.inf)
            nan, inf = births[linear]
            if nan is not None:
                break
        else:
            continue
        argument, offset = by_program[linear]
        detail = f"{nan.op} of {nan.operands} gave NaN, which program "
        detail += f"{program.machine.position(linear)} stored to {argument.name}"
        if "inf" in nan.operands and inf is not None:
            detail += f"; inf first came from {inf.op} of {inf.operands} at line {inf.site.line}"
        findings.add(
            "nan-born", nan.site, argument, program.machine.position(linear), offset, 1, detail
        )
