"""`Problem`: one attention problem without data. Frozen, validated, hashable; no torch."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from fa_verify.errors import InvalidInputError
from fa_verify.layouts import BHSD, Layout
from fa_verify.masks import FULL, Mask

__all__ = ["TERMS", "DType", "DotPrecision", "Problem", "Storage"]

DType = Literal["float16", "bfloat16", "float32"]
DotPrecision = Literal["ieee", "tf32", "tf32x3"]
Storage = Literal["float16", "bfloat16", "float32", "float8_e4m3fn"]

_DTYPES = ("float16", "bfloat16", "float32")
_DOT_PRECISIONS = ("ieee", "tf32", "tf32x3")
_MAX_HEAD_DIM = 256
_BIAS_AXES = "bhqk"
_BLOCKS = ("block16", "block32", "block64", "block128", "block256")
_SCALED = ("tensor", "head", *_BLOCKS)
TERMS = ("bias", "alibi", "sinks", "dropout", "lse_grad")
"""Fields of what attention may have beside q, k and v; each is off where it is false."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """``o = softmax(softcap(softmax_scale * q k^T) + bias + mask) v`` for one set of shapes.

    Attributes:
        batch: Sequences, at least 1.
        heads_q: Query heads, a multiple of heads_kv.
        heads_kv: Key and value heads (equal: MHA; fewer: GQA; one: MQA).
        seqlen_q: Queries a sequence; 0 is legal.
        seqlen_k: Keys a sequence; 0 is legal (every row is then fully masked).
        head_dim: Of q and k, 1 to 256.
        head_dim_v: Of v and o, 1 to 256.
        dtype: Of q, k, v, o and their gradients.
        fp8: What of q, k and v a float32 scale is for: "tensor", "head" (of a sequence), "block64"
            (64 rows of a head; 16 to 256, a power of two). They are float8_e4m3fn then, times their
            scales the problem's numbers, dtype is that of o, and there is no backward pass. "": no
            scales, and q, k and v are of dtype.
        dot_precision: What a float32 kernel is asked to use in its dots; "ieee" otherwise.
        mask: Who sees whom. Its documents need batch 1, and their lengths add up to the sequence's.
        softmax_scale: Factor of the logits; None means 1/sqrt(head_dim). Any finite float.
        softcap: c > 0 maps a logit x to c*tanh(x/c) after scaling; 0 means none.
        layout_q: Memory layout of q; likewise layout_k, layout_v, layout_do and layout_bias.
        bias: Axes (b, h, q, k) in which an additive bias has the full size, in this order; of the
            others it has one element. It is added after the softcap. "" means no bias.
        alibi: ``slope |i + shift - j|`` is taken from the logit of query i and key j, with a slope
            a query head and the shift of the mask's diagonal.
        sinks: One more logit a query head in the softmax's denominator, and in lse; it has no
            value.
        dropout: Probability with which an element of P is dropped after the softmax; those that are
            kept are divided by 1 minus that. lse is without it.
        lse_grad: The loss depends on lse too: the backward pass is handed its gradient.

    Raises:
        InvalidInputError: A field breaks its rule.
    """

    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: DType = "float16"
    fp8: str = ""
    dot_precision: DotPrecision = "ieee"
    mask: Mask = FULL
    softmax_scale: float | None = None
    softcap: float = 0.0
    layout_q: Layout = BHSD
    layout_k: Layout = BHSD
    layout_v: Layout = BHSD
    layout_do: Layout = BHSD
    layout_bias: Layout = BHSD
    bias: str = ""
    alibi: bool = False
    sinks: bool = False
    dropout: float = 0.0
    lse_grad: bool = False

    def __post_init__(self) -> None:
        """Reject problems that mean nothing."""
        for name, least in (
            ("batch", 1),
            ("heads_q", 1),
            ("heads_kv", 1),
            ("seqlen_q", 0),
            ("seqlen_k", 0),
        ):
            if getattr(self, name) < least:
                msg = f"{name}={getattr(self, name)}: must be at least {least}"
                raise InvalidInputError(msg)
        for name in ("head_dim", "head_dim_v"):
            if not 1 <= getattr(self, name) <= _MAX_HEAD_DIM:
                msg = f"{name}={getattr(self, name)}: must be 1 to {_MAX_HEAD_DIM}"
                raise InvalidInputError(msg)
        if self.heads_q % self.heads_kv:
            msg = f"heads_q={self.heads_q}: must be a multiple of heads_kv={self.heads_kv}"
            raise InvalidInputError(msg)
        if self.dtype not in _DTYPES:
            msg = f"dtype={self.dtype!r}: must be one of {', '.join(_DTYPES)}"
            raise InvalidInputError(msg)
        if self.dot_precision not in _DOT_PRECISIONS:
            msg = (
                f"dot_precision={self.dot_precision!r}: must be one of {', '.join(_DOT_PRECISIONS)}"
            )
            raise InvalidInputError(msg)
        if self.dot_precision != "ieee" and self.dtype != "float32":
            msg = (
                f"dot_precision={self.dot_precision!r}: only float32 has a choice; "
                f"with dtype={self.dtype!r} use 'ieee'"
            )
            raise InvalidInputError(msg)
        if self.softmax_scale is not None and not math.isfinite(self.softmax_scale):
            msg = (
                f"softmax_scale={self.softmax_scale}: must be finite, or None for 1/sqrt(head_dim)"
            )
            raise InvalidInputError(msg)
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            msg = f"softcap={self.softcap}: must be finite and at least 0 (0: none)"
            raise InvalidInputError(msg)
        if self.mask.documents:
            self._check_documents()
        self._check_terms()

    def _check_documents(self) -> None:
        if self.batch != 1:
            msg = f"batch={self.batch}: documents are packed into one sequence; use batch=1"
            raise InvalidInputError(msg)
        for name, lengths in zip(
            ("seqlen_q", "seqlen_k"), zip(*self.mask.documents, strict=True), strict=True
        ):
            if sum(lengths) != getattr(self, name):
                msg = f"{name}={getattr(self, name)}: the documents' lengths sum to {sum(lengths)}"
                raise InvalidInputError(msg)

    def _check_fp8(self) -> None:
        if self.fp8 not in _SCALED:
            msg = f"fp8={self.fp8!r}: must be empty or one of {', '.join(_SCALED)}"
            raise InvalidInputError(msg)
        if self.dot_precision != "ieee" or self.lse_grad:
            msg = (
                f"fp8={self.fp8!r}: dots of fp8 have no other precision, and no gradient is "
                "defined; use dot_precision='ieee' and lse_grad=False"
            )
            raise InvalidInputError(msg)

    def _check_terms(self) -> None:
        """Of what is beside q, k and v."""
        if self.fp8:
            self._check_fp8()
        if self.bias != "".join(axis for axis in _BIAS_AXES if axis in self.bias):
            msg = f"bias={self.bias!r}: must be axes of {_BIAS_AXES!r} in this order, or empty"
            raise InvalidInputError(msg)
        if self.layout_bias.shared_heads or (self.layout_bias != BHSD and not self.bias):
            msg = (
                f"layout_bias={self.layout_bias}: only a bias has one, and it shares its heads by "
                "having no axis h"
            )
            raise InvalidInputError(msg)
        if not 0 <= self.dropout < 1:
            msg = f"dropout={self.dropout}: must be a probability below 1 (0: none)"
            raise InvalidInputError(msg)

    @property
    def scale(self) -> float:
        """The softmax scale in force."""
        return 1.0 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale

    @property
    def storage(self) -> Storage:
        """Format of q, k and v."""
        return "float8_e4m3fn" if self.fp8 else self.dtype

    @property
    def precision(self) -> str:
        """The dtype, and what else decides roundings: "float32/tf32", "float8_e4m3fn/bfloat16"."""
        if self.fp8:
            return f"{self.storage}/{self.dtype}"
        return self.dtype + (f"/{self.dot_precision}" if self.dtype == "float32" else "")

    @property
    def scaled_rows(self) -> int:
        """Rows of q, k or v that share a scale, where that is not all of them."""
        return int(self.fp8.removeprefix("block")) if self.fp8 in _BLOCKS else 0

    def shape_scale(self, name: str) -> tuple[int, int, int]:
        """Shape of the scales of "q", "k" or "v": 1 in the axes along which they do not change."""
        if self.fp8 == "tensor":
            return 1, 1, 1
        batch, heads, seqlen, _ = getattr(self, f"shape_{name}")
        return batch, heads, -(-seqlen // self.scaled_rows) if self.scaled_rows else 1

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_kv

    def resized(self, seqlen_q: int, seqlen_k: int) -> Problem:
        """The problem with other lengths; documents as `Mask.resized` has them."""
        mask = self.mask.resized(seqlen_q, seqlen_k)
        return dataclasses.replace(self, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask)

    @property
    def shape_q(self) -> tuple[int, int, int, int]:
        """Shape of q and dq."""
        return self.batch, self.heads_q, self.seqlen_q, self.head_dim

    @property
    def shape_k(self) -> tuple[int, int, int, int]:
        """Shape of k and dk."""
        return self.batch, self.heads_kv, self.seqlen_k, self.head_dim

    @property
    def shape_v(self) -> tuple[int, int, int, int]:
        """Shape of v and dv."""
        return self.batch, self.heads_kv, self.seqlen_k, self.head_dim_v

    @property
    def shape_o(self) -> tuple[int, int, int, int]:
        """Shape of o and do."""
        return self.batch, self.heads_q, self.seqlen_q, self.head_dim_v

    @property
    def shape_bias(self) -> tuple[int, int, int, int]:
        """Shape of the bias and its gradient: 1 in the axes that it does not have."""
        sizes = (self.batch, self.heads_q, self.seqlen_q, self.seqlen_k)
        b, h, q, k = (
            size if axis in self.bias else 1 for axis, size in zip(_BIAS_AXES, sizes, strict=True)
        )
        return b, h, q, k

    @property
    def terms(self) -> tuple[str, ...]:
        """What the problem has beside q, k and v, by its fields' names."""
        return tuple(name for name in TERMS if getattr(self, name))

    @property
    def shape_lse(self) -> tuple[int, int, int]:
        """Shape of lse and delta."""
        return self.batch, self.heads_q, self.seqlen_q
