"""Which looser declaration of the kernel's arithmetic would make a failure a pass."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from fa_verify import bounds
from fa_verify.arithmetic import DEFAULT, Arithmetic
from fa_verify.checks.observed import GRADIENTS, comparisons
from fa_verify.checks.rounding import strays

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.bounds import Bounded
    from fa_verify.checks.comparison import Comparison
    from fa_verify.trial import Trial

__all__ = ["looser"]

_MAX_LOGITS = 1 << 20  # each try is one more bound
_POLYNOMIAL_EXP2 = 1472.0  # a degree-3 polynomial in float32, in units of 2^-24
_TANH_APPROX = 8400.0  # PTX's tanh.approx.f32; docs/bounds.md (B6)


def looser(trial: Trial, cause: str = "") -> str:
    """The first declaration under which all that is outside a bound lies inside, or "".

    Beside a pre-scaled operand dots in float16 and eager attention are named: all have half logits.

    Args:
        trial: The trial.
        cause: What explains the failure; only declarations that allow that cause are tried.
    """
    p = trial.case.problem
    every = comparisons(trial)
    broken = any(bool(part.broken.any()) for part in every.values())
    parts = {n: part for n, part in every.items() if bool((part.ratio > 1).any())}
    if not (parts or broken):  # the roundings of P and dS alone tell
        parts = {n: part for n, part in every.items() if strays(part)}
    if not parts or broken or p.batch * p.heads_q * p.seqlen_q * p.seqlen_k > _MAX_LOGITS:
        return ""
    tried = [*_variants(trial.kernel.arithmetic, p.dtype, cause)]
    tried += _of_fp8(trial.kernel.arithmetic) if p.fp8 and not cause else []
    declared = trial.kernel.arithmetic
    for text, arithmetic in tried:
        if not _explains(trial, parts, arithmetic):
            continue
        found, how = text, _spelt(declared, arithmetic)
        if not cause and arithmetic.prescaled and not declared.prescaled:
            for other, loose in tried:
                if (loose.eager or loose.half_dots == "qk") and _explains(trial, parts, loose):
                    found, how = f"{found} or {other}", f"{how} or {_spelt(declared, loose)}"
        return f"it would pass if {found} were declared: {how}"
    return ""


def _spelt(declared: Arithmetic, arithmetic: Arithmetic) -> str:
    """What there is to declare, without what it implies."""
    names = (field.name for field in dataclasses.fields(Arithmetic))
    changed = {n: getattr(arithmetic, n) for n in names}
    changed = {n: value for n, value in changed.items() if value != getattr(declared, n)}
    for name in tuple(changed):
        fewer = {n: value for n, value in changed.items() if n != name}
        if dataclasses.replace(declared, **fewer) == arithmetic:
            changed = fewer
    return f"Arithmetic({', '.join(f'{n}={value!r}' for n, value in changed.items())})"


def _explains(trial: Trial, parts: dict[str, Comparison], arithmetic: Arithmetic) -> bool:
    return all(_inside(part, bounded) for part, bounded in _bounds(trial, parts, arithmetic))


def _variants(declared: Arithmetic, dtype: str, cause: str) -> Iterator[tuple[str, Arithmetic]]:
    if "P is rounded" in cause or "dS is rounded" in cause:
        for form in ("bfloat16", "float16", "float8_e4m3fn"):
            if form != dtype and form in cause:
                p, ds = ({name: form} for name in ("p_dtype", "ds_dtype"))
                yield f"P in {form}", dataclasses.replace(declared, **p)  # type: ignore[arg-type]
                yield f"dS in {form}", dataclasses.replace(declared, **ds)  # type: ignore[arg-type]
                both = dataclasses.replace(declared, **p, **ds)  # type: ignore[arg-type]
                yield f"P and dS in {form}", both
    if "q is multiplied by softmax_scale" in cause and declared.prescaled is None:
        text = f"q multiplied by softmax_scale in {dtype}"
        yield text, dataclasses.replace(declared, prescaled="q")
    if "polynomial" in cause and declared.exp2_ulps < _POLYNOMIAL_EXP2:
        polynomial = dataclasses.replace(declared, exp2_ulps=_POLYNOMIAL_EXP2)
        yield "exp2 by a polynomial of degree 3", polynomial
    if dtype == "float16" and declared.half_dots is None:
        if "acc is kept in float16" in cause or "l is wrong: each wrong row" in cause:
            yield "sums of P V in float16", dataclasses.replace(declared, half_dots="pv")
        if "S = q k^T is rounded to float16" in cause:
            yield "sums of q k^T in float16", dataclasses.replace(declared, half_dots="qk")
    if not cause:
        yield from _without_a_cause(declared, dtype)


def _of_fp8(declared: Arithmetic) -> list[tuple[str, Arithmetic]]:
    """What a bound of fp8 operands reads beside."""
    looser: tuple[tuple[str, dict[str, object]], ...] = (
        ("sums of P V that are never promoted", {"promoted": None}),
        ("sums of fp8 products in 14 bits", {"fp8_dot_ulps": DEFAULT.fp8_dot_ulps}),
        ("P in e4m3", {"p_dtype": "float8_e4m3fn"}),
        ("P in e4m3 without a scale", {"p_dtype": "float8_e4m3fn", "p_scale": 1.0}),
        ("operands rounded to bfloat16 once scaled", {"dequantized": "bfloat16"}),
    )
    found = ((text, dataclasses.replace(declared, **fields)) for text, fields in looser)  # type: ignore[arg-type]
    return [(text, arithmetic) for text, arithmetic in found if arithmetic != declared]


def _without_a_cause(declared: Arithmetic, dtype: str) -> Iterator[tuple[str, Arithmetic]]:
    """Every field that a bound reads, the tightest declarations first."""
    half = max(2.0**-60, declared.p_scale / 2)
    looser: tuple[tuple[str, dict[str, object]], ...] = (
        ("any block_n", {"block_n": None}),
        ("any ds_scale", {"ds_scale": None}),
        ("ALiBi as slope times key", {"alibi_by_key": True}),
        (f"a bias times log2(e) in {dtype}", {"bias_dtype": "input"}),
        ("dS from the rounded P", {"ds_from_rounded_p": True}),
        ("the dk and dv of each head rounded before a group's are added", {"gqa_dtype": "input"}),
        ("gradients rounded after each block", {"gradient_dtype": "input"}),
        ("delta from an unrounded o", {"delta_from_stored_o": False}),
        ("delta from the sum of P dP", {"delta_from_p_dp": True}),
        ("l from the rounded P", {"l_from_rounded_p": True}),
        (f"lse in {dtype}", {"lse_dtype": "input"}),
        ("keys split between programs and merged by lse", {"merged_by_lse": True}),
        ("parts of the keys merged by a sigmoid", {"merged_by_sigmoid": True}),
        ("64 parts of the keys merged in turn", {"merges": max(64, declared.merges)}),
        (f"the o of parts of the keys in {dtype}", {"part_dtype": "input"}),
        ("P divided by the denominator before its cast", {"p_normalised": True}),
        (
            "P relative to a maximum that is rounded up",
            {"p_scale": half},
        ),
        ("dot_ulps=3", {"dot_ulps": max(3.0, declared.dot_ulps)}),
        (
            "dot_ulps=32, of three products of bfloat16 parts",
            {"dot_ulps": max(32.0, declared.dot_ulps)},
        ),
        ("tanh.approx", {"tanh_ulps": max(_TANH_APPROX, declared.tanh_ulps)}),
        (f"q multiplied by softmax_scale in {dtype}", {"prescaled": "q"}),
        (f"k multiplied by softmax_scale in {dtype}", {"prescaled": "k"}),
        (f"q and k multiplied by the root of softmax_scale in {dtype}", {"prescaled": "qk"}),
        ("exp2 by a polynomial of degree 3", {"exp2_ulps": _POLYNOMIAL_EXP2}),
        ("dS in bfloat16", {"ds_dtype": "bfloat16"}),
        ("P in bfloat16", {"p_dtype": "bfloat16"}),
        ("P and dS in bfloat16", {"p_dtype": "bfloat16", "ds_dtype": "bfloat16"}),
        ("sums of P V in float16", {"half_dots": "pv"}),
        ("P in int8", {"p_dtype": "int8", "p_scale": 127.0}),
        ("sums of q k^T in float16", {"half_dots": "qk"}),
        ("all dots' sums in float16", {"half_dots": "all"}),
        ("eager attention", {"eager": True}),
    )
    for text, fields in looser:
        if dtype == "bfloat16" and "bfloat16" in fields.values():
            continue
        if dtype != "float32" and "of bfloat16 parts" in text:
            continue
        if dtype != "float16" and "half_dots" in fields:
            continue
        arithmetic = dataclasses.replace(declared, **fields)  # type: ignore[arg-type]
        if arithmetic != declared:
            yield text, arithmetic


def _bounds(
    trial: Trial, parts: dict[str, Comparison], arithmetic: Arithmetic
) -> Iterator[tuple[Comparison, Bounded]]:
    p, x = trial.case.problem, trial.pristine
    if {"o", "lse"} & set(parts):
        for bounded in bounds.bound_forward(p, arithmetic, x.q, x.k, x.v, terms=trial.terms):
            if bounded.name in parts:
                yield parts[bounded.name], bounded
    gradients = {name: part for name, part in parts.items() if name in GRADIENTS}
    if gradients and x.do is not None:
        o = lse = None
        outputs = trial.execution.outputs
        if outputs is not None and all(part.conditional for part in gradients.values()):
            o, lse = outputs.o, outputs.lse
        found = bounds.bound_backward(
            p, arithmetic, x.q, x.k, x.v, x.do, terms=trial.terms, o=o, lse=lse
        )
        for bounded in found:
            if bounded.name in gradients:
                yield gradients[bounded.name], bounded


def _inside(part: Comparison, bounded: Bounded) -> bool:
    error = torch.where(part.judged, (part.got - bounded.reference).abs(), 0.0)
    if not bool((error <= bounded.det).all()) or not bool(
        bounded.det[part.judged].isfinite().all()
    ):
        return False
    return not strays(dataclasses.replace(part, bounded=bounded))
