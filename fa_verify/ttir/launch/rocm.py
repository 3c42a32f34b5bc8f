"""The compiler half for an AMD chip: Triton's own front end for it, then stop.

Only to learn what launchers launch there: the executor runs code for a Hopper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.backends.amd.compiler import HIPBackend

from fa_verify.ttir.launch.compiler import VERSION, origin, tile

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

__all__ = ["RocmCompiler"]


class RocmCompiler(HIPBackend):  # type: ignore[misc]
    """Compiles down to TTIR only."""

    def __init__(self, target: GPUTarget) -> None:
        """Take over a target."""
        super().__init__(target)
        self.binary_ext = "tile"

    def hash(self) -> str:
        """Key of this backend in Triton's disk cache."""
        return f"fa_verify-ttir-{VERSION}-{self.target.arch}-{origin.get()}"

    def parse_options(self, opts: dict[str, Any]) -> Any:
        """Options as the AMD backend reads them; FMA contraction does not exist in TTIR."""
        opts = dict(opts)
        if opts.get("enable_fp_fusion") is None:
            opts["enable_fp_fusion"] = knobs.language.default_fp_fusion
        return super().parse_options(opts)

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> None:
        """Passes, and the text as bytes."""
        del language
        stages["ttir"] = lambda module, metadata: str(self.make_ttir(module, metadata, options))
        stages["tile"] = tile
