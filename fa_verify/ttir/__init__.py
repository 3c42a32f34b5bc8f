"""Runs Triton kernels on CPU tensors by executing the compiler's own IR, and watches memory.

Knows nothing about attention and imports nothing else of fa_verify.

    with ttir.execute(ttir.Options(schedule="reverse")) as run:
        kernel[grid](...)
    print(run.incidents)
"""

from fa_verify.ttir.errors import TimeLimit, Unsupported
from fa_verify.ttir.options import FloatModel, Incident, Launch, Options
from fa_verify.ttir.session import Run, activated, available, execute

__all__ = [
    "FloatModel",
    "Incident",
    "Launch",
    "Options",
    "Run",
    "TimeLimit",
    "Unsupported",
    "activated",
    "available",
    "execute",
]
