"""tt.reduce, tt.scan and tt.histogram.

A combine region that is one well-known operation runs as one call; any other region is evaluated on
halves of the axis, as a tree (the shape of the reduction across a warp; float sums therefore differ
in their last bits from a sequential order, as they do between chips).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fa_verify.ttir.engine.control import run
from fa_verify.ttir.lowering.shorts import combines
from fa_verify.ttir.numbers.floats import NARROW, SHORT, Array, as_torch
from fa_verify.ttir.numbers.shorts import shorten, widen
from fa_verify.ttir.numbers.trees import tree
from fa_verify.ttir.ops.tiles import full, integer

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.syntax.ir import Op

_FEW = 2048  # elements of one program's tile up to which NumPy reduces faster than torch


def _small(x: Array) -> bool:
    """Whether NumPy reduces it.

    The answer, and with it the order of a sum, must not depend on how many programs run side by
    side: a kernel's bits would then depend on its batch mates.
    """
    return bool(x.size < _FEW * x.shape[0])


def _sum(x: Array, axis: int) -> Array:
    if _small(x):
        small: Array = np.add.reduce(np.ascontiguousarray(x), axis=axis)
        return small
    return as_torch(x).sum(axis).numpy()


def _extreme(
    numpy_reduce: Callable[..., Array], torch_reduce: Callable[..., torch.Tensor]
) -> Callable[[Array, int], Array]:
    """Maxnum and minnum: torch's reduction propagates NaN, so its NaNs are looked at again."""

    def apply(x: Array, axis: int) -> Array:
        if _small(x):
            return numpy_reduce(x, axis=axis)
        result: Array = torch_reduce(as_torch(x), axis).numpy()
        return numpy_reduce(x, axis=axis) if np.isnan(result).any() else result

    return apply


def _plain(function: Any) -> Callable[[Array, int], Array]:
    return lambda x, axis: function.reduce(x, axis=axis, dtype=x.dtype)


def _unsigned(function: Any) -> Callable[[Array, int], Array]:
    def apply(x: Array, axis: int) -> Array:
        result: Array = function.reduce(x.view(f"u{x.dtype.itemsize}"), axis=axis)
        return result.view(x.dtype)

    return apply


_KNOWN: dict[str, Callable[[Array, int], Array]] = {
    "arith.addf": _sum,
    "arith.mulf": _plain(np.multiply),
    "arith.maxnumf": _extreme(np.fmax.reduce, torch.amax),
    "arith.minnumf": _extreme(np.fmin.reduce, torch.amin),
    "arith.maximumf": lambda x, axis: np.maximum.reduce(x, axis=axis),
    "arith.minimumf": lambda x, axis: np.minimum.reduce(x, axis=axis),
    "arith.addi": _plain(np.add),
    "arith.muli": _plain(np.multiply),
    "arith.maxsi": _plain(np.maximum),
    "arith.minsi": _plain(np.minimum),
    "arith.maxui": _unsigned(np.maximum),
    "arith.minui": _unsigned(np.minimum),
    "arith.andi": _plain(np.bitwise_and),
    "arith.ori": _plain(np.bitwise_or),
    "arith.xori": _plain(np.bitwise_xor),
}
_ROUNDING: dict[str, Callable[..., torch.Tensor]] = {
    "arith.addf": torch.add,
    "arith.mulf": torch.mul,
}


def _known(op: Op) -> str | None:
    """The operation the combine region amounts to, if it is one that runs as one call."""
    name = combines(op)
    if op.operands[0].type.scalar == "i1" and name not in ("arith.andi", "arith.ori", "arith.xori"):
        return None
    return name


def _short_tree(
    function: Callable[..., torch.Tensor], scalar: str, *, keep: bool
) -> Callable[[Array, int], Array]:
    """Combine halves of the axis, as `reduce` does with any region, rounding each result.

    PyTorch computes with 16-bit numbers in float32 and rounds to nearest even, as the region would.
    """

    def apply(x: Array, axis: int) -> Array:
        short = shorten(x, scalar)
        whole = tree(function, short.shape, axis, short.dtype)(short)
        return whole if keep else widen(whole)

    return apply


class Combine:
    """The combine region of a reduction, as a function of two tuples of arrays."""

    def __init__(self, op: Op, low: Lowering) -> None:
        """Lower the region."""
        block = op.regions[0].blocks[0]
        self.args = [low.slot(x) for x in block.args]
        self.steps, last = low.block(block)
        self.results = [low.slot(x) for x in last.operands]

    def __call__(self, env: Env, left: list[Array], right: list[Array]) -> list[Array]:
        """Combine elementwise."""
        for slot, value in zip(self.args, left + right, strict=True):
            env[slot] = value
        run(self.steps, env)
        shape = left[0].shape
        return [np.broadcast_to(env[s], shape) for s in self.results]


def reduce(op: Op, low: Lowering) -> Step:
    """tt.reduce along one axis."""
    axis = integer(op, "axis") + 1
    shape = op.operands[0].type.shape
    name = _known(op)
    known = _KNOWN.get(name or "")
    scalar = op.operands[0].type.scalar
    if name in _ROUNDING and scalar in NARROW:
        known = None
        if scalar in SHORT:
            low.takes_short(op)
            known = _short_tree(_ROUNDING[name], scalar, keep=low.short(op.results[0]))
    extent = shape[axis - 1]
    if known is not None:
        found = known

        def whole(x: Array) -> Array:
            if x.shape[axis] != extent:
                spread = list(x.shape)
                spread[axis] = extent
                x = np.broadcast_to(x, spread)
            return (
                found(x, axis) if extent > 1 else x.reshape(*x.shape[:axis], *x.shape[axis + 1 :])
            )

        return low.unary(op, whole)
    combine = Combine(op, low)
    sources = [low.slot(x) for x in op.operands]
    results = [low.slot(x) for x in op.results]

    def step(env: Env) -> None:
        values = [full(env[s], shape) for s in sources]
        lanes = max(v.shape[0] for v in values)
        values = [np.moveaxis(np.broadcast_to(v, (lanes, *shape)), axis, 0) for v in values]
        length = extent
        while length > 1:
            half = length // 2
            combined = combine(
                env, [v[:half] for v in values], [v[half : 2 * half] for v in values]
            )
            if length % 2:
                combined = [
                    np.concatenate([c, v[-1:]]) for c, v in zip(combined, values, strict=True)
                ]
            values, length = combined, half + length % 2
        for slot, value in zip(results, values, strict=True):
            env[slot] = value[0]

    return step


def scan(op: Op, low: Lowering) -> Step:
    """tt.scan along one axis, by doubling."""
    axis = integer(op, "axis") + 1
    reverse = op.attrs.get("reverse", "false").startswith("true")
    shape = op.operands[0].type.shape
    combine = Combine(op, low)
    sources = [low.slot(x) for x in op.operands]
    results = [low.slot(x) for x in op.results]
    extent = shape[axis - 1]

    def step(env: Env) -> None:
        values = [full(env[s], shape) for s in sources]
        lanes = max(v.shape[0] for v in values)
        values = [np.moveaxis(np.broadcast_to(v, (lanes, *shape)), axis, 0) for v in values]
        if reverse:
            values = [v[::-1] for v in values]
        distance = 1
        while distance < extent:
            combined = combine(env, [v[:-distance] for v in values], [v[distance:] for v in values])
            values = [
                np.concatenate([v[:distance], c]) for v, c in zip(values, combined, strict=True)
            ]
            distance *= 2
        for slot, value in zip(results, values, strict=True):
            env[slot] = np.ascontiguousarray(
                np.moveaxis(value[::-1] if reverse else value, 0, axis)
            )

    return step


def histogram(op: Op, low: Lowering) -> Step:
    """tt.histogram: counts of 0..bins-1; values outside count nowhere."""
    bins = op.results[0].type.shape[0]
    shape = op.operands[0].type.shape

    def apply(x: Array, mask: Array | None = None) -> Array:
        lanes = max(x.shape[0], 1 if mask is None else mask.shape[0])
        x = np.broadcast_to(x, (lanes, *shape)).astype(np.int64)
        keep = (x >= 0) & (x < bins)
        if mask is not None:
            keep &= mask
        cell = x + np.arange(lanes)[:, None] * bins
        return np.bincount(cell[keep], minlength=lanes * bins).reshape(lanes, bins).astype(np.int32)

    return low.nary(op, apply)


RULES: dict[str, Rule] = {"tt.reduce": reduce, "tt.scan": scan, "tt.histogram": histogram}
