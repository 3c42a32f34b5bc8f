"""Right kernels in slow motion that keep in half what others keep in float32; torch on the CPU.

Dots that are summed in float16, P in int8, lse and a bias times log2 e in the inputs' dtype.
"""

from __future__ import annotations

import dataclasses

import torch

from fa_verify import Arithmetic

from .emulation import Emulator, emulated
from .whole_rows import LOG2E, Algorithm, kernel


def _nearest(x):
    return x.half()


def _toward_zero(x):
    half = x.half()
    down = (half.view(torch.int16) - 1).view(torch.float16)
    return torch.where(half.double().abs() > x.abs(), down, half)


@dataclasses.dataclass(frozen=True)
class _HalfSums(Emulator):
    """Dots summed in float16, so many products at a time.

    Attributes:
        dots: "qk", "pv" or "all".
        step: Products that are added exactly before the sum is rounded.
        rounded: How.
        promoted: A block's P V goes to float32; else its sums go on in float16.
    """

    dots: str = "all"
    step: int = 16
    rounded: object = _nearest
    promoted: bool = False

    def _mm(self, problem, a, b, acc=None):
        if self.dots not in ("all", "qk" if acc is None else "pv"):
            return super()._mm(problem, a, b, acc)
        total = torch.zeros(a.shape[0], a.shape[1], b.shape[2], dtype=torch.float16)
        if acc is not None and not self.promoted:
            total = acc.half()
        for at in range(0, a.shape[2], self.step):
            some = slice(at, at + self.step)
            total = self.rounded(total.double() + a[:, :, some].double() @ b[:, some].double())
        return total.float() + acc if acc is not None and self.promoted else total.float()

    def backward(self, problem, q, k, v, o, lse, do, terms):
        inner = self if self.dots == "all" else _LogitsOnly(**vars(self))
        return super(_HalfSums, inner).backward(problem, q, k, v, o, lse, do, terms)


class _LogitsOnly(_HalfSums):
    """The backward pass of one that has not all dots in half: of those, it has the logits."""

    def _mm(self, problem, a, b, acc=None):
        return Emulator._mm(self, problem, a, b, acc)  # noqa: SLF001

    def _logits(self, problem, q, k, early=None):
        return _HalfSums(**vars(self))._logits(problem, q, k, early)  # noqa: SLF001


@dataclasses.dataclass(frozen=True)
class _Int8P(Algorithm):
    """P is a whole number of 127ths."""

    p_unit: float = 1 / 127

    def _cast_p(self, native, p):
        del native
        return (p * 127).round()


@dataclasses.dataclass(frozen=True)
class _HalfLse(Emulator):
    """Lse is stored in the inputs' dtype, and the backward pass reads it so."""

    def forward(self, problem, q, k, v, terms):
        o, lse = super().forward(problem, q, k, v, terms)
        return o, lse.to(getattr(torch, problem.dtype))

    def backward(self, problem, q, k, v, o, lse, do, terms):
        return super().backward(problem, q, k, v, o, lse.float(), do, terms)


@dataclasses.dataclass(frozen=True)
class _HalfBias(Emulator):
    """A bias is multiplied by log2 e in its own dtype."""

    def _with_terms(self, problem, s, factor, bias, alibi):
        if bias is not None:
            native = getattr(torch, problem.dtype)
            bias = (bias.to(native) * LOG2E.to(native)).float() / LOG2E
        return super()._with_terms(problem, s, factor, bias, alibi)


def _half(name, arithmetic, **choices):
    limits = {"dtypes": ("float16",), "dot_precisions": ("ieee",)}
    return emulated(f"half_{name}", lambda _problem: _HalfSums(**choices), arithmetic, **limits)


half_qk = _half("qk", Arithmetic(half_dots="qk"), dots="qk", step=8, rounded=_toward_zero)
half_pv = _half(
    "pv", Arithmetic(half_dots="pv"), dots="pv", block_n=32, step=8, rounded=_toward_zero
)
half_pv_promoted = _half(
    "pv_promoted",
    Arithmetic(half_dots="pv", promoted=64),
    dots="pv",
    step=8,
    rounded=_toward_zero,
    promoted=True,
    exponent="exp",
)
half_sums = _half("sums", Arithmetic(half_dots="all"), step=8, exponent="fma")
int8_p = kernel("int8_p", _Int8P(), Arithmetic(p_dtype="int8", p_scale=127.0), backward=False)
half_lse = emulated("half_lse", lambda _problem: _HalfLse(), Arithmetic(lse_dtype="input"))
half_bias = emulated("half_bias", lambda _problem: _HalfBias(), Arithmetic(bias_dtype="input"))
