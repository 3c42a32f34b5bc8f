"""`Chip`: what a kernel is compiled for, and how much a program may take of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from triton.backends.compiler import GPUTarget

from fa_verify.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CHIPS", "Chip", "parse"]

_KB = 1024
# Columns of Blackwell's tensor memory: PTX ISA, "Tensor Memory"; Triton refuses to load more.
_COLUMNS = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A target of Triton's compiler.

    Attributes:
        name: "sm_90", "gfx942".
        shared: Bytes of shared memory (LDS) that one program may have.
        registers: 32-bit registers that one thread may have; on CDNA vector registers, those of the
            matrix unit included.
        columns: Columns of tensor memory that one program may have; 0: the chip has none.
    """

    name: str
    shared: int
    registers: int = 255
    columns: int = 0

    @property
    def amd(self) -> bool:
        """Whether Triton's AMD backend compiles for it."""
        return self.name.startswith("gfx")

    @property
    def target(self) -> GPUTarget:
        """As Triton has it: CDNA's waves have 64 lanes."""
        if self.amd:
            return GPUTarget("hip", self.name, 64)
        return GPUTarget("cuda", int(self.name.removeprefix("sm_")), 32)


# NVIDIA: CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per
# Compute Capability": "Maximum amount of shared memory per thread block" and "Maximum number of
# 32-bit registers per thread". Triton asks for all that a block can opt in to.
# CDNA: "AMD Instinct MI300" and "CDNA4" ISA guides, "LDS" (64 KB, 160 KB a work-group) and "VGPRs"
# (512 a lane: 256 architectural, 256 accumulation).
CHIPS: Final[Mapping[str, Chip]] = {
    chip.name: chip
    for chip in (
        Chip(name="sm_75", shared=64 * _KB),
        Chip(name="sm_80", shared=163 * _KB),
        Chip(name="sm_86", shared=99 * _KB),
        Chip(name="sm_87", shared=163 * _KB),
        Chip(name="sm_89", shared=99 * _KB),
        Chip(name="sm_90", shared=227 * _KB),
        Chip(name="sm_100", shared=227 * _KB, columns=_COLUMNS),
        Chip(name="sm_103", shared=227 * _KB, columns=_COLUMNS),
        Chip(name="sm_120", shared=99 * _KB),
        Chip(name="gfx90a", shared=64 * _KB, registers=512),
        Chip(name="gfx942", shared=64 * _KB, registers=512),
        Chip(name="gfx950", shared=160 * _KB, registers=512),
    )
}


def parse(text: str) -> tuple[Chip, ...]:
    """Chips by name, commas between them, each once.

    Raises:
        InvalidInputError: There is none of that name.

    >>> [chip.name for chip in parse("sm_80,gfx942,sm_80")]
    ['sm_80', 'gfx942']
    """
    names = dict.fromkeys(name.strip() for name in text.split(","))
    for name in names:
        if name not in CHIPS:
            msg = f"arch={name!r}: must be one of {', '.join(CHIPS)}"
            raise InvalidInputError(msg)
    return tuple(CHIPS[name] for name in names)
