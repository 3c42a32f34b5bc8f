"""Elementwise error bounds for attention kernels; the derivation is docs/bounds.md."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

from fa_verify.bounds.backward import backward_det, sure
from fa_verify.bounds.bias import self_normalised
from fa_verify.bounds.bounded import Bounded, as_stored, rounded
from fa_verify.bounds.delta import of_products
from fa_verify.bounds.formats import FLOAT32, FORMATS
from fa_verify.bounds.forward import Forward, forward_det
from fa_verify.bounds.further import sink_gradient
from fa_verify.bounds.inputs import Inputs, few_enough, variants
from fa_verify.bounds.looks import Source, refiner_of_gradient, refiner_of_o
from fa_verify.bounds.lse_bias import lse_allowance, rounds_to_nearest
from fa_verify.bounds.model import Model
from fa_verify.bounds.nearest import nearest
from fa_verify.bounds.noise import Noise, Observed, noise_of
from fa_verify.bounds.order import dq_spread
from fa_verify.bounds.rounding import rounded_models
from fa_verify.bounds.rows import Seen, row_statistics
from fa_verify.bounds.softmax import reach as forward_reach
from fa_verify.reference import by_kv_head
from fa_verify.terms import NO_TERMS, Terms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from fa_verify.arithmetic import Arithmetic
    from fa_verify.bounds.backward import Backward
    from fa_verify.bounds.rows import Rows
    from fa_verify.problem import Problem

__all__ = [
    "FORMATS",
    "Bounded",
    "Known",
    "Noise",
    "Observed",
    "bound_backward",
    "bound_forward",
    "dq_spread",
    "known_operands",
    "nearest",
    "noise_of",
    "rounded_models",
    "self_normalised",
]


Known = tuple[tuple[Model, Inputs], ...]


def known_operands(  # noqa: PLR0917 -- the operands of attention, in their usual order
    problem: Problem,
    arithmetic: Arithmetic,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None,
    *,
    terms: Terms = NO_TERMS,
) -> Known:
    """What the bounds of both passes need of the operands; nothing of a large problem's."""
    if not few_enough(problem):
        return ()
    return tuple(variants(problem, arithmetic, q, k, v, do, terms=terms))


def bound_forward(
    problem: Problem,
    arithmetic: Arithmetic,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    terms: Terms = NO_TERMS,
    known: Known = (),
    d: float = 1e-6,
) -> tuple[Bounded, Bounded]:
    """Bound o and lse.

    Args:
        problem: The problem.
        arithmetic: The kernel's rounding points.
        q: (batch, heads_q, seqlen_q, head_dim) in the problem's dtype, any strides.
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        terms: What the problem has beside them.
        known: All of that as `known_operands` has it, if it is kept.
        d: Probability with which a right kernel may break one tensor's `prob`.

    Returns:
        o and lse.
    """
    model, given, exact = _forward(known or variants(problem, arithmetic, q, k, v, terms=terms))
    refiner = None
    if problem.dot_precision != "tf32":
        source = Source(model, given, forward_reach(model, given), exact.o_bound, exact.tile)
        refiner = refiner_of_o(source, d)
    lse_bound, overflow = _stored_lse(model, exact)
    lse = Bounded(
        name="lse",
        reference=exact.lse.reshape(problem.shape_lse),
        det=lse_bound.reshape(problem.shape_lse),
        overflow_ok=None if overflow is None else overflow.reshape(problem.shape_lse),
        bias=functools.partial(lse_allowance, model, given) if rounds_to_nearest(model) else None,
        terms=max(1, problem.seqlen_k),
    )
    o = rounded(
        name="o",
        reference=exact.o,
        bound=exact.o_bound,
        out=model.out,
        shape=problem.shape_o,
        refiner=refiner,
        terms=problem.seqlen_k,
    )
    return o, lse


def bound_backward(  # noqa: PLR0917 -- the operands of attention, in their usual order
    problem: Problem,
    arithmetic: Arithmetic,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    terms: Terms = NO_TERMS,
    known: Known = (),
    o: Tensor | None = None,
    lse: Tensor | None = None,
    d: float = 1e-6,
) -> tuple[Bounded, ...]:
    """Bound the gradients: for the observed o and lse where given, else end to end.

    In the conditional mode the reference is the gradient for the observed o and lse; judge those
    first, since a conditional backward hides the forward's faults.

    Args:
        problem: The problem.
        arithmetic: The kernel's rounding points.
        q: (batch, heads_q, seqlen_q, head_dim) in the problem's dtype, any strides.
        k: (batch, heads_kv, seqlen_k, head_dim).
        v: (batch, heads_kv, seqlen_k, head_dim_v).
        do: (batch, heads_q, seqlen_q, head_dim_v).
        terms: What the problem has beside them.
        known: All of that as `known_operands` has it, if it is kept.
        o: The kernel's o, shaped as do.
        lse: The kernel's lse, natural logarithm, (batch, heads_q, seqlen_q).
        d: Probability with which a right kernel may break one tensor's `prob`.

    Returns:
        dq, dk and dv, and of a problem that has them dbias and dsinks.
    """
    seen_o = None if o is None else Seen(by_kv_head(problem, o), None)
    seen_lse = None if lse is None else Seen(by_kv_head(problem, lse), None)
    if seen_o is None or seen_lse is None:
        of_forward = known or variants(problem, arithmetic, q, k, v, terms=terms)
        model, _, exact = _forward(of_forward)
        seen_o = seen_o or Seen(exact.o, exact.o_bound)
        seen_lse = seen_lse or Seen(exact.lse, _stored_lse(model, exact)[0])
    every = known or tuple(variants(problem, arithmetic, q, k, v, do, terms=terms))
    if arithmetic.delta_from_p_dp:
        seen_o = of_products(every, seen_lse)
    rows = row_statistics(problem, arithmetic, do, seen_o, seen_lse, terms)
    (model, given), *others = every
    rows = sure(model, given, rows)
    union = first = backward_det(model, given, rows)
    for other, of_other in others:
        union = union.joined(backward_det(other, of_other, rows))

    pairs = [(union.dq, union.dq_bound), (union.dk, union.dk_bound), (union.dv, union.dv_bound)]
    stored = dict(zip(("dq", "dk", "dv"), as_stored(model.out, pairs), strict=True))

    def bounded(name: Literal["dq", "dk", "dv"], shape: tuple[int, ...]) -> Bounded:
        bound = getattr(union, f"{name}_bound")
        refiner = None
        if not others:
            source = Source(model, given, first.top, bound, first.tile)
            refiner = refiner_of_gradient(source, rows, name, d)
        return rounded(
            name=name,
            reference=getattr(union, name),
            bound=bound,
            out=model.out,
            shape=shape,
            refiner=refiner,
            terms=problem.seqlen_k if name == "dq" else problem.group * problem.seqlen_q,
            stored=stored[name],
        )

    return (
        bounded("dq", problem.shape_q),
        bounded("dk", problem.shape_k),
        bounded("dv", problem.shape_v),
        *_further(model, given, rows, union),
    )


def _stored_lse(model: Model, exact: Forward) -> tuple[Tensor, Tensor | None]:
    """The bound of lse as it is stored, and where that may overflow; (B76)."""
    if model.arithmetic.lse_dtype == "float32" or model.out is FLOAT32:
        return exact.lse_bound, None
    lse = exact.lse.masked_fill(exact.lse.isneginf(), 0.0)
    ((bound, overflow),) = as_stored(model.out, [(lse, exact.lse_bound)])
    return bound, overflow


def _further(model: Model, given: Inputs, rows: Rows, found: Backward) -> Iterator[Bounded]:
    """The gradients of the bias and of the sinks, where there are such."""
    problem = model.problem
    if found.dbias is not None:
        exact, bound = found.dbias
        yield rounded(
            name="dbias", reference=exact, bound=bound, out=model.out, shape=problem.shape_bias
        )
    if given.terms.sinks is not None:
        exact, bound = sink_gradient(model, given, rows, given.terms.sinks, found.sink)
        shape = (problem.heads_q,)
        yield rounded(name="dsinks", reference=exact, bound=bound, out=FLOAT32, shape=shape)


def _forward(known: Iterable[tuple[Model, Inputs]]) -> tuple[Model, Inputs, Forward]:
    """Bound the forward pass under every operand model; the model and inputs are the exact ones."""
    every = iter(known)
    model, given = next(every)
    union = forward_det(model, given)
    for other, of_other in every:
        union = union.joined(forward_det(other, of_other))
    return model, given, union
