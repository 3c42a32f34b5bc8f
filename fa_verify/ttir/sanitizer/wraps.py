"""Tells wrap-around of 32-bit arithmetic that an access feels from wrap-around that none does.

Arithmetic for addresses may wrap where a mask keeps the lane from ever using them, which is no
mistake. So after a launch in which something wrapped, it runs again with stores and atomics going
nowhere, twice: as it is, and with the wrapped results of one line changed. If some access then goes
to another element, the line is reported ("integer-overflow").
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.memory.values import conjunction, total
from fa_verify.ttir.sanitizer.births import Dry, traced
from fa_verify.ttir.sanitizer.findings import Findings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.engine.program import Program
    from fa_verify.ttir.memory.access import Update
    from fa_verify.ttir.memory.cells import Access
    from fa_verify.ttir.memory.known import Memory
    from fa_verify.ttir.memory.reach import Line
    from fa_verify.ttir.memory.values import Pointer, Terms
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.options import Options
    from fa_verify.ttir.sanitizer.findings import Site

_OTHER = 16  # what is flipped in a wrapped result: enough to tell, too little to run astray
_LINES = 4  # looked at one by one; a kernel that wraps on more is wrong enough to report them all


class _Recorded(Dry):
    """Accesses that read only, and remember where each active lane of each went."""

    def __init__(self, machine: Machine, changed: Line | None) -> None:
        super().__init__(machine, Findings(0), sanitize=False)
        self.watch_wraps, self._changed = True, changed
        self._seen = hashlib.blake2b()

    def wrapped(self, site: Site, exact: Array, wrong: Array, result: Array) -> Array:
        del exact
        changed = self._changed == (site.file, site.line)
        return np.where(wrong, result ^ _OTHER, result) if changed else result

    def digest(self) -> bytes:
        return self._seen.digest()

    def _note(self, access: Access, pointer: Pointer, masks: Terms) -> None:
        for arg, mine in self.parts(access, pointer):
            offsets = total(pointer.terms)
            active = conjunction(masks if mine is None else (*masks, mine)) if masks else mine
            if active is not None:
                offsets, active = np.broadcast_arrays(offsets, active)
                offsets = offsets[active]
            self._seen.update(arg.name.encode() + np.ascontiguousarray(offsets).tobytes())

    def load(self, access: Access, pointer: Pointer, masks: Terms, other: Array | None) -> Array:
        self._note(access, pointer, masks)
        return super().load(access, pointer, masks, other)

    def store(self, access: Access, pointer: Pointer, values: Array, masks: Terms) -> None:
        del values
        self._note(access, pointer, masks)

    def atomic(
        self, access: Access, pointer: Pointer, masks: Terms, operands: Sequence[Array],
        update: Update,
    ) -> Array:  # fmt: skip
        self._note(access, pointer, masks)
        return super().atomic(access, pointer, masks, operands, update)


def confirm(  # noqa: PLR0917
    program: Program, text: str, file: str, names: Sequence[str], values: Sequence[Any],
    grid: tuple[int, int, int], options: Options, memory: Memory, findings: Findings,
) -> None:  # fmt: skip
    """Report the lines that wrapped in the launch that just ran, if an access felt it."""
    pending = program.machine.accesses.wraps if 0 not in grid else {}
    if not pending:
        return
    again = traced(text, file, options.float_model, program.edit)

    def went(changed: Line | None) -> bytes:
        accesses = again.machine.accesses = _Recorded(again.machine, changed)
        again.run_dry(names, values, grid, options=options, memory=memory)
        return accesses.digest()

    one_by_one = not program.waits and len(pending) <= _LINES
    plain = went(None) if one_by_one else b""
    for line, wrap in pending.items():
        if not one_by_one or went(line) != plain:
            detail = f"{wrap.value} does not fit 32 bits and becomes part of an address"
            findings.add(
                "integer-overflow", wrap.site, None, wrap.program_id, wrap.value, wrap.count, detail
            )
