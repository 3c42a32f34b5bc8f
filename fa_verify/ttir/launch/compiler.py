"""The compiler half of the Triton backend: Triton's own front end and TTIR passes, then stop.

The last stage is the TTIR text, locations included; Triton's disk cache keeps it. Options, code
generation hooks and the pass list are those of Triton's NVIDIA backend for a Hopper, so that
kernels specialise and choose as they would there.
"""

from __future__ import annotations

import contextvars
import hashlib
import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import triton
from triton import knobs
from triton._C.libtriton import passes
from triton.backends.nvidia.compiler import CUDABackend

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

# `Options.origin` of the execution under way.
origin: contextvars.ContextVar[str] = contextvars.ContextVar("origin", default="")

# Kernels are compiled with each expression of their source as operations of its own.
_apart: list[bool] = []

VERSION = "3"  # of the TTIR we ask for: part of the key of Triton's disk cache
CAPABILITY = 90
_ENTRY = re.compile(r"tt\.func public @([\w$.]+|\"[^\"]*\")")


@cache
def installation() -> str:
    """What tells one installation of Triton from another: part of the key of its disk cache.

    Stands for Triton's own `triton_key`, which reads and hashes the whole compiler, 0.3 s in every
    process. Version, and size and date of each file, tell as much.
    """
    root = Path(triton.__file__).parent
    parts = ("_C", "backends", "compiler", "language", "runtime")
    files = [f for part in parts for end in ("py", "so") for f in (root / part).rglob(f"*.{end}")]
    facts = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(files)]
    return f"{triton.__version__}-{hashlib.sha256(repr(facts).encode()).hexdigest()}"


def _nothing(manager: Any) -> None:
    """A pass that is left out."""
    del manager


def keep_apart() -> None:
    """Merge equal expressions no more: from now on a slip in one line is a change of its own.

    Of this process, before it compiles: Triton keeps in memory what it has compiled.
    """
    _apart[:] = [True]


class Compiler(CUDABackend):  # type: ignore[misc]
    """Compiles as for sm_90, down to TTIR only."""

    def __init__(self, target: GPUTarget) -> None:
        """Take over a target."""
        super().__init__(target)
        self.binary_ext = "tile"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Whether we answer for `target`."""
        return bool(target.backend == "cuda")

    def hash(self) -> str:
        """Key of this backend in Triton's disk cache.

        Triton's part of the key is the source's text, not its path, but our result names the path:
        a copy of a kernel must not be shown as the file that it was copied from.
        """
        kind = "apart" if _apart else "ttir"
        return f"fa_verify-{kind}-{VERSION}-{CAPABILITY}-{origin.get()}"

    def parse_options(self, opts: dict[str, Any]) -> Any:
        """Options as the NVIDIA backend reads them; FMA contraction does not exist in TTIR."""
        opts = dict(opts)
        if opts.get("enable_fp_fusion") is None:
            opts["enable_fp_fusion"] = knobs.language.default_fp_fusion
        return super().parse_options(opts)

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> None:
        """Passes, and the text as bytes."""
        del language

        def make_ttir(module: Any, metadata: dict[str, Any]) -> str:
            with patch.object(passes.common, "add_cse", _nothing) if _apart else nullcontext():
                return str(self.make_ttir(module, metadata, options, CAPABILITY))

        stages["ttir"] = make_ttir
        # Triton wants the last stage's result as bytes; asm["ttir"] stays text, as everywhere.
        stages["tile"] = tile


def tile(ttir: Any, metadata: dict[str, Any]) -> bytes:
    """The last stage; a module instead of text is what was compiled from a file of TTIR."""
    text = str(ttir)
    match = _ENTRY.search(text)
    metadata["name"] = match[1].strip('"') if match else ""
    metadata["shared"] = 1  # a byte: nothing is allocated, but launchers divide by it
    metadata["ttir_hash"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text.encode()
