"""What PTX instructions do to bits (PTX ISA 8.7, chapter 9): one entry an instruction.

The .approx functions are taken as correctly rounded, which is within the errors that the ISA states
(a few units in the last place; 2**-11 for tanh).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.numbers.floats import Array, flush, fma, round_to, round_toward_zero
from fa_verify.ttir.ptx.bits import (
    FLOATS,
    INTEGERS,
    PAIRS,
    WIDTH,
    Instruction,
    bits_of,
    halves,
    joined,
    typed,
)
from fa_verify.ttir.ptx.cvt import cvt

if TYPE_CHECKING:
    from collections.abc import Callable

# Nothing to wait for, nothing to order: programs see each other's stores at once.
SILENT = ("fence", "membar", "bar", "barrier", "nanosleep", "griddepcontrol", "prefetch", "discard")


def _numeric(function: Callable[..., Array]) -> Callable[..., tuple[Array, ...]]:
    """An instruction on numbers of its (last) type, whose result is of its first."""

    def rule(op: Instruction, *sources: Array) -> tuple[Array, ...]:
        kind = op.types[-1]
        if kind in PAIRS:
            half = Instruction(op.name, op.suffixes, (PAIRS[kind],))
            parts = zip(*[halves(x, 16) for x in sources], strict=True)
            low, high = [rule(half, *part)[0] for part in parts]
            return (joined(low, high, 16),)
        numbers = [typed(x, kind) for x in sources]
        if "ftz" in op.suffixes:
            numbers = [flush(x) for x in numbers]
        result = function(op, *numbers)
        if kind in FLOATS:
            result = round_to(result, FLOATS[kind][0])
            if "ftz" in op.suffixes:
                result = flush(result)
            if "sat" in op.suffixes:
                result = np.clip(np.where(np.isnan(result), 0, result), 0, 1).astype(result.dtype)
        return (bits_of(result, kind),)

    return rule


def _extreme(ieee: Callable[..., Array], strict: Callable[..., Array]) -> Callable[..., Array]:
    def apply(op: Instruction, a: Array, b: Array) -> Array:
        if a.dtype.kind != "f":
            return strict(a, b)
        if "abs" in op.suffixes:  # .xorsign.abs
            sign = np.where(np.signbit(a) ^ np.signbit(b), -1, 1).astype(a.dtype)
            a, b = np.abs(a), np.abs(b)
        else:
            sign = a.dtype.type(1)
        found: Array = (strict if "NaN" in op.suffixes else ieee)(a, b) * sign
        return found

    return apply


def _rounded(op: Instruction, exact: Callable[[], Array], plain: Callable[[], Array]) -> Array:
    """A float32 result in the rounding the instruction names; directed ones from float64."""
    if {"rm", "rp"} & op.suffixes:
        msg = f"the PTX instruction {op.name} with directed rounding"
        raise Unsupported(msg)
    if "rz" in op.suffixes:
        return round_toward_zero(exact(), "f32")
    return plain()


def _add(op: Instruction, a: Array, b: Array) -> Array:
    if a.dtype != np.float32:
        return a + b
    return _rounded(op, lambda: a.astype(np.float64) + b, lambda: a + b)


def _sub(op: Instruction, a: Array, b: Array) -> Array:
    return _add(op, a, -b) if a.dtype.kind == "f" else a - b


def _mul(op: Instruction, *sources: Array) -> tuple[Array, ...]:
    kind = op.types[-1]
    if kind in INTEGERS and "lo" not in op.suffixes:
        a, b = (typed(x, kind) for x in sources)
        width, signed = WIDTH[kind], kind.startswith("s")
        if width == 64:
            msg = f"the PTX instruction mul of {kind}"
            raise Unsupported(msg)
        wide = a.astype(np.int64 if signed else np.uint64) * b
        if "hi" in op.suffixes:
            wide = wide >> wide.dtype.type(width)
            return (bits_of(wide.astype(INTEGERS[kind]), kind),)
        return (bits_of(wide, f"{'s' if signed else 'u'}{2 * width}"),)
    return _MULTIPLY(op, *sources)


_MULTIPLY = _numeric(
    lambda op, a, b: (
        _rounded(op, lambda: a.astype(np.float64) * b, lambda: a * b)
        if a.dtype == np.float32
        else a * b
    )
)


def _fused(op: Instruction, a: Array, b: Array, c: Array) -> Array:
    if a.dtype.kind != "f":
        return a * b + c
    if a.dtype == np.float64:
        return a * b + c
    name = FLOATS[op.types[-1]][0]
    result = fma(a, b, c, name)
    return np.maximum(result, 0) if "relu" in op.suffixes else result


def _mad(op: Instruction, a: Array, b: Array, c: Array) -> tuple[Array, ...]:
    if op.types[-1] in INTEGERS and "lo" not in op.suffixes:
        kind = op.types[-1]
        (product,) = _mul(op, a, b)
        wide = kind if "hi" in op.suffixes else f"{kind[0]}{2 * WIDTH[kind]}"
        return (bits_of(typed(product, wide) + typed(c, wide), wide),)
    return _numeric(_fused)(op, a, b, c)


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip


def _setp(op: Instruction, a: Array, b: Array) -> tuple[Array, ...]:
    """Predicates: of the two halves for pairs, else the comparison and its opposite."""
    kind = op.types[-1]
    if kind in PAIRS:
        half = Instruction(op.name, op.suffixes, (PAIRS[kind],))
        pairs = zip(halves(a, 16), halves(b, 16), strict=True)
        return tuple(_setp(half, x, y)[0] for x, y in pairs)
    x, y = typed(a, kind), typed(b, kind)
    for name in op.suffixes:
        ordered = _COMPARE.get(name)
        loose = _COMPARE.get(name.removesuffix("u")) if name.endswith("u") else None
        if ordered is None and loose is None:
            continue
        result = ordered(x, y) if ordered is not None else loose(x, y)  # type: ignore[misc]
        if x.dtype.kind == "f" and name not in ("num", "nan"):
            unordered = np.isnan(x) | np.isnan(y)
            result = result & ~unordered if ordered is not None else result | unordered
        return (result.astype(np.uint64), (~result).astype(np.uint64))
    msg = f"the PTX instruction setp.{'.'.join(sorted(op.suffixes))}"
    raise Unsupported(msg)


def _selp(op: Instruction, a: Array, b: Array, p: Array) -> tuple[Array, ...]:
    del op
    return (np.where(p != 0, a, b),)


def _bitwise(function: Callable[..., Array]) -> Callable[..., tuple[Array, ...]]:
    return lambda _, *sources: (function(*sources),)


def _shift(op: Instruction, a: Array, b: Array) -> tuple[Array, ...]:
    """Amounts past the width clamp."""
    kind = op.types[-1]
    width, amount = WIDTH[kind], b & np.uint64(0xFFFFFFFF)
    over, amount = amount >= width, np.minimum(amount, np.uint64(width - 1))
    x = typed(a, kind)
    if op.name == "shl":
        return (np.where(over, np.uint64(0), a << amount),)
    shifted = x >> amount.astype(x.dtype)
    if kind.startswith("s"):
        return (bits_of(shifted, kind),)
    return (np.where(over, np.uint64(0), bits_of(shifted, kind)),)


def _funnel(op: Instruction, a: Array, b: Array, c: Array) -> tuple[Array, ...]:
    """shf: the 64 bits of b (high) and a (low), shifted."""
    amount = c & np.uint64(31) if "wrap" in op.suffixes else np.minimum(c, np.uint64(32))
    whole = joined(a, b, 32)
    if "l" in op.suffixes:
        return ((whole << amount) >> np.uint64(32),)
    return (whole >> amount & np.uint64(0xFFFFFFFF),)


def _lop3(op: Instruction, a: Array, b: Array, c: Array, table: Array) -> tuple[Array, ...]:
    del op
    result = np.zeros_like(a)
    for row in range(8):
        wanted = [x if row >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
        chosen = np.where(table >> np.uint64(row) & np.uint64(1), ~np.uint64(0), np.uint64(0))
        result |= wanted[0] & wanted[1] & wanted[2] & chosen
    return (result & np.uint64(0xFFFFFFFF),)


def _prmt(op: Instruction, a: Array, b: Array, selector: Array) -> tuple[Array, ...]:
    """Bytes of b (high) and a (low), chosen by nibbles; bit 3 spreads the byte's sign."""
    if {"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"} & op.suffixes:
        msg = "the PTX instruction prmt with a mode"
        raise Unsupported(msg)
    whole, result = joined(a, b, 32), np.zeros_like(a)
    for i in range(4):
        nibble = selector >> np.uint64(4 * i) & np.uint64(15)
        byte = whole >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(nibble & np.uint64(8), sign, byte)
        result |= byte << np.uint64(8 * i)
    return (result,)


def _extract(op: Instruction, a: Array, b: Array, c: Array) -> tuple[Array, ...]:
    """bfe: c bits of a from bit b on, with the sign spread for signed types."""
    kind = op.types[-1]
    start, length = b & np.uint64(255), c & np.uint64(255)
    field = np.where(start < WIDTH[kind], a >> np.minimum(start, np.uint64(63)), np.uint64(0))
    mask = (np.uint64(1) << np.minimum(length, np.uint64(63))) - np.uint64(1)
    mask = np.where(length >= WIDTH[kind], np.uint64((1 << WIDTH[kind]) - 1), mask)
    field &= mask
    if kind.startswith("s"):
        top = np.minimum(start + length, np.uint64(WIDTH[kind])) - np.uint64(1)
        negative = (a >> top & np.uint64(1)).astype(np.bool_) & (length > 0)
        field = np.where(negative, field | ~mask, field)
    return (field,)


def _insert(op: Instruction, a: Array, b: Array, c: Array, d: Array) -> tuple[Array, ...]:
    """bfi: the low d bits of a put into b from bit c on."""
    del op
    start, length = c & np.uint64(255), np.minimum(d & np.uint64(255), np.uint64(63))
    mask = ((np.uint64(1) << length) - np.uint64(1)) << np.minimum(start, np.uint64(63))
    moved = a << np.minimum(start, np.uint64(63))
    return ((b & ~mask) | (moved & mask),)


def _counted(function: Callable[[Array, int], Array]) -> Callable[..., tuple[Array, ...]]:
    return lambda op, a: (function(a, WIDTH[op.types[-1]]).astype(np.uint64),)


def _leading(bits: Array, width: int) -> Array:
    """Leading zeros, without going through a float that would round up."""
    count = np.full(bits.shape, width, np.int64)
    for place in range(width):
        count = np.where(bits >> np.uint64(place) & np.uint64(1), width - 1 - place, count)
    return count


def _reversed(bits: Array, width: int) -> Array:
    result = np.zeros_like(bits)
    for place in range(width):
        result |= (bits >> np.uint64(place) & np.uint64(1)) << np.uint64(width - 1 - place)
    return result


def _unary(function: Callable[[Array], Array]) -> Callable[..., tuple[Array, ...]]:
    return _numeric(lambda _, x: function(x))


# Suffixes that are no types. A text with any other one would mean something else.
MODIFIERS = frozenset({
    "rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "satfinite", "relu",
    "approx", "full", "lo", "hi", "wide", "wrap", "clamp", "l", "r", "NaN", "xorsign", "abs",
    "global", "relaxed", "volatile", "nc", "cta", "gpu", "sys", "f4e", "b4e", "rc8", "ecl", "ecr",
    "rc16", *_COMPARE, *(f"{name}u" for name in ("eq", "ne", "lt", "le", "gt", "ge")),
})  # fmt: skip
INSTRUCTIONS: dict[str, Callable[..., tuple[Array, ...]]] = {
    "add": _numeric(_add),
    "sub": _numeric(_sub),
    "mul": _mul,
    "mad": _mad,
    "fma": _numeric(_fused),
    "min": _numeric(_extreme(np.fmin, np.minimum)),
    "max": _numeric(_extreme(np.fmax, np.maximum)),
    "div": _numeric(lambda _, a, b: a / b if a.dtype.kind == "f" else _quotient(a, b)),
    "rem": _numeric(lambda _, a, b: np.fmod(a, b)),
    "abs": _unary(np.abs),
    "neg": _unary(np.negative),
    "rcp": _unary(np.reciprocal),
    "sqrt": _unary(np.sqrt),
    "rsqrt": _unary(lambda x: np.reciprocal(np.sqrt(x))),
    "ex2": _unary(np.exp2),
    "lg2": _unary(np.log2),
    "sin": _unary(np.sin),
    "cos": _unary(np.cos),
    "tanh": _unary(np.tanh),
    "copysign": _numeric(lambda _, a, b: np.copysign(b, a)),
    "and": _bitwise(np.bitwise_and),
    "or": _bitwise(np.bitwise_or),
    "xor": _bitwise(np.bitwise_xor),
    "not": _bitwise(np.bitwise_not),
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel,
    "lop3": _lop3,
    "prmt": _prmt,
    "bfe": _extract,
    "bfi": _insert,
    "popc": _counted(lambda x, _: np.bitwise_count(x)),
    "clz": _counted(_leading),
    "brev": _counted(_reversed),
    "setp": _setp,
    "selp": _selp,
    "cvt": cvt,
}


def _quotient(a: Array, b: Array) -> Array:
    """Toward zero."""
    exact = np.floor_divide(np.abs(a), np.abs(b))
    return np.where((a < 0) != (b < 0), -exact, exact).astype(a.dtype)
