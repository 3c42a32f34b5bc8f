"""Constants, and select on arrays or pointers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.lowering.reuse import blend
from fa_verify.ttir.lowering.shorts import either
from fa_verify.ttir.memory.values import Pointer, union_args
from fa_verify.ttir.numbers.floats import CARRIER, RAW, Array, decode, round_to
from fa_verify.ttir.numbers.shorts import alike

if TYPE_CHECKING:
    from fa_verify.ttir.lowering.lower import Lowering, Rule, Step
    from fa_verify.ttir.syntax.ir import Op, Type


def parse_number(text: str, type_: Type) -> Any:
    """One literal of MLIR's constant syntax."""
    carrier = CARRIER[type_.scalar]
    if text in ("true", "false"):
        return carrier.type(text == "true")
    if type_.is_float:
        if text.lower().startswith("0x"):
            raw = RAW[type_.scalar]
            bits = np.array([int(text, 16)], f"u{raw.itemsize}").view(raw)
            return decode(bits, type_.scalar)[0]
        return round_to(np.array([float(text)], np.float64), type_.scalar)[0]
    number = int(text, 0)
    width = carrier.itemsize * 8
    if carrier.kind == "b":
        return carrier.type(number & 1)
    number &= (1 << width) - 1
    return carrier.type(number - (1 << width) if number >> (width - 1) else number)


def constant(op: Op, low: Lowering) -> None:
    """arith.constant: fixed before anything runs; a splat keeps extent 1."""
    value = op.results[0]
    text = op.attrs["value"]
    carrier = CARRIER[value.type.scalar]
    shape = value.type.shape
    if not text.startswith("dense"):
        low.constant(value, np.array([parse_number(text, value.type)], carrier))
        return
    inner = text[6:-1].strip()
    if inner.startswith("["):
        items = [parse_number(x, value.type) for x in re.findall(r"[^\s,\[\]]+", inner)]
        low.constant(value, np.array(items, carrier).reshape((1, *shape)))
        return
    number = parse_number(inner, value.type)
    low.constant(value, np.full((1,) * (len(shape) + 1), number, carrier))


def choose(op: Op, low: Lowering) -> Step:
    """arith.select, on arrays or on pointers lane by lane."""
    if op.results[0].type.scalar == "ptr":
        return low.nary(op, _choose_pointer)
    if op.results[0].type.scalar == "desc":
        msg = "a tensor descriptor chosen by select"
        raise Unsupported(msg)
    return low.nary(op, _choose_array)


def _choose_array(condition: Array, yes: Array, no: Array) -> Array:
    """np.where, but tiles that no mask cuts (most, usually) are passed on as they are."""
    if condition.all():
        return yes
    return blend(condition, *alike(yes, no))


def _choose_pointer(condition: Array, yes: Pointer, no: Pointer) -> Pointer:
    args = union_args([yes, no])
    (a, i), (b, j) = yes.select_arrays(args), no.select_arrays(args)
    condition = condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim))
    which = np.where(condition, i, j) if len(args) > 1 else None
    return Pointer(args, (np.where(condition, a, b),), which)


RULES: dict[str, Rule] = {"arith.constant": constant, "arith.select": either(choose)}
