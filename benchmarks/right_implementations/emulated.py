"""Right kernels in slow motion, each with other rounding choices; plain torch on the CPU.

Every choice is one that the default `Arithmetic` covers, or is declared.
"""

from __future__ import annotations

from fa_verify import Arithmetic

from .emulation import Emulator, emulated

_WORK_BY_STEPS = 2e5  # where each instruction of a matrix unit is imitated


class _Unrounded(Emulator):
    """P stays in float32."""

    def _cast_p(self, _native, p):
        return p


class _HalfP(Emulator):
    """P and dS are rounded to float16, whatever the inputs are."""

    def _cast_p(self, _native, p):
        return p.half().float()

    def _cast_in_backward(self, _native, x):
        return x.half().float()


def _kernel(name, emulator, arithmetic=None, **limits):
    return emulated(name, lambda _problem: emulator, arithmetic, **limits)


exp2_64 = _kernel("exp2_64", Emulator())
exp_16_reverse = _kernel(
    "exp_16_reverse", Emulator(exponent="exp", block_n=16, reverse=True, ds_scale="before")
)
fma_128_stale_maximum = _kernel(
    "fma_128_stale_maximum", Emulator(exponent="fma", block_n=128, threshold=8.0, sink="last")
)
unrounded_p = _kernel("unrounded_p", _Unrounded(exponent="fma", tf32="even"))
half_p = _kernel(
    "half_p",
    _HalfP(keep="before", sink="last"),
    Arithmetic(p_dtype="float16", ds_dtype="float16"),
)
one_block = _kernel(
    "one_block", Emulator(exponent="exp", block_n=1 << 16, tf32="exact", keep="before")
)
rounded_denominator = _kernel(
    "rounded_denominator",
    Emulator(l_from_rounded_p=True, block_n=32),
    Arithmetic(l_from_rounded_p=True),
)
rounded_p_in_ds = _kernel(
    "rounded_p_in_ds",
    Emulator(ds_from_rounded_p=True, block_n=32, reverse=True),
    Arithmetic(ds_from_rounded_p=True),
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
