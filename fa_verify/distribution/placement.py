"""How the tensors of a problem lie in memory: a kind from `LAYOUTS` becomes a `Layout`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.distribution.tables import INT32, MOST_APART
from fa_verify.layouts import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.problem import Problem

__all__ = ["placed"]

_ORDERS = {"bshd": "bshd", "transposed": "bhds", "sbhd": "sbhd"}
_SLACK = (1, 3, 8, 16)


def placed(
    kind: str, name: str, p: Problem, chance: Callable[[], float], axis: int | None
) -> Layout:
    """The layout of a kind for "q", "k", "v" or "do".

    Args:
        kind: An entry of `LAYOUTS`; "huge" is contiguous where no axis has three entries.
        name: Of the tensor.
        p: The problem, with its shapes.
        chance: A number in [0, 1) at each call.
        axis: Which axis a huge layout stretches; None: any that can be.
    """
    some = _SLACK[int(chance() * len(_SLACK))]
    if kind == "packed":
        # A slice of one (batch, seqlen, heads of q + k + v, head_dim) buffer.
        head_dim = p.head_dim if name in ("q", "k") else p.head_dim_v
        own = p.heads_q if name in ("q", "do") else p.heads_kv
        heads = p.heads_q + 2 * p.heads_kv
        before = {"k": p.heads_q, "v": p.heads_q + p.heads_kv}.get(name, 0)
        pad = (0, 0, (heads - own) * head_dim, 0)
        return Layout(order="bshd", pad=pad, offset=before * head_dim)
    if kind == "huge":
        return _huge(name, p, chance(), axis)
    pads = {
        "padded rows": (0, 0, some, 0),
        "padded heads": (some, 3 * some, 0, 0),
        "spread": (0, 0, 0, 1),
    }
    return Layout(
        order=_ORDERS.get(kind, "bhsd"),
        pad=pads.get(kind, (0, 0, 0, 0)),
        shared_heads=kind == "shared heads",
        offset=some if kind == "offset" else 0,
    )


def _huge(name: str, p: Problem, chance: float, wanted: int | None) -> Layout:
    """A view whose last sequence, head, row or column lies past 2^31 elements, at a shorter stride.

    The axis needs three of them; 4-byte elements would take 8 GB of addresses.
    """
    extents = getattr(p, {"do": "shape_o"}.get(name, f"shape_{name}"))
    axes = [axis for axis in range(4) if 3 <= extents[axis] <= MOST_APART]
    axes = [axis for axis in axes if axis == wanted] or axes
    if not axes or p.dtype == "float32":
        return Layout()
    axis = axes[int(chance * len(axes))]
    pad = [0, 0, 0, 0]
    pad[axis] = -(-INT32 // (extents[axis] - 1))
    order = ("bhsd", "hbsd", "sbhd", "dbhs")[axis]  # outermost, or all together span far more
    return Layout(order=order, pad=(pad[0], pad[1], pad[2], pad[3]))
