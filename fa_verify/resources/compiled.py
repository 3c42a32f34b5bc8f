"""Compiles one captured kernel for one chip, and reads what the compiler says of it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import sys
import tempfile
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources, PTXASError

from fa_verify.resources.build import Usage
from fa_verify.resources.descriptors import disassembled, lost
from fa_verify.resources.layouts import repeated
from fa_verify.resources.operands import rewritten
from fa_verify.ttir.launch.compiler import installation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.resources.chips import Chip
    from fa_verify.ttir.launch.captured import Captured

__all__ = ["compiled", "key", "usage_of", "words"]

_VERSION = "5"  # of Usage, part of every key
_DOES_NOT_FIT: Final = (OutOfResources, CompileTimeAssertionFailure, PTXASError)
_WORDS = 600  # of a compiler's message

_MATRIX: Final = {
    "wgmma": re.compile(r"\bwgmma\.mma_async"),
    "tcgen05": re.compile(r"\btcgen05\.mma"),
    "mma": re.compile(r"(?<![\w.])mma\.(?:sync|sp)"),
    "mfma": re.compile(r"\bv_s?mfma(?:c)?_"),
    "wmma": re.compile(r"\bv_s?wmma(?:c)?_"),
}
_TF32: Final = re.compile(r"\.tf32|kind::tf32|_xf32")
_DOT: Final = re.compile(
    r"tt\.dot (?P<operands>(?:[^:{\n]|\{[^}\n]*\})*): tensor<(?:\d+x)*(?P<type>\w+)[^>]*> \* tensor"
)
_AT: Final = re.compile(r"at (\d+):\d+:")
_ASKED: Final = re.compile(r"inputPrecision = (\w+)")
# `ptxas -v`, one entry function a file.
_PTXAS: Final = {
    "registers": re.compile(r"Used (\d+) registers"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
}


def key(kernel: Captured, chip: Chip) -> str:
    """The same where compiling again cannot give anything else."""
    parts = (
        _VERSION,
        installation(),
        chip.name,
        kernel.source.hash(),
        json.dumps(kernel.options, sort_keys=True, default=repr),
        sorted(get_cache_invalidating_env_vars().items()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def compiled(kernel: Captured, chip: Chip) -> Usage:
    """Compile; what does not compile is an answer too."""
    said = io.StringIO()
    with tempfile.TemporaryFile() as complaints, _heard(complaints.fileno()):
        try:
            with (
                contextlib.redirect_stdout(said),
                knobs.nvidia.scope(),
                knobs.compilation.scope(),
            ):
                knobs.nvidia.dump_ptxas_log = True
                knobs.compilation.always_compile = True  # what is cached has no log
                result = triton.compile(kernel.source, target=chip.target, options=kernel.options)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the answer
            complaints.seek(0)
            told = complaints.read().decode(errors="replace")
            return Usage(error=words(error, told), misfit=isinstance(error, _DOES_NOT_FIT))
    return usage_of(result.asm, result.metadata, said.getvalue())


def usage_of(asm: Any, metadata: Any, log: str) -> Usage:
    """Read what a compiled kernel takes.

    Args:
        asm: Its stages by name: "ttir", and "ttgir", "ptx" and "cubin", or "amdgcn".
        metadata: Triton's.
        log: What ptxas said; "" for AMD, whose assembly carries its numbers.
    """
    text = asm["amdgcn"] if "amdgcn" in asm else asm["ptx"]
    numbers = _of_amd(text) if "amdgcn" in asm else _of_ptxas(log)
    kinds: Counter[str] = Counter()
    tf32 = 0
    for line in text.splitlines():
        for kind, pattern in _MATRIX.items():
            if pattern.search(line):
                kinds[kind] += 1
                tf32 += bool(_TF32.search(line))
    return Usage(
        registers=numbers["registers"],
        spill_stores=numbers["spill_stores"],
        spill_loads=numbers["spill_loads"],
        stack=numbers["stack"],
        shared=int(metadata.shared),
        columns=int(getattr(metadata, "tmem_size", None) or 0),
        matrix=dict(sorted(kinds.items())),
        tf32=tf32,
        dots=_dots(asm["ttir"]),
        lost=lost(disassembled(asm["cubin"])) if kinds["wgmma"] else 0,
        rewritten=rewritten(text) if kinds["wgmma"] else 0,
        repeated=repeated(asm["ttgir"]) if kinds["mma"] else 0,
    )


def _of_ptxas(log: str) -> dict[str, int]:
    found = {name: pattern.findall(log) for name, pattern in _PTXAS.items()}
    missing = [name for name, numbers in found.items() if not numbers]
    if missing:
        msg = f"ptxas said nothing of {', '.join(missing)}: {log!r}"
        raise RuntimeError(msg)
    return {name: max(map(int, numbers)) for name, numbers in found.items()}


def _of_amd(text: str) -> dict[str, int]:
    """From the code object's metadata: LLVM, "User Guide for AMDGPU Backend", Code Object V5."""

    def field(name: str) -> int:
        match = re.search(rf"^\s+(?:- )?\.{name}:\s+(\d+)$", text, re.MULTILINE)
        if match is None:
            msg = f"the assembly has no .{name}"
            raise RuntimeError(msg)
        return int(match[1])

    spilled = 4 * field("vgpr_spill_count")
    return {
        "registers": field("vgpr_count"),
        "stack": field("private_segment_fixed_size"),
        "spill_stores": spilled,
        "spill_loads": spilled,
    }


def _dots(ttir: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for match in _DOT.finditer(ttir):
        asked = _ASKED.search(match["operands"])
        precision = asked[1] if asked else "ieee"
        found[f"f32 {precision}" if match["type"] == "f32" else match["type"]] += 1
    found["scaled"] += ttir.count("tt.dot_scaled ")
    return {name: count for name, count in sorted(found.items()) if count}


def words(error: BaseException, complaints: str = "") -> str:
    """What went wrong, in the words of its first cause and of MLIR; the kernel's text left out."""
    while error.__cause__ is not None:
        error = error.__cause__
    told = str(error)
    at = _AT.match(told)
    if at is not None:  # Triton's front end: the place, an excerpt of the function, a caret, why
        told = f"line {at[1]} of the function: {told.rpartition('^')[2].strip()}"
    mlir = [line for line in complaints.splitlines() if "error:" in line]
    said = "; ".join([f"{type(error).__name__}: {told}".strip(), *mlir])
    return said if len(said) <= _WORDS else said[: _WORDS - 3] + "..."


@contextlib.contextmanager
def _heard(file: int) -> Iterator[None]:
    """Send what C++ prints on stderr to a file."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(file, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
