"""Right kernels in slow motion, each with other rounding choices; plain torch on the CPU.

The arithmetic is that of tests/emulator.py. Every choice is one that the default `Arithmetic`
covers, or is declared.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from fa_verify import Arithmetic, Capabilities, Grads, Kernel, Outputs

_PATH = Path(__file__).resolve().parents[2] / "tests" / "emulator.py"
_SPEC = importlib.util.spec_from_file_location("fa_verify_emulator", _PATH)
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _MODULE
_SPEC.loader.exec_module(_MODULE)
Emulator = _MODULE.Emulator

_WORK = 2e6  # multiply-adds of a product: tens of milliseconds
_WORK_BY_STEPS = 2e5  # likewise where each instruction of a matrix unit is imitated


class Unrounded(Emulator):
    """P stays in float32."""

    def _cast_p(self, _native, p):
        return p


def _at_most(work):
    def accepts(p):
        own = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v)
        return f"more than {work:g} multiply-adds" if own > work else None

    return accepts


def _kernel(name, emulator, arithmetic=None, work=_WORK):
    def forward(problem, q, k, v):
        return Outputs(*emulator.forward(problem, q, k, v))

    def backward(problem, q, k, v, outputs, do):
        return Grads(*emulator.backward(problem, q, k, v, outputs.o, outputs.lse, do))

    return Kernel(
        name=f"emulated_{name}",
        forward=forward,
        backward=backward,
        arithmetic=arithmetic or Arithmetic(),
        capabilities=Capabilities(
            dot_precisions=("ieee", "tf32", "tf32x3"),
            head_dims_v=range(1, 257),
            window=True,
            softcap=True,
            accepts=_at_most(work),
        ),
    )


exp2_64 = _kernel("exp2_64", Emulator())
exp_16_reverse = _kernel(
    "exp_16_reverse", Emulator(exponent="exp", block_n=16, reverse=True, ds_scale="before")
)
fma_128_stale_maximum = _kernel(
    "fma_128_stale_maximum", Emulator(exponent="fma", block_n=128, threshold=8.0)
)
unrounded_p = _kernel("unrounded_p", Unrounded(exponent="fma", tf32="even"))
one_block = _kernel("one_block", Emulator(exponent="exp", block_n=1 << 16, tf32="exact"))
rounded_denominator = _kernel(
    "rounded_denominator",
    Emulator(l_from_rounded_p=True, block_n=32),
    Arithmetic(l_from_rounded_p=True),
)
prescaled_q = _kernel(
    "prescaled_q", Emulator(prescaled="q", reverse=True), Arithmetic(prescaled="q")
)
prescaled_k = _kernel(
    "prescaled_k", Emulator(prescaled="k", exponent="exp"), Arithmetic(prescaled="k")
)
truncating_accumulator = _kernel(
    "truncating_accumulator", Emulator(dot="mma", chain=True, block_n=32), work=_WORK_BY_STEPS
)
truncating_dots = _kernel(
    "truncating_dots", Emulator(dot="mma", exponent="fma", reverse=True), work=_WORK_BY_STEPS
)
