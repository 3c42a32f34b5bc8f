"""`Capabilities`: what a kernel takes and what it promises. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, get_args

from fa_verify import patterns
from fa_verify.errors import InvalidInputError
from fa_verify.masks import Alignment
from fa_verify.problem import DotPrecision, DType

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.problem import Problem

__all__ = ["Capabilities"]


_INT32 = 1 << 31  # elements that an int32 counts
_SCALES = ("", "tensor", "head", "block", "block16", "block32", "block64", "block128", "block256")
_BIASES = ["".join(axes) for count in range(1, 5) for axes in combinations("bhqk", count)]
_NAMES: dict[str, Sequence[str]] = {
    "dtypes": get_args(DType),
    "dot_precisions": get_args(DotPrecision),
    "alignments": get_args(Alignment),
    "patterns": patterns.NAMES,
    "bias": _BIASES,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a kernel takes (a problem inside that raises is a failure) and what it promises.

    Attributes:
        dtypes: Of o, and of q, k, v where they are not fp8.
        fp8: What scales it takes of q, k and v in float8_e4m3fn: "tensor", "head", "block" (of rows
            of any number that `Problem.fp8` knows) or one of those, such as "block64"; "": it takes
            q, k and v of dtypes.
        dot_precisions: For float32 inputs.
        head_dims: Of q and k.
        head_dims_v: Of v; None: the same as head_dim of the problem.
        alignments: Diagonals of causal and window masks that it knows; empty: no mask at all.
        window: Sliding windows (left and right).
        softcap: Logit softcap.
        gqa: heads_kv < heads_q.
        documents: Several documents packed into one sequence (varlen, cu_seqlens).
        patterns: Rules by which a mask hides more, by name (`fa_verify.patterns`).
        backward: Gradients.
        layouts: Any strides; False: contiguous BHSD or BSHD with a contiguous head_dim only.
        int64_offsets: Tensors with elements past 2^31 of their first one; False: offsets that
            fit 32 bits only.
        empty: seqlen_q = 0 and seqlen_k = 0.
        bias: What an additive bias may be, by its axes (`Problem.bias`); empty: none is taken.
        alibi: ALiBi's slopes.
        sinks: A sink a query head.
        dropout: Dropout; `Kernel.dropout_keep` then says which elements are kept.
        wide_seeds: Seeds of dropout of up to 63 bits; False: of 31, which an int32 holds.
        lse_grad: The gradient of lse.
        accepts: A last word: the reason why a problem is not taken, as text, or None.
        deterministic: The same launch gives the same bits, in any program order.
        batch_invariant: A sequence's bits do not depend on its batch mates.
        empty_row_lse: lse of a fully masked row.
        isolates_masked_nan: NaN at a key inside the sequence, hidden from a row, leaves the row as
            it was.

    Raises:
        InvalidInputError: A field is not of its kind, or names what there is not.
    """

    dtypes: tuple[DType, ...] = ("float16", "bfloat16", "float32")
    fp8: tuple[str, ...] = ("",)
    dot_precisions: tuple[DotPrecision, ...] = ("ieee",)
    head_dims: Container[int] = range(1, 257)
    head_dims_v: Container[int] | None = None
    alignments: tuple[Alignment, ...] = ("bottom-right", "top-left")
    window: bool = False
    softcap: bool = False
    gqa: bool = True
    documents: bool = False
    patterns: tuple[str, ...] = ()
    backward: bool = True
    layouts: bool = True
    int64_offsets: bool = True
    empty: bool = True
    bias: tuple[str, ...] = ()
    alibi: bool = False
    sinks: bool = False
    dropout: bool = False
    wide_seeds: bool = False
    lse_grad: bool = False
    accepts: Callable[[Problem], str | None] | None = None
    deterministic: bool = False
    batch_invariant: bool = False
    empty_row_lse: float = -math.inf
    isolates_masked_nan: bool = False

    def __post_init__(self) -> None:
        """Reject what would silently declare something else."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                msg = f"{field.name}={value!r}: must be True or False"
                raise InvalidInputError(msg)
        for name, known in _NAMES.items():
            _check_names(name, getattr(self, name), known)
        if not self.fp8 or not set(self.fp8) <= set(_SCALES):
            msg = f"fp8={self.fp8!r}: must be some of {', '.join(map(repr, _SCALES))}"
            raise InvalidInputError(msg)
        for name in ("head_dims", "head_dims_v"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Container | None):
                msg = f"{name}={value!r}: must be a tuple or range of integers"
                raise InvalidInputError(msg)

    def term_against(self, problem: Problem) -> str | None:
        """What of a problem beside q, k and v the kernel does not take, or None."""
        for name in problem.terms:
            taken: bool | tuple[str, ...] = getattr(self, name)
            if taken is False or (isinstance(taken, tuple) and problem.bias not in taken):
                return f"bias={problem.bias}" if name == "bias" else name
        return None

    def takes_scales(self, fp8: str) -> bool:
        """Whether it takes what `Problem.fp8` says."""
        return fp8 in self.fp8 or (fp8.startswith("block") and "block" in self.fp8)

    def reason_against(self, problem: Problem) -> str | None:
        """Why the kernel does not take the problem, or None when it does."""
        mask = problem.mask
        layouts = (
            *(problem.layout_q, problem.layout_k, problem.layout_v, problem.layout_do),
            problem.layout_bias,
        )
        spans = (
            layout.span(shape)
            for layout, shape in zip(
                layouts,
                (
                    *(problem.shape_q, problem.shape_k, problem.shape_v, problem.shape_o),
                    problem.shape_bias,
                ),
                strict=True,
            )
        )
        term = self.term_against(problem)
        head_dim_v_fits = (
            problem.head_dim_v == problem.head_dim
            if self.head_dims_v is None
            else problem.head_dim_v in self.head_dims_v
        )
        refusals = (
            (problem.dtype not in self.dtypes, f"dtype={problem.dtype}"),
            (not self.takes_scales(problem.fp8), f"fp8={problem.fp8!r}"),
            (
                problem.dtype == "float32" and problem.dot_precision not in self.dot_precisions,
                f"dot_precision={problem.dot_precision}",
            ),
            (problem.head_dim not in self.head_dims, f"head_dim={problem.head_dim}"),
            (not head_dim_v_fits, f"head_dim_v={problem.head_dim_v}"),
            (
                (mask.banded or mask.pattern) and mask.alignment not in self.alignments,
                f"mask alignment={mask.alignment}",
            ),
            (
                (mask.window_left is not None or mask.window_right is not None) and not self.window,
                "sliding window",
            ),
            (problem.softcap > 0 and not self.softcap, "softcap"),
            (bool(mask.documents) and not self.documents, "packed documents"),
            (mask.pattern.partition(":")[0] not in ("", *self.patterns), f"pattern={mask.pattern}"),
            (problem.group > 1 and not self.gqa, f"group={problem.group}"),
            (min(problem.seqlen_q, problem.seqlen_k) == 0 and not self.empty, "an empty sequence"),
            (
                not self.layouts and any(str(layout) not in ("bhsd", "bshd") for layout in layouts),
                "strided layouts",
            ),
            (not self.int64_offsets and max(spans) > _INT32, "offsets past 2^31"),
            (term is not None, str(term)),
        )
        for refused, reason in refusals:
            if refused:
                return reason
        return self._last_word(problem)

    def _last_word(self, problem: Problem) -> str | None:
        """What `accepts` says; a bool, or what it raises, is its author's slip and no answer."""
        due = "must return None where the problem is taken, and else the reason why not, as text"
        try:
            reason = self.accepts(problem) if self.accepts else None
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            msg = f"accepts={self.accepts!r}: raised {raised}, for {problem}; it {due}"
            raise InvalidInputError(msg) from error
        if not isinstance(reason, str | None):
            msg = f"accepts={self.accepts!r}: returned {reason!r}; it {due}"
            raise InvalidInputError(msg)
        return reason


def _check_names(field: str, given: object, known: Sequence[str]) -> None:
    """Refuse what is no tuple of known names."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        msg = f"{field}={given!r}: must be a tuple, such as ({known[0]!r},)"
        raise InvalidInputError(msg)
    for name in given:
        if name not in known:
            msg = f"{field}={given!r}: {name!r} is none of {', '.join(known)}"
            raise InvalidInputError(msg)
