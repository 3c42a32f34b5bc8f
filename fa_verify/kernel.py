"""`Kernel`: an attention kernel as the harness sees it, and the two records that it returns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from fa_verify.arithmetic import DEFAULT, Arithmetic
from fa_verify.capabilities import Capabilities
from fa_verify.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fa_verify.problem import Problem

__all__ = ["Grads", "Kernel", "Outputs"]


# What is drawn for who declares nothing, without a backward pass.
_FORWARD = Capabilities(
    dot_precisions=("ieee", "tf32", "tf32x3"),
    head_dims_v=range(1, 257),
    window=True,
    softcap=True,
    backward=False,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Outputs:
    """What a forward pass returns.

    Attributes:
        o: (batch, heads_q, seqlen_q, head_dim_v), any strides, the problem's dtype.
        lse: (batch, heads_q, seqlen_q) float32 natural logarithm, or None if not exposed.
        saved: Whatever the backward wants handed back (workspaces, q pre-scaled, ...).
    """

    o: Tensor
    lse: Tensor | None = None
    saved: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Grads:
    """What a backward pass returns, shaped as q, k, v; dbias and dsinks where there are such.

    Attributes:
        dq: Gradient of q; dk: of k; dv: of v.
        dbias: Of the bias, in its shape and dtype.
        dsinks: Of the sinks, (heads_q,) float32.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsinks: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """Each gradient there is, by its name."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: x for name, x in found.items() if x is not None}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One attention kernel under test.

    Attributes:
        name: Shown in tables and replay lines.
        forward: ``forward(problem, q, k, v) -> Outputs``; q, k, v are logical (batch, heads,
            seqlen, head_dim) strided views and must come back unmodified. What the problem has
            beside them is handed on by name: bias, alibi_slopes, sinks, dropout_seed, and of fp8
            q_scale, k_scale, v_scale.
        backward: ``backward(problem, q, k, v, outputs, do) -> Grads``, or "autograd" when o has a
            grad_fn, or None. By name it is handed what forward is, and dlse.
        dropout_keep: ``dropout_keep(problem, seed, device) -> Tensor``, bool, (batch, heads_q,
            seqlen_q, seqlen_k): the elements of P that the kernel keeps. It runs outside of any
            backend, in plain PyTorch.
        capabilities: What it takes. None: undeclared; a clear raise is then `unsupported`.
        expressible: What its signature can ask for: cases are drawn from it, nothing is promised.
        arithmetic: Its rounding points.
        layout: "bhsd", or "bshd" to be handed transposed views (no copy) and to return such.
        source: ``target`` string and source hash, filled in by the loader.

    Raises:
        InvalidInputError: A field is none of the above, or dropout is declared without
            dropout_keep.
    """

    name: str
    forward: Callable[..., Outputs]
    backward: Callable[..., Grads] | Literal["autograd"] | None = None
    dropout_keep: Callable[[Problem, int, str], Tensor] | None = None
    capabilities: Capabilities | None = None
    expressible: Capabilities | None = None
    arithmetic: Arithmetic = DEFAULT
    layout: Literal["bhsd", "bshd"] = "bhsd"
    target: str = ""
    source_hash: str = ""

    @property
    def takes(self) -> Capabilities | None:
        """What cases to draw: those declared, or else those that its signature can express."""
        found = self.capabilities or self.expressible
        if self.backward is not None or (found is not None and not found.backward):
            return found
        return _FORWARD if found is None else dataclasses.replace(found, backward=False)

    def __post_init__(self) -> None:
        """Reject what cannot be run."""
        if not callable(self.forward):
            msg = f"forward={self.forward!r}: must be a function"
            raise InvalidInputError(msg)
        for name in ("capabilities", "expressible"):
            if not isinstance(getattr(self, name), Capabilities | None):
                msg = f"{name}={getattr(self, name)!r}: must be Capabilities(...), or None"
                raise InvalidInputError(msg)
        if not isinstance(self.arithmetic, Arithmetic):
            msg = f"arithmetic={self.arithmetic!r}: must be Arithmetic(...)"
            raise InvalidInputError(msg)
        if not (self.backward is None or self.backward == "autograd" or callable(self.backward)):
            msg = f"backward={self.backward!r}: a function, 'autograd' or None"
            raise InvalidInputError(msg)
        if self.layout not in ("bhsd", "bshd"):
            msg = f"layout={self.layout!r}: must be 'bhsd' or 'bshd'"
            raise InvalidInputError(msg)
        if self.takes is not None and self.takes.dropout and self.dropout_keep is None:
            msg = "dropout=True: dropout_keep must say which elements are kept"
            raise InvalidInputError(msg)
