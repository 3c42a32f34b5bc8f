"""`Arithmetic`: the rounding points that a kernel declares; the rest takes the default.

The default is the published table of docs/bounds.md: P and dS in the input dtype, float32
accumulation, the hardware's exp2, round to nearest even. Looser arithmetic must be declared.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from fa_verify.errors import InvalidInputError

__all__ = ["DEFAULT", "Arithmetic"]

Format = Literal["input", "float16", "bfloat16", "float32", "float8_e4m3fn", "int8"]
_NAMES: dict[str, tuple[object, ...]] = {
    "p_dtype": get_args(Format),
    "ds_dtype": get_args(Format),
    "ds_scale": ("before", "after", None),
    "prescaled": ("q", "k", "qk", None),
    "part_dtype": ("float32", "input"),
    "gqa_dtype": ("float32", "input"),
    "gradient_dtype": ("float32", "input"),
    "half_dots": ("qk", "pv", "all", None),
    "lse_dtype": ("float32", "input"),
    "bias_dtype": ("float32", "input"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Rounding points of one kernel.

    Attributes:
        p_dtype: Format that P is rounded to before P V; "input" is the dtype of q, k, v. "int8":
            to whole numbers, with p_scale=127 as a rule.
        p_scale: What P is multiplied by for that, and the sum divided by (256 uses more of e4m3).
            Below 1: what P is relative to may be that much above the maximum.
        p_normalised: Whether P is divided by the denominator before that, as a softmax's result is.
        ds_dtype: Format that dS is rounded to before dS K and dS^T Q.
        ds_scale: Whether softmax_scale is applied before or after the cast of dS; None: either.
        prescaled: Which operand softmax_scale is folded into in the storage dtype, if any; "qk":
            its square root into both.
        l_from_rounded_p: Whether the softmax denominator sums the rounded P.
        ds_from_rounded_p: Whether dS = P (dP - delta) takes the P that was rounded for P^T dO.
        masked_logit: What hidden logits become, or have added: a finite number declares that a
            hidden key may count once its logit passes a quarter of that.
        exp2_ulps: Error of exp2 in units of 2^-24 relative (5: PTX's ex2.approx, 2 ulp).
        block_n: Keys a block, if declared; None is taken as 16, the smallest.
        half_dots: Which dots are summed in float16, as with tl.dot(..., out_dtype=tl.float16):
            q k^T, P V, or all of both passes; None: none, they are summed in float32.
        dq_atomics: Whether dQ is summed by atomic_add (in float32).
        delta_from_stored_o: delta = sum(do * o) from the o in memory; False: from an unrounded o.
        delta_from_p_dp: delta = sum(P * dP), as in the gradient of a softmax; from no o then.
        dot_ulps: Error of a dot per product, in units of 2^-24 of the sum of |products|: 1 covers
            FFMA and the matrix units of Hopper and Blackwell, 1.4 Ampere's, 3 Volta's.
        fp8_dot_ulps: The same of a dot of fp8 operands: 2176 covers Hopper, whose sums keep 13
            fraction bits. 1 where they are converted to fp16 or bf16 before.
        promoted: Products after which a sum in float16, or of P V of fp8 operands, is added to one
            in float32 (the keys of a block, of a product of its own); None: never.
        dequantized: Format that fp8 operands are rounded to once they are multiplied by their
            scales, before the dots; None: the dots read them as they are stored.
        merged_by_lse: Whether keys are split between programs whose o are merged with the weights
            exp(lse of a part - lse of all), both rounded to float32 (split-KV decoding).
        alibi_by_key: Whether ALiBi is slope * key for keys up to the diagonal, and lse is corrected
            by slope * diagonal afterwards (flash-attn under a causal mask); a sink has that added.
        bias_dtype: What a bias times log2(e) is rounded to before it is added: "input" where both
            are in the dtype of the bias.
        lse_dtype: Format of lse as it is stored.
        merges: How many such merges follow one another (devices of a ring less 1); parts that are
            merged at once, or in a tree by their maxima and denominators, count as one.
        merged_by_sigmoid: Whether they are merged as o - sigmoid(lse_i - lse) (o - o_i).
        part_dtype: Format of the o of a part, and of what is merged again.
        gqa_dtype: Format of each query head's dK and dV before those of a group are added: "input"
            for FlashAttention 2, and for autograd where k and v are repeated (or a bias is: so is
            dS then, before it is summed).
        gradient_dtype: Format of dQ, dK and dV between the blocks that are added to them: "input"
            for 16-bit atomics.
        eager: Whether it is written in operations on whole matrices that each round their result to
            the inputs' dtype: logits, P, dP and dS, and each head's gradients. It implies
            p_normalised, ds_from_rounded_p, delta_from_p_dp and gqa_dtype="input".
        tanh_ulps: Absolute error of softcap's tanh in units of 2^-24; 20 covers the usual forms
            2 * sigmoid(2x) - 1 and 1 - 2 / (exp(2x) + 1). PTX's tanh.approx needs 8400.
    """

    p_dtype: Format = "input"
    p_scale: float = 1.0
    p_normalised: bool = False
    ds_dtype: Format = "input"
    ds_scale: Literal["before", "after"] | None = None
    prescaled: Literal["q", "k", "qk"] | None = None
    l_from_rounded_p: bool = False
    ds_from_rounded_p: bool = False
    masked_logit: float = -math.inf
    exp2_ulps: float = 5.0
    block_n: int | None = None
    half_dots: Literal["qk", "pv", "all"] | None = None
    dq_atomics: bool = False
    delta_from_stored_o: bool = True
    delta_from_p_dp: bool = False
    dot_ulps: float = 1.0
    fp8_dot_ulps: float = 2176.0
    promoted: int | None = None
    dequantized: Literal["bfloat16"] | None = None
    merged_by_lse: bool = False
    merges: int = 1
    merged_by_sigmoid: bool = False
    part_dtype: Literal["float32", "input"] = "float32"
    gqa_dtype: Literal["float32", "input"] = "float32"
    gradient_dtype: Literal["float32", "input"] = "float32"
    eager: bool = False
    alibi_by_key: bool = False
    bias_dtype: Literal["float32", "input"] = "float32"
    lse_dtype: Literal["float32", "input"] = "float32"
    tanh_ulps: float = 20.0

    def __post_init__(self) -> None:
        """Reject what no bound could be derived from."""
        for name, known in _NAMES.items():
            if getattr(self, name) not in known:
                msg = f"{name}={getattr(self, name)!r}: must be one of {', '.join(map(str, known))}"
                raise InvalidInputError(msg)
        for name in ("exp2_ulps", "dot_ulps", "fp8_dot_ulps", "tanh_ulps"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                msg = f"{name}={value!r}: must be a finite number, at least 0"
                raise InvalidInputError(msg)
        if not (isinstance(self.p_scale, int | float) and 2.0**-60 <= self.p_scale <= 2.0**60):
            msg = f"p_scale={self.p_scale!r}: must be a number from 2^-60 to 2^60"
            raise InvalidInputError(msg)
        for name in ("block_n", "promoted", "merges"):
            value = getattr(self, name)
            absent = value is None and name != "merges"
            if not (absent or (isinstance(value, int) and value > 0)):
                msg = f"{name}={value!r}: must be an integer above 0"
                raise InvalidInputError(msg if name == "merges" else msg + ", or None")
        if self.eager:
            for name in ("p_normalised", "ds_from_rounded_p", "delta_from_p_dp"):
                object.__setattr__(self, name, True)
            object.__setattr__(self, "gqa_dtype", "input")
        if self.merged_by_sigmoid or self.merges > 1 or self.part_dtype == "input":
            object.__setattr__(self, "merged_by_lse", True)
        if self.delta_from_p_dp:
            object.__setattr__(self, "delta_from_stored_o", False)


DEFAULT = Arithmetic()
