"""`Case`: a problem, value families and a seed. It never holds elements; it is one line of text."""

from __future__ import annotations

import dataclasses
import hashlib
import math

from fa_verify.errors import InvalidInputError
from fa_verify.layouts import BHSD, Layout
from fa_verify.masks import FULL, Mask
from fa_verify.problem import Problem
from fa_verify.scales import SCALE_FAMILIES
from fa_verify.tokens import flag, integer, mask_text, number, pair, parse_mask
from fa_verify.values import DO_FAMILIES, QK_FAMILIES, SEED_BITS, TERM_FAMILIES, V_FAMILIES

__all__ = ["Case", "Values"]

_LAYOUTS = {
    **{name: f"layout_{name}" for name in ("q", "k", "v", "do")},
    "bias.layout": "layout_bias",
}
_FLAGS = {"alibi": "alibi", "sinks": "sinks", "dlse": "lse_grad"}
_FAMILIES = ("qk", "v", "do", "bias", "slopes", "sinks", "dlse", "scales", "seeds")
_TERM_OF = {  # of a family
    "bias": "bias",
    "slopes": "alibi",
    "sinks": "sinks",
    "dlse": "dlse",
    "scales": "fp8",
    "seeds": "dropout",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Which family each tensor's elements come from (`fa_verify.values` holds them).

    Attributes:
        qk: Family of the pair q, k: it decides what the logits look like.
        v: Family of v.
        do: Family of do.
        logits: Factor applied to q after the family, 1 to 100 as a rule.
        bias: Family of the bias.
        slopes: Family of ALiBi's slopes.
        sinks: Family of the sinks.
        dlse: Family of lse's gradient.
        scales: Family of the scales of fp8 operands.
        seeds: "narrow" (31 bits) or "wide" (63) seeds of dropout.

    Raises:
        InvalidInputError: A family is unknown, or the factor is not finite and positive.
    """

    qk: str = "normal"
    v: str = "normal"
    do: str = "normal"
    logits: float = 1.0
    bias: str = "normal"
    slopes: str = "geometric"
    sinks: str = "normal"
    dlse: str = "normal"
    scales: str = "uneven"
    seeds: str = "narrow"

    def __post_init__(self) -> None:
        """Reject unknown families."""
        families = {"qk": QK_FAMILIES, "v": V_FAMILIES, "do": DO_FAMILIES, **TERM_FAMILIES}
        families["scales"] = SCALE_FAMILIES
        for name, known in [*families.items(), ("seeds", SEED_BITS)]:
            if getattr(self, name) not in known:
                msg = f"{name}={getattr(self, name)!r}: must be one of {', '.join(known)}"
                raise InvalidInputError(msg)
        if not (math.isfinite(self.logits) and self.logits > 0):
            msg = f"logits={self.logits}: a factor must be finite and above 0"
            raise InvalidInputError(msg)


_DEFAULT = Values()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test: what to compute, on which values, forward only or backward too.

    ``str(case)`` is one line that `parse` reads back; defaults are left out.

    >>> from fa_verify.masks import Mask
    >>> mask = Mask(causal=True)
    >>> problem = Problem(seqlen_q=3, seqlen_k=5, head_dim=80, head_dim_v=80, mask=mask)
    >>> str(Case(problem=problem, seed=7))
    'pass=fwd s=3x5 d=80 dtype=float16 mask=causal seed=7'
    """

    problem: Problem
    values: Values = Values()
    seed: int = 0
    backward: bool = False

    def __post_init__(self) -> None:
        """Reject gradients that are not defined."""
        if self.backward and self.problem.fp8:
            msg = f"pass=bwd fp8={self.problem.fp8}: of fp8 there is only the forward pass"
            raise InvalidInputError(msg)

    @property
    def id(self) -> str:
        """Twelve hex digits of the content's hash."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        """The case on one line."""
        p = self.problem
        parts = [f"pass={'bwd' if self.backward else 'fwd'}"]
        if p.batch != 1:
            parts.append(f"b={p.batch}")
        if (p.heads_q, p.heads_kv) != (1, 1):
            parts.append(f"h={p.heads_q}/{p.heads_kv}")
        parts.append(f"s={p.seqlen_q}x{p.seqlen_k}")
        parts.append(f"d={p.head_dim}" + (f"/{p.head_dim_v}" if p.head_dim_v != p.head_dim else ""))
        parts.append(f"dtype={p.dtype}")
        if p.fp8:
            parts.append(f"fp8={p.fp8}")
        if p.dot_precision != "ieee":
            parts.append(f"dot={p.dot_precision}")
        if p.mask != FULL:
            parts.append(f"mask={mask_text(p.mask)}")
        if p.softmax_scale is not None:
            parts.append(f"scale={p.softmax_scale!r}")
        if p.softcap:
            parts.append(f"cap={p.softcap!r}")
        parts += _terms_text(p, backward=self.backward)
        said = _keys(parts)
        absent = {f"{name}.values" for name, term in _TERM_OF.items() if term not in said}
        for key, field in _LAYOUTS.items():
            if getattr(p, field) != BHSD:
                parts.append(f"{key}={getattr(p, field)}")
        for key in (*_FAMILIES, "logits"):
            value = getattr(self.values, key)
            if value != getattr(_DEFAULT, key) and f"{key}.values" not in absent:
                parts.append(f"{key}.values={value}" if key != "logits" else f"logits={value!r}")
        parts.append(f"seed={self.seed}")
        return " ".join(parts)

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read a case from its line. Nothing in the text is executed.

        Raises:
            InvalidInputError: A token is malformed, unknown, repeated or missing.
        """
        tokens: dict[str, str] = {}
        for token in text.split():
            key, sep, value = token.partition("=")
            if not sep or key not in _KEYS or key in tokens:
                msg = f"token={token!r}: a case is KEY=VALUE once each, keys {', '.join(_KEYS)}"
                raise InvalidInputError(msg)
            tokens[key] = value
        missing = [key for key in ("pass", "s", "d", "dtype", "seed") if key not in tokens]
        if not {"s", "d", "dtype"} & set(missing):  # what is wrong with the others is said first
            either = {"pass": "fwd" if "fp8" in tokens else "bwd", "seed": "0"}
            case = cls._from_tokens(either | tokens)
        if missing:
            msg = f"case={text!r}: {', '.join(missing)} missing; copy the whole replay line"
            raise InvalidInputError(msg)
        return case

    @classmethod
    def _from_tokens(cls, tokens: dict[str, str]) -> Case:
        heads_q, heads_kv = pair("h", tokens.get("h", "1"), "/")
        seqlen_q, seqlen_k = pair("s", tokens["s"], "x")
        head_dim, head_dim_v = pair("d", tokens["d"], "/")
        if tokens["pass"] not in ("fwd", "bwd"):
            msg = f"pass={tokens['pass']!r}: must be fwd or bwd"
            raise InvalidInputError(msg)
        _check_terms(tokens)
        problem = Problem(
            batch=integer("b", tokens.get("b", "1")),
            heads_q=heads_q,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=tokens["dtype"],  # type: ignore[arg-type]  # Problem validates it
            fp8=tokens.get("fp8", ""),
            dot_precision=tokens.get("dot", "ieee"),  # type: ignore[arg-type]
            mask=parse_mask(tokens["mask"]) if "mask" in tokens else Mask(),
            softmax_scale=number("scale", tokens["scale"]) if "scale" in tokens else None,
            softcap=number("cap", tokens.get("cap", "0")),
            bias=tokens.get("bias", ""),
            dropout=number("dropout", tokens.get("dropout", "0")),
            **{  # type: ignore[arg-type]  # Problem's fields by the key that they have here
                field: flag(key, tokens.get(key, "0")) for key, field in _FLAGS.items()
            },
            **{  # type: ignore[arg-type]
                field: Layout.parse(tokens[key]) for key, field in _LAYOUTS.items() if key in tokens
            },
        )
        values = Values(
            **{key: tokens[f"{key}.values"] for key in _FAMILIES if f"{key}.values" in tokens},
            logits=number("logits", tokens.get("logits", "1")),
        )
        return cls(
            problem=problem,
            values=values,
            seed=integer("seed", tokens["seed"]),
            backward=tokens["pass"] == "bwd",
        )


_KEYS = (
    *("pass", "b", "h", "s", "d", "dtype", "fp8", "dot", "mask", "scale", "cap"),
    *("bias", *_FLAGS, "dropout"),
    *_LAYOUTS,
    *(f"{name}.values" for name in _FAMILIES),
    *("logits", "seed"),
)


def _terms_text(p: Problem, *, backward: bool) -> list[str]:
    """What there is beside q, k and v."""
    flags = [key for key, field in _FLAGS.items() if getattr(p, field)]
    return [
        *([f"bias={p.bias}"] if p.bias else []),
        *(f"{key}=1" for key in flags if key != "dlse" or backward),
        *([f"dropout={p.dropout!r}"] if p.dropout else []),
    ]


def _keys(parts: list[str]) -> set[str]:
    return {part.partition("=")[0] for part in parts}


def _check_terms(tokens: dict[str, str]) -> None:
    """Refuse what is said of a term that is not there."""
    needs = {f"{name}.values": term for name, term in _TERM_OF.items()} | {"bias.layout": "bias"}
    for key, term in needs.items():
        if key in tokens and tokens.get(term, "0") in ("", "0"):
            msg = f"{key}={tokens[key]!r}: the case has no {term}; add {term}=... or leave this out"
            raise InvalidInputError(msg)
    if tokens["pass"] == "fwd" and tokens.get("dlse", "0") != "0":
        msg = (
            f"dlse={tokens['dlse']!r}: only a backward pass has a gradient of lse; use pass=bwd "
            "or leave it out"
        )
        raise InvalidInputError(msg)
