"""Which fp16 and bf16 tiles are kept in 16 bits: those that are rather added up or stored.

Sums, differences, products, quotients, bitcasts and stores take such a tile as it is
(`numbers.shorts`); all other operations want float32. Each operation makes its result in the form
that most of its readers want, through views, loops and branches; whoever wants the other converts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.ttir.lowering.flows import handed_on
from fa_verify.ttir.numbers.floats import SHORT
from fa_verify.ttir.numbers.shorts import is_short, widen

if TYPE_CHECKING:
    from fa_verify.ttir.lowering.lower import Env, Lowering, Rule, Step
    from fa_verify.ttir.syntax.ir import Function, Op, Value

_READERS = frozenset({
    "arith.addf", "arith.bitcast", "arith.divf", "arith.mulf", "arith.subf", "tt.bitcast",
    "tt.precise_divf",
})  # fmt: skip
_STORED = {"tt.store": 1, "tt.descriptor_store": -1}
# What hands a tile on in the form that it has.
_EITHER = frozenset({
    "arith.negf", "arith.select", "math.absf", "tt.broadcast", "tt.cat", "tt.expand_dims",
    "tt.join", "tt.reshape", "tt.splat", "tt.split", "tt.trans",
})  # fmt: skip
_FLOW = frozenset({"cf.br", "cf.cond_br", "tt.call", "tt.return"})


def short_tiles(function: Function) -> frozenset[Value]:
    """Values of a function that more readers want in 16 bits than in float32."""
    ops = list(function.walk())
    tiles = {value for op in ops for value in op.results if _is_tile(value)}
    if not tiles:
        return frozenset()
    onward: dict[Value, list[Value]] = {}
    for op in ops:
        pairs = list(handed_on(op))
        if op.name in _EITHER:
            pairs += [(x, result) for x in op.operands for result in op.results]
        for source, target in pairs:
            onward.setdefault(source, []).append(target)
    return frozenset(value for value in tiles if _balance(value, onward) > 0)


def _is_tile(value: Value) -> bool:
    return bool(value.type.shape) and value.type.scalar in SHORT


def _balance(value: Value, onward: dict[Value, list[Value]]) -> int:
    """How many more readers want 16 bits than do not."""
    seen, pending, balance = {value}, [value], 0
    while pending:
        now = pending.pop()
        balance += sum(_wish(user, now) for user in now.users)
        following = [x for x in onward.get(now, ()) if x not in seen]
        seen.update(following)
        pending += following
    return balance


def _wish(user: Op, value: Value) -> int:
    """1: in 16 bits; -1: in float32; 0: hands it on."""
    name = user.name
    if name in _EITHER or name in _FLOW or name.startswith("scf."):
        return 0
    position = _STORED.get(name)
    if position is not None:
        return 1 if user.operands[position] is value else -1
    return 1 if name in _READERS or combines(user) in _READERS else -1


def combines(op: Op) -> str | None:
    """The operation that a reduction amounts to, if it is a single one of its two arguments."""
    if op.name != "tt.reduce" or len(op.operands) != 1:
        return None
    block = op.regions[0].blocks[0]
    if len(block.ops) != 2:
        return None
    inner, last = block.ops
    same = last.operands == inner.results and set(inner.operands) == set(block.args)
    return inner.name if same else None


def either(rule: Rule) -> Rule:
    """A rule that takes tiles as they are, short or not."""

    def marked(op: Op, low: Lowering) -> Step | None:
        low.takes_short(op)
        return rule(op, low)

    return marked


def widened(op: Op, low: Lowering, step: Step) -> Step:
    """`step`, to which short tiles look like others."""
    slots = [low.slot(x) for x in dict.fromkeys(op.operands) if x.type.scalar in SHORT]
    if not slots:
        return step

    def apply(env: Env) -> None:
        held = [(slot, env[slot]) for slot in slots if is_short(env[slot])]
        for slot, tile in held:
            env[slot] = widen(tile)
        step(env)
        for slot, tile in held:
            env[slot] = tile

    return apply
