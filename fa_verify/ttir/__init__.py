"""Runs Triton kernels on CPU tensors by executing the compiler's own IR, and watches memory.

Knows nothing about attention and imports nothing else of fa_verify.

Where hardware leaves a choice, this is what happens: a masked-off lane of a load without `other`
reads 0, as in NVIDIA's code; a read outside an argument yields NaN or a large odd integer, a write
outside is dropped; programs take their turn in schedule order at atomics and where they store to
the same element; float sums are trees; a product of float32 tiles is accumulated in float32 by
BLAS, unless a `FloatModel` asks for more. What TTIR cannot show is not seen: pipelining, barriers
inside a program, num_warps, num_stages, layouts.

    with ttir.execute(ttir.Options(schedule="reverse")) as run:
        kernel[grid](...)
    print(run.incidents)
"""

from fa_verify.ttir.engine.coverage import Ran
from fa_verify.ttir.errors import TimeLimit, Unsupported
from fa_verify.ttir.launch.session import Run, activated, available, execute, running
from fa_verify.ttir.options import (
    FLOAT_MODELS,
    Alteration,
    FloatModel,
    Incident,
    Launch,
    Options,
)
from fa_verify.ttir.sanitizer.regions import Footprint
from fa_verify.ttir.scripts.redirect import redirected

__all__ = [
    "FLOAT_MODELS",
    "Alteration",
    "FloatModel",
    "Footprint",
    "Incident",
    "Launch",
    "Options",
    "Ran",
    "Run",
    "TimeLimit",
    "Unsupported",
    "activated",
    "available",
    "execute",
    "redirected",
    "running",
]
