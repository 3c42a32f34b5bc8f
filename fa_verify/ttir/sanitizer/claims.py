"""Tells a false `max_contiguous` that misleads an access from one that misleads none.

The usual `max_contiguous(where(i < n, i, 0), 128)` is false, and yet right where what lies past n
is never used, or where i counts rows. So after a launch in which such a claim did not hold, it runs
again with stores and atomics going nowhere, twice: as it is, and with accesses that believe the
claim. Those are along each axis whose steps are those of what is claimed to be contiguous; of each
16 bytes they look at the first element's address. If something else is stored then, or elsewhere,
the claim is reported.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.memory.values import Pointer, conjunction, total
from fa_verify.ttir.numbers.floats import RAW
from fa_verify.ttir.sanitizer.births import Dry, traced
from fa_verify.ttir.sanitizer.findings import Findings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.engine.program import Program
    from fa_verify.ttir.memory.access import Update
    from fa_verify.ttir.memory.cells import Access
    from fa_verify.ttir.memory.known import Memory
    from fa_verify.ttir.memory.values import Terms
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.options import Options
    from fa_verify.ttir.sanitizer.findings import Site

_WIDEST = 16  # bytes of one access on sm_90 (PTX ISA, ld.global.v4.b32)


class _Wide(Dry):
    """Accesses that remember what would be stored where; `misled` ones believe what is claimed."""

    def __init__(self, machine: Machine, *, misled: bool) -> None:
        super().__init__(machine, Findings(0), sanitize=False)
        self._claims: dict[tuple[Site, int], tuple[int, Array]] = {}  # length and steps, by axis
        self._seen = hashlib.blake2b()
        if misled:
            self.believed = self._hear

    def _hear(self, site: Site, numbers: Array, claim: tuple[int, ...]) -> None:
        for axis, length in enumerate(claim, 1):
            extent = numbers.shape[axis] if axis < numbers.ndim else 1
            if length > 1 and extent > 1:
                steps = np.moveaxis(np.diff(numbers, axis=axis), axis, -1)
                steps = steps.reshape(steps.shape[0], -1, extent - 1)[:, 0]
                self._claims[site, axis] = length, steps

    def digest(self) -> bytes:
        return self._seen.digest()

    def _pointer(self, access: Access, pointer: Pointer) -> Pointer:
        if not self._claims or pointer.which is not None:
            return pointer
        offsets, size = total(pointer.terms), RAW[access.scalar].itemsize
        for axis in range(1, offsets.ndim):
            for length, steps in self._claims.values():
                if _steps_as(offsets, axis, steps):
                    offsets = _widened(offsets, axis, size, length)
                    break
        return Pointer(pointer.args, (offsets,))

    def _note(
        self, access: Access, pointer: Pointer, masks: Terms, values: Sequence[Array]
    ) -> None:
        for arg, mine in self.parts(access, pointer):
            guarded = masks if mine is None else (*masks, mine)
            active = conjunction(guarded) if guarded else np.ones((), np.bool_)
            active, *parts = np.broadcast_arrays(active, total(pointer.terms), *values)
            self._seen.update(arg.name.encode())
            for part in parts:
                self._seen.update(part[active].tobytes())

    def load(self, access: Access, pointer: Pointer, masks: Terms, other: Array | None) -> Array:
        return super().load(access, self._pointer(access, pointer), masks, other)

    def store(self, access: Access, pointer: Pointer, values: Array, masks: Terms) -> None:
        self._note(access, self._pointer(access, pointer), masks, (values,))

    def atomic(
        self, access: Access, pointer: Pointer, masks: Terms, operands: Sequence[Array],
        update: Update,
    ) -> Array:  # fmt: skip
        self._note(access, pointer, masks, operands)
        return super().atomic(access, pointer, masks, operands, update)


def _steps_as(offsets: Array, axis: int, claimed: Array) -> bool:
    """Whether the tile goes along an axis as something claimed to be contiguous does."""
    if offsets.shape[axis] != claimed.shape[-1] + 1:
        return False
    steps = np.moveaxis(np.diff(offsets, axis=axis), axis, -1)
    steps = steps.reshape(steps.shape[0], -1, steps.shape[-1])
    fits = len(steps) == len(claimed) or 1 in {len(steps), len(claimed)}
    return fits and bool((steps == claimed[:, None]).all())


def _widened(offsets: Array, axis: int, size: int, length: int) -> Array:
    """Where accesses go that are as wide as the claim allows; alignment is not asked about."""
    at = np.arange(offsets.shape[axis])
    width = math.gcd(at.size, 1 << min(_WIDEST // size, length).bit_length() - 1)
    steps = (at % width).reshape([-1 if d == axis else 1 for d in range(offsets.ndim)])
    wide: Array = np.take(offsets, at - at % width, axis) + steps
    return wide


def confirm(  # noqa: PLR0917
    program: Program, text: str, file: str, names: Sequence[str], values: Sequence[Any],
    grid: tuple[int, int, int], options: Options, memory: Memory, findings: Findings,
) -> None:  # fmt: skip
    """Report what was claimed falsely in the launch that just ran, if an access is misled."""
    pending = program.machine.accesses.claims if 0 not in grid else {}
    if not pending:
        return
    again = traced(text, file, options.float_model, program.edit)

    def stored(*, misled: bool) -> bytes:
        accesses = again.machine.accesses = _Wide(again.machine, misled=misled)
        again.run_dry(names, values, grid, options=options, memory=memory)
        return accesses.digest()

    if not program.waits and stored(misled=True) == stored(misled=False):
        return
    for site, claim in pending.items():
        findings.add("false-hint", site, None, claim.program_id, 0, claim.count, claim.detail)
