"""Descriptors of Hopper's products in machine code, and a fault of ptxas 12.8 in computing them.

A product (wgmma) finds a tile in shared memory by 64 bits: the address in 16-byte units, 14 bits of
the low half, plus constants; the swizzle is in the topmost bits (PTX ISA, "Matrix-descriptor
format"). The sum is done in uniform or vector registers, low half first, and since an address has
no upper half, the constant is added to zero there. ptxas 12.8 (Triton 3.6 and 3.7) sometimes adds
both halves to registers that hold something else by then, the coordinates of a copy say: seen for
tiles of 16 and 32 columns of 16 bits at a fixed address. On an H200 the kernels found so died of
illegal accesses, read other tiles or gave NaN; those not found so were right.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from triton import knobs

__all__ = ["disassembled", "lost"]

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?P<text>[^;]*?)\s*;")
# An instruction that writes a register first names it, after predicates that it writes as well.
_WRITES = re.compile(
    r"(?:@!?U?P\d+ )?(?P<name>[A-Z][\w.]*) (?:U?P\w+, )*(?P<file>UR|R)(?P<register>\d+)\b"
)
_UPPER = re.compile(
    r"U?IADD3\.X U?R\d+, (?P<file>UR|R)(?P<register>\d+)(?:\.reuse)?, "
    r"(?P<constant>-?0x[0-9a-f]+), U?RZ, U?P\d, !U?PT"
)
_ZERO = re.compile(
    r"UMOV UR\d+, URZ$|IMAD\.MOV\.U32 R\d+, RZ, RZ, RZ$|MOV R\d+, RZ$|CS2R R\d+, SRZ$"
)
_READERS = ("UTMA", "UBLKCP")  # what they name first they read
_WIDE = re.compile(r"\.64|\.WIDE|CS2R$")
_BITS = 32
_SWIZZLE = 30  # its lowest bit in the upper half
_OFFSETS = 0x3FFF  # bits of the stride in the upper half; the others are 0


def disassembled(cubin: bytes) -> str:
    """Machine code as text; "" where Triton's disassembler is missing."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        try:
            return subprocess.run(  # noqa: S603 - our own command line
                [knobs.nvidia.nvdisasm.path, "-c", str(file)],
                capture_output=True,
                check=True,
                text=True,
            ).stdout
        except (OSError, RuntimeError, subprocess.CalledProcessError):
            return ""


def lost(code: str) -> int:
    """How many descriptors have an upper half that is not a constant alone.

    Straight down the listing: the instruction that last wrote the register decides.
    """
    lines = [" ".join(match["text"].split()) for match in _INSTRUCTION.finditer(code)]
    count = 0
    for index, line in enumerate(lines):
        match = _UPPER.match(line)
        if match is None or not _of_descriptor(int(match["constant"], 16)):
            continue
        count += not _ZERO.match(_writer(lines[:index], match["file"], int(match["register"])))
    return count


def _of_descriptor(constant: int) -> bool:
    """Whether a number is an upper half: a swizzle, a stride, and nothing else."""
    bits = constant % (1 << _BITS)
    swizzle = bits >> _SWIZZLE
    return swizzle > 0 and not bits & ~(3 << _SWIZZLE | _OFFSETS)


def _writer(lines: list[str], file: str, register: int) -> str:
    """The last instruction that writes a register, "" if none does."""
    for line in reversed(lines):
        match = _WRITES.match(line)
        if match is None or match["file"] != file or match["name"].startswith(_READERS):
            continue
        first = int(match["register"])
        if first <= register <= first + bool(_WIDE.search(match["name"])):
            return line
    return ""
