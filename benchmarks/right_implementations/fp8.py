"""Right kernels in slow motion whose q, k and v are fp8; dots in float32, plain torch on the CPU.

Scales before the dots or after them; P in e4m3, times 2^8 or not, in bfloat16, float16 or float32.
"""

from __future__ import annotations

import dataclasses

import torch

from fa_verify import Arithmetic

from .whole_rows import LN2, Algorithm, Rows, kernel


@dataclasses.dataclass(frozen=True)
class _Fp8(Algorithm):
    """P is cast to `p`; scales multiply the operands ("before"), or logits and P V ("after")."""

    p: torch.dtype = torch.float8_e4m3fn
    scaled: str = "after"
    rounded: torch.dtype | None = None

    def forward(self, problem, q, k, v, terms):
        """As the emulator's."""
        x = {"q": q, "k": k, "v": v}
        stored = {name: self._fold(problem, tensor) for name, tensor in x.items()}
        scales = {
            name: self._fold(problem, _of_rows(problem, getattr(terms, f"{name}_scale"), tensor))
            for name, tensor in x.items()
        }
        if self.scaled == "before":
            stored = {name: self._read(tensor * scales[name]) for name, tensor in stored.items()}
            scales = {name: torch.ones_like(scale) for name, scale in scales.items()}
        unit = torch.tensor(problem.scale) * scales["q"] * scales["k"].mT
        s = self._mm(problem, stored["q"], stored["k"].mT) * unit
        if problem.softcap:
            cap = torch.tensor(problem.softcap)
            s = cap * torch.tanh(s / cap)
        s = torch.where(self._mask(problem), s, -torch.inf)
        o, lse = self._attend(Rows(problem, s, stored["v"], None, None), scales["v"])
        o = torch.where(lse == -torch.inf, 0.0, o)
        native = getattr(torch, problem.dtype)
        return self._stored(native, o).reshape(problem.shape_o), lse.reshape(problem.shape_lse)

    def _attend(self, rows, scale):
        state = None
        for keys in self._blocks(rows.s.shape[-1]) or [slice(0, 0)]:
            part = rows.cut(keys)
            # Rows of v that share a scale are multiplied once they are added up.
            of_v = scale[:, keys] / (first := scale[:, keys][:, :1].clamp(min=2.0**-60))
            own = self._leaf(dataclasses.replace(part, v=part.v * of_v))
            own = own[0], own[1], own[2] * first if own[2].numel() and first.numel() else own[2]
            state = own if state is None else self._merged(state, own)
        return self._finished(rows, state)

    def _cast_p(self, native, p):
        del native
        return (p / self.p_unit).to(self.p).float()

    def _read(self, x):
        return x if self.rounded is None else x.to(self.rounded).float()


def _of_rows(problem, scale, x):
    """A number for each row of x, (batch, heads, seqlen, 1)."""
    size = problem.scaled_rows or max(1, x.shape[2])
    each = scale.repeat_interleave(size, 2)[:, :, : x.shape[2]]
    return each.expand(*x.shape[:2], x.shape[2]).unsqueeze(-1)


def _kernel(name, algorithm, arithmetic=None):
    return kernel(
        name,
        algorithm,
        arithmetic,
        backward=False,
        dtypes=("bfloat16", "float16"),
        fp8=("tensor", "head", "block"),
        documents=False,
        patterns=(),
        bias=(),
        alibi=False,
        sinks=False,
        dropout=False,
    )


@dataclasses.dataclass(frozen=True)
class _Offset(_Fp8):
    """FlashAttention 3's: 8 is added to exponents of 2, l and the sums are as much larger."""

    def _peak(self, s):
        return super()._peak(s) - 8 * LN2


_BFLOAT16 = torch.bfloat16
fp8 = _kernel("fp8", _Fp8(block_n=64))
fp8_lifted = _kernel("fp8_lifted", _Fp8(block_n=32, p_unit=2.0**-8), Arithmetic(p_scale=256.0))
fp8_448 = _kernel("fp8_448", _Fp8(block_n=64, p_unit=1 / 448), Arithmetic(p_scale=448.0))
fp8_offset = _kernel("fp8_offset", _Offset(block_n=64), Arithmetic(p_scale=256.0))
fp8_before = _kernel("fp8_before", _Fp8(scaled="before", block_n=128, reverse=True))
fp8_bfloat16_p = _kernel(
    "fp8_bfloat16_p", _Fp8(p=_BFLOAT16, block_n=16), Arithmetic(p_dtype="bfloat16")
)
fp8_float16_p = _kernel("fp8_float16_p", _Fp8(p=torch.float16), Arithmetic(p_dtype="float16"))
fp8_unrounded_p = _kernel("fp8_unrounded_p", _Fp8(p=torch.float32), Arithmetic(p_dtype="float32"))
fp8_dequantized = _kernel(
    "fp8_dequantized",
    _Fp8(p=_BFLOAT16, scaled="before", rounded=_BFLOAT16, block_n=48),
    Arithmetic(p_dtype="bfloat16", dequantized="bfloat16"),
)
