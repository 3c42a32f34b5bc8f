"""Whether an iteration of a loop hands on what it was handed, where its masks hide every lane.

What is read is taken to be finite, and so are products: a number times 0 is 0, which is added
without a trace. A loop that keeps a running maximum is looked at twice: in rows whose maximum is a
number, and in those where it is still -inf, as the loop began. There no lane was seen yet, so that
whatever else the loop keeps is as it began.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fa_verify.ttir.mutation.proofs import RESHAPING
from fa_verify.ttir.mutation.surgery import number
from fa_verify.ttir.ops.choice import parse_number
from fa_verify.ttir.syntax.ir import Type

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from fa_verify.ttir.syntax.ir import Op, Value

__all__ = ["adds_nothing", "masks_of"]

_KEEPING = RESHAPING | {"arith.truncf", "arith.extf", "tt.trans", "tt.reshape", "tt.fp_to_fp"}
_WRITING = ("tt.store", "tt.descriptor_store", "tt.descriptor_reduce", "tt.atomic_cas")
_LARGER = ("arith.maxnumf", "arith.maximumf")
_ELEMENTWISE = ("arith.", "math.", *_KEEPING)
_Content = object  # a number or a truth that all lanes hold, an argument of the body, or None
_FINITE = object()  # a finite number for each lane


def masks_of(loop: Op) -> set[Value]:
    """What a loop's body chooses numbers of a tile by, other than these numbers themselves."""
    found = {op.operands[0] for op in loop.walk() if op.name == "arith.select"}
    return {x for x in found if x.type.shape and x.producer and x.producer.name != "arith.cmpf"}


def adds_nothing(loop: Op, false: AbstractSet[Value]) -> bool:
    """Whether an iteration hands on what it was handed, where some masks hold in no lane."""
    args = loop.regions[0].blocks[0].args[1:]
    began = {arg: _began(loop, place) for place, arg in enumerate(args)}
    largest = [arg for arg in args if began[arg] == -math.inf]
    if not largest:
        return _Iteration(loop, false, {x: x for x in args}, set()).hands_on()
    if not all(_grows(loop, args.index(arg)) for arg in largest):
        return False
    unseen: dict[Value, _Content] = {arg: arg if began[arg] is None else began[arg] for arg in args}
    return (
        _Iteration(loop, false, {x: x for x in args}, set(largest)).hands_on()
        and _Iteration(loop, false, unseen, set()).hands_on()
    )  # fmt: skip


def _number(value: Value) -> float | None:
    text = number(value)
    if text is None or not value.type.is_float:
        return None
    return float(parse_number(text, Type(value.type.scalar)))


def _began(loop: Op, place: int) -> float | None:
    """What all lanes of something that is carried hold before the first of loops in a row."""
    handed = loop.operands[3 + place]
    before = handed.producer
    if before is not None and before.name == "scf.for":
        return _began(before, before.results.index(handed))
    return _number(handed)


def _grows(loop: Op, place: int) -> bool:
    """Whether a running maximum is -inf, after a step, only where the step's masks hid all lanes.

    So of the loops before it, too. It is the larger of what it was and of a tile's largest number,
    which is finite but for what one `where` hides.
    """
    top = loop.regions[0].blocks[0].ops[-1].operands[place].producer
    if top is None or top.name not in _LARGER:
        return False
    found = [x.producer for x in top.operands if x.producer is not None]
    tiles = [op.operands[0] for op in found if op.name == "tt.reduce"]
    if len(tiles) != 1 or loop.regions[0].blocks[0].args[1 + place] not in top.operands:
        return False
    choice = tiles[0].producer
    if choice is not None and choice.name == "arith.select":
        if _number(choice.operands[2]) != -math.inf:
            return False
        tiles = [choice.operands[1]]
    before = loop.operands[3 + place].producer
    earlier = before is None or before.name != "scf.for" or _grows(before, place)
    return _finite(tiles[0]) and earlier


def _finite(value: Value) -> bool:
    """Whether a number is made of products and of what is read, without an infinite constant."""
    known = _number(value)
    if known is not None:
        return math.isfinite(known)
    op = value.producer
    if op is None or op.name in ("tt.dot", "tt.descriptor_load") or value.type.is_int:
        return True
    if op.name.startswith(_ELEMENTWISE):
        return all(map(_finite, op.operands))
    return False


class _Iteration:
    """One iteration, as far as it is known what all lanes hold."""

    def __init__(
        self, loop: Op, false: AbstractSet[Value], handed: dict[Value, _Content],
        finite: AbstractSet[Value],
    ) -> None:  # fmt: skip
        self._loop, self._false, self._finite = loop, false, finite
        self._handed = handed
        self._known: dict[Value, _Content] = dict(handed)
        self._anew = set(loop.regions[0].blocks[0].args)  # another in each iteration

    def hands_on(self) -> bool:
        """Whether it ends as it began, and writes nothing on the way."""
        for op in self._loop.regions[0].blocks[0].ops:
            if op.name == "scf.yield":
                ends = [self._content(x) for x in op.operands]
                return all(
                    end is not None and (end is due or (isinstance(end, float) and end == due))
                    for end, due in zip(ends, self._handed.values(), strict=True)
                )
            if any(self._writes(inner) for inner in op.walk()):
                return False
            if op.name == "tt.load" and len(op.operands) < 2 and self._moves(op.operands[0]):
                return False  # an address that no mask guards
            if op.name == "scf.for":
                if not self._around(op).hands_on():
                    return False
                self._known |= {
                    x: self._content(op.operands[3 + i]) for i, x in enumerate(op.results)
                }
            elif op.results:
                self._known[op.results[0]] = self._made(op)
        return False

    def _around(self, loop: Op) -> _Iteration:
        """An iteration of a loop in this one's body."""
        args = loop.regions[0].blocks[0].args[1:]
        known = [self._content(x) for x in loop.operands[3:]]
        handed = {x: x if y is None else y for x, y in zip(args, known, strict=True)}
        inner = _Iteration(loop, self._false, handed, self._finite)
        inner._known = self._known | handed
        inner._anew |= self._anew
        return inner

    def _writes(self, op: Op) -> bool:
        """Nothing is written by adding 0."""
        if op.name == "tt.atomic_rmw":
            return self._content(op.operands[1]) != 0.0
        return op.name in _WRITING

    def _moves(self, value: Value) -> bool:
        """Whether a value is another in each iteration."""
        if value in self._anew:
            return True
        op = value.producer
        return op is not None and any(map(self._moves, op.operands))

    def _content(self, value: Value) -> _Content:
        known = self._known.get(value)
        return _number(value) if known is None else known

    def _made(self, op: Op) -> _Content:  # noqa: PLR0911 - one a kind
        inner = [self._content(x) for x in op.operands]
        if op.name == "arith.select":
            condition = False if op.operands[0] in self._false else inner[0]
            return inner[1 if condition else 2] if isinstance(condition, bool) else None
        if op.name in _KEEPING:
            if inner[0] in self._finite:
                return _FINITE
            return inner[0] if isinstance(inner[0], float | bool) or inner[0] is _FINITE else None
        if op.name == "tt.dot":
            return inner[2] if _is(inner[0], 0.0) or _is(inner[1], 0.0) else None
        if op.name == "tt.reduce":
            return _reduced(op, inner)
        if op.name in ("math.exp", "math.exp2"):
            return _power(2.0 if op.name == "math.exp2" else math.e, inner[0])
        if op.name == "arith.cmpf" and op.words[0] == "oeq":
            return self._equal(*inner)
        return self._computed(op, inner) if len(inner) == 2 else None

    def _equal(self, one: _Content, other: _Content) -> bool | None:
        for a, b in ((one, other), (other, one)):
            if a in self._finite and _is(b, -math.inf):
                return False
        return one == other if isinstance(one, float) and isinstance(other, float) else None

    def _is_finite(self, content: _Content) -> bool:
        return content is _FINITE or content in self._finite

    def _computed(  # noqa: PLR0911 - one a kind
        self, op: Op, inner: list[_Content]
    ) -> _Content:
        one, other = inner
        if op.name == "arith.subf":
            if one is other and one in self._finite:
                return 0.0
            if _is(other, 0.0) or (_is(one, -math.inf) and self._is_finite(other)):
                return one
            return one - other if isinstance(one, float) and isinstance(other, float) else None
        for a, b in (inner, inner[::-1]):
            if op.name == "arith.addf" and _is(a, 0.0):
                return b
            if op.name in _LARGER and _is(a, -math.inf):
                return b
            if op.name == "arith.mulf" and _is(a, 1.0):
                return b
            if op.name == "arith.mulf" and _is(a, 0.0) and not (isinstance(b, float) and b - b):
                return 0.0
        return None


def _is(content: _Content, number_: float) -> bool:
    return isinstance(content, float) and content == number_


def _power(base: float, exponent: _Content) -> _Content:
    return base**exponent if isinstance(exponent, float) and exponent <= 0.0 else None


def _reduced(op: Op, inner: list[_Content]) -> _Content:
    """Of a sum of zeros, and of the largest of equal numbers."""
    combine = {x.name for x in op.regions[0].blocks[0].ops}
    if len(inner) == 1 and _is(inner[0], 0.0) and "arith.addf" in combine:
        return 0.0
    if len(inner) == 1 and isinstance(inner[0], float) and combine & set(_LARGER):
        return inner[0]
    return None
